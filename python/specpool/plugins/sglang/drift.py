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
_PAGED = _ALLOCATOR + "paged:PagedTokenToKVPoolAllocator"
_TOKEN = _ALLOCATOR + "token:TokenToKVPoolAllocator"
_BASE = _ALLOCATOR + "base:BaseTokenToKVPoolAllocator"

# Parameters, by name.
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
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "target, hook, hook_type, source",
}
# Digests of the texts, per known release. `text_digest` computes them.
BODIES = {
    _PAGED: {"0.5.23": "0b2eb777b0cdacb2"},
    _TOKEN: {"0.5.23": "e451a3a63390cd06"},
    _BASE: {"0.5.23": "c39a4d51a55ef7d4"},
}


def differences(*, bodies: bool = True) -> list[str]:
    """Return in what SGLang differs from what is known, a line each; an empty list if in nothing.

    Args:
        bodies: whether texts count, too.
    """
    found = []
    for target, known in SIGNATURES.items():
        try:
            now = ", ".join(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"{target}: {error}")
            continue
        if now != known:
            found.append(f"{target} has the parameters ({now}), known are ({known})")
    if found or not bodies:
        return found
    for target, releases in BODIES.items():
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
