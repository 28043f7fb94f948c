"""`RankRequest`: a new request as plain values, for another rank to make the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specpool._core import Shape
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.scheduler.wire import Natural, RequestState, checked, sizes_of
from specpool.errors import RankError

#: Gives a request what follows its text, which is not sent: `Request.watch`, `Request.matcher`.
Equip = Callable[[Request], None]

# Fields of `Request` that are sent as they are.
_SAME = (
    "request_id",
    "index",
    "prompt_len",
    "params",
    "shape_index",
    "max_len",
    "seed",
    "priority",
    "skips_cache",
    "sample",
    "wants_pin",
    "forced_shape",
    "drafter",
    "reads_tokens",
    "choices",
    "stop_ids",
)


class RankRequest(RequestState, kw_only=True):
    """A request that has not run yet, with its siblings; the fields are those of `Request`.

    Attributes:
        conversation: the number of the session that it is a turn of; None without a session.
        siblings: request id, sample and seed of each.
    """

    request_id: Natural
    index: Natural
    tokens: list[int]
    shape_index: Natural
    max_len: Natural
    stop_ids: frozenset[int]
    choices: tuple[int, ...] | None
    skips_cache: bool
    sample: Natural
    wants_pin: bool
    forced_shape: Natural
    drafter: Natural
    reads_tokens: bool
    conversation: int | None
    siblings: list[tuple[Natural, Natural, Natural]]


def wire_of(request: Request) -> RankRequest:
    """Return a new request with its siblings as plain values."""
    conversation = request.conversation
    return RankRequest(
        **{name: getattr(request, name) for name in _SAME},
        tokens=list(request.tokens),
        shape=sizes_of(request.shape),
        conversation=None if conversation is None else conversation.number,
        siblings=[(s.request_id, s.sample, s.seed) for s in request.siblings],
    )


def request_of(wire: Any, open_conversations: dict[int, Conversation], equip: Equip) -> Request:
    """Make the request of `wire_of`, with its siblings.

    Args:
        wire: the values, as a record's payload has them.
        open_conversations: the conversations of this rank, by number.
        equip: called for the request and each sibling.

    Raises:
        RankError: the values do not make a request, or their conversation is not open.
    """
    try:
        sent: RankRequest = checked(wire, RankRequest)
        number = sent.conversation
        if number is not None and number not in open_conversations:
            raise RankError(f"session {number} is not open on this rank")
        if sent.shape is None:
            raise ValueError("its shape is missing")
        request = Request(
            **{name: getattr(sent, name) for name in _SAME},
            tokens=sent.tokens,
            shape=Shape(*sent.shape),
            conversation=None if number is None else open_conversations[number],
        )
    except ValueError as error:  # of `checked` or `Shape`
        raise RankError(f"these values make no request: {error!s:.200}") from error
    request.siblings = [request.sibling(*ids) for ids in sent.siblings]
    for sample in (request, *request.siblings):
        equip(sample)
    return request
