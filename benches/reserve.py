"""`python -m benches reserve`: slots that a round reserves, by closed form and enumeration.

A figure is `next_allocated - resolved_len` of a row that has `D = overlap_depth` rounds in flight,
for the claim of the next round alone. The row's true root lies in `[lo, hi] = [r + D, r + D * A]`.
Worst and mean are over the P offsets of r in its page. *Held* is the mean of a row that has reached
r token by token: it keeps what earlier roots claimed, and holey claims are not monotone. Its worst
is the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from specpool import _core
from specpool._core import Shape
from specpool.capacity.group_sizes import Policy
from specpool.checks import check_int
from specpool.cli.results import Result, check_plot, draw, machine, print_json
from specpool.engine.shape_names import parse_shape
from specpool.errors import ConfigError, CorruptState

POLICIES: tuple[Policy, ...] = ("double_buffer", "exact")
SLOTS, LAYER_SLOTS = "slots beyond resolved_len", "layer-slots"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared; the layers of the target and of the draft model."""

    page_size: int
    shape: Shape
    overlap_depth: int
    target_layers: int
    draft_layers: int

    def roots(self, resolved_len: int) -> tuple[int, int]:
        """`[lo, hi]` of the next round of a row with `overlap_depth` rounds in flight."""
        depth = self.overlap_depth
        return resolved_len + depth, resolved_len + depth * self.shape.max_accept_len


@dataclass(frozen=True, slots=True)
class Reserve:
    """What one group reserves, [P] slots beyond resolved_len per page offset, in two ways."""

    name: str
    num_layers: int
    closed: list[int]
    enumerated: list[int]

    @property
    def held(self) -> list[int]:
        """[P]: what a row holds that has claimed a round at every offset before."""
        size = len(self.closed)
        return [max(self.closed[at - back] - back for back in range(size)) for at in range(size)]


@dataclass(frozen=True, slots=True)
class Choice:
    """One policy, placement and layout, and what its groups reserve."""

    policy: Policy
    placement: str
    layout: str
    groups: list[Reserve]

    @property
    def name(self) -> str:
        """The name in the table and the JSON."""
        return f"{self.policy}, {self.placement}, {self.layout}"

    def layer_slots(self, combine: Callable[[list[int]], float]) -> float:
        """Slots times layers, each group at its own worst or mean."""
        return sum(group.num_layers * combine(group.closed) for group in self.groups)


def closed_form(setting: Setting, policy: Policy, hosts_drafts: bool, layout: str) -> list[int]:
    """[P]: what the core's sizing reserves, per page offset."""
    shape, P = setting.shape, setting.page_size
    group = {
        "page_size": P,
        "num_steps": shape.num_steps,
        "topk": shape.topk,
        "num_draft_tokens": shape.num_draft_tokens,
        "hosts_drafts": hosts_drafts,
        "layout": layout,
    }
    reserves = []
    for resolved_len in range(P, 2 * P):
        lo, hi = setting.roots(resolved_len)
        if policy == "exact":
            need = _core.sizing_need_exact(lo=lo, hi=hi, **group)  # type: ignore[arg-type]
        else:
            window = _core.sizing_alloc_len_per_decode(**group)  # type: ignore[arg-type]
            need = _core.sizing_need_double_buffer(
                lo=lo, alloc_len=window, overlap_depth=setting.overlap_depth
            )
        after = _core.sizing_next_allocated(allocated=0, need=need, page_size=P)
        reserves.append(after - resolved_len)
    return reserves


