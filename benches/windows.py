"""`python -m benches windows`: memory held per row, window groups on against off.

A tiny random model of each family, with its layers in the order of the published models, generates
the same texts twice: with its sliding layers in window groups, and with all layers in full groups,
as if it had no windows. A row's memory is its pages of all groups times their bytes, at the turn of
the run at which that is most. The texts must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, machine, print_json
from specpool.engine.config import EngineConfig
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError, CorruptState
from specpool.num_bytes import show_bytes

if TYPE_CHECKING:
    from specpool.engine.models import TargetModel

VOCAB, LAYERS = 256, 6
SHAPE = Shape(4, 1, 5)  # prompt lookup: random models repeat themselves

# family -> (config class, which of its layers slide)
FAMILIES: dict[str, tuple[str, list[bool] | None]] = {
    "mistral": ("MistralConfig", None),
    "gemma2": ("Gemma2Config", [True, False] * 3),
    "gemma3": ("Gemma3TextConfig", [True] * 5 + [False]),
    "gpt_oss": ("GptOssConfig", [True, False] * 3),
}


@dataclass(frozen=True, slots=True)
class Load:
    """What every model generates."""

    window: int
    num_rows: int
    prompt_len: int
    num_tokens: int
    page_size: int
    overlap_depth: int

    @property
    def most_window_slots(self) -> int:
        """Pages of a decoding row at most: window + reserve + 2 pages."""
        reserve = SHAPE.num_draft_tokens + self.overlap_depth * SHAPE.max_accept_len
        return self.window + reserve + 2 * self.page_size


@dataclass(frozen=True, slots=True)
class Held:
    """What a run's rows held on average, at the turn when that was most."""

    row_bytes: float
    window_slots: int  # of the row that held most, in a round
    texts: list[list[int]]


