"""`answer`: the end of a peer's process, on the standard library alone for any Python."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

#: Runs prompts with so many new tokens; returns the new tokens of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def take_stdout() -> TextIO:
    """Return standard output; from now on, what else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, forget: Callable[[], object], generate: Generate) -> None:
    """Say that the engine is ready, and run the traces of standard input until it ends.

    Args:
        answers: from `take_stdout`.
        forget: empties the prefix cache; it is off the clock.
        generate: is timed.
    """
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        trace = json.loads(line)
        forget()
        cpu_began, began = time.process_time(), time.perf_counter()
        token_ids = generate(trace["prompts"], trace["num_new"])
        turn = {
            "cpu_seconds": time.process_time() - cpu_began,
            "seconds": time.perf_counter() - began,
            "token_ids": token_ids,
        }
        print(json.dumps(turn), file=answers, flush=True)
