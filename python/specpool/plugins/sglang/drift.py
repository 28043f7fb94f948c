"""What the plug-in takes over of SGLang, or calls, as it is in the releases that it knows."""

from __future__ import annotations

from specpool.plugins import drift

# Parameters, by name, of what puts the plug-in's parts in place, and what level rows needs.
SIGNATURES = {
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
}
_MEMORY = "sglang.srt.mem_cache."
_ALLOCATOR = _MEMORY + "allocator."
_ROWS = _MEMORY + "memory_pool:ReqToTokenPool"
_TREE = _MEMORY + "unified_radix_cache:UnifiedRadixCache."
_BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch."
_SESSION = "sglang.srt.session.streaming_session:StreamingSession"
_RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor."
)
ROWS_SIGNATURES = {
    _TREE + "checkpoint_into_tree": "self, req, up_to, kwargs",
    _ROWS: "size, max_context_len, device, enable_memory_saver",
    _ROWS + ".alloc": "self, reqs",
    _ROWS + ".alloc_rows": "self, need_size",
    _ROWS + ".free_rows": "self, indices",
    _MEMORY + "allocation:alloc_for_extend": "batch",
    _MEMORY + "base_prefix_cache:BasePrefixCache.free_kv_row": "self, kv, ranges",
    _MEMORY + "common:evict_from_tree_cache": "tree_cache, num_tokens",
    _TREE + "path_device_indices": "self, node",
    _TREE + "prefix_device_indices": "self, req",
    _BATCH + "new_tokens_required_next_decode": "self, selected_indices",
    "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode": "batch",
    _RESULTS + "_resolve_spec_v2_tokens": "self, result, batch",
    _SESSION + "._free_kv_aligned": "self, kv, target, end",
    _SESSION + ".try_cache_finished_req": "self, req",
}
# Who takes and gives back pages and rows, and in which order.
ROWS_BODIES = {
    target: {"0.5.23": digest}
    for target, digest in {
        _ALLOCATOR + "paged:PagedTokenToKVPoolAllocator": "0b2eb777b0cdacb2",
        _ALLOCATOR + "token:TokenToKVPoolAllocator": "e451a3a63390cd06",
        _ALLOCATOR + "base:BaseTokenToKVPoolAllocator": "c39a4d51a55ef7d4",
        _ROWS: "af634bdf666f663b",
        _MEMORY + "allocation:alloc_for_extend": "bc5a0e7dffef5f0b",
        _MEMORY + "allocation:alloc_token_slots": "4d7b4bd4fb0317db",
        _MEMORY + "allocation:alloc_paged_token_slots_extend": "44bdd0bfae5490b8",
        _MEMORY + "base_prefix_cache:BasePrefixCache.free_kv_row": "8baf24b528f429a8",
        _MEMORY + "common:release_kv_cache": "7e5e27eeb8a544ee",
        _TREE + "checkpoint_into_tree": "7aa223fdc9ddcefb",
        _TREE + "prefix_device_indices": "f2b8dd91a2265bd4",
        _BATCH + "new_tokens_required_next_decode": "4c01017400555772",
        "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode": "aebf5718b5266255",
        "sglang.srt.speculative.eagle_worker_common:prepare_for_draft": "371ccbda9e72da4a",
        _RESULTS + "_resolve_spec_v2_tokens": "70db22adf78b9a14",
        _SESSION: "256d62d85f19de55",
    }.items()
}


def differences(level: str = "pages", *, bodies: bool = True) -> list[str]:
    """Return in what SGLang differs from what is needed, a line each; an empty list if in nothing.

    Levels pages and reserve are proved by what SGLang does (`pages_proof`, `reserve_proof`), each
    in at most 3 s of CPU.

    Args:
        level: the level of the plug-in.
        bodies: whether texts count, too.
    """
    if level == "rows":
        return drift.differences(SIGNATURES | ROWS_SIGNATURES, ROWS_BODIES if bodies else {})
    if lines := drift.differences(SIGNATURES, {}):
        return lines
    from specpool.plugins.sglang import pages_proof

    line = pages_proof.difference()
    if line is None and level == "reserve":
        from specpool.plugins.sglang import reserve_proof

        line = reserve_proof.difference()
    return [] if line is None else [line]
