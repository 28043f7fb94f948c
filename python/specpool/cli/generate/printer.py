"""`Printer`: prints texts while they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from specpool.engine.output import Chunk, RequestOutput

# Marks around accepted drafts if there is no colour: single angle quotation marks.
MARKS = ("\u2039", "\u203a")


class Printer:
    """A printer of chunks as they come, one prompt after the other, with accepted drafts marked.

    A heading stands above each prompt and above each answer, so that both can be told apart
    without colour.
    """

    def __init__(
        self,
        console: Console,
        prompts: Sequence[str],
        num_samples: int = 1,
        *,
        marks: bool = True,
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        """Print the first heading.

        Args:
            console: where to print.
            prompts: the prompts, as texts.
            num_samples: answers of each prompt.
            marks: without colour, put `MARKS` around accepted drafts.
            token_text: returns a token's text, to list log probabilities below each answer that
                has some; None to list none.
        """
        self._console, self._prompts, self._num_samples = console, prompts, num_samples
        self._marks = MARKS if marks and console.color_system is None else ("", "")
        self._token_text = token_text
        num_outputs = len(prompts) * num_samples
        self._pending: list[list[tuple[str, bool]]] = [[] for _ in range(num_outputs)]
        self._outputs: list[RequestOutput | None] = [None] * num_outputs
        self._current = -1
        self._advance()

    def chunk(self, chunk: Chunk) -> None:
        """Print a chunk, or keep it until the earlier outputs are done."""
        index = chunk.index * self._num_samples + chunk.sample
        self._pending[index] += chunk.pieces
        if index == self._current:
            self._flush()

    def finish(self, output: RequestOutput) -> None:
        """Mark an output as complete, and go on to the next that is not."""
        self._outputs[output.index * self._num_samples + output.sample] = output
        while self._current < len(self._outputs):
            complete = self._outputs[self._current]
            if complete is None:
                return
            self._console.print()
            self._list_logprobs(complete)
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self._outputs):
            index, sample = divmod(self._current, self._num_samples)
            if sample == 0:
                prompt = self._prompts[index]
                self._console.rule(f"prompt {index + 1}")
                self._print(prompt if prompt.endswith("\n") else f"{prompt}\n", "dim")
            self._console.rule(answer_name(index, sample, self._num_samples))
            self._flush()

    def _flush(self) -> None:
        for text, from_draft in self._pending[self._current]:
            if from_draft:
                text = text.join(self._marks)
            self._print(text, "green" if from_draft else "bold yellow")
        self._pending[self._current].clear()

    def _list_logprobs(self, output: RequestOutput) -> None:
        if self._token_text is None or not output.logprobs:
            return
        self._print("log probability of each token; the likeliest tokens and theirs\n", "dim")
        for token, entry in zip(output.token_ids, output.logprobs, strict=True):
            likeliest = "  ".join(
                f"{self._token_text(alternative)!r} {value:.3f}"
                for alternative, value in entry.top.items()
            )
            line = f"{entry.logprob:9.3f}  {self._token_text(token)!r:16}  {likeliest}"
            self._print(f"{line.rstrip()}\n", "dim")

    def _print(self, text: str, style: str) -> None:
        """Print a text literally, without rich's markup and emoji names."""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)


def answer_name(index: int, sample: int, num_samples: int) -> str:
    """Return the heading of an answer, such as "answer 2, sample 1"."""
    return f"answer {index + 1}" + (f", sample {sample + 1}" if num_samples > 1 else "")


def prompt_name(index: int, sample: int, num_samples: int) -> str:
    """Return an output's name in errors, such as "prompt 2, sample 1"."""
    return f"prompt {index + 1}" + (f", sample {sample + 1}" if num_samples > 1 else "")
