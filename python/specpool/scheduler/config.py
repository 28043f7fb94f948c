"""`SchedulerConfig`: what a scheduler may do, and what its drafter needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The options of a scheduler.

    Attributes:
        max_batch: rows that run at once.
        prefill_tokens: tokens of one prefill step at most; longer prompts come in chunks.
        keeps_draft_kv: the drafter writes draft KV of what a step keeps.
        reads_tokens: the drafter reads the rows' tokens: a row that drafts has one round in flight
            at most.
        trims_rounds: each row gives back, after a round, what that had reserved (v1).
        shares_prompts: a prompt's samples run on forks of its row; else each computes it.
        headroom: tokens beyond its next round that every row must have room for before another
            request is admitted.
        max_idle: rows that conversations keep between their turns, at most.
        idle_pages: pages of each group that these rows may keep for themselves; None = all.
    """

    max_batch: int
    prefill_tokens: int
    keeps_draft_kv: bool = False
    reads_tokens: bool = False
    trims_rounds: bool = False
    shares_prompts: bool = True
    headroom: int = 0
    max_idle: int = 0
    idle_pages: int | None = None
