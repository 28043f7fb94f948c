"""`Proposer`: gets the trees of a round, and checks them before the target sees them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.arrays import Int64
from specpool.checks import shown
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import Drafter, DraftTree
from specpool.engine.draft.side_by_side import DraftPart, drafts_side_by_side
from specpool.engine.scheduler.request import Request
from specpool.errors import ShapeError, is_fault
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload

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
    ) -> None:
        """Ask `drafters` for tokens of a vocabulary of this size.

        Args:
            drafters: the engine's; without any, no round drafts.
            vocab_size: the target's.
            device: where the trees are wanted.
        """
        self._drafters, self._vocab_size, self._device = drafters, vocab_size, device

    def propose_parts(
        self, wanted: Sequence[tuple[DraftPart, Sequence[Request]]]
    ) -> list[Proposal]:
        """Make the trees of the parts of a round, each with its lanes' requests; see `propose`.

        The parts of one drafter are drafted side by side, if it can.
        """
        part_indices: dict[int, list[int]] = {}  # drafter -> the parts that are its own
        for index, (_, requests) in enumerate(wanted):
            sources = self._sources(requests)
            if len(sources) == 1 and sources[0] != _FORCED:
                part_indices.setdefault(sources[0], []).append(index)
        proposals: dict[int, Proposal] = {}
        for source, indices in part_indices.items():
            drafter = self._drafters[source]
            parts = [wanted[index][0] for index in indices]
            if drafts_side_by_side(drafter):
                for index, tree in zip(indices, drafter.propose_parts(parts), strict=True):
                    part, requests = wanted[index]
                    checked = self._checked(tree, part.shape, part.root_tokens, requests)
                    proposals[index] = *checked, source
        return [
            proposals.get(index) or self.propose(part.lanes, part.shape, part.root_tokens, requests)
            for index, (part, requests) in enumerate(wanted)
        ]

    def _sources(self, requests: Sequence[Request]) -> list[int]:
        """Return the drafters of lanes, and `_FORCED`; the first drafter in a capture."""
        if not self._drafters:
            return [_FORCED]
        sources = [_FORCED if request.forced else request.drafter for request in requests]
        return sorted({*sources}) if requests else [0]

    def propose(
        self,
        lanes: Lanes,
        shape: Shape,
        roots: Tensor,
        requests: Sequence[Request],
    ) -> Proposal:
        """Make the trees of a part of a round.

        A lane whose form forces its next tokens gets the chain of them. The drafter of each other
        lane's request proposes its tree; in a capture it is the first drafter.

        Args:
            lanes: B lanes.
            shape: the shape of all lanes.
            roots: int64 [B], on the device.
            requests: one per lane; none in a capture.

        Returns:
            The trees, safe for verify to walk, and bool [B], the lanes whose tree was invalid and
            was replaced. None instead of the latter if the host has read the trees and all are
            valid. Last the drafter that has proposed all trees; None if no single drafter did.

        Raises:
            ShapeError: the trees are of another type or shape.
        """
        sources = self._sources(requests)
        if len(sources) == 1:
            (source,) = sources
            trees = self._trees(source, DraftPart(lanes, shape, roots), requests)
            return *trees, None if source == _FORCED else source
        of_lane = np.array([_FORCED if request.forced else request.drafter for request in requests])
        source_lanes = [np.flatnonzero(of_lane == source) for source in sources]
        order, *places = upload(self._device, np.concatenate(source_lanes).argsort(), *source_lanes)
        parts, broken = [], []
        for source, lane_index, lane_numbers in zip(sources, places, source_lanes, strict=True):
            source_part = lanes.filter(of_lane == source).part(
                0, len(lane_numbers), shape.num_draft_tokens
            )
            part_requests = [requests[i] for i in lane_numbers.tolist()]
            tree, is_broken = self._trees(
                source, DraftPart(source_part, shape, roots[lane_index]), part_requests
            )
            parts.append(tree.to(self._device))
            broken.append(is_broken)
        tree = functools.reduce(DraftTree.joined, parts).select(order)
        if all(flags is None for flags in broken):
            return tree, None, None
        is_broken_by_source = [
            torch.zeros(len(lane_numbers), dtype=torch.bool, device=self._device)
            if flags is None
            else flags
            for flags, lane_numbers in zip(broken, source_lanes, strict=True)
        ]
        return tree, torch.cat(is_broken_by_source)[order], None

    def _trees(
        self, source: int, part: DraftPart, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Get the trees of lanes that have one source: a drafter, or `_FORCED`."""
        if source == _FORCED:
            return _forced_trees(requests, part.shape).to(self._device), None
        return self._drafter_trees(self._drafters[source], part, requests)

    def _drafter_trees(
        self, drafter: Drafter, part: DraftPart, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Ask the drafter for the trees of these lanes and check them; see `propose`."""
        shape, roots = part.shape, part.root_tokens
        if drafts_side_by_side(drafter):
            (tree,) = drafter.propose_parts([part])
            return self._checked(tree, shape, roots, requests)
        if not (drafter.reads_tokens and requests):
            tree = drafter.propose(part.lanes, shape, roots, None)
            return self._checked(tree, shape, roots, requests)
        texts, failures = [request.tokens for request in requests], dict[int, str]()
        try:
            tree = drafter.propose(part.lanes, shape, roots, texts)
        except BaseException as error:
            if not is_fault(error):
                raise
            tree, failures = self._one_by_one(drafter, part, requests)
        return self._checked(tree, shape, roots, requests, texts, failures)

    def _one_by_one(
        self, drafter: Drafter, part: DraftPart, requests: Sequence[Request]
    ) -> tuple[DraftTree, dict[int, str]]:
        """Ask for the trees lane by lane, because the drafter has failed for one of the texts.

        Returns:
            The trees, and for each lane for which it fails again, why. Such a lane has no drafts.
        """
        shape, trees, failures = part.shape, [], dict[int, str]()
        for lane, request in enumerate(requests):
            lanes = part.lanes.part(lane, lane + 1, shape.num_draft_tokens)
            root = part.root_tokens[lane : lane + 1]
            try:
                tree = drafter.propose(lanes, shape, root, [request.tokens])
            except BaseException as error:
                if not is_fault(error):
                    raise
                failures[lane] = f"the drafter failed: {type(error).__name__}: {error}"
                tree = _forced_trees([request], shape)
            trees.append(tree)
        return functools.reduce(DraftTree.joined, trees), failures

    def _checked(
        self,
        tree: DraftTree,
        shape: Shape,
        roots: Tensor,
        requests: Sequence[Request],
        texts: Sequence[Sequence[int]] | None = None,
        failures: Mapping[int, str] = MappingProxyType({}),
    ) -> tuple[DraftTree, Tensor | None]:
        """Check a drafter's trees; return them and the broken lanes, see `propose`.

        `texts` are the lanes' tokens, if the drafter has read them on the host. `failures` say why
        it has failed, by lane.
        """
        if not isinstance(tree, DraftTree):
            raise ShapeError(f"a drafter proposes a DraftTree, got {shown(tree)}")
        tree.check(shape, len(roots))
        if texts is not None and tree.tokens.device.type == "cpu":
            last = np.array([text[-1] for text in texts])
            return self._checked_here(tree, shape, last, requests, failures)
        if not runs_kernels(self._device):
            return self._checked_here(tree, shape, roots.numpy(), requests, failures)
        tree = tree.to(self._device)
        links = tree.mask, tree.first_child, tree.next_sibling
        tokens, depths, is_broken = kernels.check_tree(
            tree.tokens, tree.depths, *links, roots, vocab_size=self._vocab_size
        )
        return tree.made_safe(tokens, depths), is_broken

    def _checked_here(
        self,
        tree: DraftTree,
        shape: Shape,
        roots: Int64,
        requests: Sequence[Request],
        failures: Mapping[int, str],
    ) -> tuple[DraftTree, Tensor | None]:
        """Check trees that the host can read; see `_checked`.

        A broken lane's request gets the reason, and its tree is replaced by one without drafts.
        """
        broken = tree.broken_lanes(roots, self._vocab_size)
        reasons = {lane: f"the drafter's tree is no tree: {why}" for lane, why in broken}
        reasons |= failures
        if not reasons:
            return tree.to(self._device), None
        for lane, why in reasons.items():
            requests[lane].draft_error = why
        is_broken = np.zeros(len(requests), np.bool_)
        is_broken[[*reasons]] = True
        (sound,), (wrong,) = (~is_broken).nonzero(), is_broken.nonzero()
        bare = _forced_trees([requests[lane] for lane in wrong.tolist()], shape)
        order = torch.from_numpy(np.concatenate([sound, wrong]).argsort())
        tree = DraftTree.joined(tree.select(torch.from_numpy(sound)), bare).select(order)
        (flags,) = upload(self._device, is_broken)
        return tree.to(self._device), flags


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
