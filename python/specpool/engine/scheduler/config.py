"""`SchedulerConfig`: the options of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from specpool._core import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The options of a scheduler.

    Attributes:
        max_batch: the most rows that run at once.
        prefill_tokens: the most tokens of one prefill step; longer prompts come in chunks.
        keeps_draft_kv: the drafter writes draft KV of the tokens that a step keeps.
        reads_tokens: the drafter reads the rows' tokens, so a drafting row has at most one round in
            flight.
        trims_rounds: after each round, each row gives the round's reserve back (v1).
        headroom: tokens beyond its next round that every row must have room for before another
            request is admitted.
        max_idle: the most rows that conversations keep between their turns.
        idle_pages: the most pages of each group that these rows keep; None means all.
        prefix_cache: texts that were computed stay in the ledger's index until their pages are
            needed, and requests that begin alike share them.
        goes_on_slowly: behind a state the target reads one token after the other.
        forced_shape: the chain for spans that the form of a request's text forces, if they are
            longer than the request's own shape; None if they are drafted within that.
    """

    max_batch: int
    prefill_tokens: int
    keeps_draft_kv: bool = False
    reads_tokens: bool = False
    trims_rounds: bool = False
    headroom: int = 0
    max_idle: int = 0
    idle_pages: int | None = None
    prefix_cache: bool = False
    goes_on_slowly: bool = False
    forced_shape: Shape | None = None
