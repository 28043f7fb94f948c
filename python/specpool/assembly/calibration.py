"""`calibrate`: times rounds by shape and batch size, before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Ledger, Shape
from specpool.adaptive import AdaptiveConfig, BudgetController, RangeConfig
from specpool.adaptive.budget import Spare
from specpool.arrays import Int32
from specpool.sampling_params import SamplingParams
from specpool.scheduler.request import Request

if TYPE_CHECKING:
    from specpool.adaptive import Controller
    from specpool.adaptive.base import NumCorrectDrafts
    from specpool.loop.loop import Loop

# Each pass times every shape once, so a temporary load affects all of them equally.
_PASSES = 3
# About the most seconds of all rounds. After that, a batch size gets two passes and no larger size
# is measured; the controller estimates larger sizes from the smaller ones.
_MOST_SECONDS = 4.0
_WARM_UP, _TIMED = 1, 2  # a shape's rounds in a pass that are ignored, and that count
TOLD = 3  # the number of a shape's fastest rounds, which the controller gets
_PROMPT_LEN = 32
# The prompts of the rounds with longer rows: the most seconds of their prefill, the most tokens of
# one, and the least unless the batch has one row. Fewer rows are measured before prompts are short.
_PREFILL_SECONDS, _LONGEST, _LONG = 2.0, 2048, 256

#: Seconds of a round, and the mean context of its lanes.
Timed = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of rounds.

    Attributes:
        shapes: the lanes have them by turns: one, or two.
    """

    shapes: tuple[Shape, ...]


class Tour:
    """A controller that runs each candidate in turn, and notes the seconds of its rounds.

    Attributes:
        candidates: the shapes.
        kinds: the kinds of rounds to be timed.
        timed: the rounds of the present kind.
    """

    def __init__(self, candidates: Sequence[Shape]) -> None:
        """Begin with the first candidate."""
        self.candidates = tuple(candidates)
        self.kinds: tuple[Kind, ...] = tuple(Kind((shape,)) for shape in self.candidates)
        self.begin(self.kinds[0], 1)

    def begin(self, kind: Kind, size: int) -> None:
        """Run rounds of this kind; note the seconds of those with `size` lanes."""
        (self.shape, *_), self.size = kind.shapes, size
        self.timed: list[Timed] = []  # the oldest first

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the candidate whose turn it is."""
        return self.shape

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> None:
        """Do nothing: calibration does not use acceptance."""

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Note the seconds of a round of the current shape and size."""
        if shape == self.shape and batch_size == self.size:
            self.timed.append((seconds, 0.0))


class RowTour(BudgetController):
    """A `Tour` for a budget: beside rounds of one shape it runs rounds of two.

    In these the lanes have the narrowest candidate and another one by turns.
    """

    def __init__(self, candidates: Sequence[Shape]) -> None:
        """Begin with the narrowest candidate."""
        ranges = {1: RangeConfig(candidates=tuple(candidates))}
        super().__init__(AdaptiveConfig(ranges=ranges, policy="budget"))
        narrowest, *others = self.candidates
        alone = [Kind((shape,)) for shape in self.candidates]
        pairs = [Kind((narrowest, shape)) for shape in others]
        self.kinds: tuple[Kind, ...] = (*alone, *pairs)
        self.begin(self.kinds[0], 1)

    def begin(self, kind: Kind, size: int) -> None:
        """See `Tour.begin`."""
        self._lines = [self.candidates.index(shape) for shape in kind.shapes]
        self.size, self.timed = size, list[Timed]()

    def choose(self, rows: Int32, shapes: Int32, spare: Callable[[], Spare] | None = None) -> Int32:
        """Return the shapes of the kind by turns, int32 [B]."""
        lanes = np.arange(len(rows))
        lines = np.array(self._lines)[lanes % len(self._lines)]
        chosen: Int32 = shapes[lanes, lines]
        self._chosen = chosen
        return chosen

    def observe(self, shapes: Int32, seconds: float, lens: Int32 | None = None) -> None:
        """Note the seconds of a round of the kind and size, and the mean context of its lanes."""
        is_mine = len(shapes) == self.size and (np.sort(shapes) == np.sort(self._chosen)).all()
        if is_mine:
            self.timed.append((seconds, 0.0 if lens is None else float(lens.mean())))


