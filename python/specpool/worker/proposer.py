"""`Proposer`: gets the trees of a round, and checks them before the target sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.attention.lanes import Lanes
from specpool.checks import shown
from specpool.draft.base import Drafter, DraftTree
from specpool.draft.side_by_side import DraftPart, Reading, drafts_side_by_side
from specpool.errors import ShapeError
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload
from specpool.scheduler.requests.request import Request

#: Trees, the lanes whose tree was invalid, and the drafter of all; see `Proposer.propose`.
Proposal = tuple[DraftTree, Tensor | None, int | None]

_FORCED = -1  # in place of a drafter: the form of the text forces the tokens


class Proposer:
    """A source of draft trees that verify can walk: the drafter of each lane's request."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        vocab_size: int,
        device: torch.device,
        *,
        keeps_state: bool,
    ) -> None:
        """Ask `drafters` for tokens of a vocabulary of this size.

        Args:
            drafters: the engine's; none = no round drafts.
            vocab_size: the target's.
            device: where the trees are wanted.
            keeps_state: the target verifies chains alone.
        """
        self._drafters, self._vocab_size, self._device = drafters, vocab_size, device
        self._keeps_state = keeps_state

    def propose_parts(
        self, wanted: Sequence[tuple[DraftPart, Sequence[Request]]]
    ) -> list[Proposal]:
        """Make the trees of the parts of a round, each with its lanes' requests; see `propose`.

        The parts of one drafter are drafted side by side, if it can.
        """
        mine: dict[int, list[int]] = {}  # drafter -> the parts that are its own
        for index, (_, requests) in enumerate(wanted):
            sources = self._sources(requests)
            if len(sources) == 1 and sources[0] != _FORCED:
                mine.setdefault(sources[0], []).append(index)
        found: dict[int, Proposal] = {}
        for source, indices in mine.items():
            drafter = self._drafters[source]
            parts = [wanted[index][0] for index in indices]
            if drafts_side_by_side(drafter):
                for index, tree in zip(indices, drafter.propose_parts(parts), strict=True):
                    part = wanted[index][0]
                    checked = self._checked(tree, part.shape, part.root_tokens, None)
                    found[index] = *checked, source
        return [
            found.get(index)
            or self.propose(
                part.lanes,
                part.shape,
                part.root_tokens,
                requests,
                wants_p=part.wants_p,
                reading=part.reading,
            )
            for index, (part, requests) in enumerate(wanted)
        ]

    def _sources(self, requests: Sequence[Request]) -> list[int]:
        """Return the drafters of lanes, and `_FORCED`; the first drafter in a capture."""
        if not self._drafters:
            return [_FORCED]
        by = [_FORCED if request.forced else request.drafter for request in requests]
        return sorted({*by}) if requests else [0]

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        roots: Tensor,
        requests: Sequence[Request],
        *,
        wants_p: bool = False,
        reading: Reading | None = None,
    ) -> Proposal:
        """Make the trees of a part of a round.

        A lane whose form forces its next tokens gets the chain of them. The drafter of each other
        lane's request proposes its tree; in a capture it is the first drafter.

        Args:
            lanes: B lanes.
            shape: the shape of all lanes.
            roots: int64 [B], on the device.
            requests: one per lane; none in a capture.
            wants_p: see `DraftPart`.
            reading: see `DraftPart`.

        Returns:
            The trees, safe for verify to walk, and bool [B], the lanes whose tree was invalid and
            was replaced. None instead of the latter if the host could read the trees. Last the
            drafter that has proposed all trees; None = there is no single one.

        Raises:
            ShapeError: the trees are of another type or shape, or the host found invalid values.
        """
        sources = self._sources(requests)
        if len(sources) == 1:
            (source,) = sources
            trees = self._of(source, DraftPart(lanes, shape, roots, wants_p, reading), requests)
            return *trees, None if source == _FORCED else source
        of_lane = np.array([_FORCED if each.forced else each.drafter for each in requests])
        mine = [np.flatnonzero(of_lane == source) for source in sources]
        order, *places = upload(self._device, np.concatenate(mine).argsort(), *mine)
        found, broken = [], []
        for source, place, lane in zip(sources, places, mine, strict=True):
            some = lanes.filter(of_lane == source).part(0, len(lane), shape.num_draft_tokens)
            theirs = [requests[i] for i in lane.tolist()]
            of_reading = None if reading is None else reading.of(lane)
            part = DraftPart(some, shape, roots[place], wants_p, of_reading)
            tree, is_broken = self._of(source, part, theirs)
            found.append(tree.to(self._device))
            broken.append(is_broken)
        tree = functools.reduce(DraftTree.joined, found).of(order)
        if all(each is None for each in broken):
            return tree, None, None
        flags = [
            torch.zeros(len(lane), dtype=torch.bool, device=self._device) if each is None else each
            for each, lane in zip(broken, mine, strict=True)
        ]
        return tree, torch.cat(flags)[order], None

    def _of(
        self, source: int, part: DraftPart, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Get the trees of lanes that have one source: a drafter, or `_FORCED`."""
        if source == _FORCED:
            return _forced_trees(requests, part.shape).to(self._device), None
        return self._of_drafter(self._drafters[source], part, requests)

    def _of_drafter(
        self, drafter: Drafter, part: DraftPart, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Ask the drafter for the trees of these lanes and check them; see `propose`."""
        shape, roots, texts = part.shape, part.root_tokens, None
        if drafts_side_by_side(drafter):
            (tree,) = drafter.propose_parts([part])
            return self._checked(tree, shape, roots, None)
        if drafter.reads_tokens and requests:
            texts = [request.tokens for request in requests]
        tree = drafter.propose(part.lanes, shape, roots, texts)
        return self._checked(tree, shape, roots, texts)

    def _checked(
        self,
        tree: DraftTree,
        shape: Shape,
        roots: Tensor,
        texts: Sequence[Sequence[int]] | None,
    ) -> tuple[DraftTree, Tensor | None]:
        """Check a drafter's trees; return them and the broken lanes, see `propose`."""
        if not isinstance(tree, DraftTree):
            raise ShapeError(f"a drafter proposes a DraftTree, got {shown(tree)}")
        tree.check(shape, len(roots))
        if self._keeps_state:
            tree.check_chain()
        if texts is not None and tree.tokens.device.type == "cpu":
            last = np.array([text[-1] for text in texts])
            tree.check_values(last, self._vocab_size)
            return tree.to(self._device), None
        if not runs_kernels(self._device):
            tree.check_values(roots.numpy(), self._vocab_size)
            return tree, None
        tree = tree.to(self._device)
        links = tree.mask, tree.first_child, tree.next_sibling
        tokens, depths, is_broken = kernels.check_tree(
            tree.tokens, tree.depths, *links, roots, vocab_size=self._vocab_size
        )
        return replace(tree, tokens=tokens, depths=depths), is_broken


def _forced_trees(requests: Sequence[Request], shape: Shape) -> DraftTree:
    """Return trees whose first nodes are the requests' forced tokens, on the host.

    A span is cut to the tree's depth and to its nodes, of which there may be fewer. The other nodes
    repeat the root's token: in a chain behind the span, in a tree below the root.
    """
    num_nodes = shape.num_draft_tokens
    tokens = np.empty((len(requests), num_nodes), np.int64)
    parents = np.zeros((len(requests), num_nodes), np.int32)
    parents[:, 0] = -1
    is_chain = num_nodes == shape.num_steps + 1
    for lane, request in enumerate(requests):
        span = request.forced[: shape.max_accept_len - 1]
        tokens[lane] = request.tokens[-1]
        tokens[lane, 1 : 1 + len(span)] = span
        last = num_nodes if is_chain else 1 + len(span)
        parents[lane, 1:last] = np.arange(last - 1)
    return DraftTree.from_parents(tokens, parents)
