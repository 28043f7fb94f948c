"""What the state of an image holds: a session or a request, beside its tokens and its KV."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import msgspec

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Conversation, Request, Said, TokenLogprob
from specpool.engine.scheduler.wire import RequestState, checked, sizes_of
from specpool.errors import TransferError

_PARAMS = set(SamplingParams.__dataclass_fields__)


class MovedRequest(RequestState, tag_field="kind", tag="request", kw_only=True):
    """A request that goes on in another engine.

    Attributes:
        forwards: the tokens of each forward, in order: the accept length of a verify, or -1 for the
            token of a prefill.
        logprobs: one entry for each token of the output, if its parameters ask for them.
    """

    forwards: list[Annotated[int, msgspec.Meta(ge=-1)]]
    logprobs: list[TokenLogprob]

    @property
    def accept_lens(self) -> list[int]:
        """The accept length of each verify."""
        return [length for length in self.forwards if length > 0]

    @property
    def prefill_token_indices(self) -> list[int]:
        """The index in the output of each token that a prefill has drawn."""
        starts = itertools.accumulate(map(abs, self.forwards), initial=0)
        return [start for start, length in zip(starts, self.forwards, strict=False) if length < 0]


class MovedTurn(MovedRequest, tag="turn", kw_only=True):
    """A turn of a session that goes on in another engine.

    Attributes:
        said: the earlier turns in its tokens.
        messages: the chat messages that begin it; None if it began with text or token ids.
    """

    said: list[Said]
    messages: tuple[dict[str, Any], ...] | None


class MovedSession(msgspec.Struct, tag_field="kind", tag="session", forbid_unknown_fields=True):
    """A session that goes on in another engine.

    Attributes:
        max_tokens: the most tokens of all turns.
        said: the turns that have ended.
        turn: the turn that waits or runs; the image's tokens are then its tokens.
        history: tokens of the turns that have ended, if there is a `turn`.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=2)]
    said: list[Said]
    turn: MovedTurn | None = None
    history: list[int] | None = None


def request_state(request: Request) -> MovedRequest:
    """Return the state of a request that leaves."""
    return MovedRequest(**_fields(request))


def session_state(
    conversation: Conversation, max_tokens: int, turn: Request | None = None
) -> MovedSession:
    """Return the state of a session that leaves, with the turn that waits or runs."""
    if turn is None:
        return MovedSession(max_tokens, conversation.said)
    messages = None if turn.messages is None else tuple(map(dict, turn.messages))
    moved_turn = MovedTurn(**_fields(turn), said=turn.said, messages=messages)
    return MovedSession(max_tokens, conversation.said, moved_turn, conversation.tokens)


def state_of(values: Any, num_tokens: int) -> MovedRequest | MovedSession:
    """Check the state of an image.

    Args:
        values: what its JSON holds.
        num_tokens: of the image.

    Raises:
        TransferError: a value is missing, unknown, of another type or out of range, or does not
            fit the others.
    """
    try:
        state: MovedRequest | MovedSession = checked(values, MovedRequest | MovedSession)
    except ValueError as error:
        raise TransferError(f"the state of the image: {error!s:.300}") from None
    if isinstance(state, MovedRequest):
        _check_request(state, values, num_tokens)
    elif state.turn is None:
        _check_said(state.said, num_tokens)
    else:
        _check_request(state.turn, values["turn"], num_tokens)
        _check_said(state.said, len(state.history or ()))
        _check_said(state.turn.said, state.turn.prompt_len)
    return state


def _fields(request: Request) -> dict[str, Any]:
    return {
        "params": request.params,
        "prompt_len": request.prompt_len,
        "seed": request.seed,
        "priority": request.priority,
        "shape": None if request.choices is not None else sizes_of(request.shape),
        "forwards": [n if is_verify else -n for n, is_verify in request.forwards()],
        "logprobs": request.logprobs,
    }


def _check_request(state: MovedRequest, values: Any, num_tokens: int) -> None:
    unknown = set(values["params"]) - _PARAMS
    if unknown:
        raise TransferError(f"params of the request: unknown are {sorted(unknown)!s:.200}")
    num_output = num_tokens - state.prompt_len
    if num_output < 0:
        raise TransferError(f"prompt_len is {state.prompt_len} of {num_tokens} tokens")
    if 0 in state.forwards:
        raise TransferError(
            f"forward {state.forwards.index(0)} gave 0 tokens, at least 1 is needed"
        )
    num_given = sum(map(abs, state.forwards))
    if num_given != num_output:
        raise TransferError(
            f"{len(state.forwards)} forwards gave {num_given} tokens, the output has {num_output}"
        )
    if len(state.logprobs) != (0 if state.params.logprobs is None else num_output):
        raise TransferError(f"{len(state.logprobs)} logprobs for {num_output} tokens")


def _check_said(turns: list[Said], num_tokens: int) -> None:
    start = 0
    for turn in turns:
        if not start <= turn.end <= num_tokens:
            raise TransferError(
                f"a turn of the session ends at token {turn.end}, it must end in "
                f"[{start}, {num_tokens}]"
            )
        start = turn.end
