"""`python -m benches embed`: `BlockPool` under other engines, beside their own block managers.

The calls alone are measured beside a pool of plain dicts. With `--nano-vllm PATH`, a checkout of
that project, its manager and the one of `examples/engines` serve the same sequences: prompts of
common beginnings, then decoding. Its sequences are used for both. Only the managers' time counts.
`--mini-sglang PATH` does the same with that project: `embed_mini.py`.
"""

from __future__ import annotations

import importlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benches.engines import example, stand_in_packages
from specpool import BlockPool
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, interleaved, machine, report
from specpool.errors import ConfigError

SIZES = (16, 256)  # block sizes of nano-vllm; with 1 its manager gives a decode no block
REQUESTS, PROMPT, COMMON, NEW = 64, 1024, 512, 256


class PlainPool:
    """Blocks, holders and contents in dicts: what an engine's own pool looks like."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._refs: dict[int, int] = {}
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    def take(self, count: int) -> list[int]:
        blocks = []
        for _ in range(count):
            if not self._free:
                block, _ = self._unused.popitem(last=False)
                del self._known[self._key_of.pop(block)]
                self._free.append(block)
            block = self._free.pop()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                if block in self._key_of:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def _keys(self, tokens: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        before = 0
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = (before, tuple(tokens[at : at + self.block_size]))
            yield key
            before = hash(key)

    def match(self, tokens: list[int]) -> list[int]:
        hit = []
        for key in self._keys(tokens):
            if key not in self._known:
                break
            hit.append(self._known[key])
        return hit

    def put(self, tokens: list[int], blocks: list[int]) -> None:
        for key, block in zip(self._keys(tokens), blocks, strict=False):
            if key not in self._known:
                self._known[key], self._key_of[block] = block, key


def _per_call(call: Callable[[], object], num_calls: int) -> Callable[[], float]:
    """Return a run of the call that returns microseconds a call."""

    def run() -> float:
        start = time.thread_time_ns()
        for _ in range(num_calls):
            call()
        return (time.thread_time_ns() - start) / num_calls / 1e3

    return run


def _calls(repeats: int) -> list[Result]:
    """Measure the verbs alone, on blocks of 16 tokens."""
    tokens = np.random.default_rng(0).integers(0, 32_000, 16_000).astype(np.int32)
    pool, plain = BlockPool(4096, 16), PlainPool(4096, 16)
    as_list = tokens.tolist()
    blocks, plain_blocks = pool.take(1000), plain.take(1000)
    pool.put(tokens, blocks)
    plain.put(as_list, plain_blocks)
    if len(pool.match(tokens)) != 1000 or len(plain.match(as_list)) != 1000:
        raise AssertionError("a text of 1,000 blocks is not found")
    cases = [
        (
            "take and drop of 8 blocks",
            lambda: pool.drop(pool.take(8)),
            lambda: plain.drop(plain.take(8)),
            2_000,
        ),
        ("match of 1,000 blocks", lambda: pool.match(tokens), lambda: plain.match(as_list), 20),
    ]
    results = []
    for name, ours, theirs, num_calls in cases:
        runs = [_per_call(ours, num_calls), _per_call(theirs, num_calls)]
        value, reference = interleaved(runs, repeats)
        results.append(Result(name, value, "us", "a pool of dicts", reference))
    return results


def _nano_vllm(path: Path) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Import the checkout's manager and sequence without its package, which needs a GPU's parts."""
    if not (path / "nanovllm" / "engine" / "block_manager.py").is_file():
        raise ConfigError(f"--nano-vllm: {path} has no nanovllm/engine/block_manager.py")
    stand_in_packages(path, "nanovllm", "nanovllm.engine")
    try:
        theirs = importlib.import_module("nanovllm.engine.block_manager")
        sequences = importlib.import_module("nanovllm.engine.sequence")
    except ImportError as error:
        raise ConfigError(f"--nano-vllm: {error}: pip install {error.name}") from None
    return example("nano_vllm"), theirs, sequences


class NanoLoad:
    """Sequences of nano-vllm on one of two managers, called as its scheduler calls them."""

    def __init__(self, manager: Any, sequence: Any, block_size: int) -> None:
        sequence.block_size = block_size
        self._manager = manager
        rng = np.random.default_rng(0)
        commons = [rng.integers(0, 32_000, COMMON).tolist() for _ in range(8)]
        self._sequences = [
            sequence(commons[i % 8] + rng.integers(0, 32_000, PROMPT - COMMON).tolist())
            for i in range(REQUESTS)
        ]
        self._new = rng.integers(0, 32_000, (NEW, REQUESTS)).tolist()

    def prefill(self) -> float:
        """Admit all; return microseconds a request."""
        manager, start = self._manager, time.thread_time_ns()
        for sequence in self._sequences:
            manager.allocate(sequence, manager.can_allocate(sequence))
            sequence.num_scheduled_tokens = sequence.num_tokens - sequence.num_cached_tokens
            manager.hash_blocks(sequence)
            sequence.num_cached_tokens = sequence.num_tokens
        return (time.thread_time_ns() - start) / REQUESTS / 1e3

    def decode(self) -> float:
        """Decode all to the end; return microseconds a token."""
        manager, sequences = self._manager, self._sequences
        spent = 0
        for tokens in self._new:
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.append_token(token)
                sequence.num_scheduled_tokens = 1
            start = time.thread_time_ns()
            for sequence in sequences:
                if manager.can_append(sequence):
                    manager.may_append(sequence)
            for sequence in sequences:
                manager.hash_blocks(sequence)
            spent += time.thread_time_ns() - start
            for sequence in sequences:
                sequence.num_cached_tokens += 1
        return spent / NEW / REQUESTS / 1e3


def _beside_nano(path: Path, repeats: int) -> list[Result]:
    ours, theirs, sequences = _nano_vllm(path)
    results = []
    for size in SIZES:
        num_blocks = REQUESTS * ((PROMPT + NEW) // size + 1)
        turns = [
            _turn(module.BlockManager(num_blocks, size), sequences.Sequence, size)
            for _ in range(repeats)
            for module in (ours, theirs)
        ]
        prefill, decode = np.median(turns[::2], axis=0).tolist()
        their_prefill, their_decode = np.median(turns[1::2], axis=0).tolist()
        name = f"nano-vllm, P={size}"
        results += [
            Result(f"{name}: a prefill", prefill, "us", "its own manager", their_prefill),
            Result(f"{name}: a decoded token", decode, "us", "its own manager", their_decode),
        ]
    return results


def _turn(manager: Any, sequence: Any, block_size: int) -> tuple[float, float]:
    load = NanoLoad(manager, sequence, block_size)
    return load.prefill(), load.decode()


def embed(
    *,
    nano_vllm: Path | None,
    mini_sglang: Path | None,
    repeats: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    if plot is not None:
        check_plot(plot)
    results = _calls(repeats)
    if nano_vllm is not None:
        results += _beside_nano(nano_vllm, repeats)
    if mini_sglang is not None:
        from benches import embed_mini

        results += embed_mini.measure(mini_sglang, repeats)
    report("bench embed", machine(), results, json_only=json, plot=plot)
