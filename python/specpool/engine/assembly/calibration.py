"""`calibrate`: times rounds by shape and batch size, before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specpool._core import Ledger, Shape
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request

if TYPE_CHECKING:
    from specpool.engine.loop.loop import Loop
    from specpool.engine.shapes import Controller
    from specpool.engine.shapes.base import NumCorrectDrafts

# Each pass times every shape once, so a temporary load affects all of them equally.
_PASSES = 3
# About the most seconds of all rounds. After that, a batch size gets two passes and no larger size
# is measured; the controller estimates larger sizes from the smaller ones.
_MOST_SECONDS = 4.0
_WARM_UP, _TIMED = 1, 2  # a shape's rounds in a pass that are ignored, and that count
TOLD = 3  # the number of a shape's fastest rounds, which the controller gets
_PROMPT_LEN = 32


class Tour:
    """A controller that runs each candidate in turn, and notes the seconds of its rounds.

    Attributes:
        candidates: the shapes.
        timed: the seconds of the rounds of the present shape, the oldest first.
    """

    def __init__(self, candidates: Sequence[Shape]) -> None:
        """Begin with the first candidate."""
        self.candidates = tuple(candidates)
        self.begin(self.candidates[0], 1)

    def begin(self, shape: Shape, size: int) -> None:
        """Run rounds of this shape; note the seconds of those with `size` lanes."""
        self.shape, self.size = shape, size
        self.timed: list[float] = []

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
            self.timed.append(seconds)


def calibrate(
    controller: Controller,
    tour: Tour,
    ledger: Ledger,
    build: Callable[[], Loop],
    *,
    max_batch: int,
    broadcast_first: Callable[[float], float] = float,
) -> None:
    """Time rounds of each shape of `tour` by batch size, and report them to `controller`.

    Args:
        controller: gets the fastest rounds of each shape and size.
        tour: runs the controller's candidates in turn.
        ledger: must have nothing in flight.
        build: builds a loop whose scheduler has `tour` as its controller.
        max_batch: the sizes are the powers of two up to it, and itself, as far as pages allow.
        broadcast_first: with other ranks, returns rank 0's value of a number: its clock counts for
            all.
    """
    started = time.perf_counter()

    def is_late() -> bool:
        return broadcast_first(time.perf_counter() - started) > _MOST_SECONDS

    sizes = {1 << i for i in range(max_batch.bit_length())} | {max_batch}
    for size in sorted(n for n in sizes if n <= max_batch):
        seconds = _measure(tour, ledger, build(), size, is_late)
        for shape, timed in seconds.items():
            for taken in sorted(timed)[:TOLD]:  # load only adds seconds
                controller.on_round_seconds(shape, size, broadcast_first(taken))
        if not seconds or is_late():
            return


def _measure(
    tour: Tour, ledger: Ledger, loop: Loop, size: int, is_late: Callable[[], bool]
) -> dict[Shape, list[float]]:
    """Return the seconds of rounds of `size` rows by shape; empty if there are too few pages."""
    scheduler = loop.scheduler
    prompt_len = min(_PROMPT_LEN, max(ledger.max_context_len // 4, 1))
    num_chunks = -(-size * prompt_len // scheduler.state.config.prefill_tokens)
    num_rounds = _PASSES * (_WARM_UP + _TIMED) * len(tour.candidates) + num_chunks + 1
    requests = [
        _request(i, tour, ledger, prompt_len=prompt_len, num_rounds=num_rounds) for i in range(size)
    ]
    if not all(scheduler.fits(request) for request in requests):
        return {}
    seconds: dict[Shape, list[float]] = {}
    with loop.recovering():
        for request in requests:
            scheduler.submit(request)
        tour.begin(tour.candidates[0], size)
        while not tour.timed and any(r.finish_reason is None for r in requests):
            loop.turn()
        if scheduler.num_running == size:
            seconds = {shape: [] for shape in tour.candidates}
            for number in range(_PASSES):
                if number > 1 and is_late():
                    break
                for shape in tour.candidates:
                    tour.begin(shape, size)
                    while len(tour.timed) < _WARM_UP + _TIMED and all(
                        request.finish_reason is None for request in requests
                    ):
                        loop.turn()
                    seconds[shape] += tour.timed[_WARM_UP:]
        for request in requests:
            scheduler.abort(request)
        loop.drain()
    return seconds


def _request(
    number: int, tour: Tour, ledger: Ledger, *, prompt_len: int, num_rounds: int
) -> Request:
    """Make a request with a dummy prompt; its output is ignored."""
    shapes = ledger.shapes
    largest_shape = max(tour.candidates, key=lambda shape: shape.num_draft_tokens)
    num_tokens = num_rounds * max(shape.max_accept_len for shape in tour.candidates)
    return Request(
        request_id=number,
        index=number,
        prompt_len=prompt_len,
        tokens=[0] * prompt_len,
        params=SamplingParams(max_new_tokens=1 << 20, ignore_eos=True),
        shape=largest_shape,
        shape_index=len(shapes),
        choices=tuple(shapes.index(shape) for shape in tour.candidates),
        max_len=min(prompt_len + num_tokens + 1, ledger.max_context_len),
        stop_ids=frozenset(),
        seed=number,
    )
