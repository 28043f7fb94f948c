"""`TokenBytes`: the bytes that each token adds to a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from specpool.engine.text.stream import BYTE_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """A reader of tokens' bytes. Those of a text's tokens, joined, are the bytes of the text.

    A token may be a part of a character: a token of a byte-level tokenizer, or a byte token
    (`<0xE2>`) of a sentencepiece tokenizer. A decoder alone shows both as U+FFFD.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the tokens of this tokenizer."""
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in _decoder_types(tokenizer)

    def bytes_of(self, token: int, previous: int | None = None) -> bytes:
        """Return the bytes of a token; special tokens have those of their name.

        Args:
            token: the token.
            previous: the token before it that has a text; None if the token begins the text. It
                decides only whether a space comes between them.
        """
        name: str | bytes | None = self._tokenizer.convert_ids_to_tokens([token])[0]
        if name is None:
            return b""  # not in the vocabulary
        if isinstance(name, bytes):  # tokenizers on tiktoken
            return name
        if self._is_byte_level:
            table = _byte_table()
            is_bytes = all(character in table for character in name)
            return bytes(table[c] for c in name) if is_bytes else name.encode()
        text = self._decode([token])
        if (match := BYTE_TOKEN.fullmatch(name)) and text != name:
            return bytes.fromhex(match[1])
        if previous is not None:
            start, joined = self._decode([previous]), self._decode([previous, token])
            if joined.startswith(start):
                text = joined[len(start) :]
        return text.encode()

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def _decoder_types(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the types of a fast tokenizer's decoder and its parts; of a slow one, none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return set() if decoder is None else {*_types(json.loads(decoder.__getstate__()))}


def _types(state: Any) -> Iterator[str]:
    yield str(state.get("type"))
    for part in state.get("decoders", []):
        yield from _types(part)


@cache
def _byte_table() -> dict[str, int]:
    """Return the byte of each character in the names of byte-level tokens, as GPT-2 has them."""
    from tokenizers.pre_tokenizers import ByteLevel

    characters = sorted(ByteLevel.alphabet())
    table = {character: ord(character) for character in characters if ord(character) < 256}
    unnamed_bytes = sorted(set(range(256)) - set(table.values()))
    return table | dict(zip(characters[len(table) :], unnamed_bytes, strict=True))
