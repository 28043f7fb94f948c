"""`specpool bench generate`: compares drafting, plain decoding and transformers' generate."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.generate.report import mean_accept_len
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.engine.assets import corpus, resolve
from specpool.engine.models.files.names import is_lookup
from specpool.engine.output import RequestOutput
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.draft import Drafter
    from specpool.engine.engine import Engine

#: A text that repeats itself, which models continue.
REPETITIVE = "[size]\nmin = 3\nmax = 7\nowner = erin\nplace = rome\n\n" * 4


@dataclass(slots=True, kw_only=True)
class GenerateBenchJob:
    """The arguments of the command line."""

    target: str
    draft: str | None
    options: dict[str, Any]  # of the engine
    num_tokens: Sequence[int]
    batch_sizes: Sequence[int]
    num_requests: int
    repeats: int
    device: str
    threads: int
    trust_remote_code: bool
    json: bool
    plot: Path | None


def generate(job: GenerateBenchJob) -> None:
    """Measure all cases, then print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    drafts = _checked(job)
    checks.start_torch(job.threads)
    from specpool.engine.engine import Engine

    reference = None
    results = []
    cases = list(itertools.product(job.batch_sizes, job.num_tokens))
    shortest, longest = min(job.num_tokens), max(job.num_tokens)
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(drafts) * (len(cases) + 1))
        for name in drafts:
            with Engine.from_pretrained(
                job.target,
                draft=name,
                **job.options,
                device=job.device,
                dtype="float32",
                max_batch=max(job.batch_sizes),
                overlap_depth=0,  # `_traffic` compares it with 1
                prefix_cache=False,  # every run computes the same prompts
                trust_remote_code=job.trust_remote_code,
            ) as engine:
                _check_context(engine, longest)
                # Load it after the engine, whose errors about a wrong target are clearer.
                reference = reference or _Transformers(job)
                for batch, tokens in cases:
                    results += _case(engine, name, reference, batch, tokens, job.repeats)
                    progress.advance(task)
                if is_lookup(name):
                    results += _lookup(engine, name, longest, job.repeats)
                if job.num_requests:
                    results += _traffic(engine, name, job.num_requests, shortest, job.repeats)
                progress.advance(task)
    setup = machine(job.device, job.threads, ("torch", "transformers"))
    report("bench generate", setup, results, json_only=job.json, plot=job.plot)


def _checked(job: GenerateBenchJob) -> list[str]:
    """Check a job; return its drafts."""
    check_int("repeats", job.repeats, 1, 1 << 16)
    for tokens in job.num_tokens:
        check_int("tokens", tokens, 1, 1 << 20)
    for batch in job.batch_sizes:
        check_int("batch", batch, 1, 1 << 16)
    check_int("requests", job.num_requests, 0, 1 << 10)
    checks.check_place(device=job.device, threads=job.threads)
    if job.target == "specpool/tiny" and job.draft is None:
        drafts = ["specpool/tiny-eagle", "specpool/tiny-eagle3"]
    elif job.draft in (None, "none"):
        checks.check_models(job.target, ())
        raise ConfigError("bench generate needs a draft model")
    else:
        drafts = [str(job.draft)]
    if job.options.get("shape") == Shape.none():
        raise ConfigError("shape none drafts nothing: there is nothing to compare")
    if job.plot is not None:
        check_plot(job.plot)
    for name in drafts:
        checks.check_engine_config([name], job.options)
        checks.check_models(job.target, [name])
    return drafts


def _check_context(engine: Engine, num_tokens: int) -> None:
    prompt_len = len(corpus.prompts(1)[0])
    if prompt_len + num_tokens > engine.max_context_len:
        raise ConfigError(
            f"prompts of {prompt_len} tokens and {num_tokens} new ones do not fit the model's "
            f"{engine.max_context_len} positions"
        )


def _groups(engine: Engine, batch: int) -> list[list[list[int]]]:
    """Return at least four held-out prompts of 128 tokens, in groups of `batch`.

    The lengths are equal, so that no padding is measured. There are several prompts, so that a
    single text does not decide the result.
    """
    if engine.target.vocab_size < 256:
        raise ConfigError(
            f"the prompts are bytes, the vocabulary has {engine.target.vocab_size} ids"
        )
    num_groups = -(-4 // batch)
    prompts = corpus.prompts(num_groups * batch)
    return [prompts[i * batch : (i + 1) * batch] for i in range(num_groups)]


def _case(
    engine: Engine, draft: str, reference: _Transformers, batch: int, tokens: int, repeats: int
) -> list[Result]:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    groups = _groups(engine, batch)
    total = tokens * batch * len(groups)
    accept_lens = []

    def our_rate(shape: Shape | None) -> float:
        start = time.perf_counter()
        outputs = [
            output for group in groups for output in engine.generate(group, params, shape=shape)
        ]
        seconds = time.perf_counter() - start
        if shape is None:
            accept_lens.append(mean_accept_len(outputs))
        return total / seconds

    def transformers_rate() -> float:
        return total / sum(reference.seconds(group, tokens) for group in groups)

    runs = [lambda: our_rate(None), lambda: our_rate(Shape.none()), transformers_rate]
    for run in runs:
        run()  # warm up
    drafting, plain, transformers = interleaved(runs, repeats)
    shape, load = engine.shape, f"batch {batch}, {tokens} tokens"
    form = f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}"
    if engine.stats().adaptive is not None:
        form = "adaptive"
    name = f"{draft} {form}, {load} (accept length {accept_lens[-1]:.2f})"
    unit = "tokens/s"
    return [
        Result(name, drafting, unit, "plain decoding on our pages", plain),
        Result(f"plain decoding, {load}", plain, unit, "transformers generate", transformers),
    ]


