"""`GraphWork`: the work that a graph repeats, a round for some lanes up to a bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from specpool.engine.attention import GraphRecorder
from specpool.engine.attention.lanes import Lanes
from specpool.engine.memory.kv_cache import KVCache, PageBounds
from specpool.engine.worker.graphs.round_graph import LaneBuffer, RoundKind
from specpool.engine.worker.results import Outcome
from specpool.engine.worker.row_state import RowState

Rounds = Callable[[RoundKind, Lanes], tuple[Outcome, Callable[[], None]]]
GraphKey = tuple[RoundKind, int, int]  # a graph's kind, number of lanes, and bound of the roots


class GraphWork:
    """The work of one graph. It is run to warm up, then captured.

    Attributes:
        recorder: the attention's recorder; None if the attention plans nothing.
        bounds: how many pages the round reads; None if not bounded.
    """

    def __init__(
        self,
        key: GraphKey,
        rounds: Rounds,
        buffer: LaneBuffer,
        cache: KVCache,
        rows: RowState,
        recorder: GraphRecorder | None,
        bounds: PageBounds | None,
    ) -> None:
        """Prepare the work of `key`, whose lanes are the first of `buffer`."""
        self.recorder, self.bounds = recorder, bounds
        self._key, self._rounds, self._lanes = key, rounds, buffer.lanes(key[1])
        self._cache, self._rows = cache, rows

    def __call__(self) -> tuple[Outcome, Callable[[], None]]:
        """Launch a round up to its outcome; return this and the function that launches the rest."""
        kind, _, bound = self._key
        with self._within():
            if self.recorder is not None:
                self.recorder.restart()
            outcome, follow = self._rounds(kind, self._rows.lanes_within(*self._lanes, bound))

        def launch_rest() -> None:
            with self._within():  # again, because other work may run between the two halves
                follow()

        return outcome, launch_rest

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._rows.within_graph())
            stack.enter_context(self._cache.reading_within(self.bounds))
            if self.recorder is not None:
                stack.enter_context(self._cache.attending_with(self.recorder.attend))
            yield
