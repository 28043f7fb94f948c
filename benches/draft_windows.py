"""`python -m benches draft-windows`: accept lengths with a draft window, on texts far longer.

The embedded toys were trained on short texts, and say nothing behind them. So the target, the small
model, the EAGLE-3 head and the block drafter first learn texts of `length` tokens, for some minutes
of CPU time each. These texts are the synthetic corpus; in a quarter of the places a line repeats
one of the last `_SPAN` bytes, so a window hides what a draft could have used. Then each drafts for
held-out prompts with all its KV and with windows.

Texts are drawn at temperature 1. Greedy texts of so small a target fall into a loop of three lines,
which any window holds: they would show no loss whatever the window. Texts that loop are refused.
A text depends on its seed and not on its drafts, so all windows draft the same text, or the command
fails. The standard error takes rounds for independent, also those of different windows.

Toys read little beyond their last line, so what they keep says little of a published drafter. The
heads learn half of `length`, so with all KV they draft at positions that they have not learned.
"""

from __future__ import annotations

import importlib
import json as json_text
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, machine, report
from specpool.engine.assets import resolve
from specpool.engine.assets.corpus import HELD_OUT_SEED, corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    import torch

#: Tokens of the window and of the sink. The last is a control, far too short: it must show a loss.
WINDOWS = ((512, 4), (128, 4), (8, 2))
#: The least share of the accept length that a window may leave.
LEAST_SHARE = 0.98
_SPAN = 1800
_BATCH, _LR, _WARM_UP = 2, 1.5e-3, 20
_EXAMPLES = Path(__file__).parents[1] / "examples" / "train_tiny"


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter of the embedded pair.

    Attributes:
        name: in the results.
        source: the embedded model.
        shape: what a round drafts.
    """

    name: str
    source: str
    shape: Shape


DRAFTERS = (
    Drafter("small model", "specpool/tiny-draft", Shape.eagle(3, 1, 4)),
    Drafter("EAGLE-3 head", "specpool/tiny-eagle3", Shape.eagle(3, 1, 4)),
    Drafter("block drafter", "specpool/tiny-block", Shape.eagle(7, 1, 8)),
)


def draft_windows(
    *,
    length: int,
    target_minutes: float,
    draft_minutes: float,
    prompts: int,
    prompt: int,
    tokens: int,
    keep: Path | None,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Train, measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: the texts loop, or a text with a draft window is not the text without one.
    """
    check_int("length", length, 32, 2048)
    check_int("prompts", prompts, 1, 1 << 10)
    check_int("prompt", prompt, 1, 2040)
    check_int("tokens", tokens, 2, 2040)
    check_int("threads", threads, 1, 1 << 10)
    if prompt + tokens > 2040:
        raise ConfigError(f"prompt + tokens must be at most 2040, got {prompt} + {tokens}")
    for name, minutes in (("target_minutes", target_minutes), ("draft_minutes", draft_minutes)):
        if not minutes > 0:
            raise ConfigError(f"{name} must be above 0, got {minutes}")
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    texts = [list(long_text(HELD_OUT_SEED + at, prompt + 200)[:prompt]) for at in range(prompts)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        trained = keep or Path(folder)
        target = trained / "target"
        if not target.exists():
            _tune_model("specpool/tiny", target, length, target_minutes)
        for drafter in DRAFTERS:
            draft = trained / drafter.source.removeprefix("specpool/")
            if not draft.exists():
                if drafter.source == "specpool/tiny-draft":
                    _tune_model(drafter.source, draft, length, draft_minutes)
                else:
                    _tune_head(drafter.source, target, draft, length // 2, draft_minutes)
            results += _measure(target, draft, drafter, texts, tokens)
    where = machine(threads=threads, packages=("torch", "transformers"))
    report("bench draft-windows", where, results, json_only=json, plot=plot)


def long_text(seed: int, num_bytes: int) -> bytes:
    """Return the first `num_bytes` of a corpus in which lines repeat one of the last bytes."""
    rng = random.Random(seed)
    lines: list[bytes] = []
    recent: list[bytes] = []
    length = 0
    for line in corpus(seed, num_bytes).splitlines(keepends=True):
        more = [rng.choice(recent), line] if recent and rng.random() < 0.25 else [line]
        lines += more
        recent += more
        length += sum(map(len, more))
        while sum(map(len, recent)) > _SPAN:
            del recent[0]
        if length >= num_bytes:
            break
    return b"".join(lines)[:num_bytes]


def _batches(length: int) -> Iterator[torch.Tensor]:
    """Yield random places of the training text without end, int64 [_BATCH, length]."""
    import torch

    text = torch.frombuffer(bytearray(long_text(0, 3_000_000)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(text) - length, (_BATCH,), generator=generator)
        yield torch.stack([text[at : at + length] for at in starts.tolist()])


def _train(
    parameters: Sequence[torch.nn.Parameter],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    length: int,
    minutes: float,
) -> None:
    """Train for `minutes` of CPU time."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=_LR, betas=(0.9, 0.95), weight_decay=0.1)
    data = _batches(length)
    began, step, done = time.process_time(), 0, 0.0
    while done < 1:
        optimizer.param_groups[0]["lr"] = (
            _LR * min(1.0, (step + 1) / _WARM_UP) * min(1.0, (1 - done) / 0.6)
        )
        loss = loss_of(next(data))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        done = (time.process_time() - began) / (60 * minutes)


def _tune_model(source: str, out: Path, length: int, minutes: float) -> None:
    """Train an embedded language model further and save it."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(resolve(source), dtype=torch.float32)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    _train(list(model.parameters()), loss_of, length + 1, minutes)
    model.save_pretrained(out)
    for file in Path(resolve(source)).glob("tokenizer*.json"):
        shutil.copy(file, out)


def _tune_head(source: str, target: Path, out: Path, length: int, minutes: float) -> None:
    """Train an embedded head further, for another target, and save it.

    The modules and the losses are those of `examples/train_tiny`, which the head was trained with.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    sys.path.insert(0, str(_EXAMPLES))
    try:
        train_head: Any = importlib.import_module("train_head")
        block_head: Any = importlib.import_module("block_head")
    finally:
        sys.path.remove(str(_EXAMPLES))
    torch.manual_seed(0)
    load: Any = LlamaForCausalLM.from_pretrained
    model = load(target, dtype=torch.float32).eval().requires_grad_(False)
    folder = Path(resolve(source))
    config = json_text.loads((folder / "config.json").read_text("utf-8"))
    if "dflash_config" in config:
        layers = [at + 1 for at in config["dflash_config"]["target_layer_ids"]]
        head, step_loss = block_head.BlockHead(config, model), block_head.block_loss
    else:
        layers = [at + 1 for at in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        kind = train_head.Kind.eagle3
        head, step_loss = train_head.Head(config, kind, model), train_head.unroll
    head.load_state_dict(load_file(folder / "model.safetensors"))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = step_loss(
            head, tokens, *train_head.run_target(model, tokens, tuple(layers))
        )[0]
        return loss

    _train(list(head.parameters()), loss_of, length, minutes)
    train_head.save(head, config, out)


def _measure(
    target: Path, draft: Path, drafter: Drafter, texts: Sequence[list[int]], tokens: int
) -> list[Result]:
    """Return the accept lengths with draft windows beside that with all KV."""
    from specpool.engine.engine import Engine

    lens, drawn = [], []
    for window, sink in ((None, 0), *WINDOWS):
        with Engine.from_pretrained(
            str(target),
            draft=str(draft),
            shape=drafter.shape,
            draft_window=window,
            draft_sink=sink,
            max_batch=len(texts),
            max_sessions=0,
            prefix_cache=False,
        ) as engine:
            outputs = engine.generate(
                texts,
                [
                    SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=1.0, seed=at)
                    for at in range(len(texts))
                ],
            )
        drawn.append([output.token_ids for output in outputs])
        lens.append([n for output in outputs for n in output.accept_lens])
    if any(texts_of_window != drawn[0] for texts_of_window in drawn):
        raise CorruptState("a text with a draft window is not the text without one")
    check_variety(drawn[0])
    shape = drafter.shape
    chain = f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}"
    name = f"{drafter.name}, {chain}, texts of {len(texts[0])} + {tokens}, draft window of"
    whole = statistics.mean(lens[0])
    results = []
    for (window, sink), window_lens in zip(WINDOWS, lens[1:], strict=True):
        of_window = f"{name} {window}, sink of {sink}"
        accept_len = statistics.mean(window_lens)
        figure = f"{of_window}: accept length"
        results.append(Result(figure, accept_len, "tokens a round", "all tokens kept", whole))
        share = accept_len / whole
        figure = f"{of_window}: share of the accept length"
        goal = ("target, at least", LEAST_SHARE)
        if (window, sink) == WINDOWS[-1]:
            goal = ("a control that should lose", 1.0)
        results.append(Result(figure, share, "share", *goal))
        error = share * math.hypot(_relative_error(lens[0]), _relative_error(window_lens))
        figure = f"{of_window}: standard error of the share"
        results.append(Result(figure, error, "share", "the loss allowed", 1 - LEAST_SHARE))
    return results


def check_variety(texts: Sequence[Sequence[int]]) -> None:
    """Refuse texts that loop, because a window of any length holds a loop.

    Raises:
        CorruptState: fewer than half of the lines of all texts are different from each other.
    """
    lines = [line for text in texts for line in bytes(token % 256 for token in text).split(b"\n")]
    if 2 * len(set(lines)) < len(lines):
        raise CorruptState(
            f"the texts loop: {len(set(lines))} of {len(lines)} lines are different, so no draft "
            "window could lose anything"
        )


def _relative_error(lens: Sequence[int]) -> float:
    """Return the standard error of the mean over the mean, of rounds as if independent."""
    if len(lens) < 2:
        return 0.0
    return statistics.stdev(lens) / math.sqrt(len(lens)) / statistics.mean(lens)
