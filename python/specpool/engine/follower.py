"""`follow`: what a rank other than 0 does: apply rank 0's records until it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specpool.engine.comparison import compare
from specpool.engine.core import EngineCore
from specpool.engine.output import RequestOutput
from specpool.errors import RankError, SpecpoolError
from specpool.models import TargetModel
from specpool.ranks.record import Record
from specpool.scheduler.requests.conversation import Conversation
from specpool.scheduler.requests.request import Request
from specpool.scheduler.requests.wire import params_of, params_wire, request_of
from specpool.text.stream import TextStream

if TYPE_CHECKING:
    from specpool.scheduler.pins import Pin

log = logging.getLogger("specpool")

#: A rank forgets requests that have ended when it knows so many.
_MANY = 1024


class Follower:
    """Applies the records of rank 0 to this rank's engine."""

    def __init__(self, core: EngineCore, target: TargetModel) -> None:
        """Follow on these parts, which nothing else may use."""
        self._core, self._target = core, target
        self._requests: dict[int, Request] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "abort": self._abort,
            "open": core.inputs.open,
            "fork": lambda number: core.inputs.fork(self._conversation(number)),
            "cut": lambda number, length: core.inputs.cut(self._conversation(number), length),
            "close": lambda number: core.inputs.close(self._conversation(number)),
            "unpin": lambda prefix: core.inputs.unpin(self._pin(prefix)),
            "forget": core.inputs.forget,
            "drain": core.loop.drain,
            "turn": core.loop.turn,
            "compare": self._compare,
        }

    def apply(self, data: bytes) -> bool:
        """Apply a record; return False if it is rank 0's last one.

        Raises:
            RankError: the bytes are no record, or not the next one.
            CorruptState: this rank has parted from rank 0.
        """
        record = Record.of_bytes(data)
        with self._core.lock, self._core.inputs.applying(record):
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
            if name == "turn" or isinstance(error, RankError):
                raise
            # Rank 0 has met the same error; if it has not, the next digest shows it.
            log.warning("record %d: %s: %s", number, name, error)
        except (TypeError, ValueError, AttributeError) as error:
            raise RankError(f"record {number}: {name} cannot be called so: {error}") from error

    def _submit(self, wire: Any) -> None:
        conversations = self._core.scheduler.conversations.open
        request = request_of(wire, conversations, self._equip)
        if len(self._requests) > _MANY:
            self._requests = {
                number: each for number, each in self._requests.items() if not each.finish_reason
            }
        self._requests |= {each.request_id: each for each in (request, *request.siblings)}
        self._core.inputs.submit(request)

    def _equip(self, request: Request) -> None:
        """Give a request what finds its end, as `Prompts` does on rank 0."""
        params = request.params
        if params.stop:
            request.watch = TextStream(self._core.tokenizer, params.stop)
        if params.structured is not None:
            request.matcher = self._core.compiler.matcher(params.structured)

    def _abort(self, number: int) -> None:
        if number in self._requests:  # else it was never submitted
            self._core.inputs.abort(self._requests[number])

    def _conversation(self, number: int) -> Conversation:
        conversations = self._core.scheduler.conversations.open
        if number not in conversations:
            raise RankError(f"session {number!r:.40} is not open on this rank")
        return conversations[number]

    def _pin(self, prefix: int) -> Pin:
        for pin in self._core.scheduler.pins:
            if pin.prefix == prefix:
                return pin
        raise RankError(f"no pinned text has the number {prefix!r:.40} on this rank")

    def _compare(self, *outputs: Any) -> None:
        """Take part in the forwards of a comparison, whose result rank 0 gives out."""
        compare(self._target, *(_output(wire) for wire in outputs))


def output_wire(output: RequestOutput) -> list[Any]:
    """Return what a comparison needs of an output."""
    return [output.prompt_ids, output.token_ids, params_wire(output.params), output.seed]


def _output(wire: Any) -> RequestOutput:
    prompt_ids, token_ids, params, seed = wire
    return RequestOutput(
        index=0,
        sample=0,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        text="",
        finish_reason="length",
        error=None,
        seed=seed,
        accept_lens=[],
        from_draft=[],
        logprobs=None,
        num_reused=0,
        num_drafts=0,
        params=params_of(params),
        stop_hit=None,
        queue_seconds=None,
        first_token_seconds=None,
        seconds=0.0,
    )
