"""`python -m benches drafters`: drafters without a head, beside transformers' assisted generation.

Batch 1 on a CPU, greedy: the same target, the same draft model, as many drafts a round on both
sides. The shipped toys draft in all ways. A random model of 26 million parameters with long prompts
drafts by search alone, because no draft model agrees with it. Prompts for a search repeat a
passage, as an edited text does. Both sides must write the text of plain decoding. Time is the CPU
time of this process, prefills included, so that other programs count little. The accept lengths
with a draft window, alone and with a sink, are printed beside that without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, machine, report
from specpool.engine.assets import corpus, resolve
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import CorruptState

if TYPE_CHECKING:
    from benches.llama import Llama

DRAFT = "specpool/tiny-draft"
SEARCHES = ("ngram", "suffix")
#: Tokens; the rows are longer.
DRAFT_WINDOW = 32
DRAFT_SINK = 4
_Side = Callable[[], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides run.

    Attributes:
        name: of the target.
        load: returns the target, of transformers, a new one each time.
        prompts: token ids.
        tokens: of each text.
    """

    name: str
    load: Callable[[], Any]
    prompts: Sequence[list[int]]
    tokens: int


def drafters(
    *,
    steps: int,
    tokens: int,
    prompt: int,
    repeats: int,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a text is not that of plain decoding.
    """
    check_int("steps", steps, 1, 16)
    check_int("tokens", tokens, 8, 1024)
    check_int("prompt", prompt, 0, 1 << 14)
    check_int("repeats", repeats, 1, 1 << 10)
    check_int("threads", threads, 1, 1 << 10)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    from benches.llama import Llama

    new = corpus.prompts(4, 96)
    edited = [[*text, *text[:24]] for text in corpus.prompts(4, 160)]
    results = _compare(Case("", _toy, new, tokens), DRAFT, steps, repeats)
    for draft in SEARCHES:
        results += _compare(Case("", _toy, edited, tokens), draft, steps, repeats)
    if prompt:
        large = _random(Llama(512, 8, 4, 64, 1408, 6, 8_000), prompt, 2 * tokens)
        for draft in SEARCHES:
            results += _compare(large, draft, steps, repeats)
    for name, draft in (
        ("small model", DRAFT),
        ("EAGLE head", "specpool/tiny-eagle"),
        ("block drafter", "specpool/tiny-block"),
    ):
        results += _windowed(name, draft, new, steps, tokens)
    where = machine(threads=threads, packages=("torch", "transformers"))
    report("bench drafters", where, results, json_only=json, plot=plot)


def _toy() -> Any:
    return _loaded("specpool/tiny")


def _loaded(name: str) -> Any:
    """Load an embedded model with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    return load(resolve(name), dtype=torch.float32).eval()


def _random(sizes: Llama, length: int, tokens: int) -> Case:
    """Return the case of a random model and two prompts whose second half repeats the first."""
    from benches.llama import model_of, prompts_of

    def load() -> Any:
        return model_of(sizes, "cpu")

    halves = prompts_of(sizes, 2, max(length // 2, 1))
    millions = sum(parameter.numel() for parameter in load().parameters()) / 1e6
    name = f"random model of {millions:.0f}M, prompts of {2 * len(halves[0])}: "
    return Case(name, load, [[*half, *half] for half in halves], tokens)


def _compare(case: Case, draft: str, steps: int, repeats: int) -> list[Result]:
    """Time one drafter and transformers in turn; return the tokens of a second of CPU time."""
    import torch

    from specpool.engine.engine import Engine

    target = case.load()
    more: dict[str, Any] = {"prompt_lookup_num_tokens": steps, "max_matching_ngram_size": 4}
    if draft == DRAFT:
        assistant = _loaded(DRAFT)
        assistant.generation_config.num_assistant_tokens = steps
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        more = {"assistant_model": assistant}
    params = SamplingParams(max_new_tokens=case.tokens, ignore_eos=True)
    longest = max(map(len, case.prompts)) + case.tokens + steps + 1
    options: dict[str, Any] = {"max_context_len": longest, "max_batch": 1, "prefix_cache": False}
    with Engine.from_pretrained(case.load(), **options) as plain:
        expected = [output.token_ids for output in plain.generate(case.prompts, params)]
    chain = Shape.eagle(steps, 1, steps + 1)
    engine = Engine.from_pretrained(case.load(), draft=draft, shape=chain, **options)

    def ours() -> list[list[int]]:
        return [engine.generate([prompt], params)[0].token_ids for prompt in case.prompts]

    @torch.inference_mode()
    def theirs() -> list[list[int]]:
        texts = []
        for prompt in case.prompts:
            ids = torch.tensor([prompt])
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=case.tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **more,
            )
            texts.append(out[0, len(prompt) :].tolist())
        return texts

    with engine:
        pairs = _in_turn(ours, theirs, expected, repeats)
        outputs = [engine.generate([prompt], params)[0] for prompt in case.prompts]
    num = len(case.prompts) * case.tokens
    rate, reference_rate = (statistics.median(num / seconds for seconds in side) for side in pairs)
    lens = [n for output in outputs for n in output.accept_lens]
    name = "small model" if draft == DRAFT else draft
    return [
        Result(
            name=f"{case.name}{name}, chain of {steps}, accept length {statistics.mean(lens):.2f}",
            value=rate,
            unit="tokens / CPU s",
            reference="transformers' assisted generation"
            if draft == DRAFT
            else "transformers' prompt lookup",
            reference_value=reference_rate,
        )
    ]


def _windowed(
    name: str, draft: str, prompts: Sequence[list[int]], steps: int, tokens: int
) -> list[Result]:
    """Return the accept lengths with a draft window, alone and with a sink, beside that without."""
    from specpool.engine.engine import Engine

    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    lens, texts = [], []
    for window, sink in ((DRAFT_WINDOW, 0), (DRAFT_WINDOW, DRAFT_SINK), (None, 0)):
        with Engine.from_pretrained(
            draft=draft,
            shape=Shape.eagle(steps, 1, steps + 1),
            draft_window=window,
            draft_sink=sink,
            max_context_len=1024,
        ) as engine:
            outputs = engine.generate(prompts, params)
        texts.append([output.token_ids for output in outputs])
        lens.append(statistics.mean(n for output in outputs for n in output.accept_lens))
    if any(text != texts[0] for text in texts):
        raise CorruptState("a text with a draft window is not the text without one")
    alone = f"draft window of {DRAFT_WINDOW}"
    windows = [alone, f"{alone}, sink of {DRAFT_SINK}"]
    return [
        Result(
            name=f"{name}, chain of {steps}, {what}: accept length",
            value=length,
            unit="tokens a round",
            reference="all tokens kept",
            reference_value=lens[-1],
        )
        for what, length in zip(windows, lens, strict=False)
    ]


def _in_turn(
    ours: _Side, theirs: _Side, expected: list[list[int]], repeats: int
) -> tuple[list[float], list[float]]:
    """Run both sides in turn, after a run that does not count; return the seconds of each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for side, side_seconds in zip((ours, theirs), seconds, strict=True):
            start = time.process_time()
            texts = side()
            if texts != expected:
                raise CorruptState("a drafted text is not that of plain decoding")
            if number:
                side_seconds.append(time.process_time() - start)
    return seconds
