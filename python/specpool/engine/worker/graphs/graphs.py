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
from specpool.engine.worker.graphs.graph_work import GraphKey, GraphWork, Rounds
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
        graph_of = {(graph.size, graph.bound): graph for graph in graphs}
        self.sizes = tuple(sorted({size for size, _ in graph_of}))
        self.num_graphs = len(graph_of)
        # [bound][number of lanes] -> the smallest graph that serves both
        self._by_batch: list[list[RoundGraph]] = []
        for least in self._bounds:
            line: list[RoundGraph] = []
            for size, bound in sorted(at for at in graph_of if at[1] >= least):
                line += [graph_of[size, bound]] * (size + 1 - len(line))
            self._by_batch.append(line)

    def graph_for(self, batch_size: int, root: int) -> RoundGraph | None:
        """Return the smallest graph for `batch_size` lanes with roots up to `root`, or None."""
        bound = bisect.bisect_left(self._bounds, root)
        if bound == len(self._bounds) or batch_size >= len(self._by_batch[bound]):
            return None
        return self._by_batch[bound][batch_size]


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
            recorder: (bound of a graph's roots) -> the attention's recorder for it; None means the
                attention plans nothing.
        """
        self._recorder = recorder
        self._capture, self._ledger, self._cache, self._rows = capture, ledger, cache, rows
        max_accept_len = max(shape.max_accept_len for shape in ledger.shapes)
        # No root lies beyond `last`: the scheduler prepares no row at the context's end.
        last = ledger.max_context_len - 1 + ledger.overlap_depth * max_accept_len
        bounds = [LEAST_BOUND << i for i in range(32) if LEAST_BOUND << i < last]
        if bounds and last - bounds[-1] < bounds[-1] // 8:  # what overlap adds to a whole context
            bounds.pop()
        self._bounds = [*bounds, last]
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
        keys = [
            (kind, n, b)
            for kind, batch_sizes in sizes.items()
            for n in batch_sizes
            for b in self._bounds
        ]
        keys.sort(key=lambda key: key[1:], reverse=True)
        if not keys:
            return
        buffer = LaneBuffer(keys[0][1], self._cache.device)
        graphs: dict[RoundKind, list[RoundGraph]] = {kind: [] for kind in sizes}
        refused: set[RoundKind] = set()

        works = {key: self._work(key, rounds, buffer) for key in keys}

        def attempt(key: GraphKey, run: Callable[[GraphKey], None]) -> None:
            kind = key[0]
            if kind in refused:
                return
            try:
                run(key)
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

        def warm_up(key: GraphKey) -> None:
            # A run with the longest reads that have room, and one with the shortest, load all that
            # those between use.
            kind, size, bound = key
            if (kind, size) in loaded and bound != self._bounds[0]:
                return
            with self._cache.trying_reads():
                self._capture.warm_up(works[key])
            loaded.add((kind, size))

        def record(key: GraphKey) -> None:
            graphs[key[0]].append(self._record(key, works[key], buffer))

        warm = _within_memory(keys, lambda key: attempt(key, warm_up))
        self._cache.pin_reads()
        before = self._capture.used_bytes()
        tried = _within_memory(warm, lambda key: attempt(key, record))
        self._num_bytes = max(self._capture.used_bytes() - before, 0)
        for kind, kind_graphs in graphs.items():
            if kind_graphs:
                self._sets[self._key(kind)] = GraphSet(kind_graphs, self._bounds)
        if len(tried) < len(keys):
            _log.warning(
                "out of memory while capturing CUDA graphs: there are %d of %d, with %d bytes, for "
                "batch sizes %s; other rounds run eagerly",
                self.stats().num_graphs,
                len(keys),
                self._num_bytes,
                list(self.sizes),
            )

    def _work(self, key: GraphKey, rounds: Rounds, buffer: LaneBuffer) -> GraphWork:
        recorder = None if self._recorder is None else self._recorder(key[2])
        bounds = self._page_bounds(key)
        return GraphWork(key, rounds, buffer, self._cache, self._rows, recorder, bounds)

    def _page_bounds(self, key: GraphKey) -> PageBounds | None:
        """Return how many pages a round reads; None means as many as its lanes have columns.

        Only torch's attention of 16 bits gathers live pages side by side.
        """
        if self._recorder is not None or self._cache.dtype not in FLASH_DTYPES:
            return None
        return page_bounds(key[0], key[1], self._ledger.groups)

    def _record(self, key: GraphKey, work: GraphWork, buffer: LaneBuffer) -> RoundGraph:
        with no_transfers():
            recording = self._capture.record(work, follows=key[0].drafts)
        return RoundGraph(
            *key,
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


def _within_memory(keys: Sequence[GraphKey], run: Callable[[GraphKey], None]) -> list[GraphKey]:
    """Run each key, and return those that succeeded.

    Skip a key that runs out of memory, and every later key with at least as many lanes and at
    least as long reads. A graph with more lanes but shorter reads may still find room.
    """
    done: list[GraphKey] = []
    failed: list[GraphKey] = []
    for key in keys:
        if _exceeds(key, failed):
            continue
        try:
            run(key)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failed.append(key)
        else:
            done.append(key)
    return done


def _exceeds(key: GraphKey, failed: Collection[GraphKey]) -> bool:
    """Return whether a key has at least the lanes and the reads of one that failed."""
    return any(key[1] >= size and key[2] >= bound for _, size, bound in failed)


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
