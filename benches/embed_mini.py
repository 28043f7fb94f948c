"""Part of `python -m benches embed`: mini-sglang's cache manager beside the one of `examples`.

With `--mini-sglang PATH`, a checkout of that project, both serve the same requests as its scheduler
does, on a host: prompts of common beginnings, then decoding. Its requests and its comparison of
keys in C++ are used, which needs `apache-tvm-ffi`, `ninja` and a compiler. What its manager pins
for a GPU is not pinned where there is none. Only the managers' time on the CPU counts.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benches.engines import example, stand_in_packages
from specpool.cli.results import Result
from specpool.errors import ConfigError

SIZES = (1, 16, 256)
REQUESTS, PROMPT, COMMON, NEW = 64, 1024, 512, 256
#: Prompts of one prefill.
BATCH = 8
PARTS = ("a prefill", "a decoded token", "a finish")
#: What its packages give the modules that are measured: `package.module`, and a name in it.
NAMES = (
    ("utils.misc", "align_down"),
    ("utils.misc", "div_ceil"),
    ("utils.registry", "Registry"),
    ("kernel.radix", "fast_compare_key"),
)


def _modules(path: Path) -> tuple[Any, Any, Any]:
    """Import our manager's module, the checkout's, and that of its requests.

    Raises:
        ConfigError: `path` has no such manager, or a package that it needs is missing.
    """
    if not (path / "python" / "minisgl" / "scheduler" / "cache.py").is_file():
        raise ConfigError(f"--mini-sglang: {path} has no python/minisgl/scheduler/cache.py")
    packages = ("minisgl", "minisgl.utils", "minisgl.kernel", "minisgl.scheduler")
    stand_in_packages(path / "python", *packages)
    try:
        for module, name in NAMES:
            function = getattr(importlib.import_module(f"minisgl.{module}"), name)
            setattr(sys.modules[f"minisgl.{module.partition('.')[0]}"], name, function)
        core = importlib.import_module("minisgl.core")
        theirs = importlib.import_module("minisgl.scheduler.cache")
        probe_ids = torch.zeros(1, dtype=torch.int32)
        function(probe_ids, probe_ids)  # compiled here, off the clock
    except ImportError as error:
        raise ConfigError(f"--mini-sglang: {error}: pip install {error.name}") from None
    return example("mini_sglang"), theirs, core


@contextmanager
def _no_pins() -> Iterator[None]:
    """Without a GPU torch refuses to pin memory: within it, nothing is pinned."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.empty

    @functools.wraps(original)
    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return original(*sizes, **options)

    with mock.patch.object(torch, "empty", empty):
        yield


def _use_all(pool: Any) -> None:
    """Use the pool's memory once, as after some time in an engine; the other side makes no such."""
    every = pool.take(pool.num_blocks)
    pool.put(np.arange(pool.num_blocks * pool.block_size, dtype=np.int32), every)
    pool.drop(every)
    pool.drop(pool.take(pool.num_blocks))  # gives up every text


class MiniLoad:
    """Requests of mini-sglang on one of two managers, called as its scheduler calls them."""

    def __init__(self, manager_of: Any, core: Any, page_size: int) -> None:
        core._GLOBAL_CTX = core.Context(page_size=page_size)
        width = -(-(PROMPT + NEW) // page_size) * page_size
        self._table = torch.zeros((REQUESTS, width), dtype=torch.int32)
        num_pages = REQUESTS * width // page_size
        self.manager = manager_of(num_pages, page_size, self._table, "radix")
        self._req_of, rng = core.Req, np.random.default_rng(0)
        if hasattr(self.manager, "pool"):
            _use_all(self.manager.pool)
        commons = [rng.integers(0, 32_000, COMMON) for _ in range(8)]
        self._prompts = [
            torch.from_numpy(
                np.concatenate([commons[i % 8], rng.integers(0, 32_000, PROMPT - COMMON)]).astype(
                    np.int32
                )
            )
            for i in range(REQUESTS)
        ]
        self._new = torch.from_numpy(rng.integers(0, 32_000, (NEW, REQUESTS)).astype(np.int32))
        self.reqs: list[Any] = []

    def _admit(self, line: int) -> Any:
        manager, tokens = self.manager, self._prompts[line]
        waiting = SimpleNamespace(input_ids=tokens, input_len=len(tokens), output_len=NEW)
        handle = manager.match_req(waiting).cuda_handle
        manager.lock(handle)
        known = handle.cached_len
        if known:
            self._table[line][:known].copy_(handle.get_matched_indices())
        return self._req_of(tokens, line, known, NEW, line, None, handle)

    def prefill(self) -> float:
        """Admit all, in batches; return microseconds a request."""
        manager, start = self.manager, time.thread_time_ns()
        for first in range(0, REQUESTS, BATCH):
            batch = [self._admit(line) for line in range(first, first + BATCH)]
            manager.allocate_paged(batch)
            for req in batch:
                req.complete_one()
            with manager.lazy_free_region():
                for req in batch:
                    manager.cache_req(req, finished=False)
            self.reqs += batch
        return (time.thread_time_ns() - start) / REQUESTS / 1e3

    def decode(self) -> float:
        """Decode all to the end; return microseconds a token."""
        manager, reqs, spent = self.manager, self.reqs, 0
        for tokens in self._new[:-1]:
            for req, token in zip(reqs, tokens, strict=True):
                req.append_host(token.unsqueeze(0))
            start = time.thread_time_ns()
            manager.allocate_paged(reqs)
            spent += time.thread_time_ns() - start
            for req in reqs:
                req.complete_one()
        return spent / (NEW - 1) / REQUESTS / 1e3

    def finish(self) -> float:
        """End all; return microseconds a request."""
        manager, start = self.manager, time.thread_time_ns()
        with manager.lazy_free_region():
            for req in self.reqs:
                manager.cache_req(req, finished=True)
        return (time.thread_time_ns() - start) / REQUESTS / 1e3


def _turn(manager_of: Any, core: Any, page_size: int) -> tuple[float, ...]:
    load = MiniLoad(manager_of, core, page_size)
    taken = load.prefill(), load.decode(), load.finish()
    load.manager.check_integrity()
    return taken


def measure(path: Path, repeats: int) -> list[Result]:
    """Return both managers' time for each page size; the two take turns.

    Raises:
        ConfigError: `path` is no checkout that can be used.
    """
    ours, theirs, core = _modules(path)
    results = []
    with _no_pins():
        for size in SIZES:
            turns = [
                _turn(module.CacheManager, core, size)
                for _ in range(repeats)
                for module in (ours, theirs)
            ]
            for at, name in enumerate(PARTS):
                value, reference = (float(np.median([t[at] for t in turns[n::2]])) for n in (0, 1))
                title = f"mini-sglang, P={size}: {name}"
                results.append(Result(title, value, "us", "its own manager", reference))
    return results
