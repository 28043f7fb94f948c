"""`Selection`: the nodes of a round's trees that the target reads, if it does not read all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpool.attention import AttentionView, ChosenView
from specpool.worker.parts import Part

_ROOT_P = 2.0  # above the probability of any draft
_LEFT_OUT = -3  # the token of a node that the target does not read: no walk goes there


@dataclass(frozen=True, slots=True)
class Selection:
    """The V likeliest of a round's T nodes, all roots among them, and with each node its parent.

    A node that is left out gets the results of its lane's root, and its cell the root's KV. So every
    tensor has a size that the host knows, and no cell is read that the round does not write.

    Attributes:
        nodes: int64 [V], ascending.
        places: int64 [T], each node's index in `nodes`; of a node that is left out, its root's.
        is_chosen: bool [T].
        p: float32 [T], the probabilities that decided; of the roots 2.
    """

    nodes: Tensor
    places: Tensor
    is_chosen: Tensor
    p: Tensor

    def cut(self, part: Part) -> Part:
        """Return a part in which no walk goes to a node that is left out."""
        tokens = part.tree.tokens.masked_fill(~self.of(part, self.is_chosen), _LEFT_OUT)
        return replace(part, tree=replace(part.tree, tokens=tokens))

    def view(self, whole: AttentionView) -> ChosenView:
        """Return the view of these nodes, from the view of all."""
        return ChosenView(whole, self.nodes, self.places)

    def drawn(self, part: Part, tokens: Tensor) -> Tensor:
        """Return the target's token at each node of a part, int64 [B, N], of those at `nodes`."""
        return tokens.index_select(0, self.of(part, self.places).view(-1)).view_as(part.positions)

    @staticmethod
    def of(part: Part, values: Tensor) -> Tensor:
        """Return a part's values, [B, N], of one for each node of the round, [T]."""
        mine = values[part.first : part.first + part.positions.numel()]
        return mine.view_as(part.positions)


def select(parts: Sequence[Part], num_nodes: int, factors: Tensor) -> Selection:
    """Choose the nodes that the target reads, on the device, without a wait.

    A node counts with the least probability on its path, so it never comes before its parent. Equal
    ones come in the order of the round. A probability that is not a number counts as 0.

    Args:
        parts: the round's, with their trees.
        num_nodes: V, at least the number of lanes; T or more means all.
        factors: float32 [B, D + 1], by which each lane's `DraftTree.p` counts at each depth.
    """
    device, deepest = factors.device, factors.shape[1] - 1
    of_parts, roots, lane = [], [], 0
    for part in parts:
        tree, (batch, size) = part.tree, part.positions.shape
        depths = tree.depths.long().clamp(0, deepest)
        by_depth = factors[lane : lane + batch].gather(1, depths)
        p = (tree.known_p * by_depth).nan_to_num(nan=0.0).clamp(0.0, 1.0)
        p[:, 0] = _ROOT_P
        of_parts.append(torch.where(tree.mask, p.unsqueeze(1), _ROOT_P).amin(2).view(-1))
        firsts = torch.arange(part.first, part.first + batch * size, size, device=device)
        roots.append(firsts.repeat_interleave(size, output_size=batch * size))
        lane += batch
    p = torch.cat(of_parts)
    nodes = p.argsort(descending=True, stable=True)[:num_nodes].sort().values
    is_chosen = torch.zeros_like(p, dtype=torch.bool).index_fill_(0, nodes, True)
    own = is_chosen.cumsum(0) - 1
    places = torch.where(is_chosen, own, own.index_select(0, torch.cat(roots)))
    return Selection(nodes, places, is_chosen, p)
