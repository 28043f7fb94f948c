"""What proves the hits of level `speculative`: vLLM's own lookup and ours on the same pool.

A hit of ours is vLLM's, or one block longer. The longer one must end with a block that was computed
for the same tokens and with the same token behind them: then nothing that it holds is stale.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from specpool.plugins import proof
from specpool.plugins.proof import Operation, Operations
from specpool.plugins.vllm import pool_proof, speculative
from specpool.plugins.vllm.pool_proof import HASH_SIZE, ManagerSide, TriedPool

EPISODES = 48
_own_computed: Any = KVCacheManager.get_computed_blocks


def difference(seconds: float = proof.SECONDS) -> str | None:
    """Return the first hit in which ours differs in another way, a line; None if none does.

    It takes at most this many seconds of CPU.
    """
    case = HitCase()
    line = proof.first_difference([case], episodes=EPISODES, seconds=seconds)
    if line is None and not any(lookup.num_longer for lookup in case.lookups):
        return "KV cache hits: no operation of the proof kept the last block of a hit"
    return line


class HitSide(ManagerSide):
    """vLLM's lookup, on its manager with our pool."""

    def __init__(self, managed: Any, requests: Sequence[Any]) -> None:
        super().__init__(managed, requests)
        #: For each block whose KV is computed: its request, the position behind it, and the text
        #: that its request had when it let go of the block.
        self.contents: dict[int, tuple[Any, int, list[int] | None]] = {}
        self.known: dict[int, int] = {}
        self.last: Any = None

    def hit(self, index: int) -> tuple[list[int], int]:
        """Return vLLM's own hit: the ids of its blocks, and its tokens."""
        blocks, known = _own_computed(self.managed, self.requests[index])[:2]
        return [block.block_id for block in blocks.blocks[0]], known

    def admit(self, index: int) -> Any:
        """Admit a request with the hit of ours; return whether it had room."""
        request, managed = self.requests[index], self.managed
        blocks, known = managed.get_computed_blocks(request)[:2]
        new = managed.allocate_slots(request, request.num_tokens - known, known, blocks)
        if new is not None:
            request.num_computed_tokens = request.num_tokens
            self.known[index] = known
            self._write(index)
        self.last = new is not None
        return self.last

    def grow(self, index: int, drafts: int, tokens: list[int]) -> Any:
        new = super().grow(index, drafts, tokens)
        if new is not None:
            self._write(index)
        self.last = new is not None
        return self.last

    def free_and_go_on(self, index: int, tokens: list[int]) -> None:
        """Free a request, which then gets tokens that none of its blocks was computed with."""
        request = self.requests[index]
        self.free(index)
        for block, (writer, end, text) in self.contents.items():
            if writer is request and text is None:
                self.contents[block] = writer, end, list(request.all_token_ids)
        request.append_output_token_ids(tokens)
        self.last = None

    def _write(self, index: int) -> None:
        request, first = self.requests[index], self.known[index] // HASH_SIZE
        (ids,) = self.managed.get_block_ids(request.request_id)
        for number, block in enumerate(ids[first:], first + 1):
            self.contents.pop(block, None)
            if number * HASH_SIZE <= request.num_computed_tokens:
                self.contents[block] = request, number * HASH_SIZE, None

    def state(self) -> dict[str, Any]:
        super().state()
        return {}


class LookupSide:
    """The lookup of ours on the same manager; a longer hit is checked and cut."""

    def __init__(self, hits: HitSide) -> None:
        self.hits = hits
        self.num_longer = 0

    def hit(self, index: int) -> tuple[list[int], int]:
        hits, request = self.hits, self.hits.requests[index]
        ids, known = hits.hit(index)
        managed = hits.managed
        hit, length = managed.get_computed_blocks(request)[:2]
        longer = [block.block_id for block in hit.blocks[0]]
        if length != known + HASH_SIZE or longer[:-1] != ids:
            return longer, length
        writer, end, text = hits.contents[longer[-1]]
        assert end == length, f"the last block ends at {end}, the hit at {length}"
        text = list(writer.all_token_ids) if text is None else text
        is_same = text[: length + 1] == list(request.all_token_ids[: length + 1])
        assert is_same, "the last block was computed for another text"
        self.num_longer += 1
        return ids, known

    def admit(self, index: int) -> Any:
        return self.hits.last

    def grow(self, index: int, drafts: int, tokens: list[int]) -> Any:
        return self.hits.last

    def free_and_go_on(self, index: int, tokens: list[int]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}


class HitCase:
    """Requests with common beginnings; a drafter reads one token further."""

    name = "KV cache hits"

    def __init__(self) -> None:
        self.lookups: list[LookupSide] = []

    def sides(self, rng: random.Random) -> tuple[HitSide, LookupSide]:
        settings = pool_proof.settings_of(
            KVCacheManager,
            scheduler_block_size=HASH_SIZE,
            hash_block_size=HASH_SIZE,
            enable_caching=True,
            use_eagle=True,
        )
        managed = pool_proof.manager(TriedPool, rng.randint(12, 40), None, settings)
        if managed.block_pool.next_tokens is None:  # as if the level was on
            speculative.keep_notes(managed)
        hits = HitSide(managed, pool_proof.requests(rng))
        self.lookups.append(LookupSide(hits))
        return hits, self.lookups[-1]

    def operations(self, rng: random.Random) -> Operations:
        running: list[int] = []
        waiting = list(range(4))
        for _ in range(30):
            if waiting and (rng.random() < 0.5 or not running):
                index = rng.choice(waiting)
                yield Operation("hit", (index,))
                if (yield Operation("admit", (index,))):
                    waiting.remove(index)
                    running.append(index)
            elif rng.random() < 0.6:
                drafts = rng.randint(0, 2)
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 1 + drafts))]
                yield Operation("grow", (rng.choice(running), drafts, tokens))
            else:
                index = running.pop(rng.randrange(len(running)))
                waiting.append(index)
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 2))]
                yield Operation("free_and_go_on", (index, tokens))
