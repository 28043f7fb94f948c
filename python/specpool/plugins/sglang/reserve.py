"""Level `reserve`: a round of EAGLE reserves what it can write, not twice its window.

SGLang keeps its lengths. Before a round it makes each row `committed + 2 * window` slots long: the
second window stands for a round that is in flight. What the round can write is less
(docs/contract.md, Reserve): its root lies at `committed` if nothing is in flight, else at most
A = min(S + 1, N) further. Where drafts lie depends on the root's offset in its page alone, so one
table of P entries for each case gives the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from sglang.srt.runtime_context import get_disagg, get_spec

from specpool._core import Shape, sizing_need_exact

#: Algorithms whose rounds write slots as SGLang's `prepare_for_draft` does, and no others.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")

Table = tuple[list[int], list[int]]


def install() -> None:
    """Wrap SGLang's two functions: the lengths that a round allocates, and their estimate."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sizing = "sglang.srt.mem_cache.allocation_sizing.page_aligned_decode_alloc_lens"
    estimate = (
        "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2"
    )
    HookRegistry.register(sizing, decode_alloc_lens, HookType.AROUND)
    HookRegistry.register(estimate, tokens_required, HookType.AROUND)


def decode_alloc_lens(
    own: Callable[..., Any], reqs: Sequence[Any], *, reserve: int, page_size: int
) -> Any:
    """Each row's length now and before its next round, and the slots between them in all."""
    table = _table(page_size)
    if table is None:
        return own(reqs, reserve=reserve, page_size=page_size)
    now, after, total = [], [], 0
    for req in reqs:
        kv = req.kv
        committed, allocated = kv.kv_committed_len, kv.kv_allocated_len
        # Once a round was prepared, one may be in flight: it is not asked whether it is resolved.
        need = committed + table[req.decode_batch_idx > 0][committed % page_size]
        now.append(allocated)
        if need > allocated:
            after.append(need)
            total += need - allocated
        else:
            after.append(allocated)
    return now, after, total


def tokens_required(
    own: Callable[..., int], batch: Any, requests: Sequence[Any], page_size: int
) -> int:
    """The slots of whole pages that `decode_alloc_lens` of the requests will take."""
    table = _table(page_size)
    if table is None:
        return own(batch, requests, page_size)
    total = 0
    for req in requests:
        kv = req.kv
        committed, allocated = kv.kv_committed_len, kv.kv_allocated_len
        need = committed + table[req.decode_batch_idx > 0][committed % page_size]
        if need > allocated:
            total += need + -allocated // page_size * page_size
    return total


def _table(page_size: int) -> Table | None:
    """The table of SGLang's settings now; None if its own reserve has to stay. O(1)."""
    spec = get_spec()
    return _table_of(
        spec.speculative_algorithm,
        # Its shape may change between the reserve and the round.
        spec.speculative_adaptive
        # Its draft layers each write a window of their own.
        or spec.enable_multi_layer_eagle
        # Its rounds come from another process.
        or get_disagg().decoupled_spec_role != "null",
        spec.speculative_num_steps,
        spec.speculative_eagle_topk,
        spec.speculative_num_draft_tokens,
        page_size,
    )


@lru_cache(maxsize=64)
def _table_of(
    algorithm: str | None,
    is_special: bool,
    num_steps: int | None,
    topk: int | None,
    num_draft_tokens: int | None,
    page_size: int,
) -> Table | None:
    if algorithm not in ALGORITHMS or is_special:
        return None
    num_steps = num_steps or 1
    return ahead(num_steps, topk or 1, num_draft_tokens or num_steps + 1, page_size)


@lru_cache(maxsize=64)
def ahead(num_steps: int, topk: int, num_draft_tokens: int, page_size: int) -> Table:
    """Slots beyond `committed` that a round needs, to the end of a page: `[in flight][offset]`.

    Args:
        num_steps: S.
        topk: K.
        num_draft_tokens: N.
        page_size: P; the offset is `committed % P`.
    """
    most = Shape(num_steps, topk, num_draft_tokens).max_accept_len
    tables = []
    for lag in (0, most):
        table = []
        # Any page but the first, so that a smaller root may lie on the page before.
        for committed in range(page_size, 2 * page_size):
            need = sizing_need_exact(
                lo=committed,
                hi=committed + lag,
                page_size=page_size,
                num_steps=num_steps,
                topk=topk,
                num_draft_tokens=num_draft_tokens,
                layout="holey",
            )
            table.append(-(-need // page_size) * page_size - committed)
        tables.append(table)
    return tables[0], tables[1]
