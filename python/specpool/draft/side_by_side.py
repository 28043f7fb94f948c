"""Draft several parts of a round side by side, with one forward of the drafter for each depth.

A part's drafting is a generator. It yields the forward that it needs next, and gets its result.
Every part drafts in its own cells and with its own shape, so its trees are those that it would have
drafted alone.

If the target reads only some of the nodes, drafting ends as soon as no deeper draft can be one of
them (docs/budget.md has the proof). A part whose drafting ends gets None in place of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool._core import Shape
from specpool.attention import AttentionView, ChosenView, JoinedView, View
from specpool.attention.lanes import Lanes
from specpool.draft.base import DraftTree

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the target chooses the drafts that it reads, as `select` does; on the host.

    Attributes:
        num_drafts: the drafts that are read in the whole round, roots not counted.
        factors: float32 [B, D + 1], by which `DraftTree.p` counts at each depth of these lanes.
    """

    num_drafts: int
    factors: Float32

    def of(self, lanes: npt.NDArray[np.intp]) -> Reading:
        """Return the same for some of these lanes."""
        return Reading(self.num_drafts, self.factors[lanes])

    def value(self, p: Float32, depth: int) -> Float32:
        """Return what drafts of one depth count by their own `p`, float32 [B, n]."""
        factors = self.factors[:, min(depth, self.factors.shape[1] - 1), None]
        known = np.minimum(np.fmax(p, 0.0), 1.0)  # NaN becomes 0
        value: Float32 = np.minimum(np.maximum(known * factors, 0.0), 1.0)
        return value


@dataclass(frozen=True, slots=True)
class Room:
    """The room in trees that take the N - 1 best of their candidates, of equal ones the first.

    Attributes:
        num_nodes: N - 1.
        scores: float32 [B, C], by which the candidates so far are compared.
        most: float32 [B], the most that a later candidate can have.
    """

    num_nodes: int
    scores: Float32
    most: Float32

    def is_full(self) -> Bool:
        """Return bool [B]: no later candidate can become a node."""
        if self.scores.shape[1] < self.num_nodes:
            return np.zeros(len(self.scores), bool)
        is_full: Bool = (self.scores >= self.most[:, None]).sum(axis=1) >= self.num_nodes
        return is_full

    def places(self) -> tuple[Bool, Bool]:
        """Return which candidates would be nodes now, and which of them stay it, bool [B, C]."""
        scores, left_out = self.scores, self.scores.shape[1] - self.num_nodes
        is_node = np.ones(scores.shape, bool)
        if left_out > 0:
            last = np.partition(scores, left_out, axis=1)[:, left_out, None]
            better, equal = scores > last, scores == last
            room = self.num_nodes - better.sum(axis=1, keepdims=True)
            is_node = better | (equal & (equal.cumsum(axis=1) <= room))
        return is_node, is_node & (scores >= self.most[:, None])


@dataclass(frozen=True, slots=True)
class Found:
    """The drafts of a part that were found so far, in the order of their nodes.

    Attributes:
        values: float32 [B, C], what each counts in the choice of nodes, as `DraftTree.values`.
        bound: float32 [B], what a draft that is not found yet counts at most; -1 = none will be a
            node. Such a draft comes behind all others of its lane.
        room: of the trees; None = all drafts become nodes.
    """

    values: Float32
    bound: Float32
    room: Room | None = None

    def ranked(self) -> tuple[Float32, Bool]:
        """Return what each draft counts, and whether it surely becomes a node, both [B * (C + 1)].

        A draft that becomes no node counts -1. The last column is of those not found yet.
        """
        values, is_sure = self.values, np.ones(self.values.shape, bool)
        if self.room is not None:
            is_node, is_sure = self.room.places()
            values = np.where(is_node, values, -1.0)
        later = np.zeros(len(values), bool)
        both = np.column_stack([values, self.bound]), np.column_stack([is_sure, later])
        return both[0].ravel(), both[1].ravel()


@dataclass(frozen=True, slots=True)
class DraftPart:
    """Lanes that draft with one shape.

    Attributes:
        lanes: B lanes; `starts` are the roots' positions.
        shape: the shape of all lanes.
        root_tokens: int64 [B], on the device.
        wants_p: whether the trees' `p` is wanted, which costs chains a softmax for each draft.
        reading: what the target reads of them, so that drafting may end early; None = it may not.
            A subclass that changes the trees' `p` afterwards must propose without it.
    """

    lanes: Lanes
    shape: Shape
    root_tokens: Tensor
    wants_p: bool = False
    reading: Reading | None = None


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
    own: dict[str, object] = getattr(drafter, "__dict__", {})
    for names in (own, *map(vars, type(drafter).__mro__)):
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
    found: Found | None = None  # the drafts so far; None = drafting goes on


