"""`GraphSet`: what the rounds of one shape have, built at the start; and all of them together.

Nothing is captured, compiled or allocated while requests run. A round whose shape, batch size and
lengths have a graph replays it; any other runs eagerly, with the same text.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from specpool._core import Ledger, Plan, Shape
from specpool.attention.lanes import Lanes
from specpool.kernels.transfer import no_transfers
from specpool.memory.kv_cache import KVCache
from specpool.scheduler.step import Step
from specpool.shape_names import name_of
from specpool.worker.graphs.capture import Capture, Work, is_out_of_memory
from specpool.worker.graphs.round_graph import LaneBuffer, RoundGraph, RoundKind
from specpool.worker.results import Outcome, PendingStep
from specpool.worker.row_state import RowState

#: Roots that the graphs with the shortest reads are good for; each further one reads twice as far.
LEAST_BOUND = 1024

_log = logging.getLogger("specpool")

Rounds = Callable[[RoundKind, Lanes], Iterator[Outcome]]
Place = tuple[RoundKind, int, int]  # of a graph: its lanes, and the bound of their roots


class GraphSet:
    """The graphs of one kind of round, by batch size and bound."""

    def __init__(self, graphs: Iterable[RoundGraph], bounds: Sequence[int]) -> None:
        """Find a graph for each batch size; `bounds` are those that graphs may have, ascending."""
        self._bounds = list(bounds)
        found = {(graph.size, graph.bound): graph for graph in graphs}
        self.sizes = tuple(sorted({size for size, _ in found}))
        self.num_graphs = len(found)
        # By bound, then by number of lanes: the least graph that holds both
        self._by_batch: list[list[RoundGraph]] = []
        for least in self._bounds:
            line: list[RoundGraph] = []
            for size, bound in sorted(at for at in found if at[1] >= least):
                line += [found[size, bound]] * (size + 1 - len(line))
            self._by_batch.append(line)

    def graph_for(self, batch_size: int, root: int) -> RoundGraph | None:
        """The least that holds so many lanes whose roots are at `root` at most."""
        place = bisect.bisect_left(self._bounds, root)
        if place == len(self._bounds) or batch_size >= len(self._by_batch[place]):
            return None
        return self._by_batch[place][batch_size]


class Graphs:
    """One `GraphSet` for each kind of round that has graphs; counts what replays."""

    def __init__(self, capture: Capture, ledger: Ledger, cache: KVCache, rows: RowState) -> None:
        """No graphs yet.

        Args:
            capture: captures them.
            ledger: whose plans are replayed.
            cache: the pages.
            rows: where each row stands.
        """
        self._capture, self._ledger, self._cache, self._rows = capture, ledger, cache, rows
        most = max(shape.max_accept_len for shape in ledger.shapes)
        # No round's root is beyond: whoever is at the end of the context is not prepared.
        last = ledger.max_context_len - 1 + ledger.overlap_depth * most
        self._bounds = [LEAST_BOUND << i for i in range(32) if LEAST_BOUND << i < last] + [last]
        self._sets: dict[tuple[int, bool], GraphSet] = {}
        self._num_bytes = self._replay_ct = self._eager_ct = 0

    @torch.inference_mode()
    def build(self, sizes: Mapping[RoundKind, Sequence[int]], rounds: Rounds) -> None:
        """Capture a graph for each kind, size and bound, the largest first.

        Where memory runs out, those of as many lanes that read as far are given up. Kinds of rounds
        that cannot be captured at all have none.

        Args:
            sizes: batch sizes of each kind of round.
            rounds: launches a round of these lanes.
        """
        places = [(kind, n, b) for kind, of in sizes.items() for n in of for b in self._bounds]
        places.sort(key=lambda place: place[1:], reverse=True)
        if not places:
            return
        buffer = LaneBuffer(places[0][1], self._cache.device)
        graphs: dict[RoundKind, list[RoundGraph]] = {kind: [] for kind in sizes}
        refused: set[RoundKind] = set()

        def work_of(place: Place) -> Work:
            kind, size, bound = place
            lanes = buffer.lanes(size)
            return lambda: rounds(kind, self._rows.lanes_within(*lanes, bound))

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

        def warm_up(place: Place) -> None:
            self._capture.warm_up(work_of(place))

        def record(place: Place) -> None:
            graphs[place[0]].append(self._record(place, work_of(place), buffer))

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

    def _record(self, place: Place, work: Work, buffer: LaneBuffer) -> RoundGraph:
        with no_transfers():
            recording = self._capture.record(work, follows=place[0].drafts)
        ledger = self._ledger
        return RoundGraph(*place, recording, buffer, num_rows=ledger.num_rows, groups=ledger.groups)

    def _key(self, kind: RoundKind) -> tuple[int, bool]:
        return self._ledger.shapes.index(kind.shape), kind.writes_draft

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes with a graph of whatever kind, ascending."""
        return tuple(
            sorted({size for graph_set in self._sets.values() for size in graph_set.sizes})
        )

    def replay(self, steps: Sequence[Step], before: Callable[[Plan], None]) -> PendingStep | None:
        """The results of a turn that is one round, if that has a graph; else None.

        Args:
            steps: of the turn.
            before: called with the plan of a round that is about to be replayed.
        """
        graph = self._graph_for(steps[0]) if len(steps) == 1 else None
        if graph is None:
            self._eager_ct += sum(step.is_decode for step in steps)
            return None
        before(steps[0].plan)
        pending = graph.replay(steps[0].plan, steps[0].requests)
        self._replay_ct += 1
        return pending

    def _graph_for(self, step: Step) -> RoundGraph | None:
        plan = step.plan
        if not step.is_decode or plan.shapes[0] != plan.shapes[-1]:  # equal ones side by side
            return None
        graph_set = self._sets.get((int(plan.shapes[0]), plan.writes_draft))
        if graph_set is None or any(
            request.params.logprobs is not None for request in step.requests
        ):
            return None
        return graph_set.graph_for(len(plan), int(plan.hi.max()))

    def restart(self) -> None:
        """What ran so far does not count: nobody had asked for it."""
        self._replay_ct = self._eager_ct = 0

    def stats(self) -> GraphStats:
        """What there is, and was replayed so far."""
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

    A place that runs out of memory is skipped. So is every later place that has at least as many
    lanes and reads at least as far: a graph of more lanes that reads less may still find room.
    """
    found: list[Place] = []
    failed: list[tuple[int, int]] = []  # sizes and bounds
    for place in places:
        if any(place[1] >= size and place[2] >= bound for size, bound in failed):
            continue
        try:
            run(place)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed.append(place[1:])
        else:
            found.append(place)
    return found


@dataclass(frozen=True, slots=True)
class GraphStats:
    """Decode rounds that were captured as CUDA graphs.

    Attributes:
        sizes: batch sizes with a graph, by shape.
        num_graphs: graphs of rounds: one for each kind of round, size and reach of its reads.
        num_bytes: of the device's memory that they take.
        replay_ct: rounds that were replayed.
        eager_ct: rounds that had no graph, or could not be alone with it.
    """

    sizes: dict[Shape, tuple[int, ...]]
    num_graphs: int
    num_bytes: int
    replay_ct: int
    eager_ct: int
