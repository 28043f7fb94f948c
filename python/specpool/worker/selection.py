"""`Selection`: the nodes of a round's trees that the target reads, if it does not read all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool.adaptive.node_budget import NodeChoice
from specpool.arrays import Int64
from specpool.attention import AttentionView, ChosenView
from specpool.draft.base import DraftTree
from specpool.draft.side_by_side import Reading
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload
from specpool.worker.parts import Part
from specpool.worker.verify import Verdict

_TRIES = 8  # see `EarlyEnd`
_LEFT_OUT = -3  # the token of a node that the target does not read: no walk goes there


@dataclass(frozen=True, slots=True)
class Selection:
    """The V likeliest of a round's T nodes, all roots among them, and with each node its parent.

    A node that is left out gets the results of its lane's root. On a GPU its cell gets the root's
    KV, so that the host knows every tensor's size. On a CPU the host knows the nodes: attention is
    asked for these alone, and the other cells are not written, because no node sees them.

    Attributes:
        nodes: int64 [V], ascending.
        places: int64 [T], each node's index in `nodes`; of a node that is left out, its root's.
        is_chosen: bool [T].
        curve: float32 [G], see `NodeResults`.
        num_depths: D + 1.
        of_lanes: int64 [B, Q], the nodes of each lane by their index in it, padded with its root,
            and how many they are, int64 [B], on the host; None = only the device knows.
    """

    nodes: Tensor
    places: Tensor
    is_chosen: Tensor
    curve: Tensor
    num_depths: int
    of_lanes: tuple[Tensor, Int64] | None = None

    def cut(self, part: Part) -> DraftTree:
        """Return a part's trees, in which no walk goes to a node that is left out."""
        tokens = part.tree.tokens.masked_fill(~self.of(part, self.is_chosen), _LEFT_OUT)
        return replace(part.tree, tokens=tokens)

    def view(self, whole: AttentionView) -> AttentionView | ChosenView:
        """Return the view of these nodes, from the view of all."""
        if self.of_lanes is None:
            return ChosenView(whole, self.nodes, self.places)
        queries, counts = self.of_lanes
        lanes = torch.arange(len(counts)).unsqueeze(1)
        return AttentionView(
            page_size=whole.page_size,
            write_slots=whole.write_slots.index_select(0, self.nodes),
            read_pages=whole.read_pages,
            q_lens=counts.tolist(),
            mask_for=lambda window: whole.mask(window)[lanes, queries],
            reader=whole.reader,
            kv_lens=whole.kv_lens,
            attend_with=whole.attend_with,
            scratch=whole.scratch,
        )

    def drawn(self, part: Part, tokens: Tensor) -> Tensor:
        """Return the target's token at each node of a part, int64 [B, N], of those at `nodes`."""
        return tokens.index_select(0, self.of(part, self.places).view(-1)).view_as(part.positions)

    def told(self, parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Tensor:
        """Return what `NodeResults` keeps, for `NodeResults.of`: float32 [B * (D + 3) + G].

        `verdicts` are those of the parts.
        """
        lanes, width = [], self.num_depths
        for part, verdict in zip(parts, verdicts, strict=True):
            tree, is_chosen = part.tree, self.of(part, self.is_chosen)
            guess = _probability(tree) * is_chosen
            by_depth = guess.new_zeros(len(guess), width)
            by_depth.scatter_add_(1, tree.depths.long().clamp(0, width - 1), guess)
            left = (part.num_steps - tree.known_levels).clamp(min=0)
            ends = torch.stack([_goes_on(tree, verdict), left], 1)
            lanes.append(torch.cat([by_depth, ends], 1))
        return torch.cat([torch.cat(lanes).view(-1), self.curve])

    @staticmethod
    def of(part: Part, values: Tensor) -> Tensor:
        """Return a part's values, [B, N], of one for each node of the round, [T]."""
        mine = values[part.first : part.first + part.positions.numel()]
        return mine.view_as(part.positions)


class EarlyEnd:
    """Decides in which rounds drafting may end early.

    To find out costs a little at each level. After 8 rounds that did not end early only one of 8
    rounds tries, until one does. The target reads the same nodes in any case.

    Attributes:
        is_on: whether any round tries.
    """

    def __init__(self, *, is_on: bool) -> None:
        """Try in the first rounds, if `is_on`."""
        self.is_on, self._idle = is_on, 0  # rounds since drafting has ended early

    def reading(self, choice: NodeChoice, start: int, end: int) -> Reading | None:
        """Return what the drafter of the lanes `[start, end)` is told; None = nothing."""
        if not self.is_on or (self._idle > _TRIES and self._idle % _TRIES):
            return None
        return Reading(choice.num_nodes - len(choice.factors), choice.factors[start:end])

    def note(self, parts: Sequence[Part]) -> None:
        """Note whether the drafting of a round with a choice has ended early."""
        ended = any(part.tree.levels is not None for part in parts)
        self._idle = 0 if ended else self._idle + 1


def select(parts: Sequence[Part], choice: NodeChoice) -> Selection:
    """Choose the nodes that the target reads, on the device, without a wait.

    A node counts with the least probability on its path (`DraftTree.values`), so it never comes
    before its parent. Equal ones come in the order of the round.

    Args:
        parts: the round's, with their trees.
        choice: of the round's T nodes.
    """
    device, deepest = parts[0].positions.device, choice.factors.shape[1] - 1
    factors, grid = upload(device, choice.factors, choice.grid - 1)
    of_parts, roots, lane = [], [], 0
    for part in parts:
        batch, size = part.positions.shape
        of_parts.append(part.tree.values(factors[lane : lane + batch]).view(-1))
        firsts = torch.arange(part.first, part.first + batch * size, size, device=device)
        roots.append(firsts.repeat_interleave(size, output_size=batch * size))
        lane += batch
    p, order = torch.cat(of_parts).sort(descending=True, stable=True)
    nodes = order[: choice.num_nodes].sort().values
    is_chosen = torch.zeros_like(p, dtype=torch.bool).index_fill_(0, nodes, True)
    own = is_chosen.cumsum(0) - 1
    places = torch.where(is_chosen, own, own.index_select(0, torch.cat(roots)))
    curve = p.clamp(max=1.0).cumsum(0).index_select(0, grid)
    if any(part.tree.levels is not None for part in parts):
        curve.fill_(torch.nan)  # of the drafts that are missing it knows nothing
    of_lanes = None if runs_kernels(device) else _of_lanes(parts, is_chosen.numpy())
    return Selection(nodes, places, is_chosen, curve, deepest + 1, of_lanes)


def _of_lanes(parts: Sequence[Part], is_chosen: npt.NDArray[np.bool_]) -> tuple[Tensor, Int64]:
    """Return the nodes of each lane that are set in `is_chosen`, bool [T]; see `Selection`."""
    found, num_lanes, most = [], sum(len(part.positions) for part in parts), 0
    for part in parts:
        batch, size = part.positions.shape
        mine = is_chosen[part.first : part.first + batch * size].reshape(batch, size)
        found.append(mine)
        most = max(most, int(mine.sum(axis=1).max()))
    queries, counts, lane = np.zeros((num_lanes, most), np.int64), np.zeros(num_lanes, np.int64), 0
    for mine in found:
        lanes, nodes = mine.nonzero()
        places = mine.cumsum(axis=1)[lanes, nodes] - 1
        queries[lane + lanes, places] = nodes
        counts[lane : lane + len(mine)] = mine.sum(axis=1)
        lane += len(mine)
    return torch.from_numpy(queries), counts


def _probability(tree: DraftTree) -> Tensor:
    """Return what the drafter says of each node, float32 [B, N], in [0, 1]."""
    return tree.known_p.nan_to_num(nan=0.0).clamp(0.0, 1.0)


def _goes_on(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return bool [B]: the walk ended before a right draft that the target has not read.

    Nodes below the levels that were drafted are no drafts.
    """
    lanes, size = tree.tokens.shape
    lens = verdict.accept_len.long().unsqueeze(1)
    last = verdict.accept_index.long().gather(1, lens - 1) % size  # [B, 1]
    is_below = tree.mask.gather(2, last.unsqueeze(1).expand(lanes, size, 1)).squeeze(2)
    is_child = is_below & (tree.depths == tree.depths.gather(1, last) + 1)
    is_right = tree.tokens == verdict.bonus.unsqueeze(1)
    if tree.levels is not None:
        is_right &= tree.depths <= tree.levels.unsqueeze(1)
    return (is_child & is_right).any(1)
