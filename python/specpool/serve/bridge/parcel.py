"""`SessionParcel`: a session between two servers, as text and with what its engine exports.

`ParcelNumbers` says which parcels are old, `OtherServers` where sessions belong.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from specpool.engine.scheduler.request import Said

#: Sessions whose parcels are remembered when they are not here.
_MOST = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParcel:
    """A session on its way from one server to another. It can be pickled.

    Attributes:
        ident: its full name (`ident_of`), which stays: also the key that it belongs to.
        model: what the servers must have in common.
        number: of the session's parcels, above those of all earlier ones. The same parcel keeps
            its number when it is sent again.
        max_tokens: the most tokens of all turns.
        tokens: those of all turns that have ended.
        said: these turns.
        idle_seconds: since the end of the latest call.
        image: the same with KV, as `Export.write` makes it; None if the text goes alone.
    """

    ident: str
    model: tuple[str, str]
    number: int
    max_tokens: int
    tokens: list[int]
    said: list[Said]
    idle_seconds: float
    image: bytes | None


class ParcelNumbers:
    """The highest number of each session's parcels, of the 4,096 sessions that were noted last."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, ident: str) -> bool:
        return ident in self._numbers

    def note(self, ident: str, number: int) -> None:
        """Remember the number of a parcel; a lower one than before changes nothing."""
        self._numbers[ident] = max(number, self._numbers.pop(ident, 0))
        while len(self._numbers) > _MOST:
            self._numbers.popitem(last=False)

    def latest(self, ident: str) -> int:
        """Return the highest number of a session's parcels; 0 if none is remembered."""
        return self._numbers.get(ident, 0)


class OtherServers(Protocol):
    """What a server knows of the other ones to which sessions move."""

    async def wait_for(self, ident: str) -> None:
        """Wait a moment for a session that is not here, if it may be on its way.

        Raises:
            ApiError: too many requests wait already.
        """

    def is_moving(self, ident: str) -> bool:
        """Return whether a session that is not here may be on its way, here or elsewhere."""
