"""`Printer`: prints texts while they are generated."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specpool.engine.output import Chunk, RequestOutput

# Marks around accepted drafts if there is no colour: single angle quotation marks.
MARKS = ("\u2039", "\u203a")


class Printer:
    """A printer of chunks as they come, one prompt after the other, with accepted drafts marked."""

    def __init__(self, console: Console, prompts: Sequence[str], num_samples: int = 1) -> None:
        self._console, self._prompts, self._num_samples = console, prompts, num_samples
        num_outputs = len(prompts) * num_samples
        self._waiting: list[list[tuple[str, bool]]] = [[] for _ in range(num_outputs)]
        self._done = [False] * num_outputs
        self._current = -1
        self._advance()

    def chunk(self, chunk: Chunk) -> None:
        """Print a chunk, or keep it until the earlier outputs are done."""
        place = chunk.index * self._num_samples + chunk.sample
        self._waiting[place] += chunk.pieces
        if place == self._current:
            self._flush()

    def done(self, output: RequestOutput) -> None:
        """Mark an output as complete, and go on to the next that is not."""
        self._done[output.index * self._num_samples + output.sample] = True
        while self._current < len(self._done) and self._done[self._current]:
            self._console.print()
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self._done):
            index, sample = divmod(self._current, self._num_samples)
            self._console.rule(name_of(index, sample, self._num_samples))
            if sample == 0:
                self._print(self._prompts[index], "dim")
            self._flush()

    def _flush(self) -> None:
        for text, from_draft in self._waiting[self._current]:
            if from_draft and self._console.color_system is None:
                text = f"{MARKS[0]}{text}{MARKS[1]}"
            style = "green" if from_draft else "bold yellow"
            self._print(text, style)
        self._waiting[self._current].clear()

    def _print(self, text: str, style: str) -> None:
        """Print a text literally, without rich's markup and emoji names."""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def name_of(index: int, sample: int, num_samples: int) -> str:
    """Return the printed name of an output, such as "prompt 2, sample 1"."""
    return f"prompt {index + 1}" + (f", sample {sample + 1}" if num_samples > 1 else "")
