"""`drive`: sends the requests of a trace, and notes when each part of an answer came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specpool.cli.bench_serve.http import Caller, CallFailed
from specpool.cli.bench_serve.trace import Item


@dataclass(slots=True)
class RequestRecord:
    """The times of one request, in seconds from the run's start, and its tokens.

    Attributes:
        due: when it should have been sent.
        first: when its first token came; None if none did.
        last: when its last part came.
        parts: seconds between parts that have text.
        num_tokens: new tokens, by the server's count.
        error: why it failed; None if it did not.
    """

    due: float
    first: float | None = None
    last: float = 0.0
    parts: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for a token after the first; None if there is no such token."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class How:
    """How a request is written."""

    model: str | None
    chat: bool
    temperature: float
    seed: int
    ignore_eos: bool

    def body(self, item: Item) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request."""
        body: dict[str, Any] = {
            "max_tokens": item.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            body["messages"] = [{"role": "user", "content": item.prompt}]
            return "/v1/chat/completions", body
        return "/v1/completions", body | {"prompt": item.prompt}


async def drive(
    caller: Caller,
    items: Sequence[Item],
    how: How,
    *,
    concurrency: int | None,
    seconds: float,
) -> tuple[list[RequestRecord], float]:
    """Run a trace.

    Args:
        caller: the server.
        items: the requests.
        how: their form.
        concurrency: how many run at once, the next one beginning when one ends; None if each
            begins when it is due.
        seconds: the most seconds; requests that run then are given up.

    Returns:
        The records of the requests that were sent, and the seconds of the run.
    """
    records: list[RequestRecord] = []
    start = time.perf_counter()
    waiting = iter(items)

    async def one_by_one() -> None:
        for item in waiting:
            await _ask(caller, item, how, start, records, due=time.perf_counter() - start)

    async def when_due(item: Item) -> None:
        await asyncio.sleep(item.arrival - (time.perf_counter() - start))
        await _ask(caller, item, how, start, records, due=item.arrival)

    if concurrency is None:
        tasks = [asyncio.create_task(when_due(item)) for item in items]
    else:
        tasks = [asyncio.create_task(one_by_one()) for _ in range(concurrency)]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    whole = time.perf_counter() - start
    for task in late:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return records, whole


async def _ask(
    caller: Caller, item: Item, how: How, start: float, records: list[RequestRecord], *, due: float
) -> None:
    record = RequestRecord(due)
    records.append(record)
    num_parts = 0
    try:
        async for event in caller.events(*how.body(item)):
            now = time.perf_counter() - start
            usage = event.get("usage")
            if usage:
                record.num_tokens = int(usage["completion_tokens"])
            if not any(_has_text(choice) for choice in event.get("choices", ())):
                continue
            num_parts += 1
            if record.first is None:
                record.first = now
            else:
                record.parts.append(now - record.last)
            record.last = now
        record.num_tokens = record.num_tokens or num_parts
    except (CallFailed, KeyError, ValueError, AttributeError, TypeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        record.error = "it had not ended when the time was over"
        raise


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta", choice)
    return any(delta.get(name) for name in ("content", "text", "reasoning_content", "tool_calls"))


async def drafting(caller: Caller) -> tuple[float, float] | None:
    """Return the rounds with drafts and the accepted drafts; None if the server reports none."""
    with contextlib.suppress(CallFailed):
        status, content = await caller.whole("GET", "/metrics")
        counts: dict[str, float] = {}
        for line in content.decode(errors="replace").splitlines() if status == 200 else ():
            for name in ("num_drafts_total", "num_accepted_tokens_total"):
                if line.startswith(f"vllm:spec_decode_{name}"):
                    counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
        if len(counts) == 2:
            return counts["num_drafts_total"], counts["num_accepted_tokens_total"]
    return None


async def model_of(caller: Caller) -> str | None:
    """Return the first model that the server lists; None if it lists none.

    Raises:
        CallFailed: no server answers.
    """
    status, content = await caller.whole("GET", "/v1/models")
    if status in (401, 403):
        raise CallFailed(f"{status}: the server wants a key: set SPECPOOL_API_KEY")
    try:
        return str(json.loads(content)["data"][0]["id"]) if status == 200 else None
    except (ValueError, KeyError, IndexError, TypeError):
        return None
