"""Level `rows`: lengths, claims, results, retraction and release of rounds by the ledger.

SGLang                                           the ledger
ReqToTokenPool.alloc, free_rows                  admit, admit_lent; finish
alloc_for_extend                                 prepare_extend, launch
new_tokens_required_next_decode                  tokens_required
eagle_prepare_for_decode                         prepare_decode, launch
the result of a round                            resolve
BasePrefixCache.free_kv_row                      nothing: the row's finish gives it all back
UnifiedRadixCache.insert: new pages, duplicates  lend, rebind
eviction of a tree's node                        release_lent
StreamingSession: what lies past a turn          trim
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from specpool.plugins.sglang import row_allocator, row_pool, row_sessions, row_tree
from specpool.plugins.sglang.allocator import AllocatorError


def install() -> None:
    """Put the classes and functions of this level in the place of SGLang's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # It derives from SGLang's allocator, whose lists it changes: before the exchange. Since 0.5.20.
    if importlib.util.find_spec(_MEMORY + "allocator.page_interleave"):
        importlib.import_module(_MEMORY + "allocator.page_interleave")
    for target, cls in CLASSES.items():
        HookRegistry.register(target, cls, HookType.REPLACE)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """Allocate for a prefill: SGLang's function, which asks for the slots of this batch."""
    book = batch.req_to_token_pool.book
    row_tree.upload_prefixes(book, batch.reqs)
    book.batch = batch
    try:
        return original(batch)
    finally:
        book.batch = None


def tokens_required(
    original: Callable[..., int], batch: Any, selected_indices: Sequence[int] | None = None
) -> int:
    """Return the slots that the next round of these requests will take."""
    rows = rows_of(batch)
    if selected_indices is not None:
        rows = rows[selected_indices]
    required: int = batch.req_to_token_pool.book.tokens_required(rows)
    return required


def rows_of(batch: Any) -> Any:
    """Return the rows of a batch that decodes, int32 [requests], from SGLang's host copy."""
    return batch.req_to_token_pool.book.rows_of(batch.req_pool_indices_cpu)


def prepare_round(original: Callable[..., None], batch: Any) -> None:
    """Claim a round of EAGLE; the new slots are in the rows when it returns.

    Raises:
        AllocatorError: pages lack although the tree was asked to evict, or a row is too long.
    """
    batch.maybe_evict_swa()
    if batch.sampling_info.penalizer_orchestrator.is_required:
        batch.cumulate_penalty_output_tokens()
    book, reqs = batch.req_to_token_pool.book, batch.reqs
    rows = rows_of(batch)
    lens = book.decode(rows)
    if lens is None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        needed = book.tokens_required(rows)
        evict_from_tree_cache(batch.tree_cache, needed)
        lens = book.decode(rows)
        if lens is None:
            free = book.allocator.available_size()
            raise AllocatorError(
                f"a round of {len(reqs)} requests takes {needed} slots, {free} are free"
            )
    if batch.seq_lens_cpu is None:
        batch.max_seq_len_host = max(lens)
    for req, held in zip(reqs, lens, strict=True):
        req.decode_batch_idx += 1
        req.kv.kv_allocated_len = held


def resolve_round(original: Callable[..., Any], processor: Any, result: Any, batch: Any) -> Any:
    """Count the result in the ledger before SGLang looks at any lane."""
    batch.req_to_token_pool.book.resolve(result.accept_lens)
    return original(processor, result, batch)


_MEMORY = "sglang.srt.mem_cache."
_TREE = _MEMORY + "unified_radix_cache.UnifiedRadixCache."
_SESSION = "sglang.srt.session.streaming_session.StreamingSession."
#: What takes the place of each of SGLang's classes.
CLASSES: dict[str, type] = {
    _MEMORY + "memory_pool.ReqToTokenPool": row_pool.SpecpoolRows,
    _MEMORY + "allocator.paged.PagedTokenToKVPoolAllocator": row_allocator.SpecpoolRowAllocator,
    _MEMORY + "allocator.token.TokenToKVPoolAllocator": row_allocator.SpecpoolRowTokenAllocator,
}
#: What goes around each of SGLang's functions.
HOOKS: dict[str, Callable[..., Any]] = {
    _MEMORY + "allocation.alloc_for_extend": alloc_for_extend,
    _MEMORY + "base_prefix_cache.BasePrefixCache.free_kv_row": row_tree.free_kv_row,
    **{_TREE + name: row_tree.insert_request for name in row_tree.INSERTS},
    _TREE + "insert": row_tree.insert,
    "sglang.srt.managers.schedule_batch.ScheduleBatch.new_tokens_required_next_decode": (
        tokens_required
    ),
    "sglang.srt.speculative.eagle_utils.eagle_prepare_for_decode": prepare_round,
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._resolve_spec_v2_tokens": resolve_round,
    _SESSION + "_free_kv_aligned": row_sessions.free_kv_aligned,
    _SESSION + "try_cache_finished_req": row_sessions.end_turn,
}
if row_tree.HAS_PREFIX_SLOTS:
    HOOKS[_TREE + "prefix_device_indices"] = row_tree.prefix_slots
