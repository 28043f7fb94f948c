"""`python -m benches recurrent`: decoding of models with recurrent layers, drafts beside plain.

Random models of 25 million parameters, greedy on a CPU. Prompt lookup drafts for texts that repeat
(at least `GOALS["accept"]` tokens a round), which are looked for. The two workers and plain
decoding take turns, and write the same texts. Time is the process's CPU time, prefills included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.errors import ConfigError, CorruptState

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
GOALS = {"v1": 1.0, "plain": 1.3, "accept": 2.5}
STEPS = 3
#: A prompt is a random seed and what the model goes on with, which repeats sooner or later.
SEED_LEN, NUM_BEGIN, NUM_TOKENS = 16, 160, 64
MOST_PROMPTS, BEGIN_BATCH = 24, 8  # that are tried

_Prompts = Sequence[list[int]]


@dataclass(frozen=True, slots=True)
class Texts:
    """What an engine wrote: token ids, and the accept length of each round."""

    tokens: list[list[int]]
    accept_lens: list[int]


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
    prompts = repeating_prompts(family, max(batch_sizes))
    for batch in batch_sizes:
        yield from _batch_results(family, prompts[:batch], repeats)


def repeating_prompts(family: str, count: int) -> _Prompts:
    """Return beginnings of texts that go on so that prompt lookup has the goal's accept length."""
    import numpy as np

    rng = np.random.default_rng(0)
    seeds = rng.integers(3, _COMMON["vocab_size"], (MOST_PROMPTS, SEED_LEN)).tolist()
    with _engine(family, "auto", BEGIN_BATCH, drafts=True) as engine:
        begun = _texts(engine, seeds, NUM_BEGIN).tokens
        prompts = [seed + text for seed, text in zip(seeds, begun, strict=True)]
        found: list[list[int]] = []
        for prompt in prompts:
            if statistics.mean(_texts(engine, [prompt]).accept_lens) >= GOALS["accept"]:
                found.append(prompt)
            if len(found) == count:
                return found
    raise ConfigError(f"{family}: {len(found)} of {MOST_PROMPTS} texts repeat, {count} are needed")


def _engine(family: str, worker: str, batch: int, *, drafts: bool) -> Any:
    from specpool.engine.engine import Engine

    chain: dict[str, Any] = {"draft": f"ngram:{STEPS}", "shape": Shape.eagle(STEPS, 1, STEPS + 1)}
    return Engine.from_pretrained(
        model_of(family),
        worker=worker,
        max_batch=batch,
        max_context_len=SEED_LEN + NUM_BEGIN + NUM_TOKENS + STEPS + 1,
        prefix_cache=False,
        **chain if drafts else {},
    )


def _texts(engine: Any, prompts: _Prompts, num_tokens: int | None = None) -> Texts:
    from specpool.engine.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=num_tokens or NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    lens = [n for output in outputs for n in output.accept_lens]
    return Texts([output.token_ids for output in outputs], lens)


def _batch_results(family: str, prompts: _Prompts, repeats: int) -> Iterator[Result]:
    batch = len(prompts)
    ways = [("auto", True), ("v1", True), ("auto", False)]
    engines = [_engine(family, worker, batch, drafts=drafts) for worker, drafts in ways]
    try:
        plain = _texts(engines[-1], prompts)
        drafted, _ = (_texts(engine, prompts) for engine in engines[:-1])

        def timed(engine: Any) -> Callable[[], float]:
            def run() -> float:
                start = time.process_time()
                texts = _texts(engine, prompts)
                seconds = time.process_time() - start
                if texts.tokens != plain.tokens:
                    raise CorruptState(f"{family}: a drafted text is not that of plain decoding")
                return batch * NUM_TOKENS / seconds

            return run

        rates = interleaved([timed(engine) for engine in engines], repeats)
    finally:
        for engine in engines:
            engine.close()
    accepted = statistics.mean(drafted.accept_lens)
    name = f"{family}, batch {batch}, chain of {STEPS}, accept length {accepted:.2f}"
    for reference, rate in zip(("worker v1", "plain"), rates[1:], strict=True):
        yield Result(name, rates[0], "tokens/CPU s", reference, rate)
