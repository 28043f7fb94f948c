"""A device without a GPU, keyed by content: a slot holds the text that its KV was computed for.

`Text` is what a request says: every next token follows from the tokens before it, so the KV that a
position must hold is known. `Device` keeps what each slot holds; a read of a slot that was never
written, holds an older text or belongs to another request is a fault, named at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: The token that ends a text.
STOP = 2
#: A slot that no forward has written.
UNWRITTEN = 0

_I64 = npt.NDArray[np.int64]


def digest(*parts: int) -> int:
    """Return 62 bits that depend on every part, never `UNWRITTEN`."""
    packed = b"".join(part.to_bytes(8, "little", signed=True) for part in parts)
    return 1 + (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 2)


class Text:
    """A request's text: its prompt, and what the model says after it, as far as anybody asks."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.num_prompt = len(prompt)
        self.tokens: list[int] = []
        self._keys: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self._keys.append(digest(self._keys[-1] if self._keys else 7, token))

    def _grow(self, length: int) -> None:
        while len(self.tokens) < length:
            said = digest(self._keys[-1], 11)
            self._append(STOP if said % 61 == 0 else 3 + said % 997)

    def token(self, position: int) -> int:
        """Return the token at a position."""
        self._grow(position + 1)
        return self.tokens[position]

    def keys(self, begin: int, end: int) -> _I64:
        """Return what the target's KV holds at positions `begin` to `end`, int64."""
        self._grow(end)
        return np.array(self._keys[begin:end], np.int64)

    def draft_keys(self, begin: int, end: int) -> _I64:
        """Return what the draft model's KV holds there: it also sees the token that follows."""
        self._grow(end + 1)
        pairs = zip(self._keys[begin:end], self.tokens[begin + 1 : end + 1], strict=True)
        return np.array([digest(key, token) for key, token in pairs], np.int64)

    def answer(self, most: int) -> list[int]:
        """Return what a greedy model says: up to `most` tokens, or to a stop token."""
        self._grow(self.num_prompt + most)
        said = self.tokens[self.num_prompt : self.num_prompt + most]
        return said[: said.index(STOP) + 1] if STOP in said else said


class KV:
    """What the slots of one model hold; stands for SGLang's KV pool."""

    def __init__(self, num_slots: int) -> None:
        self.held: _I64 = np.full(num_slots, UNWRITTEN, np.int64)

    def move_kv_cache(self, to: Any, source: Any) -> None:
        """Copy slots; every source is read before any target is written."""
        self.held[to.numpy()] = self.held[source.numpy()]


class Device:
    """The KV of the target and of the draft model, in the same slots, and the faults of reads."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.target, self.draft = KV(num_slots), KV(num_slots)
        self.faults: list[str] = []

    def write(self, kv: KV, slots: _I64, keys: _I64 | int, what: str) -> None:
        """Write KV. The first page is padding: nobody's KV may lie there."""
        if (slots < self.page_size).any():
            self.faults.append(f"{what} writes to the padding page: {slots.tolist()}")
        if len(np.unique(slots)) != len(slots):
            self.faults.append(f"{what} writes a slot twice: {slots.tolist()}")
        kv.held[slots] = keys

    def read(self, kv: KV, slots: _I64, keys: _I64, what: str) -> None:
        """Read KV that must be as `keys` say, one for each slot, from position 0 on."""
        wrong = np.flatnonzero(kv.held[slots] != keys)
        if len(wrong):
            at = int(wrong[0])
            held = kv.held[slots[at]]
            why = "nobody wrote" if held == UNWRITTEN else "holds the KV of another text"
            name = "draft" if kv is self.draft else "target"
            self.faults.append(
                f"{what} reads {len(wrong)} of {len(slots)} {name} slots wrongly; the first is "
                f"position {at}, slot {slots[at]}, which {why}"
            )
