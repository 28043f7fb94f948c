"""`Trial`: compiles a form in a second process first, because nothing else can stop the library.

A form of 44 characters may take for ever: `{"type": "integer", "multipleOf": 123456789}`. Within
the engine's process its thread would keep a core busy from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from specpool.engine.text.second_process import ProcessError, SecondProcess, limit_memory
from specpool.engine.text.structured.compiler import Vocabulary, compiled, token_trie
from specpool.engine.text.structured.grammar import Grammar
from specpool.errors import ConfigError

#: The most seconds for the start of the process, which reads the vocabulary.
START_SECONDS = 60.0
#: The most memory of a form beyond the vocabulary's, in bytes.
MOST_BYTES = 1 << 30


class Trial:
    """A second process that compiles forms; one at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start nothing yet; forms are over this vocabulary."""
        self._vocabulary = vocabulary
        self._process = SecondProcess(__name__, START_SECONDS)

    def check(self, grammar: Grammar, seconds: float) -> None:
        """Compile a form there.

        Raises:
            ConfigError: it is wrong, or its process ended, for example for want of memory.
            TimeoutError: it took more than `seconds`.
        """
        try:
            failure = self._process.ask(
                [grammar.kind, grammar.text], seconds, first=self._vocabulary.source()
            )
        except ProcessError as error:
            if error.is_late:
                raise TimeoutError from None
            failure = f"structured: the {grammar.kind} cannot be compiled: {error}"
            raise ConfigError(failure) from None
        if failure is not None:
            raise ConfigError(failure)

    def close(self) -> None:
        """End the process."""
        self._process.close()


class _SentVocabulary:
    """The vocabulary that the parent sent."""

    def __init__(self, source: Any) -> None:
        self._read = token_trie(*source)

    def get(self) -> Any:
        """Return it as llguidance keeps it."""
        return self._read


def serve() -> None:
    """Compile forms until standard input ends; answer null, or what is wrong with one."""
    with contextlib.suppress(OSError):
        os.nice(10)  # the engine's rounds come first
    print("true", flush=True)
    vocabulary = _SentVocabulary(json.loads(sys.stdin.readline()))
    limit_memory(MOST_BYTES)
    print("true", flush=True)
    for line in sys.stdin:
        failure = None
        try:
            compiled(vocabulary, Grammar(*json.loads(line)))
        except ConfigError as error:
            failure = str(error)
        print(json.dumps(failure), flush=True)
