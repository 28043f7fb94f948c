"""`read_prompts`: reads the prompts of a command line: texts, token ids, and files of either."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.checks import check_choice
from specpool.engine.assets import corpus
from specpool.errors import ConfigError

#: A text, token ids, or the messages of a chat.
PromptValue = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Given:
    """The values of the prompt options."""

    texts: list[str]
    ids: list[str]
    file: str | None
    format: str | None

    def __bool__(self) -> bool:
        """Return whether any prompt option was given."""
        return bool(self.texts or self.ids or self.file)


def read_prompts(given: Given, target: str, count: int) -> list[PromptValue]:
    """Return the given prompts; without any, `count` built-in ones for the embedded target.

    Raises:
        ConfigError: a file cannot be read or has no prompt, token ids have a wrong form, or there
            is no prompt at all.
    """
    prompts: list[PromptValue] = [*given.texts, *map(_ids, given.ids)]
    if given.file is None:
        if given.format is not None:
            raise ConfigError(
                f"prompt_format {given.format} needs a file: give --prompt-file, or leave it out"
            )
    else:
        prompts += _of_file(given.file, given.format)
    if prompts:
        return prompts
    if target != "specpool/tiny":
        raise ConfigError("no prompt: give --prompt, --prompt-ids or --prompt-file")
    return [bytes(ids).decode() for ids in corpus.prompts(count)]


def shown(prompt: PromptValue) -> str:
    """Return the prompt as a text to print."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _ids(text: str) -> list[int]:
    parts = re.split(r"\s*,\s*|\s+", text.strip().strip("[]").strip())
    if not all(re.fullmatch(r"[0-9]{1,10}", part) for part in parts):
        raise ConfigError(
            f"prompt_ids must be token ids with commas between, such as 1,2,3, got {text!r:.80}"
        )
    return [int(part) for part in parts]


def check_stdin(use: str) -> None:
    """Check that the process has a standard input; `use` says what reads it.

    Raises:
        ConfigError: it was started without one.
    """
    if sys.stdin is None:
        raise ConfigError(f"standard input is closed: {use}")


def _of_file(name: str, form: str | None) -> list[PromptValue]:
    if form is None:
        form = "whole" if name == "-" else "lines"
    check_choice("prompt_format", form, tuple(_FORMATS))
    if name == "-":
        check_stdin("the prompt file '-' is read from there")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if name == "-":
            raise ConfigError(f"standard input is no text: {error}") from None
        reason = error.strerror if isinstance(error, OSError) else error
        path = name or "''"
        raise ConfigError(f"cannot read the prompt file {path}: {reason}") from None
    source = "standard input" if name == "-" else name
    prompts = list(_FORMATS[form](source, text))
    if not prompts:
        raise ConfigError(f"{'' if name == '-' else 'the prompt file '}{source} holds no prompt")
    return prompts


def _lines(name: str, text: str) -> Iterator[PromptValue]:
    yield from (line for line in text.splitlines() if line.strip())


def _whole(name: str, text: str) -> Iterator[PromptValue]:
    if text:
        yield text


def _json_lines(name: str, text: str) -> Iterator[PromptValue]:
    # Split at newlines only: `splitlines` also splits at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}, line {number} is no JSON: {error}") from None
        if isinstance(value, dict):
            contents = [value[key] for key in ("prompt", "messages") if key in value]
            value = contents[0] if len(contents) == 1 else None
        if not _is_prompt(value):
            raise ConfigError(
                f"{name}, line {number} must be a text, a list of token ids, or an object with "
                f"'prompt' or 'messages', got {line.strip():.80}"
            )
        yield value


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    numbers = all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
    return numbers or all(isinstance(entry, dict) for entry in value)


_FORMATS: dict[str, Callable[[str, str], Iterator[PromptValue]]] = {
    "lines": _lines,
    "jsonl": _json_lines,
    "whole": _whole,
}
