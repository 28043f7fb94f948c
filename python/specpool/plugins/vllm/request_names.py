"""The name of the request that blocks are taken for, in errors and records.

Only vLLM's coordinator of KV cache managers knows it where a pool is asked for blocks. A pool gets
it as `tag`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager

from specpool.plugins import drift

_own_allocate: Any = KVCacheCoordinator.allocate_new_blocks
_own_allocate_computed: Any = KVCacheCoordinator.allocate_new_computed_blocks
_TARGET = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_blocks"
#: The texts of vLLM's method whose place `_allocate_known` can take.
KNOWN = {_TARGET: {"0.26.0": "e496d7afd1f18e31", "0.31.0": "44dc03f162a94643"}}


def _allocate_known(
    self: Any,
    request_id: str,
    num_tokens: int,
    num_tokens_main_model: int,
    num_encoder_tokens: int = 0,
) -> tuple[Any, ...]:
    """Do what vLLM's does, and name the request.

    Each round calls it for each request. It is in the place of vLLM's, not around it, and makes no
    generator, so that a name costs no time.
    """
    self.block_pool.tag = request_id
    new = []
    for manager in self.single_type_managers:
        is_cross = isinstance(manager, CrossAttentionManager)
        wanted = num_encoder_tokens if is_cross else num_tokens
        new.append(manager.allocate_new_blocks(request_id, wanted, num_tokens_main_model))
    return tuple(new)


def _allocate_unknown(coordinator: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
    coordinator.block_pool.tag = request_id
    return _own_allocate(coordinator, request_id, *args, **kwargs)


allocate_new_blocks: Any = _allocate_unknown if drift.differences({}, KNOWN) else _allocate_known


def allocate_new_computed_blocks(
    coordinator: Any, request_id: str, *args: Any, **kwargs: Any
) -> None:
    """Around vLLM's, which takes the blocks of what another engine computed."""
    coordinator.block_pool.tag = request_id
    _own_allocate_computed(coordinator, request_id, *args, **kwargs)


def install() -> None:
    """Let all coordinators name requests."""
    KVCacheCoordinator.allocate_new_blocks = allocate_new_blocks
    KVCacheCoordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
