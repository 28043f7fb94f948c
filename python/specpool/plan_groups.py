"""How many pages each group gets: from bytes to the groups of a ledger.

The one place that says so, without torch: an engine sizes its pools here, and so does a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specpool._core import Group, Ledger, Shape, sizing_pages_needed, sizing_row_width
from specpool.config import EngineConfig, Policy
from specpool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A group and its size."""

    name: str
    page_size: int  # slots
    page_bytes: int  # of one page, in all layers of the group
    pages_per_row: int  # that a row can ever hold
    num_pages: int  # page 0 not counted
    hosts_drafts: bool
    layout: Literal["dense", "holey"]

    @property
    def row_width(self) -> int:
        """Slots of a row."""
        return self.pages_per_row * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers, page 0 among them."""
        return (self.num_pages + 1) * self.page_bytes


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """All groups of a ledger, and what else it is built with.

    Attributes:
        groups: the target's first.
        draft_group: the group that hosts the draft's layers.
        shapes: shape 0 first.
        num_rows: requests that run at once.
        max_sessions: rows besides, of sessions between their turns.
        max_context_len: tokens of a sequence at most.
        overlap_depth: rounds prepared ahead.
        policy: how much a round reserves.
        keeps_draft_kv: the draft model has layers.
    """

    groups: tuple[GroupSize, ...]
    draft_group: int
    shapes: tuple[Shape, ...]
    num_rows: int
    max_sessions: int
    max_context_len: int
    overlap_depth: int
    policy: Policy
    keeps_draft_kv: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def most_rows(self) -> int:
        """Rows that a ledger can have: what all of them read in one round is indexed by int32."""
        topk = max(shape.topk for shape in self.shapes)
        return min(((1 << 31) - 1) // (topk * group.row_width) for group in self.groups)

    def least(self) -> GroupSizes:
        """The same with the pages of one row of the whole context."""
        groups = []
        for group in self.groups:
            width = sizing_row_width(
                self.shapes,
                page_size=group.page_size,
                max_context_len=self.max_context_len,
                overlap_depth=self.overlap_depth,
                policy=self.policy,
                hosts_drafts=group.hosts_drafts,
                layout=group.layout,
            )
            pages = width // group.page_size
            groups.append(replace(group, pages_per_row=pages, num_pages=pages))
        return replace(self, groups=tuple(groups))

    def pages_needed(self, lo: int, hi: int, shape: int) -> tuple[int, ...]:
        """Of each group, what a row can ever hold whose roots all lie in `[lo, hi]`.

        As `Ledger.pages_needed`, but of roots beyond the context too; `shape` is an index.
        """
        return tuple(
            sizing_pages_needed(
                self.shapes,
                shape,
                lo=lo,
                hi=hi,
                page_size=group.page_size,
                overlap_depth=self.overlap_depth,
                policy=self.policy,
                hosts_drafts=group.hosts_drafts,
                layout=group.layout,
            )
            for group in self.groups
        )

    def ledger(self) -> Ledger:
        """The ledger of these groups."""
        groups = [
            Group(
                group.name,
                page_size=group.page_size,
                num_pages=group.num_pages,
                hosts_drafts=group.hosts_drafts,
                layout=group.layout,
            )
            for group in self.groups
        ]
        return Ledger(
            groups,
            self.shapes,
            num_rows=self.num_rows + self.max_sessions,
            max_batch=self.num_rows,
            max_context_len=self.max_context_len,
            overlap_depth=self.overlap_depth,
            policy=self.policy,
            draft_kv=self.keeps_draft_kv,
            sessions=True,
        )


def size_groups(
    config: EngineConfig,
    target_bytes: int,
    draft_bytes: int,
    *,
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
) -> GroupSizes:
    """Size the groups.

    Args:
        config: placement, policy, layout, page size, depth, `max_batch`, and `num_pages` if given.
        target_bytes: of a token's KV in all layers of the target.
        draft_bytes: of a token's KV in all layers of the draft model; 0 = it keeps none.
        shapes: those that will run beside shape 0.
        max_context_len: tokens of a sequence at most.
        kv_bytes: for the buffers; not looked at where `config.num_pages` is given.

    Raises:
        ConfigError: the bytes do not hold one full row.
    """
    split = config.placement == "split" and draft_bytes > 0
    drafts = any(shape.num_draft_tokens > 1 for shape in shapes)
    # A shared group hosts the branches whoever drafts, as upstream's does.
    hosts_drafts = [False, True] if split else [config.placement == "shared" and drafts]
    token_bytes = [target_bytes, draft_bytes] if split else [target_bytes + draft_bytes]
    names = ("target", "draft") if split else ("kv",)
    layout: Literal["dense", "holey"] = "dense" if config.layout == "auto" else config.layout
    bare = GroupSizes(
        groups=tuple(
            GroupSize(
                name=name,
                page_size=config.page_size,
                page_bytes=config.page_size * size,
                pages_per_row=0,
                num_pages=0,
                hosts_drafts=hosts,
                layout=layout,
            )
            for name, size, hosts in zip(names, token_bytes, hosts_drafts, strict=True)
        ),
        draft_group=len(names) - 1,
        shapes=tuple(dict.fromkeys([Shape.none(), *shapes])),
        num_rows=config.max_batch,
        max_sessions=config.max_sessions,
        max_context_len=max_context_len,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        keeps_draft_kv=draft_bytes > 0,
    )
    least = bare.least()
    if config.num_pages is not None:
        num_pages = [config.num_pages] * len(names)
    else:
        most = (1 << 31) // config.page_size - 1  # slot ids are int32
        num_pages = [min(pages, most) for pages in _fit(least, kv_bytes)]
    groups = tuple(
        replace(group, num_pages=n) for group, n in zip(least.groups, num_pages, strict=True)
    )
    return replace(least, groups=groups)


def _fit(least: GroupSizes, kv_bytes: int) -> list[int]:
    """Pages of each group for as many full rows as the bytes hold, at most all rows."""
    sinks = sum(group.page_bytes for group in least.groups)  # page 0 of each
    row_bytes = sum(group.pages_per_row * group.page_bytes for group in least.groups)
    # A model whose layers are all recurrent has no KV.
    rows = min((kv_bytes - sinks) / row_bytes, least.num_rows) if row_bytes else least.num_rows
    if rows < 1:
        raise ConfigError(
            f"one row of {least.max_context_len} tokens needs {row_bytes + sinks} bytes of KV, "
            f"{kv_bytes} are to be had: lower max_context_len or the dtype, or raise kv_bytes"
        )
    return [int(rows * group.pages_per_row) for group in least.groups]
