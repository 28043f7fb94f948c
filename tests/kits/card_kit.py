"""Where the tests of CUDA graphs run: on a card, and over the double of `graph_kit.py`.

A test that counts calls runs over the double too. So a count that can never rise is found where
there is no card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cuda_host
from graph_kit import HostCapture, HostGraph, graphs_run
from specpool.engine.worker.graphs.capture import CudaCapture


class Card:
    """A CUDA device.

    Attributes:
        options: an engine's options that put it on the device.
        capture: the class that captures rounds.
        graph: the class whose `replay` runs them.
        num_rounds: how many rounds a test that measures may take.
    """

    options: dict[str, Any] = {"device": "cuda", "dtype": "float32"}  # noqa: RUF012
    capture: type = CudaCapture
    num_rounds = 100

    @property
    def graph(self) -> type:
        return torch.cuda.graphs.CUDAGraph

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield

    def memory_stats(self) -> dict[str, int]:
        """Wait for the device; return the allocator's counters."""
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()

    def num_allocations(self) -> int:
        """Return how many blocks were ever allocated; this does not wait."""
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    def run_out(self) -> None:
        """Ask for more memory than any device has."""
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

    @contextlib.contextmanager
    def refusing_waits(self) -> Iterator[None]:
        """CUDA itself reports every call that would wait, a wait for an event aside."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class HostCard(Card):
    """The double: kernels of the host runner, and graphs of `HostCapture`."""

    options: dict[str, Any] = {"dtype": "float32"}  # noqa: RUF012
    capture = HostCapture
    num_rounds = 10

    @property
    def graph(self) -> type:
        return HostGraph

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with graphs_run():
            yield

    def memory_stats(self) -> dict[str, int]:
        return {}

    def num_allocations(self) -> int:
        return 0

    def run_out(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 TiB.")

    @contextlib.contextmanager
    def refusing_waits(self) -> Iterator[None]:
        yield  # the double refuses a wait in every replay


CARDS: list[Any] = [
    pytest.param(
        HostCard(),
        id="double",
        marks=pytest.mark.skipif(
            bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or ""
        ),
    ),
    pytest.param(
        Card(),
        id="cuda",
        marks=[
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            pytest.mark.full,  # so that a sample is of cases that run without a card
        ],
    ),
]


def count_replays(
    card: Card, monkeypatch: pytest.MonkeyPatch, measure: Callable[[], int]
) -> list[int]:
    """Return a list that gets, for each replay of a graph, by how much `measure` rises in it.

    NOTE: call it before the engine is built, because recordings hold bound methods.
    """
    rises, replay = list[int](), card.graph.replay  # type: ignore[attr-defined]

    def counted(graph: Any) -> None:
        before = measure()
        replay(graph)
        rises.append(measure() - before)

    monkeypatch.setattr(card.graph, "replay", counted)
    return rises
