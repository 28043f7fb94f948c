"""Part of `python -m benches sglang`: a decode step at level `rows`, beside SGLang's own code.

A step is the estimate, the claim, the new cells of the rows, and the result of the round before.
"Calls" are the calls alone: on SGLang's side its estimate, the lengths of a round, its allocator
and the loop that keeps the new lengths, without the row writes; here the ledger's calls, which
write the rows and hold the lengths, the result of the round before among them.
"Prepare path" is SGLang's own `eagle_prepare_for_decode` with its tensors and row writes, and what
takes its place; the loop over the committed lengths, which stays SGLang's, is in both. SGLang's
kernel that writes rows needs a GPU: in both columns NumPy writes them. All memory was used before.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benches.engines import clock_ns
from specpool.cli.results import Result, interleaved

Shape = tuple[int, int, int]
ROWS, STEPS = (1, 32, 256, 1024), 12
CASES: tuple[tuple[int, Shape], ...] = ((1, (3, 1, 4)), (16, (3, 1, 4)), (64, (5, 8, 64)))


@contextmanager
def _settings(page_size: int, shape: Shape) -> Iterator[None]:
    """SGLang's published settings, as far as these calls read them."""
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache import allocation_sizing as sizing
    from sglang.srt.runtime_context import RuntimeContext

    from specpool.plugins.sglang import limits

    spec = SimpleNamespace(
        speculative_algorithm="EAGLE",
        speculative_adaptive=False,
        enable_multi_layer_eagle=False,
        speculative_num_steps=shape[0],
        speculative_eagle_topk=shape[1],
        speculative_num_draft_tokens=shape[2],
        max_speculative_num_draft_tokens=None,
    )
    bags = {
        "spec": spec,
        "schedule": SimpleNamespace(page_size=page_size),
        "disagg": SimpleNamespace(decoupled_spec_role="null"),
    }
    with (
        mock.patch.object(RuntimeContext, "config_bag", lambda _, name: bags[name]),
        mock.patch.object(sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1)),
        mock.patch.object(allocation, "attention_backends", lambda: ("torch_native",) * 2),
        mock.patch.object(allocation, "assign_req_to_token_pool_func", _write_rows),
        mock.patch.object(limits, "check", lambda: None),
    ):
        yield


def _write_rows(
    rows: torch.Tensor, table: torch.Tensor, start: Any, end: Any, slots: torch.Tensor, *_: Any
) -> None:
    begins, counts = start.numpy(), (end - start).numpy()
    lanes = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(lanes)) - np.repeat(np.cumsum(counts) - counts, counts)
    table.numpy()[rows.numpy()[lanes], begins[lanes] + within] = slots.numpy()


