"""`Proposer`: gets the trees of a round, and checks them before the target sees them."""

from __future__ import annotations

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


class Proposer:
    """A source of draft trees that verify can walk."""

    def __init__(
        self, drafter: Drafter | None, vocab_size: int, device: torch.device, *, keeps_state: bool
    ) -> None:
        """Ask `drafter` for tokens of a vocabulary of this size.

        Args:
            drafter: None = no round drafts.
            vocab_size: the target's.
            device: where the trees are wanted.
            keeps_state: the target verifies chains alone.
        """
        self._drafter, self._vocab_size, self._device = drafter, vocab_size, device
        self._keeps_state = keeps_state

    def propose(
        self, lanes: Lanes, shape: Shape, roots: Tensor, requests: Sequence[Request]
    ) -> tuple[DraftTree, Tensor | None]:
        """Make the trees of a part of a round.

        A lane whose form forces its next tokens gets the chain of them. The drafter proposes the
        trees of the other lanes alone.

        Args:
            lanes: B lanes.
            shape: the shape of all lanes.
            roots: int64 [B], on the device.
            requests: one per lane; none in a capture.

        Returns:
            The trees, safe for verify to walk, and bool [B], the lanes whose tree was invalid and
            was replaced. None instead of the latter if the host could read the trees.

        Raises:
            ShapeError: the trees are of another type or shape, or the host found invalid values.
        """
        is_forced = np.array([bool(request.forced) for request in requests], np.bool_)
        if self._drafter is not None and not is_forced.any():
            return self._of_drafter(self._drafter, lanes, shape, roots, requests)
        if self._drafter is None or is_forced.all():
            return _forced_trees(requests, shape).to(self._device), None
        (free,), (forced,) = (~is_forced).nonzero(), is_forced.nonzero()
        order, others = upload(
            self._device, np.concatenate([free, forced]).argsort(), free.astype(np.int64)
        )
        mine = lanes.filter(~is_forced).part(0, len(free), shape.num_draft_tokens)
        theirs = [requests[lane] for lane in free.tolist()]
        drafted, is_broken = self._of_drafter(self._drafter, mine, shape, roots[others], theirs)
        chains = _forced_trees([requests[lane] for lane in forced.tolist()], shape).to(self._device)
        if is_broken is not None:
            is_broken = torch.cat([is_broken, is_broken.new_zeros(len(forced))])[order]
        return DraftTree.joined(drafted, chains).of(order), is_broken

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
