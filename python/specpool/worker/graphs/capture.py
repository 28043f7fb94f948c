"""`Capture`: how work on a device becomes a graph; `CudaCapture`, or a double of the tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specpool.worker.results import Outcome

Work = Callable[[], Iterator[Outcome]]
"""Launches work; yields an outcome, once, and goes on."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Work that was captured.

    Attributes:
        outcome: what it yielded: every replay of `decide` writes these very tensors.
        decide: replays what came before.
        follow: replays what came after, which reads what `decide` has left; None = nothing did.
    """

    outcome: Outcome
    decide: Callable[[], None]
    follow: Callable[[], None] | None


class Capture(Protocol):
    """Captures work of one device. What its recordings need between themselves is one pool."""

    def warm_up(self, work: Work) -> None:
        """Runs it, so that nothing is built, loaded or first allocated within a capture."""

    def record(self, work: Work, *, follows: bool) -> Recording:
        """Captures it; `follows` says whether it goes on after its outcome."""

    def used_bytes(self) -> int:
        """Bytes of the device's memory that are taken; what is cached and not in use is not."""


class CudaCapture:
    """`torch.cuda.graph` on a stream of its own, one memory pool for all."""

    def __init__(self, device: torch.device) -> None:
        """Capture work on `device`."""
        cuda: Any = torch.cuda  # typed in some versions of torch only
        self._device, self._stream = device, cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """As `Capture` says: on the stream of the captures, whose workspaces are its own."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in work():
                pass
        current.wait_stream(self._stream)

    def record(self, work: Work, *, follows: bool) -> Recording:
        """As `Capture` says: two graphs, between which the host's copy is launched."""
        graphs = [torch.cuda.CUDAGraph() for _ in range(1 + follows)]
        with self._into(graphs[0]):
            steps = work()
            outcome = next(steps)
        for graph in graphs[1:]:
            with self._into(graph):
                next(steps, None)
        free, total = torch.cuda.mem_get_info(self._device)
        if free < total * _RESERVE:
            raise torch.OutOfMemoryError(
                f"{free} of {total} bytes are left, which prompts may want"
            )
        decide, follow = (*(graph.replay for graph in graphs), None)[:2]
        assert decide is not None
        return Recording(outcome, decide, follow)

    def used_bytes(self) -> int:
        """As `Capture` says, by whatever process: the driver's own share of a graph counts too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def _into(self, graph: Any) -> Any:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream)


# How libraries say that memory has run out, a CPU's among them.
_SIGNS = ("ALLOC_FAILED", "can't allocate memory", "not enough memory")
_RESERVE = 0.05  # of the device's memory, that graphs leave alone
_NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"

_host: Callable[[], Capture] | None = None


@contextlib.contextmanager
def host_capture(make: Callable[[], Capture]) -> Iterator[None]:
    """Graphs of CPU tensors are captured by what `make` gives, which the tests have."""
    global _host
    before, _host = _host, make
    try:
        yield
    finally:
        _host = before


def capture_on(device: torch.device) -> Capture | None:
    """What captures graphs on `device`; None = nothing does."""
    if device.type == "cuda":
        # Without its cache, as under compute-sanitizer, torch has no pools for graphs.
        return None if os.environ.get(_NO_CACHE) else CudaCapture(device)
    return None if _host is None else _host()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: Python's, torch's, the driver's or a library's.

    The end of a capture may report its own fault instead; memory's is behind it.
    """
    while error is not None:
        text = str(error)
        says = any(sign in text for sign in _SIGNS) or "out of memory" in text.lower()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, RuntimeError) and says:
            return True
        error = error.__context__
    return False
