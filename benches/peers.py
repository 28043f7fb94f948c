"""`python -m benches peers`: this engine beside another one on the same CPU.

Each engine runs in a process of its own, since vLLM needs a torch of its own. They take turns at
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
from functools import partial
from pathlib import Path
from types import TracebackType

from benches.engines import ENGINES, ROOT
from benches.plain_rows import SIZES
from specpool.checks import check_choice, check_int
from specpool.cli.results import Result, check_plot, machine, report
from specpool.errors import ConfigError

#: Peers: their name in results, and the module of their process.
PEERS = {
    "vllm": ("vLLM", "benches.peer_vllm"),
    "llama-cpp": ("llama.cpp", "benches.peer_llama_cpp"),
    "plain": ("our plain rounds", "benches.peer_specpool"),
}
#: Wall seconds over CPU seconds of the calibration loop, up to which the machine is quiet.
MAX_QUIETNESS = 1.03
#: One repeating prompt of 256 tokens; 8 and 24 prompts of 32 to 512; 24 with a common beginning of
#: 600; 24 that repeat themselves; 8 of 2,000.
TRACES = ("one", "ragged-8", "ragged-24", "shared", "repeating", "long")
#: Tries for each pair that is to count.
TRIES = 4
#: Rounds of the loop's hash: about a tenth of a second.
_ROUNDS = 150_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts that come at once, and the tokens that each request is to write."""

    prompts: list[list[int]]
    num_new: int

    @staticmethod
    def of(kind: str, vocab_size: int, max_prompt: int) -> Trace:
        """Return the trace of a kind, the same each time.

        Args:
            kind: of `TRACES`.
            vocab_size: tokens are drawn from 10 to 10 below it.
            max_prompt: longer prompts are drawn with as many tokens instead.
        """
        rng = random.Random(kind)

        def drawn(length: int) -> list[int]:
            return [rng.randint(10, vocab_size - 10) for _ in range(length)]

        def repeating(length: int) -> list[int]:
            """A text of 24 tokens again and again, so that prompt lookup has something to find."""
            return (drawn(24) * (length // 24 + 1))[:length]

        if kind == "one":
            return Trace([repeating(min(256, max_prompt))], 128)
        if kind == "shared":
            beginning = drawn(min(600, max_prompt - 40))
            prompts = [beginning + drawn(rng.randint(8, 40)) for _ in range(24)]
        elif kind == "repeating":
            prompts = [repeating(min(rng.randint(150, 280), max_prompt)) for _ in range(24)]
        elif kind == "long":
            prompts = [drawn(min(2000, max_prompt)) for _ in range(8)]
        else:
            num_prompts = {"ragged-8": 8, "ragged-24": 24}[kind]
            prompts = [drawn(min(rng.randint(32, 512), max_prompt)) for _ in range(num_prompts)]
        return Trace(prompts, 48)


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

    def __init__(
        self,
        python: Path,
        module: str,
        model: Path,
        *,
        threads: int,
        drafts: int,
        adaptive: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            python: runs the module.
            module: a module of `benches` whose `main` takes the other arguments.
            model: folder of a model.
            threads: CPU threads.
            drafts: tokens that prompt lookup proposes in a round; 0 is plain decoding.
            adaptive: the policy that chooses among so many drafts and fewer (ours alone).

        Raises:
            ConfigError: the engine does not start; its own words are on standard error.
        """
        self._name = module
        policy = [adaptive] if adaptive else []
        self._process = subprocess.Popen(
            [str(python), "-m", module, str(model), str(threads), str(drafts), *policy],
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


def results_of(name: str, reference: str, pairs: Sequence[Pair]) -> Iterator[Result]:
    """Return speeds beside the peer's. A ratio is that of medians."""
    num_tokens = sum(map(len, pairs[0].ours.token_ids))
    for field, unit in (("cpu_seconds", "tokens/CPU s"), ("seconds", "tokens/s")):
        ours, theirs = (
            num_tokens / statistics.median(getattr(getattr(pair, side), field) for pair in pairs)
            for side in ("ours", "theirs")
        )
        yield Result(name, ours, unit, reference, theirs)


def peers(
    *,
    peer: str,
    python: Path | None,
    sizes: Sequence[str],
    traces: Sequence[str],
    drafts: Sequence[int],
    threads: Sequence[int],
    adaptive: str | None,
    repeats: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure each size, number of drafts and of threads, and trace, beside the peer.

    A cell on a machine that was not quiet is left out, and standard error says so.

    Raises:
        ConfigError: an option cannot work, an engine does not start, or texts differ.
    """
    check_choice("peer", peer, tuple(PEERS))
    for size in sizes:
        check_choice("size", size, ("tiny", *SIZES))
    for kind in traces:
        check_choice("trace", kind, TRACES)
    for number in drafts:
        check_int("drafts", number, 0, 15)
    for number in threads:
        check_int("threads", number, 1, os.cpu_count() or 1)
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    if peer == "llama-cpp" and any(drafts):
        raise ConfigError(f"llama.cpp runs here without drafts: drafts must be 0, got {drafts}")
    if adaptive is not None:
        check_choice("adaptive", adaptive, ("cost", "budget"))
        if 0 in drafts:
            raise ConfigError(f"a policy chooses among drafts: drafts must be >= 1, got {drafts}")
    interpreter = Path(sys.executable)
    python = python or (
        interpreter if peer == "plain" else ENGINES / f"{peer}-cpu" / "bin" / "python"
    )
    if not python.is_file():
        raise ConfigError(f"--python: {python} is not there: `make {peer}-cpu`")
    results: list[Result] = []
    for size, num_drafts, number in itertools.product(sizes, drafts, threads):
        with ExitStack() as stack:
            model = model_folder(size, stack)
            ours = partial(Peer, interpreter, PEERS["plain"][1], model, threads=number)
            theirs = partial(Peer, python, PEERS[peer][1], model, threads=number)
            sides = (
                stack.enter_context(ours(drafts=num_drafts, adaptive=adaptive)),
                stack.enter_context(theirs(drafts=0 if peer == "plain" else num_drafts)),
            )
            for kind in traces:
                trace = Trace.of(kind, *model_sizes(model))
                name = f"{size}: {kind}, drafts {num_drafts}, threads {number}"
                name += f", {adaptive}" if adaptive else ""
                take = partial(_pair, sides, trace, number)
                check_texts(name, take(True))  # and warm
                try:
                    pairs = quiet_pairs(take, repeats)
                except ConfigError as error:
                    print(f"{name}: left out, {error}", file=sys.stderr)
                    continue
                for pair in pairs:
                    check_texts(name, pair)
                results += results_of(name, PEERS[peer][0], pairs)
    where = machine(threads=max(threads), packages=("torch", "transformers"))
    report("bench peers", where, results, json_only=json, plot=plot)


def _pair(sides: tuple[Peer, Peer], trace: Trace, threads: int, is_first: bool) -> Pair:
    before = quietness(threads)
    turns: dict[Peer, Turn] = {}
    for side in sides if is_first else sides[::-1]:
        turns[side] = side.turn(trace)
    return Pair(turns[sides[0]], turns[sides[1]], max(before, quietness(threads)))


def model_folder(size: str, stack: ExitStack) -> Path:
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


def model_sizes(model: Path) -> tuple[int, int]:
    """Return a model's vocabulary and the longest prompt of its traces, in tokens."""
    config = json.loads((model / "config.json").read_text())
    return config["vocab_size"], config["max_position_embeddings"] // 2
