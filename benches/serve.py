"""`python -m benches serve`: the server's own cost, beside the engine without it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specpool.checks import check_int
from specpool.cli.bench_serve.drive import How, RequestRecord, drive
from specpool.cli.bench_serve.http import Caller
from specpool.cli.bench_serve.trace import Item
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, draw, interleaved, machine, report
from specpool.engine.assets import corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

PROCESS = ["-m", "specpool", "serve", "--port", "0", "--no-access-log", "--max-queue", "20000"]
PROCESS += ["--max-connections", "20000"]
THREAD = ["-m", "benches.serve_thread"]
HOW = How("specpool/tiny", chat=False, temperature=0.0, seed=0, ignore_eos=True)
#: Processes that the clients of the flood run in.
CLIENTS = 2
#: Seconds for which the flood may last; then all its clients leave.
FLOOD_SECONDS = 60.0
#: The most seconds of one run.
MOST_SECONDS = 300.0


class Texts:
    """Prompts that no run has seen before, so that none finds its KV in a cache."""

    def __init__(self, length: int) -> None:
        self._length, self._next = length, 0

    def take(self, count: int) -> list[str]:
        """Return further prompts."""
        first, self._next = self._next, self._next + count
        prompts = corpus.prompts(self._next, self._length)[first:]
        return [bytes(prompt).decode() for prompt in prompts]


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[Caller]:
    """Run a server, and give a client of it."""
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if address := re.search(r"http://\S+?:\d+", line):
                    break
            else:
                raise ConfigError(f"the server did not start: {' '.join(command)}")
            yield Caller(urlsplit(address[0]), None)
        finally:
            process.terminate()
            process.wait(60)


def ask(
    caller: Caller, prompts: list[str], tokens: int, streams: int
) -> tuple[list[RequestRecord], float]:
    """Send the prompts, so many at once; returns what each got, and the seconds."""
    items = [Item(prompt, tokens, 0.0) for prompt in prompts]

    async def run() -> tuple[list[RequestRecord], float]:
        outcome = await drive(caller, items, HOW, concurrency=streams, seconds=MOST_SECONDS)
        caller.close()
        return outcome

    records, seconds = asyncio.run(run())
    if errors := [record.error for record in records if record.error]:
        raise ConfigError(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")
    return records, seconds


def serve(
    *, streams: int, tokens: int, repeats: int, flood: int, json: bool, plot: Path | None
) -> None:
    """Measure, and print the results.

    Args:
        streams: texts at once, beside `Engine.generate`.
        tokens: new tokens of each text.
        repeats: turns of each side; the median counts.
        flood: requests that may wait while `/health` is asked; a tenth more come at once.
        json: print one object.
        plot: write a picture of the times.

    Raises:
        ConfigError: an option cannot work, or a server does not start.
    """
    check_int("streams", streams, 1, 256)
    check_int("tokens", tokens, 2, 1024)
    check_int("repeats", repeats, 1, 1 << 10)
    check_int("flood", flood, 10, 1 << 16)
    _raise_limit(2 * flood)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(1)
    from specpool.engine.engine import Engine

    results = []
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(server([*PROCESS, "--batch", "64"]))
        beside = stack.enter_context(server([*THREAD, "64"]))
        engine = stack.enter_context(
            Engine.from_pretrained(draft="specpool/tiny-eagle", max_batch=64)
        )
        texts = Texts(96)
        for warm in (caller, beside):
            ask(warm, texts.take(4), 8, 4)
        results += _throughput(engine, caller, texts, streams, tokens, repeats)
        results += _first_token(engine, caller, texts, repeats)
        results += _places(caller, beside, texts, tokens, repeats)
    results += _flood(texts, flood)
    report("bench serve", machine("cpu", 1, ("torch",)), results, json_only=json, plot=None)
    if plot is not None:
        draw("bench serve", [result for result in results if result.unit == "ms"], plot)


def _throughput(
    engine: Engine, caller: Caller, texts: Texts, streams: int, tokens: int, repeats: int
) -> list[Result]:
    """Tokens a second of so many streams, beside one call of `Engine.generate`."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)

    def by_server() -> float:
        records, seconds = ask(caller, texts.take(streams), tokens, streams)
        return sum(record.num_tokens for record in records) / seconds

    def by_engine() -> float:
        prompts = texts.take(streams)
        start = time.perf_counter()
        engine.generate(prompts, params, progress=False)
        return streams * tokens / (time.perf_counter() - start)

    value, base = interleaved([by_server, by_engine], repeats)
    name = f"{streams} streams of {tokens} tokens"
    return [Result(name, value, "tokens/s", "Engine.generate in one call", base)]


