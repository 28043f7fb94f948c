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
import inspect
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
from specpool.plugins.vllm.pool import SpecpoolBlockPool, leave_requests_unnamed

#: Methods whose drafters are known to write as above.
METHODS = ("eagle", "eagle3", "mtp")

own_allocate_slots: Any = KVCacheManager.allocate_slots
_managers: WeakSet[Any] = WeakSet()
_kept_hits = [0]


def install() -> None:
    """Wrap what reserves slots, and what looks hits up."""
    wrap(Scheduler, "__init__", _init_scheduler)
    wrap(KVCacheManager, "__init__", _init_manager)
    wrap(KVCacheManager, "get_computed_blocks", _get_computed_blocks)
    KVCacheManager.spare_lookahead = 0  # of managers that were made before
    KVCacheManager.allocate_slots = allocate_slots
    leave_requests_unnamed()  # `allocate_slots` names them
    note()
    _kept_hits[0] = 0  # those of the proof do not count
    gains = status_of("vllm").gains
    gains["slots that running requests do not reserve now"] = _num_spare_slots
    gains["blocks of hits that were kept"] = lambda: _kept_hits[0]


def note() -> None:
    """Note what follows each block, and ask the notes where vLLM drops the last block of a hit."""
    original = FullAttentionManager.find_longest_cache_hit.__func__

    def find(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _find_longest_cache_hit(original, cls, *args, **kwargs)

    FullAttentionManager.find_longest_cache_hit = classmethod(find)
    SpecpoolBlockPool.note_allocation = _note_allocation  # type: ignore[assignment, method-assign]


def _num_spare_slots() -> int:
    return sum(
        manager.spare_lookahead * len(manager.coordinator.single_type_managers[0].req_to_blocks)
        for manager in list(_managers)
    )


def wrap(owner: Any, name: str, outer: Callable[..., Any]) -> None:
    """Make `owner.name(...)` call `outer(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return outer(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def _noting(original: Any) -> Any:
    """Return vLLM's `allocate_slots` with notes of the request, and of what it need not reserve.

    The wrapper has the parameters of this release, named one by one, because `*args, **kwargs`
    would cost a tenth of vLLM's call.
    """
    signature = inspect.signature(original)
    bare = [
        parameter.replace(annotation=parameter.empty, default=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    names = [
        f"{part.name}={part.name}" if part.kind is part.KEYWORD_ONLY else part.name for part in bare
    ]
    source = f"""
def allocate_slots{inspect.Signature(bare)}:
    pool = self.block_pool
    pool.tag = request.request_id
    if num_lookahead_tokens:
        num_lookahead_tokens -= self.spare_lookahead
    if pool.next_tokens is not None:
        pool.note_allocation(request, num_new_computed_tokens, num_external_computed_tokens)
    return original({", ".join(names)})
"""
    parts: dict[str, Any] = {"original": original}
    exec(compile(source, __file__, "exec"), parts)  # ours, in the frames of a wrong free
    wrapper: Any = functools.wraps(original)(parts["allocate_slots"])
    wrapper.__defaults__, wrapper.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return wrapper


allocate_slots: Any = _noting(own_allocate_slots)


def spare_lookahead(vllm_config: Any) -> int:
    """Return how many of vLLM's lookahead slots no step of the drafter writes."""
    spec = vllm_config.speculative_config
    if spec is None or vllm_config.num_lookahead_tokens <= 0 or _why_none_is_spare(spec):
        return 0
    return 1


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
    spec = vllm_config.speculative_config
    if spec is None:
        return
    unknown = _unknown_drafters()
    if unknown:
        _say(f"a round reserves as much as vLLM does: {unknown[0]}")
        return
    scheduler.kv_cache_manager.spare_lookahead = spare_lookahead(vllm_config)
    _managers.add(scheduler.kv_cache_manager)
    if vllm_config.num_lookahead_tokens > 0:
        why = _why_none_is_spare(spec)
        if why:
            _say(f"a round reserves as much as vLLM does: {why}")


def _init_manager(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    coordinator, pool = manager.coordinator, manager.block_pool
    if not manager.enable_caching or not _dropping_groups(coordinator):
        return  # no hit drops a block
    why = _why_no_hit_is_proved(coordinator, pool)
    if why:
        _say(f"hits drop their last block, as vLLM's do: {why}")
    else:
        keep_notes(pool)


def keep_notes(pool: Any) -> None:
    """Let a pool note the token behind each block that it caches."""
    pool.next_tokens = {}
    pool.cache_full_blocks = functools.partial(_cache_full_blocks, pool)


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


def _note_allocation(
    pool: SpecpoolBlockPool, request: Any, num_new_computed: int, num_external: int
) -> None:
    if num_external:
        # Another engine computed these, and with which next token nobody knows.
        computed = request.num_computed_tokens + num_new_computed
        request.specpool_unproved = computed + num_external
        _say("a block of another engine drops as vLLM's does: its next token is not known")
    mark: tuple[int, int] | None = request.__dict__.get("specpool_mark")
    if mark is not None and request.num_tokens > mark[1]:
        # The token behind the last full block is sampled. The block may have been given up
        # meanwhile, as those of a preempted request may be.
        notes = pool.next_tokens
        if notes is not None and notes.get(mark[0]) is mark:
            notes[mark[0]] = request.all_token_ids[mark[1]]
        request.specpool_mark = None


def _cache_full_blocks(
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
    type(pool).cache_full_blocks(pool, request, blocks, first, end, block_size, *rest, **named)
    if not _is_provable(request):
        return
    tokens, unproved = request.all_token_ids, request.__dict__.get("specpool_unproved", 0)
    for index in range(first, end):
        end_position, block = (index + 1) * block_size, blocks[index].block_id
        if blocks[index].block_hash is None:
            continue  # it was not cached
        if unproved < end_position < len(tokens):
            pool.next_tokens[block] = tokens[end_position]
        elif end_position == len(tokens):  # not sampled yet: `_note_allocation` does it
            request.specpool_mark = pool.next_tokens[block] = block, end_position


def _is_provable(request: Any) -> bool:
    # An image's tokens are all the same, and embeddings have none; a resumed text may change.
    if request.mm_features or request.prompt_embeds is not None or request.resumable:
        _say(
            "requests with images, prompt embeddings or a session drop the last block of a hit, as "
            "vLLM's do: their tokens do not tell what follows"
        )
        return False
    return True


def _get_computed_blocks(
    original: Any, manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    pool = manager.block_pool
    if pool.next_tokens is None or not _is_provable(request):
        return original(manager, request, *args, **kwargs)
    pool.reading = request.all_token_ids
    try:
        return original(manager, request, *args, **kwargs)
    finally:
        pool.reading = None


def _find_longest_cache_hit(
    original: Any, cls: Any, *args: Any, block_pool: Any = None, **kwargs: Any
) -> Any:
    tokens = getattr(block_pool, "reading", None)
    if tokens is None or not kwargs.get("drop_eagle_block"):
        return original(cls, *args, block_pool=block_pool, **kwargs)
    whole: Any = original(cls, *args, block_pool=block_pool, **kwargs | {"drop_eagle_block": False})
    (blocks,), length = whole
    if not blocks:
        return whole
    proved = _proved(block_pool, blocks[-1], tokens[length])
    if proved is None:
        return original(cls, *args, block_pool=block_pool, **kwargs)
    blocks[-1] = proved
    _kept_hits[0] += 1
    return whole


def _proved(pool: SpecpoolBlockPool, block: Any, token: int) -> Any:
    """Return a block with the same content whose text went on with `token`; None if none did."""
    following = pool.next_tokens or {}
    twins = pool.cached_block_hash_to_block._cache.get(block.block_hash)
    candidates = twins.values() if isinstance(twins, dict) else [block]
    return next(
        (candidate for candidate in candidates if following.get(candidate.block_id) == token), None
    )
