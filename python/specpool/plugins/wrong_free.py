"""A wrong free: its block, whose that was, and where in the engine the call was made."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import specpool

#: How the tag of a wrong free begins in an event log.
MARK = "wrong free: "
#: Frames of the engine that a wrong free names.
MOST_FRAMES = 8
_OWN = os.path.join(os.path.dirname(specpool.__file__), "")


@dataclass(frozen=True, slots=True)
class WrongFree:
    """A free that the pool refused. Texts are empty where nothing is known."""

    refusal: str  # the pool's words: the block, its state, its last verb
    owner: str  # the request that took the block last
    request: str  # the request that the engine was busy with
    frames: tuple[str, ...]  # of the engine, the caller first: `file:line function`

    @staticmethod
    def seen(refusal: str, owner: str | None, request: str | None = None) -> WrongFree:
        """Return the one that the engine is making now, from the frames below this call.

        Args:
            refusal: the pool's words.
            owner: the request that took the block last, if that is known.
            request: the request that frees now; None: the one that the engine's frames name.
        """
        frames = _engine_frames()
        by = _request_of(frames) if request is None else request
        return WrongFree(refusal, owner or "", by, tuple(_place(frame) for frame in frames))

    @property
    def tag(self) -> str:
        """The text in the event log: one line."""
        by = f"; by request {self.request}" if self.request else ""
        owned = f"; owned by request {self.owner}" if self.owner else ""
        called = f"; called from {' < '.join(self.frames)}" if self.frames else ""
        return f"{MARK}{self.refusal}{owned}{by}{called}"


def _engine_frames() -> list[FrameType]:
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < MOST_FRAMES:
        if not frame.f_code.co_filename.startswith(_OWN):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _place(frame: FrameType) -> str:
    """Return `package/file.py:line function` of a frame."""
    path = frame.f_code.co_filename.replace(os.sep, "/")
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    start = path.rfind(f"/{package}/") if package else -1
    short = path[start + 1 :] if start >= 0 else path.rpartition("/")[2]
    return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"


def _request_of(frames: Sequence[FrameType]) -> str:
    """Return the name of the request that the nearest frame has in a variable."""
    for frame in frames:
        variables = frame.f_locals
        for name in ("request_id", "rid"):
            if isinstance(variables.get(name), str):
                return str(variables[name])
        for name in ("request", "req"):
            for field in ("request_id", "rid"):
                if isinstance(called := getattr(variables.get(name), field, None), str):
                    return called
    return ""
