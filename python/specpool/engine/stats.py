"""The numbers of `Engine.stats`: what an engine holds, and its counters.

Counters (`x_ct`) only ever grow. Each step updates them with sums over whole arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specpool._core import Ledger
from specpool.engine.loop.clock import Clock, PhaseSeconds
from specpool.engine.memory.host.tier import HostStats
from specpool.engine.scheduler.counts import LatencyStats
from specpool.engine.scheduler.prefix_cache import PrefixStats
from specpool.engine.scheduler.round_shapes import AdaptiveStats
from specpool.engine.worker.graphs.graphs import GraphStats

if TYPE_CHECKING:
    from specpool.engine.loop.busy_check import BusyCheck
    from specpool.engine.memory.host.tier import HostTier
    from specpool.engine.scheduler.request import Conversation, Request
    from specpool.engine.scheduler.scheduler import Scheduler

SessionState = Literal["waiting", "running", "idle", "host", "dropped"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of one group."""

    name: str
    page_size: int
    num_pages: int
    free_pages: int
    fenced_pages: int
    cached_pages: int  # only the prefix cache holds them; they are handed out after the free ones

    @property
    def used_pages(self) -> int:
        """Pages that are neither free nor fenced nor cached."""
        return self.num_pages - self.free_pages - self.fenced_pages - self.cached_pages


@dataclass(frozen=True, slots=True)
class GroupStats(PoolStats):
    """Pages of one group, and how they are used.

    Attributes:
        pinned_pages: pages of pinned texts, each counted once; rows may share them.
        reclaimable_pages: pages that idle sessions keep and no running row shares.
        quarantined_pages: pages of rows that the busy check took out of use.
        used_tokens: slots that hold a token's KV; a slot of a shared page counts once.
        unused_slots: slots that rows have reserved beyond their tokens with KV.
    """

    pinned_pages: int
    reclaimable_pages: int
    quarantined_pages: int
    used_tokens: int
    unused_slots: int


@dataclass(frozen=True, slots=True)
class SessionStats:
    """The state and the counters of a session.

    Attributes:
        number: the session's number within its engine, from 1.
        state: `waiting` or `running`: it has a turn. Without a turn: `idle`, the KV is on the
            device; `host`, the KV is in the host tier; `dropped`, only the tokens are left.
        num_tokens: tokens of the turns that have ended, prompts and outputs.
        kept_tokens: how many of them have KV, on the device or in the host tier.
        turn_ct: turns that have ended by a stop or their length.
        computed_token_ct: tokens that prefills computed; a token counts again if its KV was lost.
        reused_token_ct: tokens whose KV a turn found in place.
        retraction_ct: retractions of the session's turns.
        drop_ct: how often the session lost its KV between turns.
    """

    number: int
    state: SessionState
    num_tokens: int
    kept_tokens: int
    turn_ct: int
    computed_token_ct: int
    reused_token_ct: int
    retraction_ct: int
    drop_ct: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The current contents of an engine, and its counters since it was built.

    Attributes:
        groups: the pages of each group.
        num_rows: all rows.
        num_free_rows: rows that can be taken now.
        num_quarantined_rows: rows that the busy check took out of use.
        num_running: requests with a row.
        num_waiting: requests without one.
        retracted_ct: retractions.
        finished_ct: requests that ended by a stop or their length, those of `pin` included.
        failed_ct: requests that ended with an error.
        aborted_ct: requests that were aborted.
        finding_ct: findings of the busy check.
        round_ct: decode steps.
        prefill_ct: prefill steps.
        prefilled_token_ct: tokens of prefill steps; a token counts again after a retraction.
        generated_token_ct: tokens of both kinds of steps, also those beyond a request's end.
        drafted_round_ct: rounds of single rows that had drafts.
        draft_ct: drafts of these rounds, right or wrong.
        forced_token_ct: accepted drafts that the form of a text left no choice about.
        accept_cts: rounds of single rows by accept length, bonus included; [0] is 0.
        seconds: seconds of the loop by phase.
        latency: of the requests that have ended, those of `pin` excluded.
        sessions: the open sessions.
        prefix: statistics of the prefix cache; None if it is off.
        host: statistics of the host tier; None if there is none.
        adaptive: statistics of the adaptive controller; None if there is none.
        graphs: statistics of the CUDA graphs; None if rounds are not captured.
    """

    groups: tuple[GroupStats, ...]
    num_rows: int
    num_free_rows: int
    num_quarantined_rows: int
    num_running: int
    num_waiting: int
    retracted_ct: int
    finished_ct: int
    failed_ct: int
    aborted_ct: int
    finding_ct: int
    round_ct: int
    prefill_ct: int
    prefilled_token_ct: int
    generated_token_ct: int
    drafted_round_ct: int
    draft_ct: int
    forced_token_ct: int
    accept_cts: tuple[int, ...]
    seconds: PhaseSeconds
    latency: LatencyStats
    sessions: tuple[SessionStats, ...]
    prefix: PrefixStats | None
    host: HostStats | None
    adaptive: AdaptiveStats | None
    graphs: GraphStats | None

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self.sessions)

    @property
    def num_idle_sessions(self) -> int:
        """Sessions that keep KV between turns."""
        return sum(session.state == "idle" for session in self.sessions)

    @property
    def verify_ct(self) -> int:
        """Rounds of single rows."""
        return sum(self.accept_cts)

    @property
    def accept_len(self) -> float:
        """Mean tokens of a row's round, the bonus included; 0 without rounds."""
        tokens = sum(length * ct for length, ct in enumerate(self.accept_cts))
        return tokens / self.verify_ct if self.verify_ct else 0.0

    @property
    def correct_draft_ct(self) -> int:
        """Drafts that were accepted."""
        return sum((length - 1) * ct for length, ct in enumerate(self.accept_cts))


