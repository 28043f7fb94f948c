"""Draft chains and trees level by level, as generators for `run_side_by_side`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.engine.attention.lanes import Lanes, chain_views
from specpool.engine.draft.base import DraftTree, Links, chain_links
from specpool.engine.draft.branches import Branches, new_candidates
from specpool.engine.draft.side_by_side import Ask, Drafting, DraftPart, Level
from specpool.engine.memory.kv_cache import KVCache
from specpool.errors import ConfigError


class Chains:
    """Drafting of single branches: each step decodes the next position, with nothing to select."""

    def __init__(self, cache: KVCache, group: int, first: int) -> None:
        """Draft over `group`; the first draft is read at position root + `first`."""
        self._cache, self._group, self._first = cache, group, first
        self._links: dict[tuple[int, ...], Links] = {}  # [B, N] -> the links of chains

    def draft(self, part: DraftPart, level: Level) -> Drafting:
        """Draft the chains of a part; `level` follows the roots."""
        lanes, num_steps = part.lanes, part.shape.num_steps
        drafts = [level.ids[:, 0]]
        if num_steps > 1:
            lens = lanes.seq_lens.ahead(self._first) if self._first else lanes.seq_lens
            ahead = Lanes(lanes.rows, lens, num_steps - 1)
            positions = ahead.positions.view(-1, num_steps - 1)
            for step, view in enumerate(chain_views(self._cache, self._group, ahead)):
                level = yield Ask(drafts[-1], positions[:, step], view, level.hidden)
                drafts.append(level.ids[:, 0])
        return self.trees(torch.stack([part.root_tokens, *drafts], 1))

    def trees(self, nodes: Tensor) -> DraftTree:
        """Return the chains of tokens, int64 [B, N], the roots first."""
        links = self._links.get(nodes.shape)
        if links is None:
            size = *nodes.shape, nodes.device
            links = self._links[nodes.shape] = chain_links(*size)
        return DraftTree.chain(nodes, links)


def draft_trees(part: DraftPart, level: Level, branches: Branches, first: int) -> Drafting:
    """Select branches level by level, then build the trees from the best candidates.

    Args:
        part: the lanes and their shape.
        level: follows the roots.
        branches: where the branches write.
        first: the number of the first drafts' step in `branches`: 0, or 1 if the root is step 0.
    """
    lanes, shape = part.lanes, part.shape
    num_steps, topk, batch = shape.num_steps, shape.topk, len(lanes.seq_lens)
    paths = BestPaths(part)
    lane_column = torch.arange(batch, device=part.root_tokens.device).unsqueeze(1)  # [B, 1]
    for step in range(num_steps):
        ids, parents = paths.add(level)
        if step == num_steps - 1:
            break
        # The lane of the last step that each branch continues. Step 0 has one lane per row.
        origins = lane_column.expand(-1, topk) if step == 0 else lane_column * topk + parents
        hidden = level.hidden
        if hidden is not None:
            hidden = hidden.index_select(0, origins.reshape(-1))
        if first and step == 0:  # every branch continues the root
            parents = torch.zeros_like(parents)
        positions = (lanes.starts + (step + first)).unsqueeze(1).expand(-1, topk).reshape(-1)
        view = branches.view(step + first, parents)
        level = yield Ask(ids, positions, view, hidden)
    return paths.trees()


class BestPaths:
    """The best paths of a part's trees, found level by level.

    A level keeps the K paths of the largest products of probabilities, and the trees get the N - 1
    best of all that were found. A path never comes without its start. Of equals the first wins.
    """

    def __init__(self, part: DraftPart) -> None:
        """Select the trees of `part`."""
        self._part, self._step = part, 0
        self._scores: Tensor | None = None
        lanes, roots = part.lanes, part.root_tokens
        self._candidates = new_candidates(len(lanes.seq_lens), part.shape, roots.device)

    def add(self, level: Level) -> tuple[Tensor, Tensor]:
        """Add the tokens that follow the kept paths; the first time, those that follow the roots.

        Args:
            level: B lanes, then B * K.

        Returns:
            The last tokens of the paths that are kept now, int64 [B * K], and the path that each
            continues, int64 [B, K].
        """
        assert level.p is not None
        topk = self._part.shape.topk
        likeliest = level.p[:, :topk].contiguous(), level.ids[:, :topk].contiguous()
        ids, parents, self._scores = kernels.select_topk(
            self._step, *likeliest, self._scores, *self._candidates
        )
        self._step += 1
        return ids, parents

    def trees(self) -> DraftTree:
        """Return the trees of the best paths."""
        shape = self._part.shape
        tokens, depths, mask, first_child, next_sibling, _ = kernels.build_tree(
            *self._candidates,
            self._part.root_tokens,
            topk=shape.topk,
            num_draft_tokens=shape.num_draft_tokens,
        )
        return DraftTree(tokens, depths, mask, first_child, next_sibling)


def check_shapes(shapes: Sequence[Shape], num_tokens: int, knower: str) -> None:
    """Check that trees of these shapes can be selected level by level.

    Args:
        shapes: the shapes that may run.
        num_tokens: tokens that the drafter can propose.
        knower: what knows these tokens, for the message.

    Raises:
        ConfigError: a shape cannot, or its topk is above `num_tokens`.
    """
    for shape in shapes:
        if shape.num_draft_tokens > 1:
            Shape.eagle(shape.num_steps, shape.topk, shape.num_draft_tokens)
    topk = max(shape.topk for shape in shapes)
    if topk > num_tokens:
        raise ConfigError(f"topk {topk} is above the {num_tokens} tokens that {knower}")
