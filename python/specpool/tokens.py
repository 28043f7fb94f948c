"""Between text and token ids: the target's tokenizer, text that streams, and where it stops.

What a stream gives out is final: it is the beginning of `tokenizer.decode` of all tokens, and it
never holds a part of a character or of a stop string.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from specpool.config import check_stop
from specpool.errors import (
    CheckpointError,
    ConfigError,
    OrderError,
    needs_trust,
    reading,
    wants_trust,
)

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


def load_tokenizer(
    source: str | PathLike[str], *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder, and try it on a line of text.

    Args:
        source: the folder.
        trust_remote_code: run Python code that the tokenizer brings; otherwise it is refused.

    Returns:
        The tokenizer; None if the folder holds none of its files.

    Raises:
        CheckpointError: its files are broken, or need a package that is not installed.
    """
    folder = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any(os.path.isfile(folder / name) for name in names):
        return None
    config = folder / "tokenizer_config.json"
    try:
        with reading(f"cannot load the tokenizer of {str(source)!r}"):
            if config.is_file():
                _check_config(json.loads(config.read_text(encoding="utf-8")))
            from transformers import AutoTokenizer

            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder),
                trust_remote_code=trust_remote_code,
                local_files_only=not trust_remote_code,
            )
            _try(tokenizer)
    except CheckpointError as error:
        if not trust_remote_code and wants_trust(error):
            raise needs_trust(str(source), "tokenizer") from error
        raise CheckpointError(
            f"{error}; mend its files, or give a tokenizer with tokenizer="
        ) from error
    return tokenizer


def _check_config(content: Any) -> None:
    """Raise `ValueError` unless a tokenizer_config.json is an object that names files beside it."""
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer_config.json holds a {type(content).__name__}, not an object")
    files = content.get("fast_tokenizer_files")
    for name in files if isinstance(files, list) else ():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"tokenizer_config.json names {name!r:.80}, which is no file beside it"
            )


def _try(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise whatever a tokenizer raises that cannot make tokens of text, or text of tokens."""
    count = len(tokenizer)
    if not count:
        raise ValueError("it knows no tokens")
    ids = list(tokenizer.encode("a 1, b"))
    if any(type(one) is not int or one < 0 for one in ids):
        raise ValueError(f"it encodes to {ids!r:.80}, not to token ids")
    for some in (ids, list(range(min(64, count))), list(range(max(0, count - 64), count))):
        tokenizer.convert_ids_to_tokens(some)
        if not isinstance(tokenizer.decode(some), str):
            raise ValueError(f"it decodes {some!r:.80} to no text")


def check_tokenizer(tokenizer: object) -> None:
    """Raise `ConfigError` unless `tokenizer` is one, or None."""
    verbs = ("encode", "decode", "convert_ids_to_tokens")
    if tokenizer is not None and not all(callable(getattr(tokenizer, v, None)) for v in verbs):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer or None, got {tokenizer!r:.80}"
        )


@dataclass(frozen=True, slots=True)
class StopHit:
    """The stop string that ended a text.

    Attributes:
        stop: which one.
        num_tokens: of the tokens pushed, those up to and with the one whose text completed it. The
            rest is no part of the output; it may have been needed to decide.
    """

    stop: str
    num_tokens: int


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
        self._stops = _StopSearch(stop) if stop else None
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
                parts.append(self._stops.finish())
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


class _StopSearch:
    """Finds the earliest of several strings in a text that comes in pieces (Aho-Corasick).

    A state is a node of the strings' trie: the longest end of the text that may begin one of them.
    Each character costs O(1), however long and many the strings are.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.hit: StopHit | None = None
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._found: list[str | None] = [None]  # the longest string that ends at a node
        for string in strings:
            self._add(string)
        self._fallbacks = self._link()
        self._state = 0
        self._held = ""  # not given out: a string may begin here
        self._position = 0  # characters fed
        self._given = 0  # characters given out
        self._start = 0  # of the earliest string that has been found
        self._earliest: StopHit | None = None

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[node] + 1)
                self._found.append(None)
            node = self._children[node][character]
        self._found[node] = string

    def _link(self) -> list[int]:
        """For each node, that of its longest proper end; breadth first."""
        fallbacks = [0] * len(self._children)
        nodes = [0]
        for node in nodes:
            for character, child in self._children[node].items():
                if node:
                    fallbacks[child] = self._step(fallbacks, fallbacks[node], character)
                self._found[child] = self._found[child] or self._found[fallbacks[child]]
                nodes.append(child)
        return fallbacks

    def _step(self, fallbacks: list[int], node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = fallbacks[node]
        return self._children[node].get(character, 0)

    def feed(self, text: str, ends: Sequence[int]) -> str:
        """Go on with `text`; returns what no string can begin in any more.

        Args:
            text: the next piece.
            ends: for each character, how many tokens have been pushed when it is complete.
        """
        if self.hit is not None:
            return ""
        self._held += text
        for character, num_tokens in zip(text, ends, strict=True):
            self._state = self._step(self._fallbacks, self._state, character)
            self._position += 1
            found = self._found[self._state]
            if found is not None:
                start = self._position - len(found)
                if self._earliest is None or start < self._start:
                    self._start, self._earliest = start, StopHit(found, num_tokens)
            # A longer string may have begun before the one that has been found.
            if self._earliest is not None and self._begun() >= self._start:
                return self.finish()
        return self._give(self._begun())

    def finish(self) -> str:
        """No text follows; returns what was held back, up to the stop string if there is one."""
        self.hit = self._earliest
        return self._give(self._position if self.hit is None else self._start)

    def _begun(self) -> int:
        """Where the earliest string begins that may be under way."""
        return self._position - self._depths[self._state]

    def _give(self, end: int) -> str:
        given, self._held = self._held[: end - self._given], self._held[end - self._given :]
        self._given = end
        return given
