"""Draft chains and trees level by level, as generators for `run_side_by_side`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool._core import Shape
from specpool.attention.lanes import Lanes, chain_views
from specpool.draft.base import DraftTree, Links, chain_links
from specpool.draft.branches import Branches, new_candidates
from specpool.draft.side_by_side import Ask, Drafting, DraftPart, Float32, Found, Level
from specpool.errors import ConfigError
from specpool.memory.kv_cache import KVCache


class Chains:
    """Drafting of single branches: each step decodes the next position, with nothing to select."""

    def __init__(self, cache: KVCache, group: int, first: int) -> None:
        """Draft over `group`; the first draft is read at position root + `first`."""
        self._cache, self._group, self._first = cache, group, first
        self._links: dict[tuple[int, ...], Links] = {}  # [B, N] -> the links of chains

    def draft(self, part: DraftPart, level: Level) -> Drafting:
        """Draft the chains of a part; `level` follows the roots."""
        lanes, num_steps = part.lanes, part.shape.num_steps
        drafts, levels = [level.ids[:, 0]], [level]
        if num_steps > 1:
            lens = lanes.seq_lens.ahead(self._first) if self._first else lanes.seq_lens
            ahead = Lanes(lanes.rows, lens, num_steps - 1)
            positions = ahead.positions.view(-1, num_steps - 1)
            for step, view in enumerate(chain_views(self._cache, self._group, ahead)):
                ask = drafts[-1], positions[:, step], view, level.hidden
                found = yield Ask(*ask, _chains_found(part, levels))
                if found is None:
                    return self._ended(part, drafts, levels)
                level = found
                drafts.append(level.ids[:, 0])
                levels.append(level)
        p = _path_p(levels) if part.wants_p else None
        return self.of(torch.stack([part.root_tokens, *drafts], 1), p)

    def _ended(
        self, part: DraftPart, drafts: Sequence[Tensor], levels: Sequence[Level]
    ) -> DraftTree:
        """Return the chains whose drafting has ended with these drafts."""
        num_left = part.shape.num_steps - len(drafts)
        left = part.root_tokens.unsqueeze(1).expand(-1, num_left)
        p = torch.nn.functional.pad(_path_p(levels), (0, num_left))
        tree = self.of(torch.cat([torch.stack([part.root_tokens, *drafts], 1), left], 1), p)
        return _ended_at(tree, len(drafts))

    def of(self, nodes: Tensor, p: Tensor | None = None) -> DraftTree:
        """Return the chains of tokens, int64 [B, N], the roots first; `p` as in `DraftTree`."""
        links = self._links.get(nodes.shape)
        if links is None:
            size = *nodes.shape, nodes.device
            links = self._links[nodes.shape] = chain_links(*size)
        return DraftTree(nodes, *links, p=p)


def _path_p(levels: Sequence[Level]) -> Tensor:
    """Return the `p` of chains of these levels, float32 [B, 1 + levels]."""
    of_drafts = [each.p[:, 0] for each in levels if each.p is not None]
    return torch.stack([torch.ones_like(of_drafts[0]), *of_drafts], 1).cumprod(1)


def _chains_found(part: DraftPart, levels: Sequence[Level]) -> Found | None:
    """Return the drafts of chains so far, all of which will be nodes."""
    if part.reading is None:
        return None
    own = part.reading.value(_path_p(levels).numpy()[:, 1:], range(1, len(levels) + 1))
    values = np.minimum.accumulate(own, axis=1)
    return Found(values, np.ones(values.shape, bool), values[:, -1])


def _ended_at(tree: DraftTree, num_levels: int) -> DraftTree:
    return replace(tree, levels=tree.depths.new_full((len(tree.depths),), num_levels))


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
    each = torch.arange(batch, device=part.root_tokens.device).unsqueeze(1)  # [B, 1]
    for step in range(num_steps):
        ids, parents = paths.add(level)
        if step == num_steps - 1:
            break
        so_far = paths.found()
        # The lane of the last step that each branch continues. Step 0 has one lane per row.
        origins = each.expand(-1, topk) if step == 0 else each * topk + parents
        hidden = level.hidden
        if hidden is not None:
            hidden = hidden.index_select(0, origins.reshape(-1))
        if first and step == 0:  # every branch continues the root
            parents = torch.zeros_like(parents)
        positions = (lanes.starts + (step + first)).unsqueeze(1).expand(-1, topk).reshape(-1)
        view = branches.view(step + first, parents)
        found = yield Ask(ids, positions, view, hidden, so_far)
        if found is None:
            return _ended_at(paths.filled(), step + 1)
        level = found
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
        # On the host, if drafting may end early; see `found`.
        self._values: Float32 | None = None  # [B, C], of the candidates so far
        self._kept: Float32 | None = None  # [B, K], of the paths that are kept

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

    def found(self) -> Found | None:
        """Return the candidates so far; call it after each level, on a CPU.

        No later candidate has a larger product than the best kept path, and of equals the first
        wins. So a candidate that is among the N - 1 best now and has no less will be a node.
        """
        reading, scores = self._part.reading, self._scores
        if reading is None or scores is None:
            return None
        topk, num_drafts = self._part.shape.topk, self._part.shape.num_draft_tokens - 1
        end = topk + (self._step - 1) * topk * topk
        first = 0 if self._step == 1 else end - topk * topk
        candidates = self._candidates[0].numpy()[:, :end]
        values = reading.value(candidates[:, first:], [self._step])
        if self._values is not None and self._kept is not None:
            values = np.minimum(values, self._kept.repeat(topk, axis=1))
            values = np.concatenate([self._values, values], axis=1)
        kept = self._candidates[2].numpy()[:, 1 + topk * (self._step - 1) :][:, :topk]
        self._values, self._kept = values, np.take_along_axis(values, kept, 1)
        is_sure = candidates >= scores.numpy().max(axis=1, keepdims=True)
        bound = self._kept.max(axis=1)
        if end >= num_drafts:
            best = np.argsort(-candidates, axis=1, kind="stable")[:, :num_drafts]
            is_node = np.zeros(candidates.shape, bool)
            np.put_along_axis(is_node, best, values=True, axis=1)
            values, is_sure = np.where(is_node, values, -1), is_sure & is_node
            bound = np.where(is_sure.sum(axis=1) == num_drafts, -1, bound)
        return Found(values, is_sure, bound)

    def filled(self) -> DraftTree:
        """Return the trees of what was found so far, and of paths of probability 0 behind it."""
        shape, roots = self._part.shape, self._part.root_tokens
        ids = roots.repeat_interleave(shape.topk).unsqueeze(1).expand(-1, shape.topk)
        nothing = Level(torch.zeros_like(ids, dtype=torch.float32), ids)
        while self._step < shape.num_steps:
            self.add(nothing)
        return self.trees()

    def trees(self) -> DraftTree:
        """Return the trees of the best paths."""
        shape = self._part.shape
        tokens, depths, mask, first_child, next_sibling, _ = kernels.build_tree(
            *self._candidates,
            self._part.root_tokens,
            topk=shape.topk,
            num_draft_tokens=shape.num_draft_tokens,
        )
        p = None
        if self._part.wants_p:  # of the candidates that became nodes, in their order
            of_all = self._candidates[0]
            best = of_all.argsort(dim=1, descending=True, stable=True)
            chosen = best[:, : shape.num_draft_tokens - 1].sort(1).values
            p = of_all.new_ones(len(of_all), shape.num_draft_tokens)
            p[:, 1:] = of_all.gather(1, chosen)
        return DraftTree(tokens, depths, mask, first_child, next_sibling, p)


def check_shapes(shapes: Sequence[Shape], num_tokens: int, who: str) -> None:
    """Check that trees of these shapes can be selected level by level.

    Args:
        shapes: the shapes that may run.
        num_tokens: tokens that the drafter can propose.
        who: what knows these tokens, for the message.

    Raises:
        ConfigError: a shape cannot, or its topk is above `num_tokens`.
    """
    for shape in shapes:
        if shape.num_draft_tokens > 1:
            Shape.eagle(shape.num_steps, shape.topk, shape.num_draft_tokens)
    topk = max(shape.topk for shape in shapes)
    if topk > num_tokens:
        raise ConfigError(f"topk {topk} is above the {num_tokens} tokens that {who}")
