"""Whether the SGLang that is installed is one that the plug-in was checked against.

Two things are compared: the parameters of what the plug-in takes over or calls, and the text of the
classes whose place it takes.
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import textwrap

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
# Digests of the texts, per known release. `text_digest` computes them.
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


def differences(level: str = "pages", *, bodies: bool = True) -> list[str]:
    """Return in what SGLang differs from what is known, a line each; an empty list if in nothing.

    Args:
        level: the level of the plug-in.
        bodies: whether texts count, too.
    """
    signatures, texts = SIGNATURES, BODIES
    if level == "reserve":
        signatures, texts = signatures | RESERVE_SIGNATURES, texts | RESERVE_BODIES
    found = []
    for target, known in signatures.items():
        try:
            now = ", ".join(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"{target}: {error}")
            continue
        if now != known:
            found.append(f"{target} has the parameters ({now}), known are ({known})")
    if found or not bodies:
        return found
    for target, releases in texts.items():
        digest = text_digest(target)
        if digest not in releases.values():
            found.append(f"{target} has the text {digest}, known are {', '.join(releases)}")
    return found


def text_digest(target: str) -> str:
    """Return a digest of a class's or function's text, without comments of their own line."""
    try:
        text = inspect.getsource(pkgutil.resolve_name(target))
    except OSError as error:
        return f"unreadable: {error}"
    lines = (line.rstrip() for line in textwrap.dedent(text).splitlines())
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
