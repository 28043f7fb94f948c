"""`Conversation`: what has been said in a session, and where its KV is between two turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.memory.host.tier import Handle

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """What one turn has added.

    Attributes:
        end: tokens of the conversation up to where the turn has ended.
        messages: of a chat, that the turn began with; None = it was text or token ids.
        answer_ids: generated, without the tokens that stop.
        stop: strings that the answer's text ends before.
    """

    end: int
    messages: tuple[Message, ...] | None
    answer_ids: list[int]
    stop: Sequence[str]


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation: what its client has of it, and the row with its KV while it is idle.

    Attributes:
        number: counts the conversations of an engine, from 1.
        tokens: of all turns that have ended.
        said: the turns that these tokens are of.
        row: idle, with KV of the first tokens; 0 = none, or the turn's request has it.
        epoch: of the row when it became idle.
        handle: KV of the first tokens on the host; None = none, or the turn's request has it.
        turn_ct: turns that have ended by a stop or their length.
        computed_token_ct: tokens of prefills.
        reused_token_ct: tokens whose KV a turn found.
        retraction_ct: retractions of its turns.
        drop_ct: how often its KV was dropped between turns, to make room.
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

    def cut(self, num_tokens: int) -> None:
        """Leave that many tokens, and the messages of turns that are whole."""
        said = [turn for turn in self.said if turn.end <= num_tokens]
        cut = self.said[len(said) :]
        if cut and cut[0].messages is None and num_tokens > (said[-1].end if said else 0):
            said.append(replace(cut[0], end=num_tokens))  # what is left of a text is still text
        self.tokens, self.said = self.tokens[:num_tokens], said


def common_len(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens, or characters, both begin with."""
    if a == b[: len(a)]:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip([*a, -1], [*b, -2], strict=False)) if x != y)