class _Side:
    """A batch of rows whose prefill is done, on one side's pools."""

    def __init__(
        self, rows_cls: Any, pool_cls: Any, num_rows: int, page_size: int, steps: int
    ) -> None:
        lens = [500 + 7 * row % 64 for row in range(num_rows)]
        ahead = 2 * 2048 if page_size > 16 else 256
        width = -(-(600 + 6 * steps + ahead) // page_size) * page_size
        size = (num_rows + 1) * width
        fixed = (torch.float16, "cpu", None, False)
        self.pool = rows_cls(num_rows, width, "cpu", False)
        self.slots = pool_cls(*((size,) if page_size == 1 else (size, page_size)), *fixed)
        self.reqs = [
            SimpleNamespace(
                rid=str(row),
                prefix_len=0,
                prefix_indices=torch.empty(0, dtype=torch.int64),
                last_node=None,
                decode_batch_idx=0,
                kv=SimpleNamespace(
                    kv_committed_len=n, kv_allocated_len=n, req_pool_idx=None, holds_kv=False
                ),
            )
            for row, n in enumerate(lens)
        ]
        rows = self.pool.alloc(self.reqs)
        cache = SimpleNamespace(
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            is_chunk_cache=lambda: True,
            is_tree_cache=lambda: False,
            supports_prefix_sharing=lambda: False,
            path_device_indices=lambda node: torch.empty(0, dtype=torch.int64),
        )
        self.batch = SimpleNamespace(
            reqs=self.reqs,
            sampling_info=SimpleNamespace(
                penalizer_orchestrator=SimpleNamespace(is_required=False)
            ),
            token_to_kv_pool_allocator=self.slots,
            req_to_token_pool=self.pool,
            req_pool_indices=torch.tensor(rows),
            seq_lens_cpu=torch.tensor(lens),
            prefix_lens=[0] * num_rows,
            tree_cache=cache,
            device="cpu",
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
        )
        self.page_size, self.lens = page_size, lens
        self.pool.req_to_token.fill_(0)

    def commit(self, accept_lens: torch.Tensor) -> None:
        """SGLang's loop over the committed lengths."""
        for req, length in zip(self.reqs, accept_lens.tolist(), strict=True):
            req.kv.kv_committed_len += length


def _sglang(
    num_rows: int, page_size: int, steps: int
) -> tuple[Callable[[], None], Callable[[], None], Any]:
    """Return the claim alone, the prepare path, and the result, of SGLang's own code."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache import allocation_sizing as sizing
    from sglang.srt.mem_cache.allocator import paged, token
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode

    pool_cls = token.TokenToKVPoolAllocator if page_size == 1 else paged.PagedTokenToKVPoolAllocator
    side = _Side(ReqToTokenPool, pool_cls, num_rows, page_size, steps)
    reqs, slots, table = side.reqs, side.slots, side.pool.req_to_token
    slots.free(slots.alloc(slots.available_size()))
    for req, length in zip(reqs, side.lens, strict=True):
        held = -(-length // page_size) * page_size
        table[req.kv.req_pool_idx, :held] = slots.alloc(held).int()
    estimate = ScheduleBatch._new_tokens_required_next_decode_spec_v2
    rows = side.batch.req_pool_indices

    def claim() -> None:
        estimate(None, reqs, page_size)
        reserve = sizing.get_alloc_reserve_per_decode()
        now, after, needed = sizing.page_aligned_decode_alloc_lens(
            reqs, reserve=reserve, page_size=page_size
        )
        if needed and page_size == 1:
            slots.alloc(needed)
        elif needed:
            before, ends = torch.tensor(now), torch.tensor(after)
            last = table[rows, before - 1].long()
            slots.alloc_extend(before, before, ends, ends, last, needed)
        for req, held in zip(reqs, after, strict=True):
            req.kv.kv_allocated_len = held

    def prepare() -> None:
        estimate(None, reqs, page_size)
        eagle_prepare_for_decode(side.batch)

    def result(accept_lens: torch.Tensor) -> None:
        """SGLang's own has only the loop that both have."""

    return claim, prepare, (result, side)


def _specpool(
    num_rows: int, page_size: int, steps: int
) -> tuple[Callable[[], None], Callable[[], None], Any]:
    """Return the same of level `rows`."""
    from specpool.plugins.sglang import row_allocator, row_pool, rows

    pool_cls = (
        row_allocator.SpecpoolRowTokenAllocator
        if page_size == 1
        else row_allocator.SpecpoolRowAllocator
    )
    side = _Side(_late(row_pool.SpecpoolRows), pool_cls, num_rows, page_size, steps)
    book, batch = side.pool.book, side.batch
    for row in [book.ledger.admit() for _ in range(num_rows)]:
        step = book.ledger.prepare_extend([row], [book.ledger.max_context_len]).step
        book.ledger.launch(step)
        book.ledger.complete(step)
        book.ledger.finish(row)
    book.batch = batch
    side.pool.late(side.reqs)
    book.batch = None
    batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in side.reqs])
    batch.req_pool_indices_cpu = batch.req_pool_indices
    at = row_pool.rows_of(side.reqs)
    book.extend(at, np.zeros(num_rows, np.int32), np.array(side.lens, np.int32))
    claimed = rows.rows_of(batch)

    def claim() -> None:
        book.tokens_required(claimed)
        book.decode(claimed)

    def prepare() -> None:
        rows.tokens_required(lambda *_: 0, batch)
        rows.prepare_round(lambda _: None, batch)

    def result(accept_lens: torch.Tensor) -> None:
        book.resolve(accept_lens)

    return claim, prepare, (result, side)


