"""`SessionParcel`: a session between two servers, as text and with what its engine exports."""

from __future__ import annotations

from dataclasses import dataclass

from specpool.scheduler.requests.conversation import Said


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParcel:
    """A session on its way from one server to another. It can be pickled.

    Attributes:
        ident: its name for clients, which stays.
        model: what the servers must have in common.
        num_moves: how often it has moved, with this time.
        max_tokens: the most tokens of all turns.
        tokens: those of all turns that have ended.
        said: these turns.
        idle_seconds: since the end of the latest call.
        image: the same with KV, as `Export.write` makes it; None = the text goes alone.
    """

    ident: str
    model: tuple[str, str]
    num_moves: int
    max_tokens: int
    tokens: list[int]
    said: list[Said]
    idle_seconds: float
    image: bytes | None