def windows(
    *,
    families: Sequence[str],
    window: int,
    num_rows: int,
    prompt_len: int,
    num_tokens: int,
    page_size: int,
    overlap_depth: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: window groups change a text, or a row holds more of one than its window.
    """
    check_int("window", window, 1, 1 << 12)
    check_int("batch", num_rows, 1, 1 << 10)
    check_int("prompt", prompt_len, 1, 1 << 14)
    check_int("tokens", num_tokens, 1, 1 << 14)
    check_int("page_size", page_size, 1, 1 << 12)
    check_int("overlap_depth", overlap_depth, 0, 1)
    if window >= prompt_len + num_tokens:
        raise ConfigError(
            f"a window of {window} hides nothing from {prompt_len} + {num_tokens} tokens"
        )
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r:.40}")
    if plot is not None:
        check_plot(plot)
    load = Load(window, num_rows, prompt_len, num_tokens, page_size, overlap_depth)
    held: dict[str, tuple[Held, Held]] = {}
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        for family in progress.track(families or list(FAMILIES), description="measuring"):
            held[family] = measured(family, load)
    if json:
        print_json(machine(packages=("torch", "transformers")), _results(load, held))
    else:
        # Wide enough for the title, also if the output is not a terminal.
        console = Console()
        Console(width=max(console.width, 100)).print(_table(load, held))
    if plot is not None:
        bars = [result for result in _results(load, held) if result.unit == "bytes"]
        draw("bench windows", bars, plot)


def measured(family: str, load: Load) -> tuple[Held, Held]:
    """With window groups and without.

    Raises:
        ConfigError: this transformers has no such family.
        CorruptState: the texts differ, or a row holds more of a group than its window.
    """
    import transformers

    from specpool.engine.models import TargetModel

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with TargetModel(_model(family, load)) as target:
        on = _run(target, load)
        target.layer_kv = tuple(replace(layer, window=None) for layer in target.layer_kv)
        off = _run(target, load)
    if on.texts != off.texts:
        raise CorruptState(f"{family}: the texts with and without window groups differ")
    if on.window_slots > load.most_window_slots:
        raise CorruptState(
            f"{family}: a row holds {on.window_slots} slots behind a window of {load.window}, at "
            f"most {load.most_window_slots} are its own"
        )
    return on, off


def _model(family: str, load: Load) -> Any:
    """Random weights, large enough for the logits to differ."""
    import torch
    import transformers

    name, slides = FAMILIES[family]
    config_class = getattr(transformers, name, None)
    if config_class is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}")
    options: dict[str, Any] = {}
    if slides is not None:
        kinds = ("full_attention", "sliding_attention")
        options["layer_types"] = [kinds[is_sliding] for is_sliding in slides]
    if family == "gpt_oss":
        options |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=load.window,
        max_position_embeddings=max(512, load.prompt_len + load.num_tokens),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config).float().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.08)
    return model


def _run(target: TargetModel, load: Load) -> Held:
    """Generate, and look at the ledger before each turn."""
    from specpool.engine.draft import NgramDrafter
    from specpool.engine.engine import Engine

    rng = random.Random(0)
    config = EngineConfig(
        shape=SHAPE,
        page_size=load.page_size,
        max_batch=load.num_rows,
        prefix_cache=False,
        max_context_len=load.prompt_len + load.num_tokens,
        prefill_tokens=max(load.window, 64),
        overlap_depth=load.overlap_depth,
    )
    engine = Engine(target, NgramDrafter(), config=config)
    params = SamplingParams(max_new_tokens=load.num_tokens, ignore_eos=True)
    texts: dict[int, list[int]] = {}

    def keep(number: int, item: Any) -> None:
        if hasattr(item, "token_ids"):
            texts[number] = item.token_ids

    for _ in range(load.num_rows):
        engine.submit(
            [rng.randrange(3, VOCAB) for _ in range(load.prompt_len)], params, on_item=keep
        )
    ledger, cache = engine.ledger, engine.cache
    page_bytes = [0] * len(ledger.groups)
    for keys, values, at in zip(cache.keys, cache.values, cache.layer_groups, strict=True):
        size = ledger.groups[at].page_size
        page_bytes[at] += size * sum(b[0].numel() * b.element_size() for b in (keys, values))
    row_bytes, window_slots, is_working = 0.0, 0, True
    while is_working:
        is_working = engine.turn()
        held = 0
        for at, group in enumerate(ledger.groups):
            slots = ledger.allocated_len(at) - ledger.evicted_len(at)
            held += int(slots.sum()) // group.page_size * page_bytes[at]
            if group.window is not None:
                decodes = ledger.resolved_len > load.prompt_len
                window_slots = max(window_slots, int(slots[decodes].max(initial=0)))
        num_rows = ledger.num_rows - ledger.num_free_rows
        row_bytes = max(row_bytes, held / max(1, num_rows))
    return Held(row_bytes, window_slots, [texts[number] for number in sorted(texts)])


def _results(load: Load, held: dict[str, tuple[Held, Held]]) -> list[Result]:
    results = []
    for family, (on, off) in held.items():
        results.append(
            Result(f"{family}: held per row", on.row_bytes, "bytes", "windows off", off.row_bytes)
        )
        results.append(
            Result(
                f"{family}: slots of a window group",
                on.window_slots,
                "slots",
                "window + reserve + 2 pages",
                load.most_window_slots,
            )
        )
    return results


def _table(load: Load, held: dict[str, tuple[Held, Held]]) -> Table:
    table = Table(
        title=f"bench windows: memory held per row at {load.prompt_len} + {load.num_tokens} tokens,"
        f" window {load.window}, P={load.page_size}, D={load.overlap_depth}, {load.num_rows} rows",
        caption=f"{LAYERS} layers, float32; off: the window group treated as full; slots: of the "
        f"window group in a round, at most window + reserve + 2 pages = {load.most_window_slots}",
    )
    table.add_column("family")
    for column in ("sliding layers", "windows on", "off", "share", "slots of a window"):
        table.add_column(column, justify="right")
    for family, (on, off) in held.items():
        slides = FAMILIES[family][1] or [True] * LAYERS
        table.add_row(
            family,
            str(sum(slides)),
            show_bytes(int(on.row_bytes)),
            show_bytes(int(off.row_bytes)),
            f"{on.row_bytes / off.row_bytes:.3f}",
            str(on.window_slots),
        )
    return table
