"""`Selection`: the nodes of a round's trees that the target reads, if it does not read all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specpool.adaptive.node_budget import NodeChoice
from specpool.attention import AttentionView, ChosenView
from specpool.draft.base import DraftTree
from specpool.kernels.transfer import upload
from specpool.worker.parts import Part
from specpool.worker.verify import Verdict

_ROOT_P = 2.0  # above the probability of any draft
_LEFT_OUT = -3  # the token of a node that the target does not read: no walk goes there


@dataclass(frozen=True, slots=True)
class Selection:
    """The V likeliest of a round's T nodes, all roots among them, and with each node its parent.

    A node that is left out gets the results of its lane's root, and its cell the root's KV. So the
    host knows every tensor's size, and no cell is read that the round does not write.

    Attributes:
        nodes: int64 [V], ascending.
        places: int64 [T], each node's index in `nodes`; of a node that is left out, its root's.
        is_chosen: bool [T].
        curve: float32 [G], see `NodeResults`.
        num_depths: D + 1.
    """

    nodes: Tensor
    places: Tensor
    is_chosen: Tensor
    curve: Tensor
    num_depths: int

    def cut(self, part: Part) -> DraftTree:
        """Return a part's trees, in which no walk goes to a node that is left out."""
        tokens = part.tree.tokens.masked_fill(~self.of(part, self.is_chosen), _LEFT_OUT)
        return replace(part.tree, tokens=tokens)

    def view(self, whole: AttentionView) -> ChosenView:
        """Return the view of these nodes, from the view of all."""
        return ChosenView(whole, self.nodes, self.places)

    def drawn(self, part: Part, tokens: Tensor) -> Tensor:
        """Return the target's token at each node of a part, int64 [B, N], of those at `nodes`."""
        return tokens.index_select(0, self.of(part, self.places).view(-1)).view_as(part.positions)

    def told(self, parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Tensor:
        """Return what `NodeResults` keeps, for `NodeResults.of`: float32 [B * (D + 2) + G].

        `verdicts` are those of the parts.
        """
        lanes, width = [], self.num_depths
        for part, verdict in zip(parts, verdicts, strict=True):
            tree, is_chosen = part.tree, self.of(part, self.is_chosen)
            guess = _probability(tree) * is_chosen
            by_depth = guess.new_zeros(len(guess), width)
            by_depth.scatter_add_(1, tree.depths.long().clamp(0, width - 1), guess)
            lanes.append(torch.cat([by_depth, _goes_on(tree, verdict).unsqueeze(1)], 1))
        return torch.cat([torch.cat(lanes).view(-1), self.curve])

    @staticmethod
    def of(part: Part, values: Tensor) -> Tensor:
        """Return a part's values, [B, N], of one for each node of the round, [T]."""
        mine = values[part.first : part.first + part.positions.numel()]
        return mine.view_as(part.positions)


def select(parts: Sequence[Part], choice: NodeChoice) -> Selection:
    """Choose the nodes that the target reads, on the device, without a wait.

    A node counts with the least probability on its path, so it never comes before its parent. Equal
    ones come in the order of the round. A probability that is not a number counts as 0.

    Args:
        parts: the round's, with their trees.
        choice: of the round's T nodes.
    """
    device, deepest = parts[0].positions.device, choice.factors.shape[1] - 1
    factors, grid = upload(device, choice.factors, choice.grid - 1)
    of_parts, roots, lane = [], [], 0
    for part in parts:
        tree, (batch, size) = part.tree, part.positions.shape
        depths = tree.depths.long().clamp(0, deepest)
        by_depth = factors[lane : lane + batch].gather(1, depths)
        p = (_probability(tree) * by_depth).clamp(0.0, 1.0)
        p[:, 0] = _ROOT_P
        of_parts.append(torch.where(tree.mask, p.unsqueeze(1), _ROOT_P).amin(2).view(-1))
        firsts = torch.arange(part.first, part.first + batch * size, size, device=device)
        roots.append(firsts.repeat_interleave(size, output_size=batch * size))
        lane += batch
    p, order = torch.cat(of_parts).sort(descending=True, stable=True)
    nodes = order[: choice.num_nodes].sort().values
    is_chosen = torch.zeros_like(p, dtype=torch.bool).index_fill_(0, nodes, True)
    own = is_chosen.cumsum(0) - 1
    places = torch.where(is_chosen, own, own.index_select(0, torch.cat(roots)))
    curve = p.clamp(max=1.0).cumsum(0).index_select(0, grid)
    return Selection(nodes, places, is_chosen, curve, deepest + 1)


def _probability(tree: DraftTree) -> Tensor:
    """Return what the drafter says of each node, float32 [B, N], in [0, 1]."""
    return tree.known_p.nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _goes_on(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return bool [B]: the walk ended before a right draft that the target has not read."""
    lanes, size = tree.tokens.shape
    lens = verdict.accept_len.long().unsqueeze(1)
    last = verdict.accept_index.long().gather(1, lens - 1) % size  # [B, 1]
    is_below = tree.mask.gather(2, last.unsqueeze(1).expand(lanes, size, 1)).squeeze(2)
    is_child = is_below & (tree.depths == tree.depths.gather(1, last) + 1)
    is_right = tree.tokens == verdict.bonus.unsqueeze(1)
    return (is_child & is_right).any(1)
