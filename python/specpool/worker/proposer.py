"""`Proposer`: gets the trees of a round, and checks them before the target sees them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.attention.lanes import Lanes
from specpool.draft.base import Drafter, DraftTree
from specpool.errors import ShapeError
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload
from specpool.scheduler.requests.request import Request

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

    def propose(
        self, lanes: Lanes, shape: Shape, roots: Tensor, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None, int | None]:
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
            was replaced. None instead of the latter if the host could read the trees. Last the
            drafter that has proposed all trees; None = there is no single one.

        Raises:
            ShapeError: the trees are of another type or shape, or the host found invalid values.
        """
        by = [_FORCED if request.forced else request.drafter for request in requests]
        sources = sorted({*by}) if requests else [0]
        if len(sources) == 1 or not self._drafters:
            (source,) = sources if self._drafters else (_FORCED,)
            trees = self._of(source, lanes, shape, roots, requests)
            return *trees, None if source == _FORCED else source
        of_lane = np.array(by)
        mine = [np.flatnonzero(of_lane == source) for source in sources]
        order, *places = upload(self._device, np.concatenate(mine).argsort(), *mine)
        found, broken = [], []
        for source, place, lane in zip(sources, places, mine, strict=True):
            some = lanes.filter(of_lane == source).part(0, len(lane), shape.num_draft_tokens)
            theirs = [requests[i] for i in lane.tolist()]
            tree, is_broken = self._of(source, some, shape, roots[place], theirs)
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
        self, source: int, lanes: Lanes, shape: Shape, roots: Tensor, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Get the trees of lanes that have one source: a drafter, or `_FORCED`."""
        if source == _FORCED:
            return _forced_trees(requests, shape).to(self._device), None
        return self._of_drafter(self._drafters[source], lanes, shape, roots, requests)

    def _of_drafter(
        self,
        drafter: Drafter,
        lanes: Lanes,
        shape: Shape,
        roots: Tensor,
        requests: Sequence[Request],
    ) -> tuple[DraftTree, Tensor | None]:
        """Ask the drafter for the trees of these lanes and check them; see `propose`."""
        texts = None
        if drafter.reads_tokens and requests:
            texts = [request.tokens for request in requests]
        tree = drafter.propose(lanes, shape, roots, texts)
        if not isinstance(tree, DraftTree):
            raise ShapeError(f"a drafter proposes a DraftTree, got {tree!r:.80}")
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
        return DraftTree(tokens, depths, *links), is_broken


def _forced_trees(requests: Sequence[Request], shape: Shape) -> DraftTree:
    """Return trees whose first nodes are the requests' forced tokens, on the host.

    The other nodes repeat the root's token: in a chain behind the span, in a tree below the root.
    """
    num_nodes = shape.num_draft_tokens
    tokens = np.empty((len(requests), num_nodes), np.int64)
    parents = np.zeros((len(requests), num_nodes), np.int32)
    parents[:, 0] = -1
    is_chain = num_nodes == shape.num_steps + 1
    for lane, request in enumerate(requests):
        span = request.forced[: shape.num_steps]
        tokens[lane] = request.tokens[-1]
        tokens[lane, 1 : 1 + len(span)] = span
        last = num_nodes if is_chain else 1 + len(span)
        parents[lane, 1:last] = np.arange(last - 1)
    return DraftTree.from_parents(tokens, parents)
