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
        """Ask the drafter for trees and check them.

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
        assert self._drafter is not None
        texts = None
        if self._drafter.reads_tokens and requests:
            texts = [request.tokens for request in requests]
        tree = self._drafter.propose(lanes, shape, roots, texts)
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
