"""A double of what torch's binary keeps while CUDA graphs are captured, and after a failure.

It captures nothing: what runs within a capture is noted, and runs at once on the CPU. Its states
are those of torch 2.11, read in its headers and source.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

_zeros = torch.zeros


class Stream:
    """A `torch.cuda.Stream`."""

    cuda: FakeCuda

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        self.cuda.calls.append("side after current")


class Graph:
    """A `torch.cuda.CUDAGraph`.

    The first graph that begins gives the generator its tensor; it goes with the last one.
    """

    cuda: FakeCuda

    def __init__(self) -> None:
        self.cuda.num_graphs += 1
        self.name = f"graph {self.cuda.num_graphs}"

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        cuda = self.cuda
        pool = object() if pool is None else pool
        if pool in cuda.open_pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        graphs = cuda.graphs_of_pools.setdefault(pool, weakref.WeakSet())
        if pool in cuda.used_pools and not graphs:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        cuda.used_pools.append(pool)
        graphs.add(self)
        if not cuda.registered:
            cuda.seed = _zeros(1)  # an inference tensor in inference mode
        cuda.registered.add(self)
        cuda.seed.fill_(7)
        cuda.generator_captures = True
        cuda.open_pools.append(pool)
        cuda.host_filters.append(weakref.ref(self))
        self.pool, self.stream = pool, [*cuda.streams, None][0]
        cuda.into.append((self.pool, self.stream))
        cuda.modes.add(capture_error_mode)
        cuda.calls.append(f"begin {self.name}")

    def capture_end(self) -> None:
        cuda = self.cuda
        if self.stream is not [*cuda.streams, None][0]:
            raise RuntimeError("Capture must end on the same stream it began on.")
        if cuda.is_invalid:  # the driver has ended the capture, and torch does nothing more
            cuda.is_invalid = False
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        cuda.open_pools.remove(self.pool)
        cuda.host_filters.remove(weakref.ref(self))
        cuda.generator_captures = False
        cuda.calls.append(f"end {self.name}")

    def replay(self) -> None:
        self.cuda.calls.append(f"replay {self.name}")


class FakeCuda:
    """Record the calls of `torch.cuda`, in order, with the states that torch's binary keeps.

    A capture that became invalid ends with an error, and leaves open: its pool, so that each later
    capture to that pool is refused until `_cuda_endAllocateToPool`; the generator's mark; and a
    filter of the allocator of pinned memory, which is asked at each allocation.

    Attributes:
        calls: what was asked.
        into: the pool and stream of each capture.
        modes: how captures treat the calls of other threads.
        is_invalid: the capture that runs is spoiled.
        num_graphs: how many were made.
        registered: graphs that the generator knows.
        used_pools: pools into which a graph was captured.
        graphs_of_pools: of each of them, its graphs that live; torch takes no more without one.
        generator_captures: the generator takes itself to be in a capture.
        host_filters: the graphs that the allocator of pinned memory asks.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.into: list[tuple[Any, Any]] = []
        self.modes: set[str] = set()
        self.is_invalid = False
        self._of_thread = threading.local()
        self.open_pools: list[Any] = []
        self.used_pools: list[Any] = []
        self.graphs_of_pools: dict[Any, weakref.WeakSet[Graph]] = {}
        self.registered: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.seed = _zeros(1)
        self.generator_captures = False
        self.host_filters: list[weakref.ref[Graph]] = []
        self.num_graphs = 0

    @property
    def streams(self) -> list[Any]:
        """This thread's current streams, the innermost first."""
        streams: list[Any] = self._of_thread.__dict__.setdefault("streams", [])
        return streams

    def stream(self, stream: Any) -> Any:
        @contextlib.contextmanager
        def current() -> Iterator[None]:
            self.streams.insert(0, stream)
            try:
                yield
            finally:
                self.streams.pop(0)

        return current()

    def draw(self) -> None:
        """Draw random numbers on the device, outside of a capture."""
        if self.generator_captures:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def pin(self) -> None:
        """Allocate pinned memory."""
        assert all(graph() is not None for graph in self.host_filters), "a read of freed memory"

    def close(self, index: int, pool: Any) -> None:
        assert index == 0
        self.open_pools.remove(pool)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, holds_tensors: bool = False) -> None:
        """Take the place of `torch.cuda`; tensors of the device lie on the host unless it has them.

        Args:
            monkeypatch: undoes it.
            holds_tensors: something else makes tensors of the device.
        """
        for name, kind in (("Stream", Stream), ("CUDAGraph", Graph)):  # others name these classes
            monkeypatch.setattr(torch.cuda, name, type(name, (kind,), {"cuda": self}))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

        def zeros(*shape: Any, device: Any = None, **options: Any) -> Tensor:
            on_card = device is not None and torch.device(device).type == "cuda"
            return _zeros(*shape, device="cpu" if on_card else device, **options)

        current = SimpleNamespace(wait_stream=lambda other: self.calls.append("current after side"))
        if not holds_tensors:
            monkeypatch.setattr(torch, "zeros", zeros)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: self.calls.append("wait"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 1000))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.close, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *at: None, raising=False)
