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
from specpool.draft.side_by_side import Ask, Drafting, DraftPart, Float32, Found, Level, Room
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
        drafts, paths = [level.ids[:, 0]], ChainPaths(part)
        paths.add(level)
        if num_steps > 1:
            lens = lanes.seq_lens.ahead(self._first) if self._first else lanes.seq_lens
            ahead = Lanes(lanes.rows, lens, num_steps - 1)
            positions = ahead.positions.view(-1, num_steps - 1)
            for step, view in enumerate(chain_views(self._cache, self._group, ahead)):
                ask = drafts[-1], positions[:, step], view, level.hidden
                following = yield Ask(*ask, paths.found())
                if following is None:
                    break
                level = following
                drafts.append(level.ids[:, 0])
                paths.add(level)
        num_levels = len(drafts)
        drafts += [part.root_tokens] * (num_steps - num_levels)
        tree = self.of(torch.stack([part.root_tokens, *drafts], 1), paths.p())
        return tree if num_levels == num_steps else _ended_at(tree, num_levels)

    def of(self, nodes: Tensor, p: Tensor | None = None) -> DraftTree:
        """Return the chains of tokens, int64 [B, N], the roots first; `p` as in `DraftTree`."""
        links = self._links.get(nodes.shape)
        if links is None:
            size = *nodes.shape, nodes.device
            links = self._links[nodes.shape] = chain_links(*size)
        return DraftTree(nodes, *links, p=p)


class ChainPaths:
    """The `p` of a part's chains, level by level, if it is wanted."""

    def __init__(self, part: DraftPart) -> None:
        """Begin at the roots of `part`."""
        self._part = part
        self._p: list[Tensor] = []  # [B] of each level
        self._values: list[Float32] = []  # [B, 1] of each level, if drafting may end early

    def add(self, level: Level) -> None:
        """Add the next drafts."""
        if not self._part.wants_p:
            return
        assert level.p is not None
        p = level.p[:, 0]
        self._p.append(p * self._p[-1] if self._p else p)
        if self._part.reading is not None:
            values = self._part.reading.value(self._p[-1].numpy()[:, None], len(self._p))
            self._values.append(np.minimum(values, self._values[-1]) if self._values else values)

    def found(self) -> Found | None:
        """Return the drafts so far; None = drafting does not end early."""
        if not self._values:
            return None
        return Found(np.concatenate(self._values, axis=1), self._values[-1][:, 0])

    def p(self) -> Tensor | None:
        """Return the `p` of the chains, 0 where drafting has ended; None = it is not wanted."""
        if not self._part.wants_p:
            return None
        left = [torch.zeros_like(self._p[0])] * (self._part.shape.num_steps - len(self._p))
        return torch.stack([torch.ones_like(self._p[0]), *self._p, *left], 1)


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
        following = yield Ask(ids, positions, view, hidden, so_far)
        if following is None:
            return _ended_at(paths.filled(), step + 1)
        level = following
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

        No later candidate has a larger product than the best path that is kept.
        """
        reading, scores = self._part.reading, self._scores
        if reading is None or scores is None:
            return None
        topk, step = self._part.shape.topk, self._step
        end = topk + (step - 1) * topk * topk
        first = 0 if step == 1 else end - topk * topk
        candidates = self._candidates[0].numpy()[:, :end]
        values = reading.value(candidates[:, first:], step)
        if self._values is not None and self._kept is not None:
            values = np.minimum(values, self._kept.repeat(topk, axis=1))
            values = np.concatenate([self._values, values], axis=1)
        kept = self._candidates[2].numpy()[:, 1 + topk * (step - 1) : 1 + topk * step]
        self._values, self._kept = values, values[np.arange(len(kept))[:, None], kept]
        bound = self._kept.max(axis=1)
        most = scores.numpy().max(axis=1)
        room = Room(self._part.shape.num_draft_tokens - 1, candidates, most)
        return Found(values, np.where(room.is_full(), np.float32(-1), bound), room)

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
