"""`Graphs`: all CUDA graphs of an engine, and `GraphSet`: those of one kind of round.

All graphs are built at the start; nothing is captured, compiled or allocated while requests run. A
round whose shape, batch size and lengths have a graph replays it. Any other round runs eagerly and
gives the same text.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specpool._core import Ledger, Plan, Shape
from specpool.engine.attention import GraphRecorder
from specpool.engine.attention.fused import FLASH_DTYPES
from specpool.engine.memory.kv_cache import KVCache, PageBounds
from specpool.engine.scheduler.step import Step
from specpool.engine.shape_names import name_of
from specpool.engine.worker.graphs.capture import Capture, is_out_of_memory
from specpool.engine.worker.graphs.graph_work import GraphWork, Place, Rounds
from specpool.engine.worker.graphs.round_graph import LaneBuffer, RoundGraph, RoundKind, page_bounds
from specpool.engine.worker.results import PendingStep
from specpool.engine.worker.row_state import RowState
from specpool.kernels.transfer import no_transfers

#: The greatest root position of the graphs with the shortest reads; each next bound is twice it.
LEAST_BOUND = 1024

_log = logging.getLogger("specpool")


class GraphSet:
    """The graphs of one kind of round, by batch size and bound."""

    def __init__(self, graphs: Iterable[RoundGraph], bounds: Sequence[int]) -> None:
        """Index the graphs by batch size and bound.

        Args:
            graphs: all of one kind of round.
            bounds: the bounds that graphs may have, ascending.
        """
        self._bounds = list(bounds)
        found = {(graph.size, graph.bound): graph for graph in graphs}
        self.sizes = tuple(sorted({size for size, _ in found}))
        self.num_graphs = len(found)
        # [bound][number of lanes] -> the smallest graph that serves both
        self._by_batch: list[list[RoundGraph]] = []
        for least in self._bounds:
            line: list[RoundGraph] = []
            for size, bound in sorted(at for at in found if at[1] >= least):
                line += [found[size, bound]] * (size + 1 - len(line))
            self._by_batch.append(line)

    def graph_for(self, batch_size: int, root: int) -> RoundGraph | None:
        """Return the smallest graph for `batch_size` lanes with roots up to `root`, or None."""
        place = bisect.bisect_left(self._bounds, root)
        if place == len(self._bounds) or batch_size >= len(self._by_batch[place]):
            return None
        return self._by_batch[place][batch_size]


class Graphs:
    """The graph sets of an engine, one for each kind of round, with counters of replays."""

    def __init__(
        self,
        capture: Capture,
        ledger: Ledger,
        cache: KVCache,
        rows: RowState,
        recorder: Callable[[int], GraphRecorder] | None = None,
    ) -> None:
        """Start without graphs; `build` captures them.

        Args:
            capture: captures the graphs.
            ledger: makes the plans that are replayed.
            cache: the pages.
            rows: the lengths of the rows.
            recorder: (bound of a graph's roots) -> the attention's recorder for it; None = the
                attention plans nothing.
        """
        self._recorder = recorder
        self._capture, self._ledger, self._cache, self._rows = capture, ledger, cache, rows
        most = max(shape.max_accept_len for shape in ledger.shapes)
        # No root lies beyond `last`: the scheduler prepares no row at the context's end.
        last = ledger.max_context_len - 1 + ledger.overlap_depth * most
        self._bounds = [LEAST_BOUND << i for i in range(32) if LEAST_BOUND << i < last] + [last]
        self._sets: dict[tuple[int, bool], GraphSet] = {}
        self._num_bytes = self._replay_ct = self._eager_ct = 0

    @torch.inference_mode()
    def build(self, sizes: Mapping[RoundKind, Sequence[int]], rounds: Rounds) -> None:
        """Capture a graph for each kind, size and bound, the largest first.

        If capture runs out of memory, skip that graph and every graph with at least as many lanes
        and as long reads. If a kind of round cannot be captured at all, log a warning; it runs
        eagerly.

        Args:
            sizes: the batch sizes of each kind of round.
            rounds: launches a round of given lanes.
        """
        places = [(kind, n, b) for kind, of in sizes.items() for n in of for b in self._bounds]
        places.sort(key=lambda place: place[1:], reverse=True)
        if not places:
            return
        buffer = LaneBuffer(places[0][1], self._cache.device)
        graphs: dict[RoundKind, list[RoundGraph]] = {kind: [] for kind in sizes}
        refused: set[RoundKind] = set()

        works = {place: self._work(place, rounds, buffer) for place in places}

        def attempt(place: Place, run: Callable[[Place], None]) -> None:
            kind = place[0]
            if kind in refused:
                return
            try:
                run(place)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                refused.add(kind)
                graphs[kind].clear()
                _log.warning(
                    "rounds of %s cannot be captured as CUDA graphs (%s) and run eagerly",
                    name_of(kind.shape),
                    str(error).partition("\n")[0] or repr(error),
                )

        loaded: set[tuple[RoundKind, int]] = set()

        def warm_up(place: Place) -> None:
            # A run with the longest reads that have room, and one with the shortest, load all that
            # those between use.
            kind, size, bound = place
            if (kind, size) in loaded and bound != self._bounds[0]:
                return
            with self._cache.trying_reads():
                self._capture.warm_up(works[place])
            loaded.add((kind, size))

        def record(place: Place) -> None:
            graphs[place[0]].append(self._record(place, works[place], buffer))

        warm = _within_memory(places, lambda place: attempt(place, warm_up))
        self._cache.pin_reads()
        before = self._capture.used_bytes()
        tried = _within_memory(warm, lambda place: attempt(place, record))
        self._num_bytes = max(self._capture.used_bytes() - before, 0)
        for kind, mine in graphs.items():
            if mine:
                self._sets[self._key(kind)] = GraphSet(mine, self._bounds)
        if len(tried) < len(places):
            _log.warning(
                "out of memory while capturing CUDA graphs: there are %d of %d, with %d bytes, for "
                "batch sizes %s; other rounds run eagerly",
                self.stats().num_graphs,
                len(places),
                self._num_bytes,
                list(self.sizes),
            )

    def _work(self, place: Place, rounds: Rounds, buffer: LaneBuffer) -> GraphWork:
        recorder = None if self._recorder is None else self._recorder(place[2])
        bounds = self._page_bounds(place)
        return GraphWork(place, rounds, buffer, self._cache, self._rows, recorder, bounds)

    def _page_bounds(self, place: Place) -> PageBounds | None:
        """Return how many pages a round reads; None = as many as its lanes have columns.

        Only torch's attention of 16 bits gathers live pages side by side.
        """
        if self._recorder is not None or self._cache.dtype not in FLASH_DTYPES:
            return None
        return page_bounds(place[0], place[1], self._ledger.groups)

    def _record(self, place: Place, work: GraphWork, buffer: LaneBuffer) -> RoundGraph:
        with no_transfers():
            recording = self._capture.record(work, follows=place[0].drafts)
        return RoundGraph(
            *place,
            recording,
            buffer,
            num_rows=self._ledger.num_rows,
            groups=self._ledger.groups,
            recorder=work.recorder,
            bounds=work.bounds,
        )

    def _key(self, kind: RoundKind) -> tuple[int, bool]:
        return self._ledger.shapes.index(kind.shape), kind.writes_draft

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes with a graph of any kind, ascending."""
        return tuple(
            sorted({size for graph_set in self._sets.values() for size in graph_set.sizes})
        )

    def replay(self, steps: Sequence[Step], before: Callable[[Plan], None]) -> PendingStep | None:
        """Replay the turn's round, if the turn is one round that has a graph; else return None.

        Args:
            steps: the steps of the turn.
            before: called with the round's plan before the replay.
        """
        graph = self._graph_for(steps[0]) if len(steps) == 1 else None
        if graph is None:
            self._eager_ct += sum(step.is_decode for step in steps)
            return None
        before(steps[0].plan)
        pending = graph.replay(steps[0].plan, steps[0].requests)
        self._rows.forget_copy()
        self._replay_ct += 1
        return pending

    def _graph_for(self, step: Step) -> RoundGraph | None:
        plan = step.plan
        if not step.is_decode or plan.shapes[0] != plan.shapes[-1]:  # equal ones side by side
            return None
        graph_set = self._sets.get((int(plan.shapes[0]), plan.writes_draft))
        # Processors and log probabilities need what only the host knows of the requests. The first
        # drafter drafts in a graph.
        if graph_set is None or any(
            request.params.logprobs is not None or request.changes_logits or request.drafter
            for request in step.requests
        ):
            return None
        graph = graph_set.graph_for(len(plan), int(plan.hi.max()))
        return graph if graph is not None and graph.holds(plan) else None

    def restart(self) -> None:
        """Set the counters to 0: the rounds so far were not requests'."""
        self._replay_ct = self._eager_ct = 0

    def stats(self) -> GraphStats:
        """Return the graphs that exist and the counters of replayed and eager rounds."""
        sizes: dict[Shape, tuple[int, ...]] = {}
        for (index, _), graph_set in self._sets.items():
            shape = self._ledger.shapes[index]
            sizes[shape] = tuple(sorted({*sizes.get(shape, ()), *graph_set.sizes}))
        return GraphStats(
            sizes=sizes,
            num_graphs=sum(graph_set.num_graphs for graph_set in self._sets.values()),
            num_bytes=self._num_bytes,
            replay_ct=self._replay_ct,
            eager_ct=self._eager_ct,
        )


def _within_memory(places: Sequence[Place], run: Callable[[Place], None]) -> list[Place]:
    """Run each place, and return those that succeeded.

    Skip a place that runs out of memory, and every later place with at least as many lanes and at
    least as long reads. A graph with more lanes but shorter reads may still find room.
    """
    found: list[Place] = []
    failed: list[Place] = []
    for place in places:
        if _exceeds(place, failed):
            continue
        try:
            run(place)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed.append(place)
        else:
            found.append(place)
    return found


def _exceeds(place: Place, failed: Collection[Place]) -> bool:
    """Return whether a place has at least the lanes and the reads of one that failed."""
    return any(place[1] >= size and place[2] >= bound for _, size, bound in failed)


@dataclass(frozen=True, slots=True)
class GraphStats:
    """The CUDA graphs of decode rounds, and how often they ran.

    Attributes:
        sizes: the batch sizes with a graph, by shape.
        num_graphs: graphs in all: one per kind of round, batch size and bound of its reads.
        num_bytes: bytes of device memory that the graphs take.
        replay_ct: rounds that were replayed.
        eager_ct: rounds that ran eagerly: without a graph, or together with a prefill.
    """

    sizes: dict[Shape, tuple[int, ...]]
    num_graphs: int
    num_bytes: int
    replay_ct: int
    eager_ct: int
