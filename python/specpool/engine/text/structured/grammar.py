"""`Grammar`: the form that a request's text must have; the other files here compile it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specpool.checks import check_choice, shown
from specpool.errors import ConfigError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]

#: The most characters of a grammar's text.
MAX_GRAMMAR_CHARS = 1 << 16
#: The most strings of a choice.
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a text: of the whole output, from its first token to its end.

    Make one with `json_schema`, `json_object`, `regex`, `choice` or `ebnf`.

    Attributes:
        kind: what `text` is.
        text: `json_schema`: the schema as JSON; `json_object`: empty; `regex`: the pattern, in the
            syntax of Rust's regex crate; `choice`: a JSON list of strings; `ebnf`: the rules, in
            llama.cpp's GBNF or in Lark's syntax.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(GrammarKind))
        if not isinstance(self.text, str):
            raise ConfigError(f"structured: text must be a string, got {shown(self.text)}")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise ConfigError(
                f"structured: a grammar has at most {MAX_GRAMMAR_CHARS} characters, got "
                f"{len(self.text)}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"structured: the text is not valid: a lone surrogate at position {error.start}"
            ) from None
        if self.kind == "json_object":
            if self.text:
                raise ConfigError(f"structured: json_object has no text, got {shown(self.text)}")
        elif not self.text.strip():
            raise ConfigError(f"structured: the text of a {self.kind} is empty")
        if self.kind == "json_schema":
            _check_schema(self.text)
        if self.kind == "choice":
            _check_choices(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Allow the JSON values that a JSON Schema describes.

        Args:
            schema: a dict, True, or the schema as JSON text.

        Raises:
            ConfigError: the schema is no JSON, or longer than `MAX_GRAMMAR_CHARS`.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"structured: the schema is no JSON: {error}") from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Allow any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Allow the texts that match a regular expression from their first to their last byte."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, strings: Sequence[str]) -> Grammar:
        """Allow exactly these texts, at most `MAX_CHOICES`.

        Raises:
            ConfigError: there is none, or one is no string, or is empty.
        """
        if isinstance(strings, str) or not isinstance(strings, Sequence):
            raise ConfigError(f"structured: a choice is a list of strings, got {shown(strings)}")
        for string in strings:
            if not isinstance(string, str):
                raise ConfigError(f"structured: a choice is a list of strings, got {shown(string)}")
        return cls("choice", json.dumps(list(strings)))

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """Allow the texts of a context-free grammar, in GBNF or Lark syntax."""
        return cls("ebnf", rules)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"structured: the schema is no JSON: {error.msg} at line {error.lineno}, column "
            f"{error.colno}"
        ) from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"structured: the schema is no JSON: {error}") from None
    if not isinstance(schema, dict) and schema is not True:
        raise ConfigError(
            f"structured: a schema is an object or true, got {text[:80]!r}"
            + (": false allows no text" if schema is False else "")
        )
    _check_unicode("schema", schema)


def _check_choices(text: str) -> None:
    try:
        strings = json.loads(text)
    except (ValueError, RecursionError):
        strings = None
    if not isinstance(strings, list) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise ConfigError(
            f"structured: a choice is a JSON list of strings that are not empty, got {text[:80]!r}"
        )
    if not 1 <= len(strings) <= MAX_CHOICES:
        raise ConfigError(
            f"structured: a choice has 1 to {MAX_CHOICES} strings, got {len(strings)}"
        )
    _check_unicode("choice", strings)


def _check_unicode(kind: str, value: object) -> None:
    """Raise `ConfigError` for a lone surrogate, which JSON can write, in a string of `value`."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"structured: the {kind} is not valid: a lone surrogate in "
            f"{shown(text[max(error.start - 20, 0) : error.end])}"
        ) from None