def _first_token(engine: Engine, caller: Caller, texts: Texts, repeats: int) -> list[Result]:
    """Milliseconds to the first token of one request, beside `Engine.stream`."""
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)

    def by_server() -> float:
        records, _ = ask(caller, texts.take(1), 2, 1)
        return 1e3 * (records[0].first or 0.0)

    def by_engine() -> float:
        (prompt,) = texts.take(1)
        start = time.perf_counter()
        stream = engine.stream(prompt, params)
        next(stream)
        seconds = time.perf_counter() - start
        list(stream)
        return 1e3 * seconds

    value, base = interleaved([by_server, by_engine], 5 * repeats)
    return [
        Result("time to first token, one request", value, "ms", "Engine.stream", base),
        Result("what the server adds to it", value - base, "ms", "the goal", 10.0),
    ]


def _places(
    process_caller: Caller, beside: Caller, texts: Texts, tokens: int, repeats: int
) -> list[Result]:
    """Times with 1 and 64 streams: engine in a process of its own, or in a thread of the front.

    A thread delivers late and then much at once, which flatters the time per token: look at the
    time to the first token and to the end too.
    """
    kinds: dict[str, Callable[[RequestRecord], float]] = {
        "time to first token": lambda r: (r.first or 0.0) - r.due,
        "time per token": lambda r: r.per_token or 0.0,
        "time to the end": lambda r: r.last - r.due,
    }
    results = []
    for streams in (1, 64):
        taken: dict[tuple[str, int], list[float]] = {}
        for repeat in range(repeats):
            for index, caller in enumerate(
                (process_caller, beside) if repeat % 2 else (beside, process_caller)
            ):
                side = index if repeat % 2 else 1 - index
                records, _ = ask(caller, texts.take(max(streams, 4)), tokens, streams)
                for kind, value_of in kinds.items():
                    value = 1e3 * median(map(value_of, records))
                    taken.setdefault((kind, side), []).append(value)
        for kind in kinds:
            value, base = median(taken[kind, 0]), median(taken[kind, 1])
            name = f"{kind}, {streams} streams: engine in a process"
            results.append(Result(name, value, "ms", "engine in a thread", base))
    return results


def _raise_limit(num_files: int) -> None:
    """Allow this process, and those that it starts, so many open files.

    Raises:
        ConfigError: the system does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num_files:
        raise ConfigError(f"flood needs {num_files} open files, the system allows {hard}")
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))


def crowd(url: str, prompt: str, count: int) -> None:
    """Send so many requests at once; the target of a process of its own."""
    caller = Caller(urlsplit(url), None)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}

    async def run() -> None:
        asks = (caller.whole("POST", "/v1/completions", body) for _ in range(count))
        await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), FLOOD_SECONDS)
        caller.close()

    with contextlib.suppress(asyncio.TimeoutError):
        asyncio.run(run())


def _flood(texts: Texts, max_queue: int) -> list[Result]:
    """Milliseconds until `/health` answers beside `max_queue` queued requests, and without them."""
    (prompt,) = texts.take(1)
    options = ["--max-queue", str(max_queue), "--max-connections", str(2 * max_queue)]
    command = ["-m", "specpool", "serve", "--port", "0", "--no-access-log", "--batch", "64"]
    count = max_queue + max_queue // 10 + 64
    with server([*command, *options]) as caller:
        quiet, _, _ = asyncio.run(_looks(caller, lambda: True))
        spawn = multiprocessing.get_context("spawn").Process
        clients = [
            spawn(target=crowd, args=(caller.url, prompt, count // CLIENTS)) for _ in "." * CLIENTS
        ]
        for client in clients:
            client.start()
        busy, waiting, refused = asyncio.run(
            _looks(caller, lambda: not any(c.is_alive() for c in clients))
        )
    name = f"health beside a flood of {count:,} requests"
    return [
        Result("most requests that waited", waiting, "requests", "the limit", float(max_queue)),
        Result(
            "requests refused with 429", refused, "requests", "beyond the limit", count - max_queue
        ),
        Result(f"{name}, p50", median(busy), "ms", "without it", median(quiet)),
        Result(f"{name}, p99", busy[int(0.99 * len(busy))], "ms", "the goal", 100.0),
    ]


async def _looks(caller: Caller, is_over: Callable[[], bool]) -> tuple[list[float], float, float]:
    """Ask for `/health` until it is over.

    Returns:
        The milliseconds, the most requests that waited, and those that were refused.
    """
    taken: list[float] = []
    max_waiting = 0.0
    while not is_over() or len(taken) < 50:
        start = time.perf_counter()
        await caller.whole("GET", "/health")
        taken.append(1e3 * (time.perf_counter() - start))
        if len(taken) % 50 == 0:
            max_waiting = max(max_waiting, await _metric(caller, "vllm:num_requests_waiting{"))
        await asyncio.sleep(0.02)
    refused = await _metric(
        caller, 'specpool_http_requests_total{path="/v1/completions",status="429"}'
    )
    caller.close()
    return sorted(taken), max_waiting, refused


async def _metric(caller: Caller, name: str) -> float:
    """Return a number of `/metrics`; 0 if it is not there."""
    _, content = await caller.whole("GET", "/metrics")
    for line in content.decode().splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    return 0.0
