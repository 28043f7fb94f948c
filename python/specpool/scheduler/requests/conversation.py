"""`Conversation`: the tokens of a session, and the place of its KV between two turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.memory.host.handle import Handle

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """The part of a conversation that one turn has added.

    Attributes:
        end: the number of tokens of the conversation at the turn's end.
        messages: the chat messages that began the turn; None = it began with text or token ids.
        answer_ids: the generated tokens without those that end a text; with them if a stop string
            ended it, because such a token may be part of that string.
        stop: the turn's stop strings; the answer's text ends before the first of them.
        message: the answer as a chat message with its calls of tools; None = it has none, or nobody
            has read them.
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
        row: the idle row with KV of the first tokens; 0 = none, or the turn's request has it.
        epoch: the row's epoch when it became idle.
        handle: KV of the first tokens on the host; None = none, or the turn's request has it.
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