def _traffic(
    engine: Engine, draft: str, num_requests: int, tokens: int, repeats: int
) -> list[Result]:
    """Compare many requests at once with one after another, and overlap with synchronous rounds."""
    batch = engine.ledger.max_batch
    prompts = corpus.prompts(num_requests)
    # Lengths from half to one and a half times `tokens`, so that rows come and go.
    lens = [tokens // 2 + 1 + i * 7 % (tokens + 1) for i in range(num_requests)]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lens]
    total = sum(lens)

    def together(runner: Engine) -> float:
        start = time.perf_counter()
        runner.generate(prompts, params)
        return total / (time.perf_counter() - start)

    def one_by_one() -> float:
        start = time.perf_counter()
        for prompt, request_params in zip(prompts, params, strict=True):
            engine.generate([prompt], request_params)
        return total / (time.perf_counter() - start)

    from specpool.engine.engine import Engine

    # Two engines on one target: they run in turn.
    config = dataclasses.replace(engine.config, overlap_depth=1)
    overlapped = Engine(engine.target, _second(engine, draft), config=config)
    runs = [lambda: together(engine), lambda: together(overlapped), one_by_one]
    for run in runs[:2]:
        run()  # warm up
    synchronous, overlap, one_at_a_time = interleaved(runs, repeats)
    name, unit = f"{draft}, {num_requests} requests of about {tokens} tokens", "tokens/s"
    return [
        Result(f"{name}, {batch} rows", synchronous, unit, "one after another", one_at_a_time),
        Result(f"{name}, {batch} rows, overlap", overlap, unit, "without overlap", synchronous),
    ]


def _lookup(engine: Engine, draft: str, tokens: int, repeats: int) -> list[Result]:
    """Measure prompt lookup on a text that repeats itself, and on one without repeats."""
    batch = engine.ledger.max_batch
    greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    # At this temperature the text is almost random and repeats nothing.
    random = dataclasses.replace(greedy, temperature=4.0, seed=0)
    results = []
    for kind, prompts, params in (
        ("a text that repeats itself", [list(REPETITIVE.encode())] * batch, greedy),
        ("a text without repeats", corpus.prompts(batch), random),
    ):
        outputs: list[RequestOutput] = []
        run = partial(_run_lookup, engine, prompts, params, outputs)
        runs = [partial(run, None), partial(run, Shape.none())]
        for run_once in runs:
            run_once()  # warm up
        drafting, plain = interleaved(runs, repeats)
        name = f"{draft}, batch {batch}, {kind} (accept length {mean_accept_len(outputs):.2f})"
        results.append(Result(name, drafting, "tokens/s", "plain decoding on our pages", plain))
    return results


def _run_lookup(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    outputs: list[RequestOutput],
    shape: Shape | None,
) -> float:
    """Return tokens per second; replace `outputs` by those of a drafting run."""
    start = time.perf_counter()
    generated = engine.generate(prompts, params, shape=shape)
    seconds = time.perf_counter() - start
    if shape is None:
        outputs[:] = generated
    return sum(len(output.token_ids) for output in generated) / seconds


def _second(engine: Engine, draft: str) -> Drafter:
    """Return a second drafter of the same model, because a drafter serves one engine only."""
    from specpool.engine.draft import (
        BlockDrafter,
        EagleDrafter,
        LMDrafter,
        MTPDrafter,
        named_drafter,
    )

    if isinstance(engine.drafter, EagleDrafter):
        return EagleDrafter(engine.drafter.head)
    if isinstance(engine.drafter, BlockDrafter):
        return BlockDrafter(engine.drafter.head)
    if isinstance(engine.drafter, MTPDrafter):
        return MTPDrafter(engine.drafter.head)
    if isinstance(engine.drafter, LMDrafter):
        return LMDrafter(engine.drafter.model, vocab_size=engine.target.vocab_size)
    named = named_drafter(draft)
    assert named is not None
    return named


class _Transformers:
    """The same model in transformers' own greedy `generate`, with its KV cache."""

    def __init__(self, job: GenerateBenchJob) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve(job.target), trust_remote_code=job.trust_remote_code
        )
        self._model = model.float().to(job.device).eval()
        self._device = job.device

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds of one call; all prompts must have the same length."""
        import torch

        ids = torch.tensor(prompts, device=self._device)
        start = time.perf_counter()
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - start
