"""`Inputs`: the one way by which anything from outside reaches a scheduler and its loop.

Without peers a call goes straight to the scheduler. On rank 0 of several it is also noted, and
`begin_turn` sends the notes to the other ranks as a record. These apply the same calls in the same
order before they run the same turn, so that all schedulers and ledgers stay the same. A record has
the digest of rank 0's ledger, what its steps gave, and how many requests it has; each rank compares
these with its own first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from specpool._core import Ledger
from specpool.errors import ConfigError, CorruptState, RankError, one_line
from specpool.ranks.record import Record, StepTokens
from specpool.ranks.wire import wire_of
from specpool.scheduler.pins import Pin
from specpool.scheduler.request import Conversation, Request
from specpool.scheduler.scheduler import Scheduler
from specpool.scheduler.step import StepResult


class Peers(Protocol):
    """The other ranks, as `Inputs` sees them.

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


class Inputs:
    """The calls on a scheduler; hold the engine's lock for each.

    Attributes:
        num_records: records that were sent or applied.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without notes.

        Args:
            ledger: the scheduler's.
            scheduler: takes the calls.
            peers: the other ranks; None = this rank is alone.
            clock: the seconds that rank 0 tells the others.
        """
        self._clock = clock
        self._ledger, self._scheduler, self._peers = ledger, scheduler, peers
        self._notes: list[list[Any]] = []
        self._results: list[StepTokens] = []
        self._measured: list[tuple[Callable[[float], None], float]] = []
        self._is_within = False  # a turn runs, or a record is applied: nothing is noted
        self._broken: str | None = None
        self.num_records = 0
        # As of the end of the last turn or record: what the next record is compared with.
        self._digest, self._told, self._counts = 0, list[StepTokens](), list[int]()
        self._end_turn()

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self._peers is not None

    @property
    def broken(self) -> str | None:
        """Why the ranks cannot go on together; None = they can."""
        return self._broken

    # --- calls ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request with its siblings; see `Scheduler.submit`."""
        if self._is_noting():
            self._note("submit", wire_of(request))
        self._scheduler.submit(request)

    def abort(self, request: Request) -> None:
        """Abort a request that has not ended."""
        if request.finish_reason is None:
            self._note_end("abort", request.request_id)
            self._scheduler.abort(request)

    def open(self, tokens: Sequence[int] = ()) -> Conversation:
        """Open a conversation that begins with these tokens."""
        self._note("open", list(tokens))
        return self._scheduler.conversations.new(list(tokens))

    def fork(self, conversation: Conversation) -> Conversation:
        """Open a conversation with the same tokens."""
        self._note("fork", conversation.number)
        return self._scheduler.conversations.fork(conversation)

    def cut(self, conversation: Conversation, num_tokens: int) -> int:
        """Cut a conversation; return how many of its tokens have KV."""
        self._note("cut", conversation.number, num_tokens)
        return self._scheduler.conversations.cut(conversation, num_tokens)

    def close(self, conversation: Conversation) -> None:
        """Close a conversation."""
        self._note_end("close", conversation.number)
        self._scheduler.conversations.close(conversation)

    def unpin(self, pin: Pin) -> None:
        """Drop a pinned text."""
        self._note_end("unpin", pin.prefix)
        self._scheduler.pins.drop(pin)

    def forget(self, salt: bytes | None) -> None:
        """Drop the texts of the prefix cache, of one salt or all."""
        self._note_end("forget", salt)
        self._scheduler.prefix_cache.forget(salt)

    def drain(self) -> None:
        """Note that the loop takes over all that is on its way, between two turns."""
        self._note_end("drain")

    # --- time -------------------------------------------------------------------------------------

    def measured(self, apply: Callable[[float], None], seconds: float) -> None:
        """Let `apply` have the seconds that something took; on all ranks those of rank 0.

        With other ranks it has them before the next turn, because they come with its record.
        """
        if self._peers is None:
            apply(seconds)
        else:
            self._measured.append((apply, seconds))

    def tell_time(self, now: float, seconds: Sequence[float]) -> None:
        """Go on with rank 0's clock, and with the seconds that it has measured.

        Raises:
            CorruptState: this rank has measured more or fewer things.
        """
        assert self._peers is not None
        measured, self._measured = self._measured, []
        if len(measured) != len(seconds):
            raise CorruptState(f"{len(measured)} turns were timed here, {len(seconds)} on rank 0")
        self._peers.now = now
        for (apply, _), each in zip(measured, seconds, strict=True):
            apply(each)

    # --- the turn ---------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run a turn: rank 0 sends its record first.

        Raises:
            RankError: a rank has gone, or the ranks have parted before.
        """
        if self._peers is None:
            yield
            return
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
        if self._peers is not None:
            self._send(*call)
            self._end_turn()

    def _send(self, *call: Any) -> None:
        assert self._peers is not None
        self._check()
        now, seconds = self._clock(), [each for _, each in self._measured]
        notes = [*self._notes, ["time", now, seconds], *([list(call)] if call else [])]
        self._notes = []
        self.tell_time(now, seconds)
        record = Record(self.num_records + 1, self._digest, notes, self._told, self._counts)
        try:
            self._peers.send(record.to_bytes(self._peers.key))
        except BaseException as error:
            self.broke(error)
            raise
        self.num_records += 1

    def failed(self, step: int, error: Exception) -> Exception:
        """Return the error that ends this rank after a forward failed; it names rank and step.

        The other ranks may be waiting in the same forward, so they cannot go on without it.
        """
        assert self._peers is not None
        if isinstance(error, RuntimeError):  # of a collective, if another rank has gone
            explained = self._peers.explain(error)
            if explained is not error:
                return explained
        return RankError(
            f"rank {self._peers.rank}: the forward of step {step} failed: {one_line(error, 1000)}"
        )

    def result(self, step: int, result: StepResult) -> None:
        """Note what a step gave."""
        if self._peers is not None:
            self._results.append(StepTokens.of(step, result))

    def broke(self, error: BaseException) -> None:
        """Tell the other ranks that this one was stopped halfway: they cannot go on with it."""
        if self._peers is not None and self._broken is None:
            self._broken = f"{type(error).__name__}: {error}"
            self._peers.fail(error)

    # --- on the other ranks -----------------------------------------------------------------------

    @contextmanager
    def applying(self, data: bytes) -> Iterator[Record]:
        """Check a record, and let the block make its calls; a turn among them sends nothing.

        Raises:
            RankError: the bytes are no record of this group, or not the next one.
            CorruptState: this rank's digest or results are others than rank 0's.
        """
        assert self._peers is not None
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
        found = [
            difference
            for own, other in zip(self._told, record.results, strict=False)
            if (difference := own.difference(other)) is not None
        ]
        if not found and len(self._told) != len(record.results):
            found = [f"{len(self._told)} steps ended here, {len(record.results)} there"]
        if self._counts != record.counts:
            found.append(
                f"requests that run, wait and have ended, and open sessions are {self._counts} "
                f"here, {record.counts} there"
            )
        if self._digest != record.digest:
            found.append(f"the ledger's digest is {self._digest:016x} here")
        if found:
            raise CorruptState(
                f"this rank has parted from rank 0 before record {record.number}, after step "
                f"{self._last_step()}: rank 0's digest is {record.digest:016x}; " + "; ".join(found)
            )

    # --- helpers ----------------------------------------------------------------------------------

    def _last_step(self) -> int:
        return self._told[-1].step if self._told else 0

    def _is_noting(self) -> bool:
        return self._peers is not None and not self._is_within

    def _note(self, *call: Any) -> None:
        """Note a call that asks for something; refuse it if this rank may not decide."""
        if self._is_noting():
            self._check()
            self._notes.append(list(call))

    def _note_end(self, *call: Any) -> None:
        """Note a call that ends something. It is also made when the ranks have parted."""
        if self._is_noting() and self._broken is None:
            self._notes.append(list(call))

    def _check(self) -> None:
        """Raise unless this rank may decide."""
        if self._broken is not None:
            raise RankError(f"the ranks cannot go on together: {self._broken}")
        if self._peers is not None and not self._peers.leads:
            raise ConfigError("this rank follows rank 0, which alone takes requests")

    def _end_turn(self) -> None:
        """Keep what the next record will be compared with."""
        if self._peers is None:
            return
        scheduler = self._scheduler
        self._digest = self._ledger.digest or 0
        self._told, self._results = self._results, []
        self._counts = [
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_ended,
            len(scheduler.conversations.open),
        ]
