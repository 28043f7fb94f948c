"""A block pool under random calls: those that can succeed, and any method with any arguments.

The law: a refused call leaves the state as it was, no call panics, the counts sum up, the audit
finds nothing, and dropping what is held gives all blocks back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from border import REFUSALS
from ledger import arguments
from source import Source, array

from specpool import BlockPool

#: The methods that are called by name: every public one; `close` and `replay` are not calls of it.
METHODS = sorted(
    name
    for name in dir(BlockPool)
    if not name.startswith("_")
    and callable(getattr(BlockPool, name))
    and name not in ("close", "replay")
)
MOST_CALLS = 80


def pool_of(source: Source) -> BlockPool:
    return BlockPool(
        1 + source.below(24),
        1 + source.below(4),
        first_id=source.below(2),
        caching=source.byte() % 8 != 7,
        fencing=source.byte() % 2 == 1,
        digest=source.byte() % 2 == 1,
    )


def sensible(source: Source, pool: BlockPool, step: int) -> Callable[[], Any]:
    """A call as an engine makes it, of blocks that are held more often than not."""
    taken = pool.taken()
    start = source.below(len(taken) + 1)
    held = taken[start : start + source.below(5)]
    # Few different tokens, so that texts begin alike.
    tokens = array(source, "i4", (source.below(4 * pool.block_size + 2),), 2)
    salt = source.pick((b"", b"a"))
    verb = source.below(8)
    if verb == 0:
        hold = held if source.is_rare(8) else pool.match(tokens, salt)
        return partial(pool.take, source.below(6), hold, source.pick((None, "request")))
    if verb == 1:
        return partial(pool.drop, held, step if pool.fencing and source.is_rare(8) else None)
    if verb < 4:
        return partial(pool.put, tokens[: len(held) * pool.block_size], held, 0, salt)
    if verb == 4:
        return partial(pool.put, tokens, held, source.below(3), salt)
    if verb > 5:
        return partial(pool.keep if verb == 6 else pool.unkeep, held)
    return partial(pool.complete, step) if source.is_rare(8) else partial(pool.forget, salt)


def one_input(data: bytes) -> int:
    """Run the calls that the bytes encode.

    Returns:
        How many were accepted.
    """
    source = Source(data)
    pool, accepted = pool_of(source), 0
    for step in range(1, MOST_CALLS + 1):
        if source.is_empty:
            break
        state = pool.state_hash()
        try:
            if source.is_rare(4):
                getattr(pool, source.pick(METHODS))(*arguments(source))
            else:
                sensible(source, pool, step)()
            accepted += 1
        except REFUSALS:
            assert pool.state_hash() == state, "a refused call has changed the pool"
        held = sum(pool.refs(int(block)) > 0 for block in pool.taken())
        counts = pool.num_free + pool.num_cached + pool.num_fenced + held
        assert counts == pool.num_blocks, f"{counts} of {pool.num_blocks} blocks are counted"
    pool.check()
    for block in pool.taken():
        pool.drop([block] * pool.refs(int(block)))
    if pool.fencing:
        pool.complete(2**64 - 1)
    assert pool.num_free + pool.num_cached == pool.num_blocks
    return accepted
