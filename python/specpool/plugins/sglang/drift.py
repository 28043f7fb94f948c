"""What the plug-in takes over of SGLang, or calls, as it is in the releases that it knows."""

from __future__ import annotations

from specpool.plugins import drift

_ALLOCATOR = "sglang.srt.mem_cache.allocator."
_ALLOCATION = "sglang.srt.mem_cache.allocation:"
_PAGED = _ALLOCATOR + "paged:PagedTokenToKVPoolAllocator"
_TOKEN = _ALLOCATOR + "token:TokenToKVPoolAllocator"
_BASE = _ALLOCATOR + "base:BaseTokenToKVPoolAllocator"

# Parameters, by name: of level pages, and what each further level needs beside it.
SIGNATURES = {
    _PAGED: "size, page_size, dtype, device, kvcache, need_sort",
    _PAGED + ".alloc": "self, need_size",
    _PAGED + ".alloc_extend": "self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, "
    "last_loc, extend_num_tokens, num_new_pages",
    _PAGED + ".alloc_decode": "self, seq_lens, seq_lens_cpu, last_loc",
    _PAGED + ".free": "self, free_index",
    _PAGED + ".free_segment": "self, free_index, start_pos",
    _PAGED + ".free_page_ids": "self, page_ids",
    _PAGED + ".get_cpu_copy": "self, indices, mamba_indices, req_pool_index",
    _PAGED + ".load_cpu_copy": "self, kv_cache_cpu, indices, mamba_indices, req_pool_index",
    _TOKEN: "size, dtype, device, kvcache, need_sort",
    _TOKEN + ".alloc": "self, need_size",
    _TOKEN + ".free": "self, free_index",
    _BASE + ".free_group_begin": "self",
    _BASE + ".free_group_end": "self",
    _BASE + "._copy_for_free_group": "free_index",
    _BASE + ".resize": "self, config",
    _ALLOCATION + "alloc_for_extend": "batch",
    _ALLOCATION + "alloc_for_decode": "batch, token_per_req",
    _ALLOCATION + "alloc_for_spec_decode": "tree_cache, req_to_token_pool, reqs, req_pool_indices, "
    "cur_kv_lens, cur_kv_lens_cpu, nxt_kv_lens, nxt_kv_lens_cpu, num_needed_tokens, batch",
    "sglang.srt.mem_cache.common:release_kv_cache": "req, tree_cache, checkpoint",
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
}
_SIZING = "sglang.srt.mem_cache.allocation_sizing:"
_BATCH = "sglang.srt.managers.schedule_batch:ScheduleBatch."
RESERVE_SIGNATURES = {
    _SIZING + "page_aligned_decode_alloc_lens": "reqs, reserve, page_size",
    _BATCH + "_new_tokens_required_next_decode_spec_v2": "self, requests, page_size",
}
# Digests of the texts, per known release. `drift.text_digest` computes them.
BODIES = {
    _PAGED: {"0.5.23": "0b2eb777b0cdacb2"},
    _TOKEN: {"0.5.23": "e451a3a63390cd06"},
    _BASE: {"0.5.23": "c39a4d51a55ef7d4"},
}
# Who allocates for a round, and where its drafts lie.
RESERVE_BODIES = {
    _SIZING + "page_aligned_decode_alloc_lens": {"0.5.23": "c2b8ba46e4006265"},
    _BATCH + "_new_tokens_required_next_decode_spec_v2": {"0.5.23": "6cc92601e982be3e"},
    "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode": {"0.5.23": "aebf5718b5266255"},
    "sglang.srt.speculative.eagle_worker_common:prepare_for_draft": {"0.5.23": "371ccbda9e72da4a"},
}
_MEMORY = "sglang.srt.mem_cache."
_ROWS = _MEMORY + "memory_pool:ReqToTokenPool"
_TREE = _MEMORY + "unified_radix_cache:UnifiedRadixCache."
_SESSION = "sglang.srt.session.streaming_session:StreamingSession"
_RESULTS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor."
)
ROWS_SIGNATURES = {
    _ROWS: "size, max_context_len, device, enable_memory_saver",
    _ROWS + ".alloc": "self, reqs",
    _ROWS + ".alloc_rows": "self, need_size",
    _ROWS + ".free_rows": "self, indices",
    _MEMORY + "allocation:alloc_for_extend": "batch",
    _MEMORY + "base_prefix_cache:BasePrefixCache.free_kv_row": "self, kv, ranges",
    _MEMORY + "common:evict_from_tree_cache": "tree_cache, num_tokens",
    _TREE + "checkpoint_into_tree": "self, req, up_to, kwargs",
    _TREE + "path_device_indices": "self, node",
    _TREE + "prefix_device_indices": "self, req",
    _BATCH + "new_tokens_required_next_decode": "self, selected_indices",
    "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode": "batch",
    _RESULTS + "_resolve_spec_v2_tokens": "self, result, batch",
    _SESSION + "._free_kv_aligned": "self, kv, target, end",
    _SESSION + ".try_cache_finished_req": "self, req",
}
# Who takes and gives back rows, and in which order.
ROWS_BODIES = {
    target: {"0.5.23": digest}
    for target, digest in {
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
    """Return in what SGLang differs from what is known, a line each; an empty list if in nothing.

    Args:
        level: the level of the plug-in.
        bodies: whether texts count, too.
    """
    signatures, texts = SIGNATURES, BODIES
    if level == "reserve":
        signatures, texts = signatures | RESERVE_SIGNATURES, texts | RESERVE_BODIES
    if level == "rows":
        signatures, texts = signatures | ROWS_SIGNATURES, texts | ROWS_BODIES
    return drift.differences(signatures, texts if bodies else {})
