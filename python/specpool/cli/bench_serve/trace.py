"""`Trace`: the requests of a benchmark, and when they come. The seed decides everything."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.engine.assets import corpus
from specpool.errors import ConfigError

#: The longest file of prompts that is read, in bytes.
MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Item:
    """A request: its prompt, its most tokens, and the seconds from the start to its arrival."""

    prompt: str
    max_tokens: int
    arrival: float


def trace_of(
    prompts: list[str],
    *,
    num_requests: int,
    max_tokens: int,
    rate: float | None,
    seed: int,
) -> list[Item]:
    """Return the requests.

    Args:
        prompts: each comes once before any comes twice.
        num_requests: how many requests.
        max_tokens: mean of the most new tokens; each request has 0.5 to 1.5 times as many.
        rate: requests a second that come by a Poisson process; None if all come at once.
        seed: decides the order, the lengths and the arrivals.
    """
    rng = random.Random(seed)
    items, now, order = [], 0.0, list[str]()
    for _ in range(num_requests):
        if not order:
            order = rng.sample(prompts, len(prompts))
        if rate is not None:
            now += rng.expovariate(rate)
        items.append(Item(order.pop(), max(1, round(max_tokens * rng.uniform(0.5, 1.5))), now))
    return items


def synthetic(count: int, num_characters: int, seed: int) -> list[str]:
    """Return texts of 0.5 to 1.5 times `num_characters`, each with its own beginning."""
    rng = random.Random(seed)
    text = corpus.corpus(corpus.HELD_OUT_SEED + 1 + seed, 1 << 20).decode("ascii")
    texts = []
    for _ in range(count):
        length = max(1, round(num_characters * rng.uniform(0.5, 1.5)))
        start = rng.randrange(max(1, len(text) - length))
        texts.append(text[start : start + length])
    return texts


def of_file(path: Path) -> list[str]:
    """Return the prompts of a file.

    It may be ShareGPT's JSON (a list of `{"conversations": [{"from", "value"}, ..]}`), or lines of
    JSON as SPEED-Bench, Spec-Bench and MT-Bench have (`turns`), or with `prompt`, `messages` or
    `question`. The first thing that a user says is the prompt.

    Raises:
        ConfigError: the file cannot be read, or has no prompt.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"dataset: {path} has more than {MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"dataset: {path} cannot be read: {why}") from None
    prompts = [prompt for record in _records(path, text) if (prompt := _prompt(record))]
    if not prompts:
        raise ConfigError(f"dataset: {path} has no prompt in a form that is known")
    return prompts


def _records(path: Path, text: str) -> Iterator[Any]:
    try:
        if text.lstrip()[:1] == "[":
            yield from json.loads(text)
            return
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"dataset: {path} is neither JSON nor lines of it: {error}") from None


def _prompt(record: Any) -> str | None:
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        return None
    for name in ("conversations", "messages", "turns"):
        turns = record.get(name)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, str):
                return turn
            if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
                text = turn.get("value", turn.get("content"))
                return text if isinstance(text, str) else None
    for name in ("prompt", "question", "instruction", "text"):
        if isinstance(record.get(name), str):
            return str(record[name])
    return None
