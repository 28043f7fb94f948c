"""Between text and token ids: the target's tokenizer, text that streams, and where it stops.

What a stream gives out is final: it is the beginning of `tokenizer.decode` of all tokens, and it
never holds a part of a character or of a stop string.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from specpool.errors import (
    ConfigError,
    OrderError,
)
from specpool.sampling_params import check_stop
from specpool.text.stop_search import StopHit, StopSearch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens that are decoded again before the new ones: they give those their right spaces, and hold
#: a few characters even when all of them are bytes of broken ones.
CONTEXT = 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

Kind = Literal["plain", "byte", "empty", "silent"]

# What has been looked up of each tokenizer.
_KINDS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, Kind]] = WeakKeyDictionary()


class TextStream:
    """Decodes tokens as they come, and gives out what no later token can change.

    Held back are a character whose bytes are not all there; a run of byte tokens (`<0xE2>`, of
    sentencepiece tokenizers), which decodes as a whole once another token ends it; and what may be
    the beginning of a stop string. Special tokens have no text. The state is a function of the
    tokens pushed, however they were split.

    Attributes:
        hit: the stop string that has been found; None = none yet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        """Decode with `tokenizer`; without one, every text is empty.

        Args:
            tokenizer: the target's.
            stop: the text ends before the earliest place where one of these begins.

        Raises:
            ConfigError: stop strings without a tokenizer, or ones that no text can hold.
        """
        check_stop(stop)
        if stop and tokenizer is None:
            raise ConfigError(f"stop strings need a tokenizer, and the target has none: {stop!r}")
        self.hit: StopHit | None = None
        self._tokenizer = tokenizer
        self._kinds = {} if tokenizer is None else _KINDS.setdefault(tokenizer, {})
        self._stops = StopSearch(stop) if stop else None
        self._window: list[int] = []  # the last tokens, decoded again with each new one
        self._given_len = 0  # characters of the window's text that were taken
        self._run: list[int] = []  # byte tokens that nothing has ended yet
        self._run_ends: list[int] = []  # tokens pushed up to each of them
        self._num_tokens = 0  # pushed
        self._is_closed = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add tokens.

        Args:
            tokens: those that come next; after a hit they are ignored.
            last: no others will come: what was held back is given out, or found to be a stop.

        Returns:
            The text that may be given out now.

        Raises:
            OrderError: tokens after the last ones.
        """
        if self._is_closed and tokens:
            raise OrderError(f"{len(tokens)} tokens after the last of {self._num_tokens}")
        if self._tokenizer is None or self.hit is not None:
            return ""
        parts = []
        for kind, group in itertools.groupby(tokens, self._kind):
            block = list(group)
            ends = range(self._num_tokens + 1, self._num_tokens + len(block) + 1)
            self._num_tokens += len(block)
            if kind == "byte":
                self._run += block
                self._run_ends += ends
            elif kind != "silent":
                parts.append(self._end_run())
                if kind == "empty":  # one has to stay between two runs; more would add up
                    block, ends = block[-1:], ends[-1:]
                    if self._window[-1:] == block:
                        continue
                if self._stops is None:
                    parts.append(self._take(block, []))
                else:  # each character is to be of the token that completes it
                    parts += [self._take([t], [n]) for t, n in zip(block, ends, strict=True)]
        if last:
            self._is_closed = True
            parts += [self._end_run(), self._take([], [self._num_tokens], whole=True)]
            if self._stops is not None:
                parts.append(self._stops.close())
        if self._stops is not None:
            self.hit = self._stops.hit
        return "".join(parts)

    def _end_run(self) -> str:
        """Take the byte tokens that came one after the other; each character has its own end."""
        run, ends = self._run, self._run_ends
        if not run:
            return ""
        self._run, self._run_ends = [], []
        if self._stops is None:
            return self._take(run, [], whole=True)
        assert self._tokenizer is not None
        names = "".join(self._tokenizer.convert_ids_to_tokens(run))
        try:
            text = bytes.fromhex(names.replace("<0x", "").replace(">", "")).decode()
        except UnicodeDecodeError:  # as many replacement characters as bytes
            return self._take(run, ends, whole=True)
        lens = itertools.accumulate(len(character.encode()) for character in text)
        return self._take(run, [ends[n - 1] for n in lens], whole=True)

    def _take(self, tokens: list[int], ends: Sequence[int], *, whole: bool = False) -> str:
        """Decode tokens behind the window.

        Args:
            tokens: their text is what is new.
            ends: for the last of the new characters, how many tokens have been pushed when each is
                complete; those before have the first one's.
            whole: no later token can complete a character that seems to be cut.
        """
        self._window += tokens
        text = self._decode(self._window)
        # A decoder shows the beginning of a character as one replacement character.
        held_len = 0 if whole or not text.endswith(REPLACEMENT) else 1
        new = text[self._given_len : len(text) - held_len]
        self._given_len = max(self._given_len, len(text) - held_len)
        if len(self._window) >= 2 * CONTEXT:  # where it begins anew, it may cut a character
            self._window = self._window[-CONTEXT:]
            self._given_len = len(self._decode(self._window)) - held_len
        if self._stops is None:
            return new
        num_more = len(new) - len(ends)
        return self._stops.feed(new, [*[ends[0]] * num_more, *ends[max(0, -num_more) :]])

    def _kind(self, token: int) -> Kind:
        """What a token does to the text: adds to it or to a run, only ends a run, or nothing."""
        if token not in self._kinds:
            self._kinds[token] = self._look_up(token)
        return self._kinds[token]

    def _look_up(self, token: int) -> Kind:
        assert self._tokenizer is not None
        name: str | None = self._tokenizer.convert_ids_to_tokens([token])[0]
        text = self._decode([token])
        if name is None or (not text and self._decode([token], skip_special=False)):
            return "silent"  # no token of the tokenizer, or a special one
        if not name:
            return "empty"
        return "byte" if BYTE_TOKEN.fullmatch(name) and text != name else "plain"

    def _decode(self, tokens: list[int], *, skip_special: bool = True) -> str:
        """The text as the tokens have it: no space before punctuation is taken away."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)
