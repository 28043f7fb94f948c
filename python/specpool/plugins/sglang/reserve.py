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
from operator import attrgetter, itemgetter
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import allocation_sizing

from specpool._core import Shape, sizing_need_exact

try:
    from sglang.srt.runtime_context import get_disagg, get_spec
except ImportError:  # before SGLang 0.5.17 one object holds all settings
    from sglang.srt.runtime_context import get_server_args as get_disagg
    from sglang.srt.runtime_context import get_server_args as get_spec

#: Algorithms whose rounds write slots as SGLang's `prepare_for_draft` does, and no others.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")

Table = tuple[list[int], list[int]]


#: Whether SGLang computes the lengths in a function of their own, as it does since 0.5.19.
HAS_LENS = hasattr(allocation_sizing, "page_aligned_decode_alloc_lens")
#: A request's committed length, which lay in the request itself before SGLang 0.5.19.
committed_len: Callable[[Any], int] = attrgetter(
    "kv.kv_committed_len" if hasattr(ReqKvInfo, "kv_committed_len") else "kv_committed_len"
)


def install() -> None:
    """Wrap SGLang's two functions: the lengths that a round allocates, and their estimate."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    memory = "sglang.srt.mem_cache."
    estimate = (
        "sglang.srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2"
    )
    if HAS_LENS:
        lens = memory + "allocation_sizing.page_aligned_decode_alloc_lens"
        HookRegistry.register(lens, decode_alloc_lens, HookType.AROUND)
    else:
        HookRegistry.register(
            memory + "allocation.alloc_for_spec_decode", alloc_round, HookType.AROUND
        )
    HookRegistry.register(estimate, tokens_required, HookType.AROUND)


def decode_alloc_lens(
    original: Callable[..., Any], reqs: Sequence[Any], *, reserve: int, page_size: int
) -> Any:
    """Return each row's length now and before its next round, and all slots between them."""
    table = _table(page_size)
    if table is None:
        return original(reqs, reserve=reserve, page_size=page_size)
    return _lens(reqs, table, page_size, 0)


def alloc_round(
    original: Callable[..., None], tree_cache: Any, req_to_token_pool: Any, **named: Any
) -> None:
    """Allocate for a round with these lengths, where SGLang computes its own beforehand."""
    page_size = tree_cache.token_to_kv_pool_allocator.page_size
    table = _table(page_size)
    if table is not None:
        # The round is counted already.
        now, needed, total = _lens(named["reqs"], table, page_size, 1)
        assert now == named["cur_kv_lens_cpu"].tolist()
        lens = torch.tensor(needed, dtype=torch.int32)
        device_lens = lens.to(device=named["nxt_kv_lens"].device, non_blocking=True)
        named |= {
            "nxt_kv_lens": device_lens,
            "nxt_kv_lens_cpu": lens,
            "num_needed_tokens": total,
        }
    original(tree_cache, req_to_token_pool, **named)


def _lens(
    reqs: Sequence[Any], table: Table, page_size: int, first_round: int
) -> tuple[list[int], list[int], int]:
    now, needed, total = [], [], 0
    for req in reqs:
        committed, allocated = committed_len(req), req.kv.kv_allocated_len
        # Once a round was prepared, one may be in flight: it is not asked whether it is resolved.
        need = committed + table[req.decode_batch_idx > first_round][committed % page_size]
        now.append(allocated)
        if need > allocated:
            needed.append(need)
            total += need - allocated
        else:
            needed.append(allocated)
    return now, needed, total


def tokens_required(
    original: Callable[..., int], batch: Any, requests: Sequence[Any], page_size: int
) -> int:
    """Return the slots, in whole pages, that `decode_alloc_lens` of the requests will take."""
    table = _table(page_size)
    if table is None:
        return original(batch, requests, page_size)
    total = 0
    for req in requests:
        committed, allocated = committed_len(req), req.kv.kv_allocated_len
        need = committed + table[req.decode_batch_idx > 0][committed % page_size]
        if need > allocated:
            total += need + -allocated // page_size * page_size
    return total


def _table(page_size: int) -> Table | None:
    """Return the table of SGLang's settings now; None if its own reserve has to stay. O(1).

    SGLang may change a leaf of its settings at any time without notice. Reading all in one call
    and comparing them with the last ones takes less time than looking a table up by them. The role
    of the process is written only when settings are published, and then `spec` is another object.
    """
    global _last
    spec = get_spec()
    leaves = _leaves(vars(spec))
    last_spec, last_leaves, last_size, table = _last
    if spec is not last_spec or leaves != last_leaves or page_size != last_size:
        table = _table_of(leaves, get_disagg().decoupled_spec_role, page_size)
        _last = spec, leaves, page_size, table
    return table


#: The leaves that `_table_of` names.
_leaves = itemgetter(
    "speculative_algorithm",
    "speculative_adaptive",
    "enable_multi_layer_eagle",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
#: The settings of the last call, and its table.
_last: tuple[Any, tuple[Any, ...], int, Table | None] = None, (), 0, None


def _table_of(leaves: tuple[Any, ...], role: str, page_size: int) -> Table | None:
    algorithm, is_adaptive, is_multi_layer, num_steps, topk, num_draft_tokens = leaves
    # The reserve and the round may see two values of an adaptive shape; several draft layers each
    # write a window of their own; with a role the rounds come from another process.
    if algorithm not in ALGORITHMS or is_adaptive or is_multi_layer or role != "null":
        return None
    num_steps = num_steps or 1
    return slots_ahead(num_steps, topk or 1, num_draft_tokens or num_steps + 1, page_size)


@lru_cache(maxsize=64)
def slots_ahead(num_steps: int, topk: int, num_draft_tokens: int, page_size: int) -> Table:
    """Return the slots beyond `committed` that a round needs, as `[in flight][offset]`.

    They reach to the end of a page.

    Args:
        num_steps: S.
        topk: K.
        num_draft_tokens: N.
        page_size: P; the offset is `committed % P`.
    """
    max_accept_len = Shape(num_steps, topk, num_draft_tokens).max_accept_len
    tables = []
    for lag in (0, max_accept_len):
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
