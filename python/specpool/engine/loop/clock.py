"""`Clock`: measures the seconds of a loop's phases."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from types import TracebackType


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds that the loop has spent, by phase.

    Attributes:
        schedule: decide what runs, and prepare it in the ledger.
        launch: apply table deltas and launch forwards. On a CPU the forward runs in this phase; on
            a GPU it is only enqueued.
        wait: wait until a step's results are on the host.
        finish: give the results to the requests.
    """

    schedule: float
    launch: float
    wait: float
    finish: float


class Stopwatch:
    """A stopwatch that adds up the seconds of its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._start


class Clock:
    """A stopwatch for each phase."""

    def __init__(self) -> None:
        self.schedule, self.launch = Stopwatch(), Stopwatch()
        self.wait, self.finish = Stopwatch(), Stopwatch()

    def seconds(self) -> PhaseSeconds:
        """Return the seconds so far."""
        return PhaseSeconds(*(getattr(self, phase.name).seconds for phase in fields(PhaseSeconds)))
