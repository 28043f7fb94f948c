"""`Capture`: turns work on a device into a graph. `CudaCapture` does it; tests have a double."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specpool.engine.switches import HeldOff
from specpool.engine.worker.results import Outcome

Work = Callable[[], tuple[Outcome, Callable[[], None]]]
"""A function that launches work; returns an outcome and the function that launches the rest."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Captured work.

    Attributes:
        outcome: what the work returned. Every replay of `decide` writes these same tensors.
        decide: replays the work up to the outcome.
        follow: replays the rest, which reads what `decide` wrote; None if there is none.
    """

    outcome: Outcome
    decide: Callable[[], None]
    follow: Callable[[], None] | None


class Capture(Protocol):
    """The part that captures work on one device. Its recordings share one memory pool."""

    def warm_up(self, work: Work) -> None:
        """Run the work, so that nothing is compiled, loaded or first allocated in a capture."""

    def record(self, work: Work, *, follows: bool) -> Recording:
        """Capture the work; `follows` says whether it launches anything after its outcome."""

    def used_bytes(self) -> int:
        """Return the bytes of device memory in use, without unused cached memory."""


class CudaCapture:
    """A `Capture` by `torch.cuda.CUDAGraph`, on its own stream and with one memory pool.

    `torch.cuda.graph` is not used: if a capture fails, it leaves the pool open and its stream
    current, and every later capture fails too.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture work on `device`."""
        cuda: Any = torch.cuda  # only some versions of torch have types for it
        self._device, self._stream = device, cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()
        self._pool_holder: Any = None  # the pool's first graph, by `_capture_nothing`

    def warm_up(self, work: Work) -> None:
        """Run the work on the capture stream, because libraries keep a workspace per stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _, follow = work()
            follow()
        current.wait_stream(self._stream)

    def record(self, work: Work, *, follows: bool) -> Recording:
        """Capture two graphs, so that a replay can start the copy to the host between them.

        Raises:
            torch.OutOfMemoryError: less than `_reserve` bytes of the device's memory are left.
        """
        if self._pool_holder is None:
            self._pool_holder = self._capture_nothing()
            gc.collect()
        else:  # dead tensors would keep their memory; a whole search takes tenths of a second
            gc.collect(1)
        graphs = [torch.cuda.CUDAGraph() for _ in range(1 + follows)]
        with self._recording(graphs[0]):
            outcome, launch_rest = work()
        if follows:
            with self._recording(graphs[1]):
                launch_rest()
        free, total = torch.cuda.mem_get_info(self._device)
        if free < _reserve(total):
            raise torch.OutOfMemoryError(
                f"{free} of {total} bytes are left, and prompts need {_reserve(total)}"
            )
        return Recording(outcome, graphs[0].replay, graphs[1].replay if follows else None)

    def used_bytes(self) -> int:
        """Return the bytes in use by all processes, because the driver's share counts too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    @contextlib.contextmanager
    def _recording(self, graph: Any) -> Iterator[None]:
        """Capture the block's work as `graph`; a capture that fails does not harm later ones."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # leaves the graph as much memory as there is
        # The objects of an engine that is gone may free pinned memory or wait for an event, which
        # spoils a capture. So no garbage is collected.
        with torch.cuda.stream(self._stream), _collector.block():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode=_OTHERS_MAY)
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # the cause is on its way already
                    self._end(graph)
                raise
            self._end(graph)

    def _end(self, graph: Any) -> None:
        """End a capture. If it is invalid, leave torch as if it had not been.

        Close its pool, and take a new one for later graphs.

        Raises:
            RuntimeError: the work cannot be captured.
        """
        try:
            graph.capture_end()
        except BaseException:
            # torch's allocator of pinned memory goes on asking this graph about each allocation.
            _failed.append(graph)
            pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
            index = (
                torch.cuda.current_device() if self._device.index is None else self._device.index
            )
            for name in _CLOSE_POOL:
                if hasattr(torch._C, name):
                    with contextlib.suppress(RuntimeError):  # the capture may not have begun
                        getattr(torch._C, name)(index, pool)
            # torch's generator of random numbers still takes itself to be in a capture, and refuses
            # all work outside of one, until a capture ends well.
            self._pool_holder = None
            with contextlib.suppress(RuntimeError):
                self._pool_holder = self._capture_nothing()
            raise

    def _capture_nothing(self) -> Any:
        """Capture a graph of one operation into the pool, outside of inference mode; return it.

        The graph holds the pool: torch takes no graph into a pool whose graphs are all gone, as
        they are if the first work raised.

        NOTE: a process's first graph makes tensors that torch writes at each later capture. Made in
        inference mode, they would refuse the captures of all others. They live as long as a graph.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            cell = torch.zeros(1, device=self._device)
            graph.capture_begin(pool=self._pool, capture_error_mode=_OTHERS_MAY)
            cell.zero_()
            graph.capture_end()
        return graph


_OTHERS_MAY = "thread_local"  # while this thread captures, others may allocate and wait
_failed: list[Any] = []  # graphs whose capture failed; they live as long as the process
_collector = HeldOff(gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable())

# torch's functions that end the allocation to a pool, under its names of two versions, and drop it.
_CLOSE_POOL = (
    "_cuda_endAllocateToPool",
    "_cuda_endAllocateCurrentStreamToPool",
    "_cuda_releasePool",
)


# Parts of the messages by which libraries report that GPU or CPU memory has run out.
_SIGNS = ("ALLOC_FAILED", "can't allocate memory", "not enough memory")
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"

_host: Callable[[], Capture] | None = None


def _reserve(total: int) -> int:
    """Return how many of a device's bytes graphs must leave free for prompts: 5 %, at most 2 GiB.

    What the activations of a prompt take does not grow with the card.
    """
    return min(total // 20, 2 << 30)


@contextlib.contextmanager
def host_capture(make: Callable[[], Capture]) -> Iterator[None]:
    """Capture graphs of CPU tensors with the result of `make` within the block, for tests."""
    global _host
    before, _host = _host, make
    try:
        yield
    finally:
        _host = before


def capture_on(device: torch.device) -> Capture | None:
    """Return a `Capture` for `device`; None if graphs cannot be captured there."""
    if device.type == "cuda":
        # torch has no pools for graphs if its cache is off, as it is under compute-sanitizer.
        return None if os.environ.get(_NO_CACHE) else CudaCapture(device)
    return None if _host is None else _host()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out: Python's, torch's or a library's.

    A failing capture can hide the out-of-memory error, so search the whole exception chain.
    """
    while error is not None:
        text = str(error)
        has_sign = any(sign in text for sign in _SIGNS) or "out of memory" in text.lower()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and has_sign:
            return True
        error = error.__context__
    return False
