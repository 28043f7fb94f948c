"""`Settings`: the options of the engine that a scenario runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specpool._core import (
    Group,
    Ledger,
    Shape,
    StateGroup,
    sizing_most_window_pages,
    sizing_row_width,
)
from specpool.capacity.group_sizes import Placement, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine's options; the names are those of `EngineConfig` and `SchedulerConfig`."""

    page_sizes: tuple[int, ...]  # of each group; a window group is the last
    num_pages: tuple[int, ...]
    window: int | None = None
    sink: int = 0  # of the window group
    drafts_slide: bool = False  # the draft group has the window; False means a further group has it
    placement: Placement = "split"
    layout: Literal["dense", "holey"] = "dense"
    policy: Policy = "exact"
    shapes: tuple[tuple[int, int, int], ...] = ()  # beside shape 0
    keeps_draft_kv: bool = True
    reads_tokens: bool = False
    # Requests differ in their drafter: whether it reads tokens, and how often it skips a round.
    mixes_drafters: bool = False
    overlap_depth: int = 0
    page_fencing: bool = True
    max_batch: int = 4
    prefix_cache: bool = False
    forgets: float = 0.0  # the share of turns in which the index gives up a salt's texts, or all
    max_sessions: int = 0
    state_flush: int = 0  # of the rows' states; 0 if the target has none
    session_pages: int | None = None
    host_pages: tuple[int, ...] = ()  # of each group; () if there is no host tier
    copy_faults: float = 0.0  # share of copies to the host and back that fail
    prefill_tokens: int = 64
    headroom: int = 0
    max_context_len: int = 128
    # The controller of requests without a shape; None if there are none.
    adapts: Literal["ema", "dice", "budget"] | None = None
    threshold_rounds: int = 0
    keeps_digest: bool = False  # the ledger keeps its digest, for ranks to compare
    is_late: bool = False  # the seed chooses when forwards run and results are taken over

    @property
    def hosts_drafts(self) -> tuple[bool, ...]:
        """Whether each group hosts drafts, as in `plan_pools`."""
        last = () if self.window is None or self.drafts_slide else (False,)
        if len(self.page_sizes) == 2 + len(last):
            return (False, True, *last)
        return (self.placement == "shared" and bool(self.shapes), *last)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group; None means a full group."""
        return (*[None] * (len(self.page_sizes) - 1), self.window)

    @property
    def sinks(self) -> tuple[int, ...]:
        """The sink of each group; 0 means none."""
        return (*[0] * (len(self.page_sizes) - 1), self.sink)

    @property
    def may_go_back(self) -> bool:
        """Whether a cut row or a hit may have fewer tokens than there is KV of."""
        return self.window is not None or bool(self.state_flush)

    def ledger(self) -> Ledger:
        """Build a ledger for these settings."""
        groups = [
            Group(
                f"group{i}",
                page_size=P,
                num_pages=n,
                hosts_drafts=hosts,
                layout=self.layout,
                window=self.windows[i],
                sink=self.sinks[i],
            )
            for i, (P, n, hosts) in enumerate(
                zip(self.page_sizes, self.num_pages, self.hosts_drafts, strict=True)
            )
        ]
        num_rows, states = self.max_batch + self.max_sessions, list[StateGroup]()
        if self.state_flush:
            flush = self.state_flush
            states = [StateGroup("states", num_slots=max(num_rows, 2), flush=flush, eager=True)]
        return Ledger(
            groups,
            [Shape.none(), *(Shape(*shape) for shape in self.shapes)],
            states=states,
            num_rows=num_rows,
            max_batch=self.max_batch,
            max_context_len=self.max_context_len,
            overlap_depth=self.overlap_depth,
            policy=self.policy,
            draft_kv=self.keeps_draft_kv,
            page_fencing=self.page_fencing,
            max_chunk=min(self.prefill_tokens, self.max_context_len),
            sessions=True,
            digest=self.keeps_digest,
        )

    def pages_per_row(self) -> tuple[int, ...]:
        """Return the pages of a full row in each group; a pool has at least as many."""
        shapes = [Shape.none(), *(Shape(*shape) for shape in self.shapes)]
        num_pages = []
        for P, hosts, window in zip(self.page_sizes, self.hosts_drafts, self.windows, strict=True):
            width = sizing_row_width(
                shapes,
                page_size=P,
                max_context_len=self.max_context_len,
                overlap_depth=self.overlap_depth,
                policy=self.policy,
                hosts_drafts=hosts,
                layout=self.layout,
            )
            num_pages.append(width // P)
            if window is not None:
                held = sizing_most_window_pages(
                    shapes,
                    window=window,
                    sink=self.sink,
                    max_chunk=min(self.prefill_tokens, self.max_context_len),
                    page_size=P,
                    overlap_depth=self.overlap_depth,
                    policy=self.policy,
                    hosts_drafts=hosts,
                    layout=self.layout,
                )
                checkpoint = -(-(window - 1) // P) + 1
                num_pages[-1] = min(num_pages[-1], held + checkpoint)
        return tuple(num_pages)