def enumerated(setting: Setting, policy: Policy, hosts_drafts: bool, layout: str) -> list[int]:
    """[P]: the same from the cells that a round writes; it shares no arithmetic with the core."""
    shape, P, depth = setting.shape, setting.page_size, setting.overlap_depth
    S, K, N = shape.num_steps, shape.topk, shape.num_draft_tokens
    holey = layout == "holey" and P > 1 and K > 1

    def draft_cells(root: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Positions of the branches."""
        if not holey:
            return root + np.arange(K * S)
        # Every branch has whole pages of its own, as many as the tail and S drafts touch.
        offset = root % P
        touched = {(offset + step) // P for step in range(S)}
        return root - offset + np.arange(K * (max(touched) + 1) * P)

    def last_cell(root: int) -> int:
        verified = root + N - 1
        return max(verified, int(draft_cells(root).max())) if hosts_drafts else verified

    # The widest window of any root, because double_buffer does not depend on the root.
    widest = max(len(draft_cells(root)) for root in range(P)) if hosts_drafts else 0
    window = max(N, widest)

    reserves = []
    for resolved_len in range(P, 2 * P):
        lo, hi = setting.roots(resolved_len)
        if policy == "exact":
            last = max(last_cell(root) for root in range(lo, hi + 1))
        else:
            last = lo + window * (depth + 1) - 1
        page_end = next(end for end in range(last + 1, last + 1 + P) if end % P == 0)
        reserves.append(page_end - resolved_len)
    return reserves


def choices(setting: Setting) -> Iterator[Choice]:
    """Return every policy, placement and layout; the first is SGLang's.

    Raises:
        CorruptState: the closed form and the enumeration disagree.
    """
    holey_differs = setting.page_size > 1 and setting.shape.topk > 1
    for policy in POLICIES:
        for placement in ("shared", "split"):
            for layout in ("holey", "dense") if holey_differs else ("dense",):
                if placement == "shared":
                    layers = setting.target_layers + setting.draft_layers
                    groups = [("all", layers, True)]
                else:
                    groups = [
                        ("target", setting.target_layers, False),
                        ("draft", setting.draft_layers, True),
                    ]
                reserves = []
                for name, num_layers, hosts_drafts in groups:
                    how = (setting, policy, hosts_drafts, layout)
                    reserve = Reserve(name, num_layers, closed_form(*how), enumerated(*how))
                    if reserve.closed != reserve.enumerated:
                        raise CorruptState(
                            f"{policy}, {placement}, {layout}, {name} layers: the closed form "
                            f"reserves {reserve.closed}, the enumeration {reserve.enumerated}"
                        )
                    reserves.append(reserve)
                yield Choice(policy, placement, layout, reserves)


def reserve(
    *,
    page_size: int,
    shape: str,
    overlap_depth: int,
    target_layers: int,
    draft_layers: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Compute, compare, print.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: the closed form and the enumeration disagree.
    """
    parsed = parse_shape("--shape", shape)
    if parsed == Shape.none():
        raise ConfigError(f"shape {shape} drafts nothing: there is nothing to compare")
    check_int("page_size", page_size, 1, 1 << 12)
    check_int("overlap_depth", overlap_depth, 0, 16)
    check_int("layers", target_layers, 1, 1 << 12)
    check_int("draft_layers", draft_layers, 1, 1 << 12)
    if plot is not None:
        check_plot(plot)
    setting = Setting(page_size, parsed, overlap_depth, target_layers, draft_layers)
    all_choices = list(choices(setting))
    if json:
        print_json(machine(), _results(all_choices))
    else:
        # Wide enough for every column, also if the output is not a terminal.
        console = Console()
        Console(width=max(console.width, 124)).print(_table(setting, all_choices))
    if plot is not None:
        bars = [result for result in _results(all_choices) if result.unit == LAYER_SLOTS]
        draw("bench reserve", bars, plot)


def _results(all_choices: Sequence[Choice]) -> list[Result]:
    results = []
    upstream = all_choices[0]
    for choice in all_choices:
        for word, combine in (("worst", max), ("mean", statistics.fmean)):
            for group in choice.groups:
                name = f"{choice.name}: {group.name} layers, {word}"
                closed, brute = combine(group.closed), combine(group.enumerated)
                results.append(Result(name, closed, SLOTS, "brute force", brute))
                if combine is not max:
                    held = combine(group.held)
                    name = f"{choice.name}: {group.name} layers, held on average"
                    results.append(Result(name, held, SLOTS, "the claim alone, mean", closed))
            results.append(
                Result(
                    f"{choice.name}: {word}",
                    choice.layer_slots(combine),
                    LAYER_SLOTS,
                    f"{upstream.name} (SGLang)",
                    upstream.layer_slots(combine),
                )
            )
    return results


def _table(setting: Setting, all_choices: Sequence[Choice]) -> Table:
    shape = setting.shape
    table = Table(
        title=f"bench reserve: slots beyond resolved_len at P={setting.page_size}, S/K/N="
        f"{shape.num_steps}/{shape.topk}/{shape.num_draft_tokens}, D={setting.overlap_depth}",
        caption="worst and mean over the page offsets of resolved_len, with D rounds in flight; "
        "held: the mean of a row that keeps its earlier claims; layer-slots: worst x layers; "
        "share: of the first line's, which is what SGLang reserves",
    )
    columns = [
        "layers",
        "worst",
        "brute force",
        "mean",
        "brute force",
        "held",
        LAYER_SLOTS,
        "share",
    ]
    table.add_column("policy, placement, layout", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    upstream = all_choices[0].layer_slots(max)
    for choice in all_choices:
        slots = choice.layer_slots(max)
        for group in choice.groups:
            of_all = group is choice.groups[-1]
            table.add_row(
                choice.name if group is choice.groups[0] else "",
                f"{group.num_layers} {group.name}",
                f"{max(group.closed):,}",
                f"{max(group.enumerated):,}",
                f"{statistics.fmean(group.closed):,.1f}",
                f"{statistics.fmean(group.enumerated):,.1f}",
                f"{statistics.fmean(group.held):,.1f}",
                f"{slots:,}" if of_all else "",
                f"{slots / upstream:.3f}" if of_all else "",
                end_section=of_all,
            )
    return table
