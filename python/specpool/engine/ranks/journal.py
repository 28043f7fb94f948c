"""`RankJournal`: the calls from outside on the scheduler of rank 0, as records for other ranks.

Rank 0 notes each call, and sends its notes to the other ranks as a record before each turn. These
apply the same calls in the same order before they run the same turn, so that all schedulers and
ledgers stay the same. A record has the digest of rank 0's ledger, what its steps gave, and how many
requests it has; each rank compares these with its own first. A process alone has no journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from specpool._core import Ledger
from specpool.engine.ranks.record import Record, StepTokens
from specpool.engine.ranks.wire import wire_of
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import StepResult
from specpool.errors import ConfigError, CorruptState, RankError, one_line


class Peers(Protocol):
    """The other ranks, as `RankJournal` sees them.

    Attributes:
        rank: this rank's number.
        key: seals the records of this group, 1 to 64 bytes.
        now: seconds of rank 0's clock at the latest record, for decisions that depend on time.
    """

    rank: int
    key: bytes
    now: float

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides."""

    def send(self, frame: bytes) -> None:
        """Send a record to all others."""

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank ends."""

    def explain(self, error: RuntimeError) -> Exception:
        """Return an error of a forward, or the error that names the rank whose end caused it."""


class RankJournal:
    """The calls on the scheduler of a rank; hold the engine's lock for each.

    Attributes:
        num_records: records that were sent or applied.
    """

    def __init__(
        self, ledger: Ledger, peers: Peers, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start without notes; the scheduler calls `begin`.

        Args:
            ledger: the scheduler's.
            peers: the other ranks.
            clock: returns the seconds that rank 0 sends to the others.
        """
        self._clock, self._ledger, self._peers = clock, ledger, peers
        self._notes: list[list[Any]] = []
        self._results: list[StepTokens] = []
        self._measured: list[tuple[Callable[[float], None], float]] = []
        self._is_within = False  # a turn runs, or a record is applied: nothing is noted
        self._broken: str | None = None
        self.num_records = 0
        # As of the end of the last turn or record: what the next record is compared with.
        self._digest, self._latest_results, self._counts = 0, list[StepTokens](), list[int]()

    def begin(self, scheduler: Scheduler) -> None:
        """See `Journal`."""
        self._scheduler = scheduler
        self._end_turn()

    @property
    def broken(self) -> str | None:
        """Why the ranks cannot go on together; None if they can."""
        return self._broken

    def note(self, call: str, *args: Any) -> None:
        """Note a call that asks for something; see `Journal`.

        Raises:
            ConfigError: this rank follows rank 0.
            RankError: the ranks have parted.
        """
        if not self._is_within:
            self._check()
            wire_args = [wire_of(arg) if isinstance(arg, Request) else arg for arg in args]
            self._notes.append([call, *wire_args])

    def note_end(self, call: str, *args: Any) -> None:
        """Note a call that ends something; it is also made when the ranks have parted."""
        if not self._is_within and self._broken is None:
            self._notes.append([call, *args])

    # --- time -------------------------------------------------------------------------------------

    def measured(self, apply: Callable[[float], None], seconds: float) -> None:
        """Let `apply` have the seconds that something took on rank 0, before the next turn.

        They come with the next record.
        """
        self._measured.append((apply, seconds))

    def set_time(self, now: float, seconds: Sequence[float]) -> None:
        """Go on with rank 0's clock, and with the seconds that it has measured.

        Raises:
            CorruptState: this rank has measured more or fewer things.
        """
        measured, self._measured = self._measured, []
        if len(measured) != len(seconds):
            raise CorruptState(f"{len(measured)} turns were timed here, {len(seconds)} on rank 0")
        self._peers.now = now
        for (apply, _), seconds_of_rank_0 in zip(measured, seconds, strict=True):
            apply(seconds_of_rank_0)

    # --- the turn ---------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run a turn: rank 0 sends its record first.

        Raises:
            RankError: a rank has gone, or the ranks have parted before.
        """
        within = self._is_within  # on the other ranks: a record is being applied
        if not within:
            self._send("turn")
        self._is_within = True
        try:
            yield
        except RuntimeError as error:
            raise self._peers.explain(error) from error
        finally:
            self._is_within = within
        if not within:
            self._end_turn()

    def flush(self, *call: Any) -> None:
        """Send what was noted, with this call at its end if there is one.

        Raises:
            RankError: a rank has gone, or the ranks have parted before.
        """
        self._send(*call)
        self._end_turn()

    def _send(self, *call: Any) -> None:
        self._check()
        now, seconds = self._clock(), [seconds for _, seconds in self._measured]
        notes = [*self._notes, ["time", now, seconds], *([list(call)] if call else [])]
        self._notes = []
        self.set_time(now, seconds)
        record = Record(
            self.num_records + 1, self._digest, notes, self._latest_results, self._counts
        )
        try:
            self._peers.send(record.to_bytes(self._peers.key))
        except BaseException as error:
            self.report_failure(error)
            raise
        self.num_records += 1

    def failed(self, step: int, error: Exception) -> Exception:
        """Return the error that ends this rank after a forward failed; it names rank and step.

        The other ranks may be waiting in the same forward, so they cannot go on without it.
        """
        if isinstance(error, RuntimeError):  # of a collective, if another rank has gone
            explained = self._peers.explain(error)
            if explained is not error:
                return explained
        return RankError(
            f"rank {self._peers.rank}: the forward of step {step} failed: {one_line(error, 1000)}"
        )

    def result(self, step: int, result: StepResult) -> None:
        """Note what a step gave."""
        self._results.append(StepTokens(step, [list(tokens) for tokens in result.tokens]))

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one was stopped halfway: they cannot go on with it."""
        if self._broken is None:
            self._broken = f"{type(error).__name__}: {error}"
            self._peers.fail(error)

    # --- on the other ranks -----------------------------------------------------------------------

    @contextmanager
    def applying(self, data: bytes) -> Iterator[Record]:
        """Check a record, and let the block make its calls; a turn among them sends nothing.

        Raises:
            RankError: the bytes are not a record of this group, or not the next one.
            CorruptState: this rank's digest or results are others than rank 0's.
        """
        record = Record.of_bytes(data, self._peers.key)
        if record.number != self.num_records + 1:
            raise RankError(f"record {record.number} came, {self.num_records + 1} is the next one")
        self._compare(record)
        self.num_records += 1
        self._is_within = True
        try:
            yield record
        finally:
            self._is_within = False
        self._end_turn()

    def _compare(self, record: Record) -> None:
        """Raise `CorruptState` if this rank is not where rank 0 was when it sent the record."""
        differences = [
            difference
            for own_result, result in zip(self._latest_results, record.results, strict=False)
            if (difference := own_result.difference(result)) is not None
        ]
        if not differences and len(self._latest_results) != len(record.results):
            differences = [
                f"{len(self._latest_results)} steps ended here, {len(record.results)} there"
            ]
        if self._counts != record.counts:
            differences.append(
                f"requests that run, wait and have ended, and open sessions are {self._counts} "
                f"here, {record.counts} there"
            )
        if self._digest != record.digest:
            differences.append(f"the ledger's digest is {self._digest:016x} here")
        if differences:
            raise CorruptState(
                f"this rank has parted from rank 0 before record {record.number}, after step "
                f"{self._last_step()}: rank 0's digest is {record.digest:016x}; "
                + "; ".join(differences)
            )

    # --- helpers ----------------------------------------------------------------------------------

    def _last_step(self) -> int:
        return self._latest_results[-1].step if self._latest_results else 0

    def _check(self) -> None:
        """Raise unless this rank may decide."""
        if self._broken is not None:
            raise RankError(f"the ranks cannot go on together: {self._broken}")
        if not self._peers.leads:
            raise ConfigError("this rank follows rank 0, which alone takes requests")

    def _end_turn(self) -> None:
        """Keep what the next record will be compared with."""
        scheduler = self._scheduler
        self._digest = self._ledger.digest or 0
        self._latest_results, self._results = self._results, []
        self._counts = [
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_ended,
            len(scheduler.conversations.open),
        ]