def calibrate(
    controller: Controller,
    tour: Tour | RowTour,
    ledger: Ledger,
    build: Callable[[], Loop],
    *,
    max_batch: int,
    of_first: Callable[[float], float] = float,
) -> None:
    """Time rounds of each kind of `tour` by batch size, and report them to `controller`.

    For a budget, rounds of each shape are then timed with longer rows, so that the cost of context
    is known too.

    Args:
        controller: gets the fastest rounds of each kind and size.
        tour: runs the controller's candidates in turn; a `RowTour` for a budget.
        ledger: must have nothing in flight.
        build: builds a loop whose scheduler has `tour` as its controller.
        max_batch: the sizes are the powers of two up to it, and itself, as far as pages allow.
        of_first: with other ranks, returns rank 0's value of a number: its clock counts for all.
    """
    start = _Start(controller, tour, ledger, build, of_first)
    prompt_len = min(_PROMPT_LEN, max(ledger.max_context_len // 4, 1))
    sizes = {1 << i for i in range(max_batch.bit_length())} | {max_batch}
    largest = 0
    for size in sorted(n for n in sizes if n <= max_batch):
        kinds = [kind for kind in tour.kinds if len(kind.shapes) <= size]
        if not start.measure(size, prompt_len, kinds):
            break
        largest = size
        if start.is_late():
            break
    if isinstance(tour, RowTour) and largest:
        alone = [kind for kind in tour.kinds if len(kind.shapes) == 1]
        size, long = largest, start.longest(largest)
        while size > 1 and long < _LONG:
            size //= 2
            long = start.longest(size)
        if long >= 4 * prompt_len:
            start.measure(size, long, alone)


class _Start:
    """The measurements of one start; see `calibrate`."""

    def __init__(
        self,
        controller: Controller,
        tour: Tour | RowTour,
        ledger: Ledger,
        build: Callable[[], Loop],
        of_first: Callable[[float], float],
    ) -> None:
        self._controller, self._tour, self._ledger = controller, tour, ledger
        self._build, self._of_first = build, of_first
        self._started = time.perf_counter()
        self._token_seconds = 0.0  # of prefill, in the latest measurement

    def is_late(self) -> bool:
        """Return whether no larger size is measured."""
        return self._of_first(time.perf_counter() - self._started) > _MOST_SECONDS

    def longest(self, size: int) -> int:
        """Return the longest prompts of so many rows that time and pages allow."""
        slots = [group.num_pages * group.page_size for group in self._ledger.groups]
        token_seconds = max(self._of_first(self._token_seconds), 1e-9)
        fits = min(slots) // (2 * size), self._ledger.max_context_len // 2, _LONGEST
        return int(min(*fits, _PREFILL_SECONDS / (token_seconds * size)))

    def measure(self, size: int, prompt_len: int, kinds: Sequence[Kind]) -> bool:
        """Time rounds of these kinds and report them; return whether so many rows had pages."""
        tour, loop = self._tour, self._build()
        scheduler = loop.scheduler
        num_chunks = -(-size * prompt_len // scheduler.state.config.prefill_tokens)
        num_rounds = _PASSES * (_WARM_UP + _TIMED) * len(kinds) + num_chunks + 1
        requests = [
            _request(i, tour, self._ledger, prompt_len=prompt_len, num_rounds=num_rounds)
            for i in range(size)
        ]
        if not all(scheduler.fits(request) for request in requests):
            return False
        with loop.recovering():
            for request in requests:
                scheduler.submit(request)
            tour.begin(kinds[0], size)
            while not tour.timed and any(r.finish_reason is None for r in requests):
                loop.turn()
            num_rows = scheduler.num_running
            if num_rows == size:  # else there are too few pages
                found: dict[Kind, list[Timed]] = {kind: [] for kind in kinds}
                for number in range(_PASSES):
                    if number > 1 and self.is_late():
                        break
                    for kind in kinds:
                        tour.begin(kind, size)
                        while len(tour.timed) < _WARM_UP + _TIMED and _can_go_on(requests):
                            loop.turn()
                        found[kind] += tour.timed[_WARM_UP:]
                for kind, timed in found.items():
                    context = sum(held for _, held in timed) / max(len(timed), 1)
                    for seconds, _ in sorted(timed)[:TOLD]:  # load only adds seconds
                        _report(self._controller, kind, size, self._of_first(seconds), context)
            self._token_seconds = scheduler.handles.token_seconds
            for request in requests:
                scheduler.abort(request)
            loop.drain()
        return num_rows == size


def _report(controller: Controller, kind: Kind, size: int, seconds: float, context: float) -> None:
    if not isinstance(controller, BudgetController):
        controller.on_round_seconds(kind.shapes[0], size, seconds)
        return
    num = len(kind.shapes)
    counts = {shape: -(-(size - at) // num) for at, shape in enumerate(kind.shapes)}
    controller.on_mixed_seconds(counts, seconds, context)


def _can_go_on(requests: Sequence[Request]) -> bool:
    return all(request.finish_reason is None for request in requests)


def _request(
    number: int, tour: Tour | RowTour, ledger: Ledger, *, prompt_len: int, num_rounds: int
) -> Request:
    """Make a request with a dummy prompt; its output is ignored."""
    shapes = ledger.shapes
    most = max(tour.candidates, key=lambda shape: shape.num_draft_tokens)
    num_tokens = num_rounds * max(shape.max_accept_len for shape in tour.candidates)
    return Request(
        request_id=number,
        index=number,
        prompt_len=prompt_len,
        tokens=[0] * prompt_len,
        params=SamplingParams(max_new_tokens=1 << 20, ignore_eos=True),
        shape=most,
        shape_index=len(shapes),
        choices=tuple(shapes.index(shape) for shape in tour.candidates),
        max_len=min(prompt_len + num_tokens + 1, ledger.max_context_len),
        stop_ids=frozenset(),
        seed=number,
    )
