"""`python -m benches prefix`: the prefix cache, beside a tree in plain Python and beside none."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benches.loading import checked_loading
from specpool._core import Group, Ledger, Shape
from specpool.arrays import Int32
from specpool.checks import check_int
from specpool.cli.options.groups import PlaceOptions
from specpool.cli.results import Result, draw, interleaved, machine, report
from specpool.engine.assets import corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

PAGE_SIZE = 64
NUM_NEW = 32  # tokens that each request generates
INDEXED = (8_000, 100_000)  # tokens of the texts that are indexed and matched


class PlainTree:
    """A radix tree of pages as engines write it in Python: a dict of children by page of tokens."""

    def __init__(self) -> None:
        self._root: dict[tuple[int, ...], Any] = {}
        self._clock = 0

    def insert(self, tokens: list[int], pages: list[int]) -> int:
        """Add the tokens' whole pages; return how many tokens were there."""
        node, matched_len = self._root, 0
        self._clock += 1
        for at, page in zip(range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE), pages, strict=False):
            key = tuple(tokens[at : at + PAGE_SIZE])
            entry = node.get(key)
            if entry is None:
                entry = node[key] = [{}, page, self._clock]
            else:
                matched_len, entry[2] = at + PAGE_SIZE, self._clock
            node = entry[0]
        return matched_len

    def match(self, tokens: list[int]) -> list[int]:
        """Return the pages of the longest beginning."""
        node, pages = self._root, []
        for at in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
            entry = node.get(tuple(tokens[at : at + PAGE_SIZE]))
            if entry is None:
                break
            pages.append(entry[1])
            node = entry[0]
        return pages


