"""`TextStream`: decodes tokens as they come, and finds stop strings.

The output of a stream is final: it is the beginning of `tokenizer.decode` of all tokens, and it
never ends within a character or a stop string. Special tokens have no text in the output, but stop
strings see their names.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from specpool.engine.text.stop_search import StopHit, VeiledSearch, check_stop
from specpool.engine.text.tokenizer import decoder_of
from specpool.errors import (
    ConfigError,
    OrderError,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Old tokens that are decoded again in front of new ones, so that these get the right spaces. They
#: hold a few characters even if all of them are bytes of broken characters.
CONTEXT = 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

Kind = Literal["plain", "byte", "empty", "hidden", "silent"]

# For each tokenizer, the kinds of the tokens that have been looked up.
_KINDS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, Kind]] = WeakKeyDictionary()


class TextStream:
    """A decoder of tokens as they come, which outputs the text that no later token can change.

    It holds back a character whose bytes are not complete; a run of byte tokens (`<0xE2>`, of
    sentencepiece tokenizers), which decodes as a whole once another token ends it; and text that
    may begin a stop string. The output does not depend on how the tokens are split into calls.

    Attributes:
        hit: the stop string that ended the text; None if none has yet.
        specials: if they are noted, the special tokens that are not output: each as the number of
            the text's characters before it, and its name. The text may not be output that far yet.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        *,
        hidden: Collection[int] = (),
        shows_special: bool = False,
        notes_special: bool = False,
    ) -> None:
        """Decode with `tokenizer`; without one, every text is empty.

        Args:
            tokenizer: the target's.
            stop: strings; the text ends before the first place where one of them begins. They are
                looked for in the text as it is output, and in the text with the hidden tokens.
            hidden: tokens that have no text in the output, such as those that end a text.
            shows_special: output the names of special tokens; if False, they are hidden too.
            notes_special: list special tokens that are hidden, other than `hidden`, in `specials`.

        Raises:
            ConfigError: there are stop strings without a tokenizer, or they are not valid.
        """
        check_stop(stop)
        if stop and tokenizer is None:
            raise ConfigError(f"stop strings need a tokenizer, and the target has none: {stop!r}")
        self.hit: StopHit | None = None
        self.specials: list[tuple[int, str]] = []
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else decoder_of(tokenizer)
        self._kinds = {} if tokenizer is None else _KINDS.setdefault(tokenizer, {})
        self._hidden, self._shows_special = hidden, shows_special
        self._notes_special = notes_special
        self._stops = VeiledSearch(stop) if stop else None
        self._window: list[int] = []  # the last tokens, decoded again with each new one
        self._given_len = 0  # characters of the window's text that were taken
        self._run: list[int] = []  # byte tokens of a run that has not ended
        self._run_ends: list[int] = []  # for each of them, the tokens pushed up to it
        self._veiled: list[tuple[int, int]] = []  # hidden tokens amid the run, and their numbers
        self._num_decoded = 0  # characters so far, those that are held back included
        self._num_tokens = 0  # pushed so far
        self._is_closed = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add tokens, and return the text that is final now.

        Args:
            tokens: the next tokens; after a hit they are ignored.
            last: no tokens follow, so the text held back is output, or found to be a stop string.

        Raises:
            OrderError: tokens come after a call with `last`.
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
            elif kind == "hidden":
                parts += [self._hide(t, n) for t, n in zip(block, ends, strict=True)]
            elif kind != "silent":
                parts.append(self._end_run())
                if kind == "empty":  # keep one between two runs, but only one
                    block, ends = block[-1:], ends[-1:]
                    if self._window[-1:] == block:
                        continue
                if self._stops is None:
                    parts.append(self._take(block, []))
                else:  # each character counts to the token that completes it
                    parts += [self._take([t], [n]) for t, n in zip(block, ends, strict=True)]
        if last:
            self._is_closed = True
            parts += [self._end_run(), self._take([], [self._num_tokens], whole=True)]
            if self._stops is not None:
                parts.append(self._stops.close())
        if self._stops is not None:
            self.hit = self._stops.hit
        return "".join(parts)

    def shows(self, token: int) -> bool:
        """Return whether a token has a part in the text that is output."""
        return self._tokenizer is not None and self._kind(token) not in ("hidden", "silent")

    def _end_run(self) -> str:
        """Decode the run of byte tokens; each character is complete at its own token."""
        run, ends = self._run, self._run_ends
        if not run:
            return ""
        self._run, self._run_ends = [], []
        if self._stops is None and not self._veiled:
            return self._take(run, [], whole=True)
        assert self._tokenizer is not None
        names = "".join(self._tokenizer.convert_ids_to_tokens(run))
        try:
            text = bytes.fromhex(names.replace("<0x", "").replace(">", "")).decode()
        except UnicodeDecodeError:  # each byte becomes a replacement character
            return self._take(run, ends, whole=True)
        lens = itertools.accumulate(len(character.encode()) for character in text)
        return self._take(run, [ends[n - 1] for n in lens], whole=True)

    def _take(self, tokens: list[int], ends: Sequence[int], *, whole: bool = False) -> str:
        """Decode tokens after those of the window, and return their text.

        Args:
            tokens: the new tokens.
            ends: for the last new characters, the number of pushed tokens when each is complete;
                earlier new characters get the first of these numbers.
            whole: no later token can complete a character that seems to be cut.
        """
        self._window += tokens
        text = self._decode(self._window)
        # A decoder shows an incomplete character as one replacement character.
        held_len = 0 if whole or not text.endswith(REPLACEMENT) else 1
        new = text[self._given_len : len(text) - held_len]
        self._given_len = max(self._given_len, len(text) - held_len)
        if len(self._window) >= 2 * CONTEXT:  # the shorter window may cut a character
            held_len = len(text) - self._given_len  # none if a run before has shown it
            self._window = self._window[-CONTEXT:]
            self._given_len = len(self._decode(self._window)) - held_len
        if self._stops is None and not self._veiled:
            return self._show(new, ends)
        num_more = len(new) - len(ends)
        ends = [*[ends[0]] * num_more, *ends[max(0, -num_more) :]]
        parts, start = [], 0
        for token, number in self._veiled:  # each stands behind the characters complete before it
            end = bisect_left(ends, number)
            parts += [self._show(new[start:end], ends[start:end]), self._veil(token, number)]
            start = end
        self._veiled.clear()
        return "".join([*parts, self._show(new[start:], ends[start:])])

    def _show(self, text: str, ends: Sequence[int]) -> str:
        """Return what can be output now that this text has been decoded."""
        self._num_decoded += len(text)
        return text if self._stops is None else self._stops.feed(text, ends)

    def _hide(self, token: int, number: int) -> str:
        """Take a hidden token; return text that was held back until now."""
        if self._run:
            self._veiled.append((token, number))
            return ""
        return self._veil(token, number)

    def _veil(self, token: int, number: int) -> str:
        """Show a hidden token to the search for stop strings, and note it."""
        is_noted = self._notes_special and token not in self._hidden
        if self._stops is None and not is_noted:
            return ""
        text = self._decode([token], skip_special=False)
        if is_noted:
            self.specials.append((self._num_decoded, text))
        return "" if self._stops is None else self._stops.hide(text, number)

    def _kind(self, token: int) -> Kind:
        """Return the effect of a token: text, part of a byte run, the end of a run, or none."""
        if token in self._hidden:
            return "hidden"
        if token not in self._kinds:
            self._kinds[token] = self._look_up(token)
        kind = self._kinds[token]
        return "plain" if kind == "hidden" and self._shows_special else kind

    def _look_up(self, token: int) -> Kind:
        assert self._tokenizer is not None
        name: str | None = self._tokenizer.convert_ids_to_tokens([token])[0]
        text = self._decode([token], skip_special=True)
        if name is None:
            return "silent"  # not in the vocabulary
        if not text and self._decode([token], skip_special=False):
            return "hidden"  # special
        if not name:
            return "empty"
        return "byte" if BYTE_TOKEN.fullmatch(name) and text != name else "plain"

    def _decode(self, tokens: list[int], *, skip_special: bool | None = None) -> str:
        """Decode tokens, without removing spaces before punctuation."""
        assert self._decoder is not None
        return self._decoder(
            tokens, not self._shows_special if skip_special is None else skip_special
        )
