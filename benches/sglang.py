"""`python -m benches sglang`: the plug-in's allocators beside SGLang's own, on a CPU.

Both get the same calls in turns: a decode step in which no row, or every row, crosses a page's
edge, and the growth of every row by what a round of EAGLE reserves. A call's time is that of the
allocator alone, on the CPU. Beside it, the sizing of a round for all rows, at level `reserve`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benches import sglang_rows
from benches.engines import freed, load, timed
from specpool.cli.results import Result, interleaved, machine, report

ROWS, PAGE_SIZES, RESERVE = (1, 32, 256, 1024), (1, 16, 64), 64


_timed = partial(timed, num_calls=40)
_freed = partial(freed, num_calls=40)


def _cases(pool: Any, rows: int, page_size: int) -> dict[str, Callable[[], float]]:
    """Return the runs of one allocator, by name."""
    if page_size == 1:
        calls = (lambda: pool.alloc(rows)), pool.free
        return {"decode": _timed(*calls), "free": _freed(*calls)}
    length = 10 * page_size
    held = pool.alloc(rows * length).reshape(rows, length)

    def decode(at: int) -> Callable[[], torch.Tensor]:
        lens, last = torch.full((rows,), at + 1), held[:, at - 1].contiguous()

        def call() -> torch.Tensor:
            new: torch.Tensor = pool.alloc_decode(lens, lens, last)
            return new

        return call

    before, after = torch.full((rows,), length), torch.full((rows,), length + RESERVE)
    last = held[:, -1].contiguous()

    def grow() -> torch.Tensor:
        new: torch.Tensor = pool.alloc_extend(before, before, after, after, last, rows * RESERVE)
        return new

    def keep(slots: torch.Tensor) -> None:
        pass

    def free(slots: torch.Tensor) -> None:
        pool.free_page_ids(slots // page_size)

    def free_grown(slots: torch.Tensor) -> None:
        pool.free_segment(slots, start_pos=length)

    return {
        "decode within pages": _timed(decode(length - 1), keep),
        "decode across an edge": _timed(decode(length), free),
        f"reserve of {RESERVE}": _timed(grow, free_grown),
        "free of a segment": _freed(grow, free_grown),
    }


def _slots_ahead(lengths: Callable[..., Any], shape: tuple[int, int, int]) -> float:
    """Mean slots that a row has beyond its committed tokens, over 4,000 rounds one behind."""
    rng = random.Random(7)
    kv = SimpleNamespace(kv_committed_len=100, kv_allocated_len=100)
    request = SimpleNamespace(kv=kv, decode_batch_idx=0)
    total = 0
    for _ in range(4000):
        _, (kv.kv_allocated_len,), _ = lengths([request])
        total += kv.kv_allocated_len - kv.kv_committed_len
        kv.kv_committed_len += rng.randint(1, min(shape[0] + 1, shape[2]))
        request.decode_batch_idx += 1
    return total / 4000


def _sizing(repeats: int) -> list[Result]:
    """The lengths that a round of a tree of 64 nodes allocates, and their estimate."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache import allocation_sizing as sizing
    from sglang.srt.runtime_context import RuntimeContext

    from specpool.plugins.sglang import reserve

    page_size = 64
    spec = SimpleNamespace(
        speculative_algorithm="EAGLE",
        speculative_adaptive=False,
        enable_multi_layer_eagle=False,
        speculative_num_steps=5,
        speculative_eagle_topk=8,
        speculative_num_draft_tokens=64,
        max_speculative_num_draft_tokens=None,
    )
    disagg = SimpleNamespace(decoupled_spec_role="null")
    bags = {"spec": spec, "schedule": SimpleNamespace(page_size=page_size), "disagg": disagg}
    own_lens = sizing.page_aligned_decode_alloc_lens
    own_estimate = ScheduleBatch._new_tokens_required_next_decode_spec_v2
    results = []
    with (
        mock.patch.object(RuntimeContext, "config_bag", lambda _, name: bags[name]),
        mock.patch.object(sizing, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1)),
    ):
        twice = sizing.get_alloc_reserve_per_decode()
        for rows in ROWS:
            lens = [500 + 7 * row for row in range(rows)]
            kvs = [SimpleNamespace(kv_committed_len=n, kv_allocated_len=n) for n in lens]
            reqs = [SimpleNamespace(kv=kv, decode_batch_idx=1) for kv in kvs]
            fixed = {"reserve": twice, "page_size": page_size}
            # Bound at once: the loop goes on before they run.
            pairs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
                "lengths of a round": (
                    lambda r=reqs, f=fixed: reserve.decode_alloc_lens(own_lens, r, **f),
                    lambda r=reqs, f=fixed: own_lens(r, **f),
                ),
                "estimate of a round": (
                    lambda r=reqs: reserve.tokens_required(own_estimate, None, r, page_size),
                    lambda r=reqs: own_estimate(None, r, page_size),
                ),
            }
            for name, calls in pairs.items():
                runs = [_timed(call, lambda _: None) for call in calls]
                value, reference = interleaved(runs, repeats)
                title = f"P={page_size}, {rows} rows: {name}"
                results.append(Result(title, value, "us", "SGLang's own", reference))
        for shape in ((5, 8, 64), (5, 4, 8), (3, 1, 4)):
            names = ("num_steps", "eagle_topk", "num_draft_tokens")
            settings = zip(names, shape, strict=True)
            vars(spec).update({f"speculative_{name}": value for name, value in settings})
            fixed["reserve"] = sizing.get_alloc_reserve_per_decode()
            ours = _slots_ahead(partial(reserve.decode_alloc_lens, own_lens, **fixed), shape)
            sglang_slots = _slots_ahead(partial(own_lens, **fixed), shape)
            title = f"P={page_size}, {'/'.join(map(str, shape))}: slots ahead of a committed token"
            results.append(Result(title, ours, "slots", "SGLang's own", sglang_slots))
    return results


def sglang(path: Path | None, *, repeats: int, json: bool, plot: Path | None) -> None:
    """Measure, and print what each call takes on both sides.

    Raises:
        ConfigError: an option cannot work.
    """
    load("sglang", "SGLang", path, repeats=repeats, plot=plot)
    from sglang.srt.mem_cache.allocator import paged, token

    from specpool.plugins.sglang import allocator

    torch.set_num_threads(1)  # the clock is that of one thread
    results = []
    for page_size in PAGE_SIZES:
        for rows in ROWS:
            size = (rows * (10 * page_size + RESERVE) // page_size + 1) * page_size
            fixed = (torch.float16, "cpu", None, False)
            if page_size == 1:
                pools = [
                    allocator.SpecpoolTokenAllocator(size, *fixed),
                    token.TokenToKVPoolAllocator(size, *fixed),
                ]
            else:
                pools = [
                    allocator.SpecpoolPagedAllocator(size, page_size, *fixed),
                    paged.PagedTokenToKVPoolAllocator(size, page_size, *fixed),
                ]
            ours, theirs = (_cases(pool, rows, page_size) for pool in pools)
            for name, run in ours.items():
                value, reference = interleaved([run, theirs[name]], repeats)
                title = f"P={page_size}, {rows} rows: {name}"
                results.append(Result(title, value, "us", "SGLang's own", reference))
    results += _sizing(repeats)
    results += sglang_rows.measure(repeats)
    where = machine(threads=torch.get_num_threads(), packages=("torch", "sglang"))
    report("bench sglang", where, results, json_only=json, plot=plot)