def pool_stats(ledger: Ledger) -> list[PoolStats]:
    """Return the page counts of each group now."""
    return [
        PoolStats(
            group.name,
            group.page_size,
            group.num_pages,
            ledger.free_pages(index),
            ledger.fenced_pages(index),
            ledger.cached_pages(index),
        )
        for index, group in enumerate(ledger.groups)
    ]


def engine_stats(
    ledger: Ledger,
    scheduler: Scheduler,
    busy_check: BusyCheck,
    clock: Clock,
    host: HostTier | None,
    graphs: GraphStats | None,
) -> EngineStats:
    """Collect the statistics of an engine from its parts."""
    counts, ends = scheduler.counts, scheduler.counts.end_cts
    return EngineStats(
        groups=tuple(
            _group_stats(ledger, index, pool, busy_check)
            for index, pool in enumerate(pool_stats(ledger))
        ),
        num_rows=ledger.num_rows,
        num_free_rows=ledger.num_free_rows,
        num_quarantined_rows=len(busy_check.rows),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        retracted_ct=scheduler.num_retracted,
        finished_ct=ends["stop"] + ends["length"],
        failed_ct=ends["error"],
        aborted_ct=ends["abort"],
        finding_ct=busy_check.finding_ct,
        round_ct=counts.round_ct,
        prefill_ct=counts.prefill_ct,
        prefilled_token_ct=counts.prefilled_token_ct,
        generated_token_ct=counts.generated_token_ct,
        drafted_round_ct=counts.drafted_round_ct,
        draft_ct=counts.draft_ct,
        forced_token_ct=counts.forced_token_ct,
        accept_cts=tuple(counts.accept_cts),
        seconds=clock.seconds(),
        latency=counts.latency.stats(),
        sessions=tuple(
            _session_stats(ledger, conversation, scheduler.conversations.turn_of(conversation))
            for conversation in list(scheduler.conversations.open.values())
        ),
        prefix=scheduler.prefix_cache.stats(),
        host=None if host is None else host.stats(),
        adaptive=scheduler.round_shapes.stats(),
        graphs=graphs,
    )


def _session_stats(
    ledger: Ledger, conversation: Conversation, turn: Request | None
) -> SessionStats:
    row, handle = conversation.row, conversation.handle
    state: SessionState = "idle" if row else "dropped" if handle is None else "host"
    if turn is not None:
        state = "running" if turn.row else "waiting"
    return SessionStats(
        number=conversation.number,
        state=state,
        num_tokens=len(conversation.tokens),
        kept_tokens=int(ledger.resolved_len[row]) if row else handle.length if handle else 0,
        turn_ct=conversation.turn_ct,
        computed_token_ct=conversation.computed_token_ct,
        reused_token_ct=conversation.reused_token_ct,
        retraction_ct=conversation.retraction_ct,
        drop_ct=conversation.drop_ct,
    )


def _group_stats(ledger: Ledger, index: int, pool: PoolStats, busy_check: BusyCheck) -> GroupStats:
    committed = ledger.kv_committed_len
    spare = ledger.allocated_len(index) - committed
    spare[list(busy_check.rows)] = 0  # the lengths of a quarantined row cannot be trusted
    unused, quarantined = int(spare.sum()), busy_check.num_pages[index]
    return GroupStats(
        pool.name,
        pool.page_size,
        pool.num_pages,
        pool.free_pages,
        pool.fenced_pages,
        pool.cached_pages,
        pinned_pages=ledger.pinned_pages(index),
        reclaimable_pages=ledger.reclaimable_pages(index),
        quarantined_pages=quarantined,
        # Shared pages are full. Pages of one row are full but for the row's spare slots.
        used_tokens=(pool.used_pages - quarantined) * pool.page_size - unused,
        unused_slots=unused,
    )
