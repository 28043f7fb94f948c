"""`Text`: what a request says, and the key of the KV that each of its positions must hold.

Every token that a model says follows from the tokens before it, so the content of every slot is
known in advance, whoever computed it. A key depends on all tokens up to its position and on the
salt of the request; a draft model's key depends on the next token too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: The token that ends a text.
STOP = 2
#: Stands in a prompt where an image is.
IMAGE = 1
#: Tokens are below this.
VOCABULARY = 1000

Keys = npt.NDArray[np.int64]


def digest(*parts: int) -> int:
    """Return 62 bits that depend on every part, never 0."""
    packed = b"".join(part.to_bytes(8, "little", signed=True) for part in parts)
    return 1 + (int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 2)


def tokens_of(seed: int, stem: int, length: int) -> list[int]:
    """Return the first tokens of a stem: equal for equal arguments, none of them `STOP`."""
    return [3 + digest(seed, stem, at) % (VOCABULARY - 3) for at in range(length)]


class Text:
    """A prompt, and what the model says after it, as far as anybody asks."""

    def __init__(
        self, prompt: Sequence[int], salt: int = 0, images: Sequence[Sequence[int]] = ()
    ) -> None:
        """`images` have an offset, a length, and which one it is; a key depends on that too."""
        self.num_prompt = len(prompt)
        self.images = images
        which = {
            position: image
            for offset, length, image in images
            for position in range(offset, offset + length)
        }
        self.salt = salt
        self.tokens: list[int] = []
        self._keys: list[int] = []
        for position, token in enumerate(prompt):
            self._append(token, which.get(position, 0))

    def _append(self, token: int, image: int = 0) -> None:
        self.tokens.append(token)
        seen = (token, image) if image else (token,)
        self._keys.append(digest(self._keys[-1] if self._keys else self.salt, *seen))

    def _grow(self, length: int) -> None:
        while len(self.tokens) < length:
            said = digest(self._keys[-1], 11)
            self._append(STOP if said % 61 == 0 else 3 + said % (VOCABULARY - 3))

    def token(self, position: int) -> int:
        """Return the token at a position."""
        self._grow(position + 1)
        return self.tokens[position]

    def keys(self, begin: int, end: int) -> Keys:
        """Return the target's keys at positions `begin` to `end`, int64."""
        self._grow(end)
        return np.array(self._keys[begin:end], np.int64)

    def draft_keys(self, begin: int, end: int) -> Keys:
        """Return the draft model's keys there: it also sees the token that follows, int64."""
        self._grow(end + 1)
        pairs = zip(self._keys[begin:end], self.tokens[begin + 1 : end + 1], strict=True)
        return np.array([digest(key, token) for key, token in pairs], np.int64)

    def state_key(self, length: int) -> int:
        """Return the key of a recurrent state that has consumed so many tokens."""
        self._grow(length)
        return digest(self._keys[length - 1], 13) if length else 0

    def answer(self, most: int) -> list[int]:
        """Return what a greedy model says: up to `most` tokens, or to a stop token."""
        self._grow(self.num_prompt + most)
        said = self.tokens[self.num_prompt : self.num_prompt + most]
        return said[: said.index(STOP) + 1] if STOP in said else said
