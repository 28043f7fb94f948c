"""vLLM's KV cache managers and requests, as its scheduler makes them; it imports vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

init_none_hash(sha256)
# Looked at when this is imported, so before the plug-in puts its own in place.
OWN_POOL = kv_cache_coordinator.BlockPool
OWN_METHODS = {
    name: getattr(kv_cache_coordinator.KVCacheCoordinator, name)
    for name in ("allocate_new_blocks", "allocate_new_computed_blocks")
}


def config(num_blocks: int, block_size: int, window: int | None = None) -> Any:
    """Return a model's KV cache: a group of full attention, and one with a window if given."""
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes))]
    if window:
        groups.append(KVCacheGroupSpec(["near"], SlidingWindowSpec(**sizes, sliding_window=window)))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def manager(pool: type, num_blocks: int, block_size: int, **settings: Any) -> Any:
    """Return vLLM's manager of KV blocks on a class of block pools; all of `OWN_POOL` is vLLM's."""
    before, kv_cache_coordinator.BlockPool = kv_cache_coordinator.BlockPool, pool
    try:
        managed: Any = KVCacheManager(
            config(num_blocks, block_size, settings.pop("window", None)),
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            **settings,
        )
    finally:
        kv_cache_coordinator.BlockPool = before
    if pool is OWN_POOL:
        for name, method in OWN_METHODS.items():
            setattr(managed.coordinator, name, MethodType(method, managed.coordinator))
    return managed


def request(
    name: str,
    tokens: Sequence[int],
    block_size: int,
    num_hash_lookahead_tokens: int = 0,
    **rest: Any,
) -> Any:
    """Return a request for up to 1,000 tokens behind these."""
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1000),
        pooling_params=None,
        block_hasher=get_request_block_hasher(block_size, sha256, num_hash_lookahead_tokens),
        **rest,
    )


def drafter(**changes: Any) -> Any:
    """Return what the plug-in reads of vLLM's settings of an EAGLE drafter, with changes."""
    no_mtp = {f"use_{kind}_mtp": bool for kind in ("multi_module", "gemma4", "step3p5")}
    return SimpleNamespace(**{"method": "eagle3", "parallel_drafting": False} | no_mtp | changes)


def scheduler(managed: Any, num_lookahead_tokens: int, **changes: Any) -> Any:
    """Return what the plug-in reads and changes of vLLM's scheduler, with an EAGLE drafter.

    Args:
        managed: the scheduler's manager of KV blocks.
        num_lookahead_tokens: what vLLM reserves for a request.
        changes: of the settings of the drafter.
    """
    from specpool.plugins.vllm import speculative

    made = SimpleNamespace(kv_cache_manager=managed, num_lookahead_tokens=num_lookahead_tokens)
    speculative.reserve_what_is_written(made, drafter(**changes))
    return made


def admit(managed: Any, wanted: Any, **settings: Any) -> list[int] | None:
    """Look a request's hit up and give it blocks for its whole prompt, as vLLM's scheduler does.

    Returns:
        the tokens of the hit, then the ids of its blocks in the first group; None: no room.
    """
    blocks, known, _ = managed.get_computed_blocks(wanted)
    new = managed.allocate_slots(wanted, wanted.num_tokens - known, known, blocks, **settings)
    if new is None:
        return None
    wanted.num_computed_tokens = wanted.num_tokens
    return [known, *managed.get_block_ids(wanted.request_id)[0]]
