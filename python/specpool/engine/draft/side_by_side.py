"""Draft several parts of a round side by side, with one forward of the drafter for each depth.

A part's drafting is a generator. It yields the forward that it needs next, and gets its result.
Every part drafts in its own cells and with its own shape, so its trees are those that it would have
drafted alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import AttentionView, JoinedView, View
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Lanes that draft with one shape.

    Attributes:
        lanes: B lanes; `starts` are the roots' positions.
        shape: the shape of all lanes.
        root_tokens: int64 [B], on the device.
    """

    lanes: Lanes
    shape: Shape
    root_tokens: Tensor


class SideBySide(Protocol):
    """A drafter that drafts all parts of a round with one forward for each depth."""

    def propose_parts(self, parts: Sequence[DraftPart]) -> list[DraftTree]:
        """Propose the trees of each part; see `Drafter.propose`."""


class ByParts(SideBySide):
    """The `propose` of drafters that draft side by side: a single part."""

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        root_tokens: Tensor,
        tokens: Sequence[Sequence[int]] | None,
    ) -> DraftTree:
        """Propose a tree for each lane; see `Drafter.propose`."""
        return self.propose_parts([DraftPart(lanes, shape, root_tokens)])[0]


def drafts_side_by_side(drafter: object) -> TypeGuard[SideBySide]:
    """Return whether a drafter drafts side by side what its `propose` would draft.

    A subclass with a `propose` of its own is asked part by part.
    """
    instance_names: dict[str, object] = getattr(drafter, "__dict__", {})
    for names in (instance_names, *map(vars, type(drafter).__mro__)):
        if "propose_parts" in names:
            return True
        if "propose" in names:
            return False
    return False


@dataclass(frozen=True, slots=True)
class Ask:
    """A forward of the drafter that a part needs: T tokens, all of one depth."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int32 or int64 [T]
    view: View
    hidden: Tensor | None = None  # [T, h], what a head reads beside the tokens; a model has none


@dataclass(frozen=True, slots=True)
class Level:
    """The results of a forward: the likeliest next tokens of each of its T tokens."""

    p: Tensor | None  # float32 [T, K or more], best first; None means chains, which need none
    ids: Tensor  # int64 [T, K or more]
    hidden: Tensor | None = None

    def part(self, first: int, size: int) -> Level:
        """Return the results of the tokens `[first, first + size)`."""
        tokens = slice(first, first + size)
        p = None if self.p is None else self.p[tokens]
        return Level(p, self.ids[tokens], None if self.hidden is None else self.hidden[tokens])


Drafting = Generator[Ask, Level, DraftTree]


def run_side_by_side(drafting: Sequence[Drafting], run: Callable[[Ask], Level]) -> list[DraftTree]:
    """Run the drafting of all parts to its end; `run` runs a forward."""
    trees: dict[int, DraftTree] = {}
    levels: dict[int, Level | None] = dict.fromkeys(range(len(drafting)))
    while levels:
        asks: dict[int, Ask] = {}
        for index, level in levels.items():
            try:
                part = drafting[index]
                asks[index] = next(part) if level is None else part.send(level)
            except StopIteration as end:
                trees[index] = end.value
        levels = {}
        if asks:
            joined, first = run(_joined([*asks.values()])), 0
            for index, ask in asks.items():
                size = len(ask.tokens)
                levels[index] = joined.part(first, size) if len(asks) > 1 else joined
                first += size
    return [trees[index] for index in range(len(drafting))]


def _joined(asks: Sequence[Ask]) -> Ask:
    """Return one forward for all."""
    if len(asks) == 1:
        return asks[0]
    views: list[AttentionView] = []
    for ask in asks:
        views += ask.view.views if isinstance(ask.view, JoinedView) else [ask.view]
    hidden = [ask.hidden for ask in asks if ask.hidden is not None]
    return Ask(
        torch.cat([ask.tokens for ask in asks]),
        torch.cat([ask.positions.long() for ask in asks]),
        JoinedView(views),
        torch.cat(hidden) if hidden else None,
    )
