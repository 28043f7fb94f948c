"""Level `speculative`: a round reserves what it can write, and a proved hit keeps its last block.

*Lookahead.* A drafter with S steps writes its first step's KV at the positions that the target has
just verified, and one position further with each later step: S - 1 behind the last verified one.
vLLM reserves S.

*Hits.* The draft KV at a block's last position was computed with the token behind the block, which
the block's hash does not cover. vLLM then drops the last block of each hit. Here that token is
noted, and a hit whose text goes on with the same token keeps the block: nothing of it is stale.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from specpool.plugins.status import status_of
from specpool.plugins.vllm import drafters
from specpool.plugins.vllm.next_tokens import NextTokens
from specpool.plugins.vllm.pool import SpecpoolBlockPool

#: Methods whose drafters are known to write as above.
METHODS = ("eagle", "eagle3", "mtp")

#: Those whose requests reserve a slot less than vLLM's.
_managers: WeakSet[Any] = WeakSet()
_kept_hits = [0]


def install() -> None:
    """Wrap what makes schedulers and managers: no call of a round is wrapped."""
    wrap(Scheduler, "__init__", _init_scheduler)
    wrap(KVCacheManager, "__init__", _init_manager)
    _kept_hits[0] = 0  # those of the proof do not count
    gains = status_of("vllm").gains
    gains["slots that running requests do not reserve now"] = _num_spare_slots
    gains["blocks of hits that were kept"] = lambda: _kept_hits[0]


def _num_spare_slots() -> int:
    return sum(
        len(manager.coordinator.single_type_managers[0].req_to_blocks)
        for manager in list(_managers)
    )


def wrap(owner: Any, name: str, outer: Callable[..., Any]) -> None:
    """Make `owner.name(...)` call `outer(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return outer(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def reserve_what_is_written(scheduler: Any, spec: Any) -> None:
    """Take the slot that no step of the drafter writes off a scheduler's lookahead, if one is.

    Args:
        scheduler: vLLM's; it has reserved nothing yet.
        spec: vLLM's settings of the drafter.
    """
    if scheduler.num_lookahead_tokens <= 0:
        return
    unknown = _unknown_drafters()
    why = unknown[0] if unknown else _why_none_is_spare(spec)
    if why:
        _say(f"a round reserves as much as vLLM does: {why}")
        return
    scheduler.num_lookahead_tokens -= 1
    _managers.add(scheduler.kv_cache_manager)


def _why_none_is_spare(spec: Any) -> str | None:
    if spec.method not in METHODS:
        return f"drafter {spec.method!r} writes elsewhere than {', '.join(METHODS)} do"
    if spec.parallel_drafting:
        return "parallel drafting writes the positions of all drafts in one forward"
    if spec.use_multi_module_mtp() or spec.use_gemma4_mtp() or spec.use_step3p5_mtp():
        return "MTP of several modules writes windows of its own, or elsewhere"
    return None


@functools.cache
def _unknown_drafters() -> list[str]:
    """Return in what vLLM's drafters differ from those whose writes are known, a line each."""
    if os.environ.get("SPECPOOL_VLLM_DRIFT") == "trust":
        return []
    return drafters.differences()


def _say(text: str) -> None:
    """Log once per process that vLLM itself does something which the level could do."""
    status_of("vllm").leave_alone(text)


def _init_scheduler(
    original: Any, scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    original(scheduler, vllm_config, *args, **kwargs)
    if vllm_config.speculative_config is not None:
        reserve_what_is_written(scheduler, vllm_config.speculative_config)


def _init_manager(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    coordinator, pool = manager.coordinator, manager.block_pool
    if not manager.enable_caching or not _dropping_groups(coordinator):
        return  # no hit drops a block
    why = _why_no_hit_is_proved(coordinator, pool)
    if why:
        _say(f"hits drop their last block, as vLLM's do: {why}")
    else:
        keep_notes(manager)


def keep_notes(manager: Any) -> None:
    """Let a manager note what follows each block, and ask where vLLM drops the last one of a hit.

    Only methods of this manager and its parts are wrapped, and none that a round calls: those for
    requests that come or go, and for full blocks.
    """
    pool, coordinator = manager.block_pool, manager.coordinator
    (single,) = coordinator.single_type_managers
    pool.next_tokens = NextTokens()
    for owner, name, outer in (
        (pool, "cache_full_blocks", _cache_full_blocks),
        (coordinator, "allocate_new_computed_blocks", _allocate_new_computed_blocks),
        (single, "pop_blocks_for_free", _pop_blocks_for_free),
        (single, "find_longest_cache_hit", _find_longest_cache_hit),
        (manager, "get_computed_blocks", _get_computed_blocks),
    ):
        setattr(owner, name, functools.partial(outer, getattr(owner, name), pool))


def _dropping_groups(coordinator: Any) -> Any:
    """Return the groups whose hits drop a block; before vLLM 0.33 these are all of a drafter."""
    name = "drop_eagle_group_ids"
    return getattr(coordinator, name if hasattr(coordinator, name) else "eagle_group_ids")


def _why_no_hit_is_proved(coordinator: Any, pool: Any) -> str | None:
    if not isinstance(pool, SpecpoolBlockPool):
        return f"the pool is a {type(pool).__name__}"
    if type(coordinator) is not UnitaryKVCacheCoordinator:
        return "the model has several groups of KV"
    if getattr(coordinator, "num_reprefillable_tokens", 0):  # since vLLM 0.28
        return "the drafter reads more than the next token"
    if type(coordinator.single_type_managers[0]) is not FullAttentionManager:
        return f"its group is a {type(coordinator.single_type_managers[0]).__name__}'s"
    return None


def _cache_full_blocks(
    original: Any,
    pool: Any,
    request: Any,
    blocks: Any,
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    *rest: Any,
    **named: Any,
) -> None:
    first, end = num_cached_blocks, num_full_blocks
    original(request, blocks, first, end, block_size, *rest, **named)
    if _is_provable(request):
        pool.next_tokens.note(request, blocks, first, end, block_size)


def _allocate_new_computed_blocks(
    original: Any,
    pool: Any,
    request_id: str,
    new_computed_blocks: Any,
    num_local_computed_tokens: int,
    num_external_computed_tokens: int,
    *rest: Any,
    **named: Any,
) -> None:
    num_local, num_external = num_local_computed_tokens, num_external_computed_tokens
    if num_external:
        # Another engine computed these, and with which next token nobody knows.
        pool.next_tokens.note_external(request_id, num_local + num_external)
        _say("a block of another engine drops as vLLM's does: its next token is not known")
    original(request_id, new_computed_blocks, num_local, num_external, *rest, **named)


def _pop_blocks_for_free(original: Any, pool: Any, request_id: str) -> Any:
    pool.next_tokens.let_go(request_id)
    return original(request_id)


def _is_provable(request: Any) -> bool:
    # An image's tokens are all the same, and embeddings have none; a resumed text may change.
    if request.mm_features or request.prompt_embeds is not None or request.resumable:
        _say(
            "requests with images, prompt embeddings or a session drop the last block of a hit, as "
            "vLLM's do: their tokens do not tell what follows"
        )
        return False
    return True


def _get_computed_blocks(original: Any, pool: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_provable(request):
        return original(request, *args, **kwargs)
    pool.next_tokens.reading = request.all_token_ids
    try:
        return original(request, *args, **kwargs)
    finally:
        pool.next_tokens.reading = None


def _find_longest_cache_hit(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
    tokens = pool.next_tokens.reading
    if tokens is None or not kwargs.get("drop_eagle_block"):
        return original(*args, **kwargs)
    whole: Any = original(*args, **kwargs | {"drop_eagle_block": False})
    (blocks,), length = whole
    if not blocks:
        return whole
    proved = _proved(pool, blocks[-1], tokens[length])
    if proved is None:
        del blocks[-1]  # as vLLM does, without a second lookup
        return (blocks,), length - pool.hash_block_size
    blocks[-1] = proved
    _kept_hits[0] += 1
    return whole


def _proved(pool: SpecpoolBlockPool, block: Any, token: int) -> Any:
    """Return a block with the same content whose text went on with `token`; None if none did."""
    notes = pool.next_tokens
    assert notes is not None
    twins = pool.cached_block_hash_to_block._cache.get(block.block_hash)
    candidates = twins.values() if isinstance(twins, dict) else [block]
    return next(
        (candidate for candidate in candidates if notes.of(candidate.block_id) == token), None
    )
