"""`python -m benches session`: time to a turn's first token, beside the same tokens as a prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from benches.loading import checked_loading
from specpool.checks import check_int
from specpool.cli.options.groups import PlaceOptions
from specpool.cli.results import Result, draw, interleaved, machine, report
from specpool.engine.assets import corpus
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine

#: Tokens of the history's last answer, and of those that are compared.
NUM_ANSWERED = 16


class Conversation:
    """A session with a history, and the same tokens without it."""

    def __init__(self, engine: Engine, history: int) -> None:
        """Have one turn, whose answer ends the history."""
        self._engine, self._session = engine, engine.open_session()
        self._params = SamplingParams(max_new_tokens=NUM_ANSWERED, ignore_eos=True)
        (prompt,) = corpus.prompts(1, history - NUM_ANSWERED)
        self._session.append(prompt, self._params).output()

    def turn(self, new: list[int]) -> float:
        """Seconds to a turn's first token; the turn is aborted then, the history as before."""
        start = time.perf_counter()
        with self._session.append(new, self._params) as turn:
            next(turn)
            return time.perf_counter() - start

    def prompt(self, new: list[int]) -> float:
        """Seconds to the first token without the session."""
        tokens = [*self._session.tokens, *new]
        start = time.perf_counter()
        stream = self._engine.stream([tokens], self._params)
        next(stream)
        seconds = time.perf_counter() - start
        stream.close()  # type: ignore[attr-defined]
        return seconds

    def computed(self, new: list[int]) -> tuple[int, int]:
        """Prompt tokens that are computed, with the session and without.

        Raises:
            CorruptState: the answers differ.
        """
        length = self._session.num_tokens
        (fresh,) = self._engine.generate([[*self._session.tokens, *new]], self._params)
        output = self._session.append(new, self._params).output()
        self._session.rewind(length)
        if output.token_ids != fresh.token_ids:
            raise CorruptState(
                f"the turn says {output.token_ids}, the same prompt {fresh.token_ids}"
            )
        prompt_len = len(fresh.prompt_ids)
        return prompt_len - output.num_reused, prompt_len - fresh.num_reused

    def close(self) -> None:
        """Close the session."""
        self._session.close()


def session(
    *,
    target: str,
    draft: str | None,
    shape: str | None,
    history: int,
    num_new: Sequence[int],
    repeats: int,
    device: str,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a session says something else than the same prompt.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    check_int("history", history, NUM_ANSWERED + 1, 1 << 20)
    for tokens in num_new:
        check_int("new", tokens, 1, 1 << 20)
    place = PlaceOptions(device=device, threads=threads)
    loading = checked_loading(target=target, draft=draft, shape=shape, place=place, plot=plot)
    from specpool.engine.engine import Engine

    results = []
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(num_new))
        with Engine.from_pretrained(**loading, max_batch=2, prefix_cache=False) as engine:
            longest = history + max(num_new) + NUM_ANSWERED
            if longest > engine.max_context_len:
                raise ConfigError(
                    f"a history of {history} tokens, {max(num_new)} new ones and an answer of "
                    f"{NUM_ANSWERED} do not fit the model's {engine.max_context_len} positions"
                )
            conversation = Conversation(engine, history)
            for tokens in num_new:
                results += _case(conversation, history, tokens, repeats)
                progress.advance(task)
            conversation.close()
    where = machine(device, threads, ("torch", "transformers"))
    report("bench session", where, results, json_only=json, plot=None)
    if plot is not None:
        draw("bench session", [result for result in results if result.unit == "ms"], plot)


def _case(conversation: Conversation, history: int, num_new: int, repeats: int) -> list[Result]:
    new = corpus.prompts(2, num_new)[1]
    computed, computed_fresh = conversation.computed(new)  # warms up too
    fresh, turn = interleaved(
        [lambda: conversation.prompt(new), lambda: conversation.turn(new)], repeats
    )
    name, reference = f"{num_new:,} new tokens on {history:,}, without a session", "with it"
    return [
        Result(f"{name}: time to first token", 1e3 * fresh, "ms", reference, 1e3 * turn),
        Result(f"{name}: computed", computed_fresh, "tokens", reference, computed),
    ]
