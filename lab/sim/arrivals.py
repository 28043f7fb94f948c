"""`Arrival`: a future request of a simulation, and the text that its model will write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from specpool._core import Shape
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request
from specpool.engine.text.stop_search import StopHit
from specpool.engine.text.stream import TextStream

#: The token that ends a request; no other position of a text has it.
STOP = 1 << 20
# The number of places in the table of words at which a text may begin.
_NUM_STARTS = (1 << 16) - (1 << 12)
# No two are equal, so two texts are equal as far as they have the same origins.
_WORDS = 2 * np.random.default_rng(0).permutation(STOP)[: 1 << 16].tolist()  # twice the list
_LOG_DICE = np.tile(np.log(np.random.default_rng(1).uniform(1e-9, 1.0, 1 << 16)), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A future request of a simulation."""

    request_id: int
    turn: int  # of the loop, after which it comes
    prompt_len: int
    max_len: int  # tokens at most, the prompt included
    stop_at: int | None = None  # position of its stop token; None means its length ends it
    abort_after: int | None = None  # turns from its arrival to its abort
    shape: int = 0
    priority: int = 0
    salt: str = ""
    accept_rate: float = 0.0  # probability that a draft is right if those before it are
    jump: tuple[int, float] | None = None  # (position, the accept rate from there on)
    reads_tokens: bool = True  # if any drafter reads tokens: this one's does
    doubts: float = 0.0  # share of its rounds that its drafter finds not worth drafting
    adapts: bool = False  # names no shape: the controller chooses
    most_steps: int | None = None  # the most steps that it drafts; None means no limit
    # Positions of the token that completes a stop string, and of the token that settles this.
    stop_text: tuple[int, int] | None = None
    sample_of: int | None = None  # the request with the same prompt, which it may be forked from
    # The requests that its first words are from, as (request id, end position), from position 0 on.
    origins: tuple[tuple[int, int], ...] = ()
    is_pin: bool = False  # its prompt is to be pinned
    unpin_after: int | None = None  # turns from its arrival on; None means at the end
    # For a turn of a session: it comes `pause` turns after the end of the turn before. Its lengths
    # and positions count from the end of the session's text.
    session: int = 0  # the session's number; 0 if it is no turn
    pause: int = 0
    rewind: float | None = None  # the share of the session's tokens to keep; None means all
    fork_of: int | None = None  # the session that its own is a fork of
    stops: tuple[int, ...] = ()  # positions of earlier turns' stop tokens
    closes: bool = False  # the session is closed when this turn ends

    @property
    def end(self) -> tuple[int, str]:
        """The request's number of tokens without faults, and its finish reason."""
        end, reason = self.max_len, "length"
        if self.stop_at is not None and self.stop_at < self.max_len:
            end, reason = self.stop_at + 1, "stop"
        if self.stop_text is not None and self.stop_text[0] < end - (reason == "stop"):
            return self.stop_text[0] + 1, "stop"
        return end, "stop" if self.is_pin else reason

    @property
    def most_tokens(self) -> int:
        """The most tokens that it may hold: a stop string may be found some tokens late."""
        return self.end[0] if self.stop_text is None else self.max_len

    def is_promising(self, num_tokens: int) -> bool:
        """Return whether its drafter finds a round worth drafting after so many tokens."""
        dice = math.exp(_LOG_DICE[_start(self.request_id) + 3 * num_tokens])
        return bool(dice >= self.doubts)

    def is_sample(self, first: Arrival) -> bool:
        """Return whether this is another sample of the other arrival's prompt."""
        same = self.prompt_len == first.prompt_len and self.shape == first.shape
        origins = (*first.origins, (first.request_id, first.prompt_len))
        return same and self.sample_of == first.request_id and self.origins == origins

    def request(self) -> Request:
        """Build the scheduler's request."""
        return Request(
            request_id=self.request_id,
            index=0,
            prompt_len=self.prompt_len,
            tokens=Text(self).tokens[: self.prompt_len],
            params=SamplingParams(cache_salt=self.salt),
            shape=Shape.none(),  # not used; `shape_index` is
            shape_index=self.shape,
            max_len=self.max_len,
            stop_ids=frozenset((STOP,)),
            seed=self.request_id,
            priority=self.priority,
            sample=0 if self.sample_of is None else self.request_id - self.sample_of,
            wants_pin=self.is_pin,
            reads_tokens=self.reads_tokens,
            watch=None if self.stop_text is None else cast("TextStream", StopWatch(self)),
        )


class StopWatch:
    """A stand-in for `TextStream` that finds the stop string where the arrival has it.

    Attributes:
        hit: see `TextStream`.
    """

    def __init__(self, arrival: Arrival) -> None:
        self.hit: StopHit | None = None
        assert arrival.stop_text is not None
        ends, decides = arrival.stop_text
        self._end_len = ends + 1 - arrival.prompt_len
        self._decides_len = decides + 1 - arrival.prompt_len
        self._num_tokens = 0

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add these tokens."""
        self._num_tokens += len(tokens)
        if self._num_tokens >= (self._end_len if last else self._decides_len):
            self.hit = self.hit or StopHit("stop", self._end_len)
        return ""


class Text:
    """The text of a request without faults, also beyond its end.

    Attributes:
        tokens: prompt and output.
        words: int64 [positions]: the text's owner and the position, in one number.
        correct_drafts: [positions]: the number of right drafts at each root.
    """

    def __init__(self, arrival: Arrival) -> None:
        num_tokens = arrival.max_len + 2 * 64  # rounds in flight pass the end
        start = _start(arrival.request_id)
        self.tokens: list[int] = _WORDS[start : start + num_tokens]
        self.words = np.arange(num_tokens) + (arrival.request_id << 20)
        begin = 0
        for request_id, end in arrival.origins:
            other = _start(request_id)
            self.tokens[begin:end] = _WORDS[other + begin : other + end]
            self.words[begin:end] = np.arange(begin, end) + (request_id << 20)
            begin = end
        for position in (arrival.stop_at, *arrival.stops):
            if position is not None:
                self.tokens[position] = STOP
        rates = np.full(num_tokens, arrival.accept_rate)
        if arrival.jump is not None:
            rates[arrival.jump[0] :] = arrival.jump[1]
        correct = _LOG_DICE[start : start + num_tokens] / np.log(rates.clip(1e-9, 1 - 1e-9))
        self.correct_drafts: list[int] = np.minimum(correct, 64).astype(int).tolist()


def _start(request_id: int) -> int:
    """Return where a request's words begin in the table of all words."""
    return request_id * 7919 % _NUM_STARTS
