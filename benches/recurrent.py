"""`python -m benches recurrent`: decoding of models with recurrent layers, drafts beside plain.

Random models of 25 million parameters, greedy on a CPU. The drafter knows the texts, and is wrong
in `ERROR_RATE` of its tokens. The two workers and plain decoding take turns, and write the same
texts. Time is the process's CPU time, prefills included.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from specpool.engine.draft import Drafter
    from specpool.engine.engine import Engine

_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1 << 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
#: For each family its config class in transformers, and its arguments: a quarter is attention.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "attn_layer_indices": [3, 7],
            "intermediate_size": 512,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2}),
}
STEPS = 3
ERROR_RATE = 0.2  # of drafted tokens: an accept length of 1 + 0.8 + 0.8**2 + 0.8**3 = 2.95
PROMPT_LEN, NUM_TOKENS = 32, 48


def recurrent(
    *,
    families: Sequence[str],
    batch_sizes: Sequence[int],
    repeats: int,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a drafted text is not that of plain decoding.
    """
    for family in families:
        if family not in FAMILIES:
            raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r:.40}")
    for batch in batch_sizes:
        check_int("batch", batch, 1, 64)
    check_int("repeats", repeats, 1, 1 << 10)
    check_int("threads", threads, 1, 1 << 10)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    results = [r for family in families for r in results_of(family, batch_sizes, repeats)]
    where = machine(threads=threads, packages=("torch", "transformers"))
    report("bench recurrent", where, results, json_only=json, plot=plot)


def model_of(family: str) -> Any:
    """Return a random model of `FAMILIES` of transformers, in float32."""
    import torch
    import transformers

    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**{**_COMMON, **arguments})
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32).eval()


def results_of(family: str, batch_sizes: Sequence[int], repeats: int) -> Iterator[Result]:
    """Measure one family at each batch: a chain with either worker, and plain decoding."""
    import numpy as np

    rng = np.random.default_rng(0)
    for batch in batch_sizes:
        prompts = rng.integers(3, _COMMON["vocab_size"], (batch, PROMPT_LEN)).tolist()
        yield from _batch_results(family, prompts, repeats)


def _engine(family: str, worker: str, batch: int, drafter: Drafter | None = None) -> Engine:
    from specpool.engine.engine import Engine

    return Engine.from_pretrained(
        model_of(family),
        worker=worker,
        draft=drafter,
        shape=None if drafter is None else Shape.eagle(STEPS, 1, STEPS + 1),
        max_batch=batch,
        max_context_len=PROMPT_LEN + NUM_TOKENS + STEPS + 1,
        prefix_cache=False,
    )


def _batch_results(family: str, prompts: list[list[int]], repeats: int) -> Iterator[Result]:
    from specpool.engine.draft import ScriptedDrafter
    from specpool.engine.sampling_params import SamplingParams

    batch = len(prompts)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(_engine(family, "auto", batch))
        texts = [output.token_ids for output in plain.generate(prompts, params)]
        known = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]

        def drafting(worker: str) -> Engine:
            vocab_size = _COMMON["vocab_size"]
            drafter = ScriptedDrafter(known, vocab_size=vocab_size, error_rate=ERROR_RATE)
            return stack.enter_context(_engine(family, worker, batch, drafter))

        def rate(engine: Engine) -> float:
            start = time.process_time()
            outputs = engine.generate(prompts, params)
            seconds = time.process_time() - start
            if [output.token_ids for output in outputs] != texts:
                raise CorruptState(f"{family}: a drafted text is not that of plain decoding")
            return batch * NUM_TOKENS / seconds

        ours, v1 = drafting("auto"), drafting("v1")
        for engine in (ours, v1):  # a first run is not counted
            rate(engine)
        rates = interleaved([partial(rate, engine) for engine in (ours, v1, plain)], repeats)
        accepted = f"accept length {ours.stats().accept_len:.2f}"
    name = f"{family}, batch {batch}, chain of {STEPS}, {accepted}"
    for reference, its_rate in zip(("worker v1", "plain"), rates[1:], strict=True):
        yield Result(name, rates[0], "tokens/CPU s", reference, its_rate)
