"""Between text and token ids: the target's tokenizer, and text that streams by whole characters."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Decoding a piece with this many tokens before it gives the piece its right spaces.
_CONTEXT = 5


def load_tokenizer(source: str | PathLike[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or a hub name; None if it has none."""
    from transformers import AutoTokenizer

    folder = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer


class TextStream:
    """Decodes tokens as they come; a character is given out when all its bytes are there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Decode with `tokenizer`; without one, every text is empty."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # tokens before it are context no more
        self._done = 0  # tokens before it have been given out

    def push(self, tokens: list[int], *, last: bool = False) -> str:
        """Add tokens; returns the text that they complete, and with `last` all that is left."""
        if self._tokenizer is None:
            return ""
        self._tokens += tokens
        known = self._decode(self._tokens[self._start : self._done])
        text = self._decode(self._tokens[self._start :])
        if not last and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._done = len(self._tokens)
        self._start = max(self._start, self._done - _CONTEXT)
        return text[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
