"""A continuous-batching scheduler on `BlockPool`: admission, decoding, preemption, a prefix cache.

It runs on a `specpool.testing.BlockDevice` in place of a GPU, which needs the extra `testing`
(`pip install '.[testing]'`). Run it: it serves 60 requests with common beginnings and prints how
many tokens it computed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from specpool import BlockPool
from specpool.testing import BlockDevice


@dataclass
class Request:
    """A text that grows.

    Attributes:
        number: its name.
        tokens: prompt and answer so far.
        end: how many tokens it has when it is done.
        blocks: the blocks of its text, in order; empty while it waits.
        computed: tokens with KV, from the beginning.
        noted: blocks that `put` was told of, or that a match gave.
    """

    number: int
    tokens: list[int]
    end: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    noted: int = 0


class BlockScheduler:
    """Runs all requests that fit; whoever came last gives way."""

    def __init__(self, num_blocks: int, block_size: int, device: BlockDevice) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.device = device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.texts: dict[int, list[int]] = {}  # of requests that are done
        self.num_computed = self.num_preempted = 0

    def submit(self, request: int, tokens: list[int], max_new_tokens: int) -> None:
        """Queue a request. It must fit into the pool alone."""
        self.waiting.append(Request(request, list(tokens), len(tokens) + max_new_tokens))

    def abort(self, request: int) -> None:
        """End a request, wherever it is."""
        for running in [candidate for candidate in self.running if candidate.number == request]:
            self.give_back(running)
        self.waiting = deque(candidate for candidate in self.waiting if candidate.number != request)

    def step(self) -> bool:
        """Run one turn; return False when all is done."""
        while self.waiting and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for request in list(self.running):
            if request in self.running and self.grow(request):
                self.forward(request)
        return bool(self.waiting or self.running)

    def admit(self, request: Request) -> bool:
        size = self.pool.block_size
        # The last token's forward gives the next token, so it is computed in any case.
        hit = self.pool.match(request.tokens, limit=len(request.tokens) - 1)
        count = -(-len(request.tokens) // size) - len(hit)
        if not self.pool.fits(count, hit):
            return False
        request.blocks = hit.tolist() + self.pool.take(count, hit, self.name_of(request)).tolist()
        request.computed, request.noted = len(hit) * size, len(hit)
        return True

    def grow(self, request: Request) -> bool:
        """Give the request a block for its next token; return False if it had to give way."""
        while len(request.tokens) > len(request.blocks) * self.pool.block_size:
            if self.pool.fits(1):
                request.blocks += self.pool.take(1, tag=self.name_of(request)).tolist()
            else:
                last = self.running[-1]
                self.give_back(last)
                self.waiting.appendleft(last)  # its blocks stay cached until others need them
                self.num_preempted += 1
                if last is request:
                    return False
        return True

    def forward(self, request: Request) -> None:
        token = self.device.forward(request.tokens, request.blocks, request.computed)
        self.num_computed += len(request.tokens) - request.computed
        request.computed = len(request.tokens)
        if request.computed // self.pool.block_size > request.noted:
            # All of these tokens have KV; the new one has none yet.
            self.pool.put(request.tokens, request.blocks, request.noted)
            request.noted = request.computed // self.pool.block_size
        request.tokens.append(token)
        if len(request.tokens) == request.end:
            self.give_back(request)
            self.texts[request.number] = request.tokens

    def give_back(self, request: Request) -> None:
        self.pool.drop(request.blocks, tag=self.name_of(request))
        request.blocks, request.computed, request.noted = [], 0, 0
        self.running.remove(request)

    def name_of(self, request: Request) -> str:
        return f"request {request.number}"


def main() -> None:
    """Serve 60 requests in 48 blocks."""
    rng = random.Random(1)
    commons = [[rng.randrange(7) for _ in range(rng.randrange(5, 60))] for _ in range(4)]
    scheduler = BlockScheduler(48, 8, BlockDevice(48, 8))
    for number in range(60):
        tail = [rng.randrange(7) for _ in range(rng.randrange(1, 20))]
        scheduler.submit(number, rng.choice(commons) + tail, rng.randrange(1, 30))
    turns = 0
    while scheduler.step():
        turns += 1
    num_tokens = sum(len(text) - 1 for text in scheduler.texts.values())
    print(
        f"{len(scheduler.texts)} requests in {turns} turns: {scheduler.num_computed} of "
        f"{num_tokens} tokens computed, {scheduler.num_preempted} preemptions, "
        f"{len(scheduler.pool.taken())} blocks left behind"
    )


if __name__ == "__main__":
    main()