def _late(cls: Any) -> Any:
    """The row pool, whose rows are given once it has its allocator."""

    class Late(cls):  # type: ignore[misc]
        def alloc(self, reqs: Any) -> list[int]:
            return [0] * len(reqs)

        def late(self, reqs: Any) -> None:
            super().alloc(reqs)

    return Late


def _timed(
    make: Callable[..., Any], num_rows: int, page_size: int, shape: Shape, *, alone: bool
) -> Callable[[], float]:
    """Return a run that returns the median microseconds of a step, one round in flight.

    It is time on the CPU: what else the machine does, while a step waits for it, does not count.
    What the clock itself takes does not count, either.
    """
    max_accept_len = min(shape[0] + 1, shape[2])

    def run() -> float:
        rng = random.Random(3)
        claim, prepare, (result, side) = make(num_rows, page_size, STEPS + 1)
        step = claim if alone else prepare
        accepted = [
            torch.tensor(
                [rng.randint(1, max_accept_len) for _ in range(num_rows)], dtype=torch.int32
            )
            for _ in range(STEPS)
        ]
        step()
        spent, clock = [], clock_ns()
        for accept_lens in accepted:
            start = time.thread_time_ns()
            step()
            result(accept_lens)
            if not alone:
                side.commit(accept_lens)
            spent.append(time.thread_time_ns() - start)
            if alone:
                side.commit(accept_lens)
        return (statistics.median(spent) - clock) / 1e3

    return run


def _slots_ahead(make: Callable[..., Any], shape: Shape) -> float:
    """Mean slots beyond the committed tokens, over rounds one behind, P = 64."""
    rng, total, max_accept_len, steps = random.Random(7), 0, min(shape[0] + 1, shape[2]), 500
    _, prepare, (result, side) = make(8, 64, steps)
    prepare()
    for _ in range(steps):
        prepare()
        total += sum(r.kv.kv_allocated_len - r.kv.kv_committed_len for r in side.reqs)
        accept_lens = torch.tensor(
            [rng.randint(1, max_accept_len) for _ in side.reqs], dtype=torch.int32
        )
        result(accept_lens)
        side.commit(accept_lens)
    return total / steps / len(side.reqs)


def measure(repeats: int) -> list[Result]:
    """Return a step's time for each case, and the slots that rows hold ahead."""
    results = []
    for page_size, shape in CASES:
        with _settings(page_size, shape):
            for num_rows in ROWS:
                for alone in (True, False):
                    sides = [
                        _timed(make, num_rows, page_size, shape, alone=alone)
                        for make in (_specpool, _sglang)
                    ]
                    value, reference = interleaved(sides, repeats)
                    what = "calls of a step" if alone else "step inside the prepare path"
                    name = f"P={page_size}, {'/'.join(map(str, shape))}, {num_rows} rows: {what}"
                    results.append(Result(name, value, "us", "SGLang's own", reference))
    for shape in ((5, 8, 64), (5, 4, 8), (3, 1, 4)):
        with _settings(64, shape):
            name = f"P=64, {'/'.join(map(str, shape))}: slots ahead of a committed token, rows"
            slots_ahead, reference = (_slots_ahead(make, shape) for make in (_specpool, _sglang))
            results.append(Result(name, slots_ahead, "slots", "SGLang's own", reference))
    return results
