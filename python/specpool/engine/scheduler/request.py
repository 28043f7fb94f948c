"""`Request`, a prompt and its output, and `Conversation`, the session that it may be a turn of."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from specpool._core import Shape
from specpool.arrays import Int32
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.bans import Bans
from specpool.engine.text.stream import TextStream
from specpool.engine.text.structured.matcher import Matcher

if TYPE_CHECKING:
    from specpool.engine.memory.host.handle import Handle
    from specpool.engine.scheduler.pins import Pin


Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """The part of a conversation that one turn has added.

    Attributes:
        end: the number of tokens of the conversation at the turn's end.
        messages: the chat messages that began the turn; None if it began with text or token ids.
        answer_ids: the generated tokens without those that end a text; with them if a stop string
            ended it, because such a token may be part of that string.
        stop: the turn's stop strings; the answer's text ends before the first of them.
        message: the answer as a chat message with its calls of tools; None if it has none, or if
            they were not read.
    """

    end: int
    messages: tuple[Message, ...] | None
    answer_ids: list[int]
    stop: Sequence[str]
    message: Message | None = None


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation: its tokens, and the row or handle with its KV while it is idle.

    Attributes:
        number: its number within the engine, from 1.
        tokens: the tokens of all turns that have ended.
        said: the turns that these tokens are from.
        row: the idle row with KV of the first tokens; 0 for none, or the turn's request has it.
        epoch: the row's epoch when it became idle.
        handle: KV of the first tokens on the host; None if there is none, or if the
            turn's request has it.
        turn_ct: turns that have ended by a stop or their length.
        computed_token_ct: tokens that prefills computed.
        reused_token_ct: tokens whose KV a turn found in place.
        retraction_ct: retractions of its turns.
        drop_ct: how often its KV was dropped between turns, to make room.
        leaves: whether it is on its way to another engine.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    row: int = 0
    epoch: int = 0
    handle: Handle | None = None
    turn_ct: int = 0
    computed_token_ct: int = 0
    reused_token_ct: int = 0
    retraction_ct: int = 0
    drop_ct: int = 0
    leaves: bool = False

    def add_turn(
        self,
        tokens: list[int],
        said: Sequence[Said],
        *,
        messages: tuple[Message, ...] | None,
        output_ids: list[int],
        params: SamplingParams,
        stop_ids: Collection[int],
        hit_stop_string: bool,
        message: Message | None = None,
    ) -> None:
        """Add a turn that has ended by a stop or its length.

        Args:
            tokens: the conversation's from now on, to the turn's end.
            said: the earlier turns in them.
            messages: the chat messages that began the turn, as in `Said`.
            output_ids: the tokens that the turn generated.
            params: the turn's.
            stop_ids: the tokens that end its text.
            hit_stop_string: whether a stop string ended it; a stop token may be part of that.
            message: the answer as a chat message, as in `Said`.
        """
        answer_ids = output_ids
        if not hit_stop_string:
            answer_ids = [token for token in output_ids if token not in stop_ids]
        turn = Said(len(tokens), messages, answer_ids, params.stop, message)
        # One statement, so that Ctrl-C leaves both or neither.
        self.tokens, self.said = tokens, [*said, turn]

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and the turns that end within them.

        A cut turn that began with text or token ids stays with its shorter length.
        """
        said = [turn for turn in self.said if turn.end <= num_tokens]
        cut = self.said[len(said) :]
        if cut and cut[0].messages is None and num_tokens > (said[-1].end if said else 0):
            said.append(replace(cut[0], end=num_tokens))  # what is left of a text is still text
        self.tokens, self.said = self.tokens[:num_tokens], said


