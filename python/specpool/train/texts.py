"""`Text`: what a head is trained on; and what a user's files hold.

A file is plain text, or JSON lines. Of a line with an answer, a head learns the answer. A line
without one is a prompt, which the target answers before training begins: drafts follow the target's
own words, not those of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from specpool.checks import shown
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specpool.engine.texts import Prompt

#: The names of files that hold JSON lines; all others are plain text.
JSON_LINES = (".jsonl", ".ndjson", ".json")
#: The keys of a line, by what it is.
_KEYS = (("text",), ("prompt",), ("prompt", "completion"), ("messages",))
#: The least tokens of a text, and of an answer.
LEAST_TOKENS, LEAST_ANSWER = 8, 2
# Plain text is tokenized in pieces of about this many characters, which end with a line.
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Text:
    """A text in tokens.

    Attributes:
        tokens: int32 [n].
        learned: bool [n], the tokens that a drafter would follow: those of answers, or all.
        prompt_len: the tokens that are a prompt where the text is held out.
    """

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    prompt_len: int

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return cast("list[int]", self.tokens[: self.prompt_len].tolist())


@dataclass(frozen=True, slots=True)
class Row:
    """A text of the user's files, before it is tokenized.

    Attributes:
        source: the file and the line, for errors.
        prompt: a text, token ids, or the messages of a chat.
        answer: what follows the prompt; None if the target is asked.
        is_plain: the prompt is text to learn, and nothing is asked.
    """

    source: str
    prompt: Prompt
    answer: str | None = None
    is_plain: bool = False

    @property
    def is_question(self) -> bool:
        """Whether the target has to answer."""
        return self.answer is None and not self.is_plain


@dataclass(frozen=True, slots=True)
class TextRows:
    """All rows of the user's files, and a digest of the files."""

    rows: list[Row]
    digest: str


def read_rows(files: Sequence[Path]) -> TextRows:
    """Read the files of a user.

    Raises:
        ConfigError: a file cannot be read or is not UTF-8, a line has another form, or there is no
            text in them.
    """
    rows: list[Row] = []
    digest = hashlib.sha256()
    for path in files:
        try:
            content = path.read_bytes()
            text = content.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"data: {path} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}"
            ) from None
        digest.update(hashlib.sha256(content).digest())
        if path.suffix.lower() in JSON_LINES:
            rows += _json_rows(path, text)
        elif text.strip():
            rows.append(Row(str(path), text, is_plain=True))
    if not rows:
        raise ConfigError(f"data: there is no text in {', '.join(map(str, files)):.200}")
    return TextRows(rows, digest.hexdigest())


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    # Split at newlines only: `splitlines` also splits at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        source = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        yield from _rows_of(source, value)


def _rows_of(source: str, value: Any) -> Iterator[Row]:
    keys = tuple(sorted(value, reverse=True)) if isinstance(value, dict) else ()
    if keys not in _KEYS:
        forms = " or ".join(" and ".join(map(repr, names)) for names in _KEYS)
        description = f"the keys {', '.join(map(shown, keys)):.200}" if keys else shown(value)
        raise ConfigError(
            f"{source} must be an object with {forms}, and no other keys, got {description}"
        )
    for key in ("text", "completion"):
        if key in value and not isinstance(value[key], str):
            raise ConfigError(f"{source}: {key!r} must be a string, got {shown(value[key])}")
    if "text" in value:
        yield Row(source, value["text"], is_plain=True)
    elif "prompt" in value:
        prompt = value["prompt"]
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ConfigError(
                f"{source}: 'prompt' must be a text or a list of token ids, got {shown(prompt)}"
            )
        yield Row(source, prompt, value.get("completion"))
    else:
        yield from _turns(source, value["messages"])