def _index(num_tokens: int, repeats: int) -> list[Result]:
    """Microseconds to index and to match one text among others that begin alike."""
    rng = np.random.default_rng(0)
    group = Group("kv", page_size=PAGE_SIZE, num_pages=4 * num_tokens // PAGE_SIZE + 100)
    ledger = Ledger([group], [Shape.none()], num_rows=4, max_context_len=num_tokens + 8)
    tree = PlainTree()
    texts = [rng.integers(0, 100_000, num_tokens, np.int32) for _ in range(3)]
    for text in texts[1:]:
        text[: num_tokens // 2] = texts[0][: num_tokens // 2]

    def filled(text: Int32) -> int:
        row = ledger.admit()
        plan = ledger.prepare_extend([row], [len(text)])
        ledger.launch(plan.step)
        ledger.complete(plan.step)
        return row

    for text in texts[:2]:
        row = filled(text)
        ledger.index(row, text)
        ledger.finish(row)
        tree.insert(text.tolist(), list(range(num_tokens // PAGE_SIZE)))
    # What an engine has at hand: here an array, there a list.
    last, listed = texts[2], texts[2].tolist()
    row, pages = filled(last), list(range(num_tokens // PAGE_SIZE))

    def timed(call: Any, *arguments: Any) -> float:
        start = time.perf_counter_ns()
        call(*arguments)
        return (time.perf_counter_ns() - start) / 1e3

    def index() -> float:
        return timed(ledger.index, row, last)

    matched, plainly = interleaved(
        [lambda: timed(ledger.match_prefix, last), lambda: timed(tree.match, listed)], repeats
    )
    ours, theirs = list[float](), list[float]()
    for _ in range(repeats):
        ledger.forget()
        ours.append(index())
        theirs.append(timed(PlainTree().insert, listed, pages))
    name = f"{num_tokens:,} tokens"
    num_entries = ledger.index_size[0]
    reference = "a dict of children in Python"
    index_us, plain_us = statistics.median(ours), statistics.median(theirs)
    num_bytes = ledger.index_bytes() / num_entries
    return [
        Result(f"match, {name}", matched, "us", reference, plainly),
        Result(f"index, {name}", index_us, "us", reference, plain_us),
        Result(f"an entry, {name}", num_bytes, "bytes", "its tokens alone", 4 * PAGE_SIZE),
    ]


@dataclass(frozen=True, slots=True)
class Trace:
    """Rounds of requests; each round comes at once, when the one before has ended."""

    name: str
    rounds: list[list[list[int]]]


def _traces(num_requests: int, common: int, max_len: int) -> list[Trace]:
    """A common system prompt, chats over a few system prompts, and random texts."""
    rng = random.Random(0)

    def some(length: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(length)]

    system = corpus.prompts(1, common)[0]
    same = [[*system, *some(20)] for _ in range(num_requests)]
    systems = [[*some(common // 2)] for _ in range(4)]
    chats, rounds = [list(rng.choice(systems)) for _ in range(num_requests // 4)], []
    for _ in range(4):
        chats = [[*chat, *some(24)] for chat in chats]
        rounds.append([list(chat) for chat in chats if len(chat) + NUM_NEW < max_len])
        chats = [[*chat, *some(NUM_NEW)] for chat in chats]  # an answer, as the client tells it
    random_texts = [some(common // 2) for _ in range(num_requests // 2)]
    return [
        Trace(f"{num_requests} requests with {common} common tokens", [same]),
        Trace(f"{num_requests // 4} chats over 4 system prompts", rounds),
        Trace("random texts", [random_texts]),
    ]


def _more_than_a_pool(num_requests: int, common: int) -> Trace:
    """Texts in turn, twice, of which the device's pool holds few."""
    rng = random.Random(1)
    num_texts = max(num_requests // 4, 8)
    texts = [[rng.randrange(32, 127) for _ in range(common)] for _ in range(num_texts)]
    name = f"{len(texts)} texts of {common} tokens in turn, twice, in a pool for few of them"
    return Trace(name, [[text] for text in (*texts, *texts)])


@dataclass(slots=True)
class Ran:
    """What one run of a trace took."""

    seconds: float
    computed: int
    hits: int
    first_token: float  # seconds to the first token, the mean of all but the first request
    texts: list[list[int]]


def _ran(engine: Engine, trace: Trace, num_new: int) -> Ran:
    engine.forget_prefixes()
    before = engine.stats().prefilled_token_ct
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    outputs, start = [], time.perf_counter()
    for prompts in trace.rounds:
        outputs += engine.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - start
    later = [output.first_token_seconds or 0.0 for output in outputs[1:]]
    return Ran(
        seconds,
        engine.stats().prefilled_token_ct - before,
        sum(output.num_reused for output in outputs),
        statistics.mean(later),
        [output.token_ids for output in outputs],
    )


def _least(trace: Trace) -> int:
    """Tokens that must be computed: those behind the longest beginning of any earlier prompt."""
    seen: list[list[int]] = []
    computed = 0
    for prompt in (prompt for prompts in trace.rounds for prompt in prompts):
        longest = 0
        for other in seen:
            pairs = zip(prompt, other, strict=False)
            end = min(len(prompt), len(other))
            longest = max(longest, next((i for i, (a, b) in enumerate(pairs) if a != b), end))
        computed += len(prompt) - min(longest, len(prompt) - 1)
        seen.append(prompt)
    return computed


def _case(engines: Sequence[Engine], trace: Trace, repeats: int, without: str) -> list[Result]:
    """Run a trace on the engine without something and on the one with it, in turn."""
    prefills: list[list[float]] = [[], []]
    runs: list[list[Ran]] = [[], []]
    for _ in range(repeats + 1):  # the first one warms up
        for at in range(len(engines)):
            prefills[at].append(_ran(engines[at], trace, 1).seconds)
            runs[at].append(_ran(engines[at], trace, NUM_NEW))
    off, on = (
        Ran(
            statistics.median(run.seconds for run in run_list[1:]),
            run_list[-1].computed,
            run_list[-1].hits,
            statistics.median(run.first_token for run in run_list[1:]),
            run_list[-1].texts,
        )
        for run_list in runs
    )
    if on.texts != off.texts:
        raise CorruptState(f"{trace.name}: the texts differ from those {without}")
    prefill_off, prefill_on = (
        statistics.median(prefill_seconds[1:]) for prefill_seconds in prefills
    )
    num_tokens = NUM_NEW * len(on.texts)
    name = trace.name
    pairs = {
        "prefills alone": (prefill_on * 1e3, "ms", prefill_off * 1e3),
        "time to first token": (on.first_token * 1e3, "ms", off.first_token * 1e3),
        "throughput": (num_tokens / on.seconds, "tokens/s", num_tokens / off.seconds),
        "tokens computed": (on.computed, "tokens", off.computed),
    }
    least = Result(
        f"{name}: tokens computed", on.computed, "tokens", "behind an earlier prompt", _least(trace)
    )
    return [
        *(
            Result(f"{name}: {what}", ours, unit, without, theirs)
            for what, (ours, unit, theirs) in pairs.items()
        ),
        least,
    ]


def prefix(
    *,
    target: str,
    draft: str | None,
    shape: str | None,
    num_requests: int,
    common: int,
    repeats: int,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a text with the cache differs from that without.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    check_int("requests", num_requests, 8, 1 << 16)
    check_int("common", common, 8, 1 << 20)
    place = PlaceOptions(dtype="float32", threads=threads)
    loading = checked_loading(target=target, draft=draft, shape=shape, place=place, plot=plot)
    from specpool.engine.engine import Engine

    max_len = common + 20 + 8 * NUM_NEW

    def engine(**options: Any) -> Engine:
        return Engine.from_pretrained(**loading, max_context_len=max_len, **options)

    def cases(
        option_sets: Sequence[dict[str, Any]], traces: Sequence[Trace], without: str
    ) -> Iterator[Result]:
        engines = [engine(**options) for options in option_sets]
        try:
            for trace in traces:
                yield from _case(engines, trace, repeats, without)
        finally:
            for opened in engines:
                opened.close()

    results = [result for num in INDEXED for result in _index(num, 3 * repeats)]
    on_and_off = [{"max_batch": num_requests, "prefix_cache": is_on} for is_on in (False, True)]
    results += cases(on_and_off, _traces(num_requests, common, max_len), "without the cache")
    pool = {"max_batch": 4, "page_size": 16, "num_pages": max_len // 16 + 4 + 2 * (common // 16)}
    tiers = [{**pool, "host_bytes": num_bytes} for num_bytes in (0, 1 << 30)]
    results += cases(tiers, [_more_than_a_pool(num_requests, common)], "without the host tier")
    where = machine("cpu", threads, ("torch", "transformers"))
    report("bench prefix", where, results, json_only=json, plot=None)
    if plot is not None:
        draw("bench prefix", [result for result in results if result.unit == "ms"], plot)
