"""The part of vLLM's interface that the plug-in's pool takes over, in its plainest form.

It stands in for vLLM where that is not installed: a pool, its blocks, and what names requests.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


class KVCacheBlock:
    __slots__ = (
        "_block_hash",
        "_block_hash_num_tokens",
        "block_id",
        "is_null",
        "next_free_block",
        "pool",
        "prev_free_block",
    )

    def __init__(self, block_id: int, pool: Any = None) -> None:
        self.block_id, self.pool, self.is_null = block_id, pool, False
        self._block_hash = self._block_hash_num_tokens = None


class KnownBlocks(dict[str, Any]):
    def insert(self, key: str, block: Any) -> None:
        self[key] = block


class BlockPool:
    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        self.num_gpu_blocks, self.enable_caching = num_gpu_blocks, enable_caching
        self.metrics_collector = None
        self._reuse_watchers: dict[int, Any] = {}
        self.known = KnownBlocks()
        self.cached_block_hash_to_block = self.known
        self.enable_kv_cache_events = True
        self.removed: list[str] = []

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def cache_full_blocks(self, request, blocks, first, end, block_size, group) -> None:
        for block, key in zip(blocks[first:end], request.block_hashes[first:end], strict=True):
            self._insert_block_hash(key, block, None)

    def _insert_block_hash(self, key: str, block: Any, num_tokens: int | None) -> None:
        block._block_hash, self.known[key] = key, block

    def _remove_cached_block_hashes(self, block: Any) -> list[str]:
        key, block._block_hash = block._block_hash, None
        return [key] if self.known.pop(key, None) else []

    def _emit_block_removed_events(self, keys: list[str]) -> None:
        self.removed += keys

    def reset_prefix_cache(self) -> bool:
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        self.known.clear()
        for block in self.blocks:
            block._block_hash = None
        return True


class KVCacheCoordinator:
    def __init__(self, block_pool: Any) -> None:
        self.block_pool = block_pool

    def allocate_new_computed_blocks(self, request_id: str) -> None: ...

    def allocate_new_blocks(self, request_id: str, count: int) -> Any:
        return self.block_pool.get_new_blocks(count)


@contextmanager
def stand_in():
    """Put the stand-in in place of vLLM; yield the plug-in's pool module, installed on it."""
    parts = {
        "block_pool": {"BlockPool": BlockPool},
        "kv_cache_coordinator": {
            "BlockPool": BlockPool,
            "KVCacheCoordinator": type("Coordinator", (KVCacheCoordinator,), {}),
        },
        "kv_cache_utils": {"KVCacheBlock": KVCacheBlock},
        "single_type_kv_cache_manager": {"CrossAttentionManager": type("Cross", (), {})},
    }
    before = {name: sys.modules.get(name) for name in sys.modules if name.startswith("vllm")}
    ours = "specpool.plugins.vllm.pool", "specpool.plugins.vllm.request_names"
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.core")}
    for part, names in parts.items():
        modules[f"vllm.v1.core.{part}"] = module = ModuleType(part)
        vars(module).update(names)
        setattr(modules["vllm.v1.core"], part, module)
    sys.modules.update(modules)
    for name in ours:
        sys.modules.pop(name, None)
    try:
        import specpool.plugins.vllm.pool as pool

        pool.install()
        yield SimpleNamespace(
            pool=pool, **{name: modules[f"vllm.v1.core.{name}"] for name in parts}
        )
    finally:
        for name in (*modules, *ours):
            sys.modules.pop(name, None)
        import specpool.plugins.vllm as package

        for name in ours:
            vars(package).pop(name.rpartition(".")[2], None)
        sys.modules.update({name: module for name, module in before.items() if module})
