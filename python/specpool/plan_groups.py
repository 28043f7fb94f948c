"""How many pages each group gets: from bytes to the groups of a ledger.

The one place that says so, without torch: an engine sizes its pools here, and so does a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specpool._core import Group, Ledger, Shape, sizing_row_width
from specpool.config import EngineConfig, Policy
from specpool.errors import ConfigError


def most_pages(page_size: int) -> int:
    """Pages that a group can have at most: slot ids are int32."""
    return (1 << 31) // page_size - 1


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
    is_capped: bool  # the bytes would hold more pages than int32 slots can name

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
        max_context_len: tokens of a sequence at most.
        overlap_depth: rounds prepared ahead.
        policy: how much a round reserves.
        keeps_draft_kv: the draft model has layers.
    """

    groups: tuple[GroupSize, ...]
    draft_group: int
    shapes: tuple[Shape, ...]
    num_rows: int
    max_context_len: int
    overlap_depth: int
    policy: Policy
    keeps_draft_kv: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(group.num_bytes for group in self.groups)

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
            num_rows=self.num_rows,
            max_context_len=self.max_context_len,
            overlap_depth=self.overlap_depth,
            policy=self.policy,
            draft_kv=self.keeps_draft_kv,
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
    page_bytes = [config.page_size * size for size in token_bytes]
    layout = "dense" if config.layout == "auto" else config.layout
    all_shapes = (Shape.none(), *(shape for shape in shapes if shape != Shape.none()))
    pages_per_row = [
        sizing_row_width(
            all_shapes,
            page_size=config.page_size,
            max_context_len=max_context_len,
            overlap_depth=config.overlap_depth,
            policy=config.policy,
            hosts_drafts=hosts,
            layout=layout,
        )
        // config.page_size
        for hosts in hosts_drafts
    ]
    if config.num_pages is not None:
        wanted = [config.num_pages] * len(hosts_drafts)
        most = config.num_pages
    else:
        wanted = _fit(config.max_batch, pages_per_row, page_bytes, kv_bytes, max_context_len)
        most = most_pages(config.page_size)
    names = ("target", "draft") if split else ("kv",)
    groups = tuple(
        GroupSize(
            name=name,
            page_size=config.page_size,
            page_bytes=page_bytes[g],
            pages_per_row=pages_per_row[g],
            num_pages=min(wanted[g], most),
            hosts_drafts=hosts_drafts[g],
            layout=layout,
            is_capped=wanted[g] > most,
        )
        for g, name in enumerate(names)
    )
    return GroupSizes(
        groups=groups,
        draft_group=len(groups) - 1,
        shapes=all_shapes,
        num_rows=config.max_batch,
        max_context_len=max_context_len,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        keeps_draft_kv=draft_bytes > 0,
    )


def _fit(
    max_batch: int,
    pages_per_row: Sequence[int],
    page_bytes: Sequence[int],
    kv_bytes: int,
    max_context_len: int,
) -> list[int]:
    """Pages of each group for as many full rows as the bytes hold, at most `max_batch`."""
    sinks = sum(page_bytes)  # page 0 of each group
    row_bytes = sum(p * b for p, b in zip(pages_per_row, page_bytes, strict=True))
    rows = min((kv_bytes - sinks) / row_bytes, max_batch)
    if rows < 1:
        raise ConfigError(
            f"one row of {max_context_len} tokens needs {row_bytes + sinks} bytes of KV, {kv_bytes}"
            " are to be had: lower max_context_len or the dtype, or raise kv_bytes"
        )
    return [int(rows * pages) for pages in pages_per_row]
