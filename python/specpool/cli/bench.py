"""`specpool bench generate`: tokens per second beside plain decoding and transformers' generate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specpool import corpus
from specpool._core import Shape
from specpool.assets import resolve
from specpool.cli.generate import draft_of, mean_accept_len, parse_shape
from specpool.cli.machine import Result, interleaved, machine, report
from specpool.config import SamplingParams
from specpool.engine import Engine
from specpool.errors import ConfigError


def generate(
    *,
    target: str,
    draft: str | None,
    shape: str | None,
    num_tokens: Sequence[int],
    batch_sizes: Sequence[int],
    repeats: int,
    device: str,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, then print.

    Raises:
        ConfigError: an option that cannot work.
    """
    if repeats < 1 or min(*num_tokens, *batch_sizes, 1) < 1:
        raise ConfigError(
            f"repeats, tokens and batch must be at least 1, got {repeats}, {num_tokens}, {batch_sizes}"
        )
    draft = draft_of(target, draft)
    if draft is None:
        raise ConfigError("bench generate needs a draft model")
    torch.set_num_threads(threads)
    reference = _Transformers(resolve(target), device)
    results = []
    with Engine.from_pretrained(
        target, draft=draft, shape=parse_shape(shape), device=device, max_batch=max(batch_sizes)
    ) as engine:
        prompts = _prompts(engine, max(batch_sizes))
        for batch in batch_sizes:
            for tokens in num_tokens:
                results += _case(engine, reference, prompts[:batch], tokens, repeats)
    report("bench generate", machine(device, threads), results, json_only=json, plot=plot)


def _prompts(engine: Engine, count: int) -> list[list[int]]:
    """Held-out synthetic text, 128 tokens each: equal lengths, so that nobody pays for padding."""
    prompts = corpus.prompts(min(count, 24))
    if engine.target.vocab_size < 256:
        raise ConfigError(
            f"the prompts are bytes, the vocabulary has {engine.target.vocab_size} ids"
        )
    return [prompts[i % len(prompts)] for i in range(count)]


def _case(
    engine: Engine, reference: _Transformers, prompts: list[list[int]], tokens: int, repeats: int
) -> list[Result]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    accept_lens = []

    def ours(shape: Shape | None) -> float:
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, shape=shape)
        seconds = time.perf_counter() - start
        if shape is None:
            accept_lens.append(mean_accept_len(outputs))
        return tokens * len(prompts) / seconds

    def theirs() -> float:
        return tokens * len(prompts) / reference.seconds(prompts, tokens)

    runs = [lambda: ours(None), lambda: ours(Shape.none()), theirs]
    for run in runs:
        run()  # warm up
    drafting, plain, transformers = interleaved(runs, repeats)
    shape, where = engine.shape, f"batch {len(prompts)}, {tokens} tokens"
    name = f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens} (accept length {accept_lens[-1]:.2f})"
    unit = "tokens/s"
    return [
        Result(f"drafting {name}, {where}", drafting, unit, "plain decoding on our pages", plain),
        Result(f"plain decoding, {where}", plain, unit, "transformers generate", transformers),
    ]


class _Transformers:
    """The same model under transformers' own `generate`, greedy, with its KV cache."""

    def __init__(self, source: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self._model = model.to(device).eval()
        self._device = device

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Time of one call; every prompt has the same length."""
        ids = torch.tensor(prompts, device=self._device)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - start