def _turns(source: str, messages: Any) -> Iterator[Row]:
    """Yield a row for each answer of a chat; if a user speaks last, the chat is a prompt."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{source}: 'messages' must be a list of messages, got {shown(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ConfigError(
                f"{source}: a message needs strings as 'role' and 'content', got {shown(message)}"
            )
    if messages[-1]["role"] != "assistant":
        yield Row(source, messages)
        return
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            yield Row(source, messages[:index], message["content"])


class TextTokenizer:
    """A maker of texts in tokens, of at most `length` tokens each."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int, length: int
    ) -> None:
        """Tokenize as an engine does; without a tokenizer, rows have token ids."""
        from specpool.engine.texts import Texts

        self._tokenizer, self._vocab_size, self._length = tokenizer, vocab_size, length
        self._texts = Texts(tokenizer)

    def prompt(self, row: Row) -> list[int]:
        """Return the token ids of a row's prompt.

        Raises:
            ConfigError: the tokenizer or its template refuses it, or a token is not in the
                vocabulary.
        """
        try:
            ids = self._texts.encode(0, row.prompt)
        except ConfigError as error:
            raise ConfigError(f"{row.source}: {error}") from None
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise ConfigError(
                    f"{row.source}: token id {token} is outside the vocabulary [0, "
                    f"{self._vocab_size})"
                )
        return ids

    def plain(self, row: Row) -> Iterator[Text]:
        """Yield the texts of a plain row: pieces of it, each begun as the tokenizer begins one."""
        assert isinstance(row.prompt, str)
        begin = self._texts.encode(0, "") if self._tokenizer is not None else []
        size, rest_ids = self._length - len(begin), np.empty(0, np.int32)
        for piece in _pieces(row.prompt):
            try:
                ids = self._texts.encode(0, piece, adds_special=False)
            except ConfigError as error:
                raise ConfigError(f"{row.source}: {error}") from None
            rest_ids = np.append(rest_ids, np.array(ids, np.int32))
            while len(rest_ids) >= size:
                yield _plain_text(begin, rest_ids[:size])
                rest_ids = rest_ids[size:]
        if len(rest_ids) + len(begin) >= LEAST_TOKENS:
            yield _plain_text(begin, rest_ids)

    def answered(self, row: Row) -> Text | None:
        """Return the text of a row with an answer; see `joined`."""
        assert row.answer is not None
        ids = self._texts.encode(0, row.answer, adds_special=False) if row.answer else []
        end = getattr(self._tokenizer, "eos_token_id", None)
        return self.joined(self.prompt(row), ids if end is None else [*ids, end])

    def joined(self, prompt: Sequence[int], answer: Sequence[int]) -> Text | None:
        """Return a prompt and its answer, cut to the length; None if no answer is left."""
        ids = np.array([*prompt, *answer][: self._length], np.int32)
        if not prompt or len(ids) < max(LEAST_TOKENS, len(prompt) + LEAST_ANSWER):
            return None
        return Text(ids, np.arange(len(ids)) >= len(prompt), len(prompt))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def _plain_text(begin: Sequence[int], ids: NDArray[np.int32]) -> Text:
    tokens = np.concatenate((np.array(begin, np.int32), ids))
    return Text(tokens, np.ones(len(tokens), np.bool_), max(1, len(tokens) // 2))


def pack(texts: Sequence[Text]) -> dict[str, NDArray[Any]]:
    """Return texts as four arrays, for a file."""
    return {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "learned": np.concatenate([text.learned for text in texts]),
        "lens": np.array([len(text.tokens) for text in texts], np.int64),
        "prompt_lens": np.array([text.prompt_len for text in texts], np.int64),
    }


def unpack(arrays: dict[str, NDArray[Any]]) -> list[Text]:
    """Return the texts of the arrays of `pack`."""
    ends = arrays["lens"].cumsum()[:-1]
    tokens, learned = (np.split(arrays[name], ends) for name in ("tokens", "learned"))
    lens = arrays["prompt_lens"].tolist()
    return [Text(*parts) for parts in zip(tokens, learned, lens, strict=True)]
