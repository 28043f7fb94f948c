"""A scheduler with the interface of nano-vllm's: chunked prefill, decode, preemption."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from specpool.testing import BlockDevice


@dataclass(eq=False)
class Sequence:
    """One request, with the fields that a block manager reads and writes."""

    number: int
    token_ids: list[int]
    most_tokens: int
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class NanoScheduler:
    """Prefill before decode; the latest request gives way when blocks run out."""

    def __init__(self, manager: Any, device: BlockDevice, budget: int = 24, max_seqs: int = 4):
        self.manager, self.pool, self.device = manager, manager.pool, device
        self.budget, self.max_seqs = budget, max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.reused = self.preemptions = 0

    def submit(self, request: int, tokens: list[int], max_new_tokens: int) -> None:
        self.waiting.append(Sequence(request, tokens, len(tokens) + max_new_tokens))

    def abort(self, request: int) -> None:
        for line in (self.waiting, self.running):
            for seq in [seq for seq in line if seq.number == request]:
                if seq.block_table:
                    self.manager.deallocate(seq)
                line.remove(seq)

    def step(self) -> bool:
        batch = self.prefill() or self.decode()
        for seq in batch:
            end = seq.num_cached_tokens + seq.num_scheduled_tokens
            token = self.device.forward(seq.token_ids[:end], seq.block_table, seq.num_cached_tokens)
            self.manager.hash_blocks(seq)
            seq.num_cached_tokens, seq.num_scheduled_tokens = end, 0
            if end == seq.num_tokens:
                seq.token_ids.append(token)
            if seq.num_tokens == seq.most_tokens:
                self.manager.deallocate(seq)
                self.running.remove(seq)
        return bool(self.waiting or self.running)

    def prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        budget = self.budget
        while self.waiting and budget and len(self.running) < self.max_seqs:
            seq = self.waiting[0]
            if not seq.block_table:
                num_cached = self.manager.can_allocate(seq)
                if num_cached < 0:
                    break
                self.manager.allocate(seq, num_cached)
                self.reused += seq.num_cached_tokens
            seq.num_scheduled_tokens = min(seq.num_tokens - seq.num_cached_tokens, budget)
            budget -= seq.num_scheduled_tokens
            if seq.num_cached_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                self.running.append(self.waiting.popleft())
            batch.append(seq)
        return batch

    def decode(self) -> list[Sequence]:
        if not self.running and self.waiting and self.waiting[0].block_table:
            raise AssertionError("a prefill has stopped")
        batch: list[Sequence] = []
        while self.running:
            seq = self.running.popleft()
            while not self.manager.can_append(seq):
                victim = self.running.pop() if self.running else seq
                self.manager.deallocate(victim)
                self.waiting.appendleft(victim)
                self.preemptions += 1
                if victim is seq:
                    break
            else:
                self.manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                batch.append(seq)
        self.running.extend(batch)
        return batch
