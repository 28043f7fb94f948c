"""`python -m benches host`: a request comes back from the host, beside prefilling it again.

Both ways end with the request's next token. A reload leaves the last token, which has no KV, to be
fed; a prefill feeds all tokens. The token must be the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benches.loading import checked_loading
from specpool.checks import check_int
from specpool.cli.options.groups import PlaceOptions
from specpool.cli.results import Result, interleaved, machine, report
from specpool.engine.assets import corpus
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.step import Step
from specpool.errors import ConfigError, CorruptState

if TYPE_CHECKING:
    from specpool.engine.engine import Engine


class Return:
    """One request that goes to the host and comes back, on the parts of an engine."""

    def __init__(self, engine: Engine, tier: HostTier, num_tokens: int) -> None:
        """A request whose first `num_tokens` tokens have KV."""
        (ids,) = corpus.prompts(1, num_tokens + 1)
        (self._request,) = engine.core.prompts.requests(
            [ids], SamplingParams(max_new_tokens=1), None, 0
        )
        self._request.prefill_len = len(ids)
        self._engine, self._tier, self._num_tokens = engine, tier, num_tokens
        self._tokens: set[int] = set()

    def prefill(self) -> float:
        """Seconds to the next token without the host."""
        start = time.perf_counter()
        row = self._engine.ledger.admit()
        self._feed(row, 0)
        seconds = time.perf_counter() - start
        self._engine.ledger.retract(row)
        return seconds

    def offload(self) -> float:
        """Seconds of the copy to the host."""
        handle, seconds = self._offloaded()
        self._tier.drop(handle)
        return seconds

    def _offloaded(self) -> tuple[Handle, float]:
        """A new row on the host, and the seconds of its copy there."""
        ledger = self._engine.ledger
        row = ledger.admit()
        self._feed(row, 0)
        ledger.trim(row, self._num_tokens)
        start = time.perf_counter()
        handle = self._tier.save(row)
        self._synchronize()
        seconds = time.perf_counter() - start
        ledger.retract(row)
        if handle is None:
            raise CorruptState(f"{self._num_tokens} tokens have no room on an empty host")
        for g, group in enumerate(ledger.groups):  # or they would be found where they were
            self._engine.cache.scrub(g, np.arange(1, group.num_pages + 1, dtype=np.int32))
        return handle, seconds

    def reload(self) -> float:
        """Seconds to the next token, from the host; the row goes back."""
        from specpool.engine.memory.host.reload import reload

        handle, _ = self._offloaded()
        start = time.perf_counter()
        row = reload(self._tier, self._engine.cache, handle)
        if row is None:
            raise CorruptState("a copy from the host has failed")
        self._feed(row, self._num_tokens)
        seconds = time.perf_counter() - start
        self._engine.ledger.retract(row)
        return seconds

    def check(self) -> None:
        """Check that both ways have given the same token.

        Raises:
            CorruptState: they have not.
        """
        if len(self._tokens) != 1:
            raise CorruptState(f"prefill and reload give different tokens: {self._tokens}")

    def _feed(self, row: int, start: int) -> None:
        """Prefill the row from there on, in the engine's chunks, up to the next token."""
        engine, end = self._engine, self._request.prefill_len
        chunk = engine.config.prefill_tokens
        self._request.row = row
        for new_len in [*range(start + chunk, end, chunk), end]:
            self._tokens.update(_run(engine, self._request, row, new_len))

    def _synchronize(self) -> None:
        if self._engine.cache.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._engine.cache.device)


def _run(engine: Engine, request: Request, row: int, new_len: int) -> list[int]:
    """One prefill step, to its end; the token that it gave, if any."""
    plan = engine.ledger.prepare_extend([row], [new_len])
    engine.ledger.launch(plan.step)
    engine.cache.apply_delta(plan.step)
    engine.cache.copy_pages(plan.page_copies)
    (pending,) = engine.core.worker.run([Step(plan, [request])])
    result = pending.result()
    engine.ledger.complete(plan.step)
    return result.tokens[0]


def host(
    *,
    target: str,
    draft: str | None,
    shape: str | None,
    num_tokens: Sequence[int],
    repeats: int,
    device: str,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: what comes back is not what went.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    for tokens in num_tokens:
        check_int("tokens", tokens, 1, 1 << 20)
    place = PlaceOptions(device=device, threads=threads)
    loading = checked_loading(target=target, draft=draft, shape=shape, place=place, plot=plot)
    from specpool.engine.engine import Engine
    from specpool.engine.memory.host.copies import HostMemory

    results = []
    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=len(num_tokens))
        with Engine.from_pretrained(**loading, max_batch=1, prefix_cache=False) as engine:
            if max(num_tokens) + 2 > engine.max_context_len:
                raise ConfigError(
                    f"{max(num_tokens)} tokens and two more do not fit the model's "
                    f"{engine.max_context_len} positions"
                )
            memory = HostMemory(engine.ledger, engine.cache, engine.kv_bytes)
            tier = HostTier(engine.ledger, memory)
            for tokens in num_tokens:
                results += _case(Return(engine, tier, tokens), tokens, repeats)
                progress.advance(task)
    where = machine(device, threads, ("torch", "transformers"))
    report("bench host", where, results, json_only=json, plot=plot)


def _case(request: Return, num_tokens: int, repeats: int) -> list[Result]:
    runs = [request.prefill, request.offload, request.reload]
    for run in runs:
        run()  # warm up
    prefill, there, back = (1e3 * seconds for seconds in interleaved(runs, repeats))
    request.check()
    where = ("ms", "prefilled again", prefill)
    return [
        Result(f"{num_tokens:,} tokens: back from the host", back, *where),
        Result(f"{num_tokens:,} tokens: to the host and back", there + back, *where),
    ]