@dataclass(frozen=True, slots=True)
class Level:
    """The results of a forward: the likeliest next tokens of each of its T tokens."""

    p: Tensor | None  # float32 [T, K or more], best first; None = chains, whose p is not wanted
    ids: Tensor  # int64 [T, K or more]
    hidden: Tensor | None = None

    def part(self, first: int, size: int) -> Level:
        """Return the results of the tokens `[first, first + size)`."""
        mine = slice(first, first + size)
        p = None if self.p is None else self.p[mine]
        return Level(p, self.ids[mine], None if self.hidden is None else self.hidden[mine])


Drafting = Generator[Ask, Level | None, DraftTree]


def run_side_by_side(
    drafting: Sequence[Drafting], run: Callable[[Ask], Level], parts: Sequence[DraftPart]
) -> list[DraftTree]:
    """Run the drafting of all `parts` to its end; `run` runs a forward."""
    trees: dict[int, DraftTree] = {}
    levels: dict[int, Level | None] = dict.fromkeys(range(len(drafting)))
    while levels:
        asks: dict[int, Ask] = {}
        for index, level in levels.items():
            try:
                asks[index] = drafting[index].send(level)  # None begins it, or ends it early
            except StopIteration as end:
                trees[index] = end.value
        levels = {}
        if asks and _is_settled(asks, trees, parts):
            levels = dict.fromkeys(asks)
        elif asks:
            found, first = run(_joined([*asks.values()])), 0
            for index, ask in asks.items():
                levels[index] = found.part(first, len(ask.tokens)) if len(asks) > 1 else found
                first += len(ask.tokens)
    return [trees[index] for index in range(len(drafting))]


def _is_settled(
    asks: dict[int, Ask], trees: dict[int, DraftTree], parts: Sequence[DraftPart]
) -> bool:
    """Return whether the target reads no draft of a deeper level, whatever is drafted there.

    Args:
        asks: the forwards that parts need next, by the parts' indices.
        trees: those of the other parts.
        parts: all that are drafted side by side.
    """
    reading, found = parts[0].reading, {}
    if reading is None:
        return False
    for index, ask in asks.items():
        if ask.found is None:
            return False
        found[index] = ask.found
    # Only drafts that count as much as what may come can be ahead of it. Mostly these are few.
    most = max(float(each.bound.max()) for each in found.values())
    num_ahead = sum(int(np.count_nonzero(each.values >= most)) for each in found.values())
    num_ahead += sum(tree.tokens[:, 1:].numel() for tree in trees.values())
    if num_ahead < reading.num_drafts:
        return False
    for index, tree in trees.items():
        found[index] = _found_of(tree, parts[index])
    ranked = [found[index].ranked() for index in range(len(parts))]
    value, is_sure = (np.concatenate(each) for each in zip(*ranked, strict=True))
    # The first in the order of `select` that is not sure: the greatest, of equal ones the first.
    others = np.where(is_sure, -2.0, value)
    first = int(others.argmax())
    ahead = value > others[first]
    ahead[:first] |= value[:first] == others[first]
    return int(np.count_nonzero(ahead & is_sure)) >= reading.num_drafts


def _found_of(tree: DraftTree, part: DraftPart) -> Found:
    """Return what is found of a part whose trees are complete."""
    assert part.reading is not None
    values = tree.values(torch.from_numpy(part.reading.factors)).numpy()[:, 1:]
    return Found(values, np.full(len(values), -1.0, np.float32))


def _joined(asks: Sequence[Ask]) -> Ask:
    """Return one forward for all."""
    if len(asks) == 1:
        return asks[0]
    views: list[AttentionView | ChosenView] = []
    for ask in asks:
        views += ask.view.views if isinstance(ask.view, JoinedView) else [ask.view]
    hidden = [ask.hidden for ask in asks if ask.hidden is not None]
    return Ask(
        torch.cat([ask.tokens for ask in asks]),
        torch.cat([ask.positions.long() for ask in asks]),
        JoinedView(views),
        torch.cat(hidden) if hidden else None,
    )
