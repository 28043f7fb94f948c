"""`Follower`: applies the records of rank 0 to the scheduler and the loop of another rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specpool.engine.ranks.journal import RankJournal
from specpool.engine.ranks.wire import Equip, request_of
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.errors import CorruptState, RankError, SpecpoolError

if TYPE_CHECKING:
    from specpool.engine.scheduler.pins import Pin

log = logging.getLogger("specpool")

#: A rank forgets requests that have ended when it knows more than this.
_MANY = 1024
#: Calls that run steps: an error there does not answer a request, it ends the rank.
_STEPS = ("turn", "drain")


class Follower:
    """The end of the records on a rank other than 0.

    Attributes:
        requests: the requests that were submitted here, by number; ended ones are dropped in time.
    """

    def __init__(
        self,
        journal: RankJournal,
        scheduler: Scheduler,
        equip: Equip,
        calls: Mapping[str, Any],
    ) -> None:
        """Apply records to these parts, which nothing else may use.

        Args:
            journal: checks the records.
            scheduler: takes the calls.
            equip: called for each new request; see `request_of`.
            calls: what a record may also ask for, by name: `turn` and `drain` at least.
        """
        self._journal, self._scheduler, self._equip = journal, scheduler, equip
        self.requests: dict[int, Request] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "abort": self._abort,
            "open": scheduler.open,
            "fork": lambda number: scheduler.fork(self._conversation(number)),
            "cut": lambda number, length: scheduler.cut(self._conversation(number), length),
            "close": lambda number: scheduler.close(self._conversation(number)),
            "unpin": lambda prefix: scheduler.unpin(self._pin(prefix)),
            "forget": scheduler.forget,
            "time": journal.set_time,
            **calls,
        }

    def apply(self, data: bytes) -> bool:
        """Apply a record; return False if it is rank 0's last one. Hold the engine's lock.

        Raises:
            RankError: the bytes are not a record, or not the next one.
            CorruptState: this rank has parted from rank 0.
        """
        with self._journal.applying(data) as record:
            for name, *args in record.inputs:
                if name == "end":
                    return False
                self._call(record.number, name, args)
        return True

    def _call(self, number: int, name: str, args: list[Any]) -> None:
        if name not in self._calls:
            raise RankError(f"record {number} has a call {name!r:.40}, which is unknown")
        try:
            self._calls[name](*args)
        except SpecpoolError as error:
            if name in _STEPS or isinstance(error, RankError | CorruptState):
                raise
            # Rank 0 has met the same error; if it has not, the next digest shows it.
            log.warning("record %d: %s: %s", number, name, error)
        except (TypeError, ValueError, AttributeError) as error:
            if name in _STEPS:  # it takes no arguments: the error is of what it has run
                raise
            raise RankError(f"record {number}: {name} cannot be called so: {error}") from error

    def _submit(self, wire: Any) -> None:
        request = request_of(wire, self._scheduler.conversations.open, self._equip)
        if len(self.requests) > _MANY:
            self.requests = {
                number: earlier
                for number, earlier in self.requests.items()
                if not earlier.finish_reason
            }
        self.requests |= {sample.request_id: sample for sample in (request, *request.siblings)}
        self._scheduler.submit(request)

    def _abort(self, number: int) -> None:
        if number in self.requests:  # else it was never submitted
            self._scheduler.abort(self.requests[number])

    def _conversation(self, number: int) -> Conversation:
        conversations = self._scheduler.conversations.open
        if number not in conversations:
            raise RankError(f"session {number!r:.40} is not open on this rank")
        return conversations[number]

    def _pin(self, prefix: int) -> Pin:
        for pin in self._scheduler.pins:
            if pin.prefix == prefix:
                return pin
        raise RankError(f"no pinned text has the number {prefix!r:.40} on this rank")