def common_len(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences of tokens or characters."""
    if a == b[: len(a)]:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip([*a, -1], [*b, -2], strict=False)) if x != y)


#: Values in a token's place: the logits were not finite; the drafter's tree was not a tree.
NOT_FINITE, NO_TREE = -1, -2


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probabilities at one position, from the target's logits before any truncation."""

    token_id: int
    logprob: float
    top: dict[int, float]  # the most likely tokens, most likely first

    def first(self, num_top: int) -> TokenLogprob:
        """Return a copy with only the `num_top` most likely tokens."""
        return TokenLogprob(self.token_id, self.logprob, dict(list(self.top.items())[:num_top]))


@dataclass(slots=True)
class Times:
    """The times of a request's milestones, by `time.perf_counter`; None if not reached yet."""

    queued: float | None = None
    started: float | None = None  # when it got its first row
    first_token: float | None = None  # when the host had it
    ended: float | None = None

    def since_queued(self, name: str) -> float | None:
        """Return the seconds from arrival to the milestone `name`; None if not reached."""
        end = getattr(self, name)
        return None if end is None or self.queued is None else end - self.queued


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output so far; requests are compared by identity.

    `tokens` are the prompt and the output. While the request decodes, the last token is the root,
    the only token without KV.
    """

    request_id: int  # in the order of arrival
    index: int  # of its prompt in the call
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    shape: Shape
    shape_index: int  # into the ledger's shapes, and beyond them into `all_choices`
    max_len: int  # tokens at most, the prompt included
    stop_ids: frozenset[int]
    seed: int
    choices: tuple[int, ...] | None = None  # by the controller's candidates; None if it is fixed
    priority: int = 0  # the greater comes first
    row: int = 0  # 0 for none
    epoch: int = 0  # the row's epoch while this request has it
    prefill_len: int = 0  # positions to be prefilled: all tokens known when the row was taken
    prefilled_len: int = 0  # positions in prefill steps so far
    indexed_len: int = 0  # tokens that the prefix cache has been given since the row was taken
    skips_cache: bool = False  # it takes nothing from the prefix cache
    cuts: set[int] = field(default_factory=set)  # see `StateCuts`
    num_retractions: int = 0
    finish_reason: str | None = None  # "stop", "length", "error", "abort"
    error: str | None = None
    tainted: bool = False  # its KV may be NaN, after a fault or bad logits
    # The accept length of each verify. The last one may count more tokens than were kept.
    accept_lens: list[int] = field(default_factory=list)
    # The index in the output of each token that a prefill has drawn: of the first token, and of one
    # more after each retraction.
    prefill_token_indices: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    watch: TextStream | None = None  # looks for the stop strings
    siblings: list[Request] = field(default_factory=list)  # of the same prompt, not forked yet
    sample: int = 0  # its number among the prompt's samples
    wants_pin: bool = False  # pin its prompt, and generate nothing
    pin: Pin | None = None
    conversation: Conversation | None = None  # the session that it is a turn of
    said: list[Said] = field(default_factory=list)  # the earlier turns in its tokens
    messages: tuple[Message, ...] | None = None  # the chat messages that begin its turn
    num_reused: int = 0  # prompt tokens with KV when it got its first row
    num_drafts: int = 0  # proposed in its rounds so far
    shared_len: int = 0  # tokens with KV from others or an earlier turn, when it got its row
    handle: Handle | None = None  # its KV on the host, until the last reload is taken over
    host_len: int = 0  # tokens of a text on the host that its new row has, until they are counted
    times: Times = field(default_factory=Times)
    # The request adds itself, by number, when it loses its row or ends: it may have news.
    mailbox: dict[int, Request] | None = None
    matcher: Matcher | None = None  # follows the form of its output
    forced: list[int] = field(default_factory=list)  # tokens after the root that the form leaves
    # The index of the shape for more of them than its own shape has steps; 0 for none.
    forced_shape: int = 0
    changes_logits: bool = field(init=False)  # as in `params`, looked up in every round
    penalizes: bool = field(init=False)
    draft_error: str | None = None  # why its drafter's proposal cannot be used
    drafter: int = 0  # number of the engine's drafter that drafts for it
    reads_tokens: bool = True  # if any drafter reads tokens: this one does
    _flags: list[bool] = field(init=False, default_factory=list, repr=False)  # of `from_draft`
    _flagged: tuple[int, int] = field(init=False, default=(0, 0), repr=False)  # tokens, verifies
    _token_array: Int32 = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)

    bans: Bans | None = field(init=False, repr=False)  # what may not follow its text

    def __post_init__(self) -> None:
        self.params = params = self.params.filled()
        self.changes_logits = params.changes_logits
        self.penalizes = params.penalizes
        self.bans = None
        if params.bans:
            self.bans = Bans(
                self.prompt_len,
                self.stop_ids,
                always=params.suppress_tokens or (),
                first=params.begin_suppress_tokens or (),
                words=params.bad_words_ids or (),
                ngram_size=params.no_repeat_ngram_size or 0,
                min_new_tokens=params.min_new_tokens or 0,
            )

    @property
    def waits_for_tokens(self) -> bool:
        """Whether its next round needs the tokens of its last one on the host."""
        return self.matcher is not None or self.bans is not None

    def sibling(self, request_id: int, sample: int, seed: int) -> Request:
        """Return a further sample of the same prompt, of a request that has no output yet.

        Its `watch` and `matcher` are those of this request: give it its own.
        """
        return replace(
            self,
            request_id=request_id,
            sample=sample,
            seed=seed,
            tokens=list(self.tokens),
            forced=[],
            accept_lens=[],
            prefill_token_indices=[],
            logprobs=[],
            siblings=[],
            times=Times(),
        )

    def post(self) -> None:
        """Put the request into its mailbox: it does not run any more, but may have news."""
        if self.mailbox is not None:
            self.mailbox[self.request_id] = self

    def token_array(self) -> Int32:
        """Return `tokens` as int32 [len(tokens)]; a later call converts only the new ones."""
        num_tokens, known_tokens = len(self.tokens), self._token_array
        if len(known_tokens) < num_tokens:
            new_tokens = np.array(self.tokens[len(known_tokens) :], np.int32)
            self._token_array = known_tokens = np.concatenate((known_tokens, new_tokens))
        return known_tokens[:num_tokens]

    def useful_len(self, kept_len: int, drafted_len: int) -> int:
        """Return how many of the request's tokens need no prefill on a row that has KV.

        Args:
            kept_len: tokens of the row that have KV.
            drafted_len: tokens of the row that have draft KV; a request without drafts needs none.
        """
        length = min(kept_len, len(self.tokens) - 1)  # the last one's forward has to run
        if self.shape_index:
            length = min(length, drafted_len)
        if self.conversation is not None:
            length = min(length, common_len(self.conversation.tokens, self.tokens))
        return length

    @property
    def salt(self) -> bytes:
        """The salt of its text in the prefix cache."""
        return self.params.cache_salt.encode()

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def from_draft(self) -> list[bool]:
        """Whether each generated token is an accepted draft: all of a verify but its last."""
        return self.from_draft_since(0)

    def from_draft_since(self, start: int) -> list[bool]:
        """Return `from_draft[start:]`; the cost grows with these and the new tokens alone."""
        flags, (num_flags, num_verifies) = self._flags, self._flagged
        del flags[num_flags:]  # Ctrl-C has stopped a look in here
        prefills = set(self.prefill_token_indices)
        while len(flags) < self.num_output_tokens:
            num_tokens = 1
            if len(flags) not in prefills:
                num_tokens = self.accept_lens[num_verifies]
                num_verifies += 1
            flags += [True] * (num_tokens - 1) + [False]
        self._flagged = len(flags), num_verifies
        return flags[start : self.num_output_tokens]

    def forwards(self) -> Iterator[tuple[int, bool]]:
        """Yield the number of tokens of each forward, and whether it was a verify, in order."""
        num_tokens = num_prefills = num_verifies = 0
        while True:
            if self.prefill_token_indices[num_prefills : num_prefills + 1] == [num_tokens]:
                num_prefills += 1
                num_tokens += 1
                yield 1, False
            elif num_verifies < len(self.accept_lens):
                accept_len = self.accept_lens[num_verifies]
                num_verifies += 1
                num_tokens += accept_len
                yield accept_len, True
            else:
                return

    def append(
        self,
        tokens: list[int],
        *,
        accept_len: int | None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """Add the tokens of one forward, the last of which is not a draft.

        Set `finish_reason` at the first token that ends the request, and drop the tokens that a
        verify accepted beyond it. A last token of `NOT_FINITE` or `NO_TREE` ends the request
        with an error.

        Args:
            tokens: at least one.
            accept_len: of a verify, the number of `tokens`; None for the token of a prefill.
            logprobs: one entry for each token; None if they are not wanted.
        """
        if (
            len(self.tokens) + len(tokens) >= self.max_len
            or tokens[-1] < 0
            or not self.stop_ids.isdisjoint(tokens)
        ):
            tokens = self._end(tokens)
        if not self.num_output_tokens:
            self.times.first_token = time.perf_counter()
        # Tokens last, because Ctrl-C may come between: the other lists must not be shorter.
        if accept_len is None:
            self.prefill_token_indices.append(self.num_output_tokens)
        else:
            self.accept_lens.append(accept_len)
        if logprobs is not None:
            num_top = self.params.logprobs or 0
            self.logprobs += [entry.first(num_top) for entry in logprobs[: len(tokens)]]
        self.tokens += tokens
        if self.watch is not None:
            self._look_for_stop(self.watch, tokens)

    def _look_for_stop(self, watch: TextStream, new: list[int]) -> None:
        """End the request if its text holds a stop string, which may begin some tokens back."""
        watch.push(new)
        if self.finish_reason is not None:
            watch.push([], last=True)
        if watch.hit is not None:
            self.finish_reason, self.error = "stop", None
            del self.tokens[self.prompt_len + watch.hit.num_tokens :]
            del self.logprobs[watch.hit.num_tokens :]

    def _end(self, tokens: list[int]) -> list[int]:
        """Set `finish_reason` if the request ends within these tokens; return those to keep."""
        new_tokens = tokens[:-1] if tokens[-1] < 0 else tokens
        if not self.stop_ids.isdisjoint(new_tokens):
            new_tokens = new_tokens[
                : 1 + next(i for i, t in enumerate(new_tokens) if t in self.stop_ids)
            ]
            self.finish_reason = "stop"
        room = self.max_len - len(self.tokens)
        if len(new_tokens) >= room:
            # If the last token that fits is a stop token, the reason is "stop".
            stopped = self.finish_reason is not None and len(new_tokens) == room
            new_tokens, self.finish_reason = new_tokens[:room], "stop" if stopped else "length"
        if self.finish_reason is None and tokens[-1] < 0:
            self.finish_reason = "error"
            position = len(self.tokens) + len(new_tokens) - 1
            self.error = f"the logits at position {position} are not finite"
            if tokens[-1] == NO_TREE:
                why = self.draft_error or (
                    "the drafter's tree is no tree: a wrong root, a token outside the target's "
                    "vocabulary, or mask, depths and links that disagree"
                )
                self.error = f"{why}, at position {position}"
            elif self.bans is not None and self.matcher is None:  # a form comes before them
                self.error += ", or the request's bans leave no token"
            if self.matcher is not None:
                dead_end = self.matcher.dead_end([*self.tokens, *new_tokens], self.prompt_len)
                if dead_end is not None:
                    self.error = f"{dead_end}, at position {position + 1}"
        return new_tokens
