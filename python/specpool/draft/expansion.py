"""Draft chains and trees level by level, as generators for `run_side_by_side`."""

from __future__ import annotations

import torch

from specpool import kernels
from specpool.attention.lanes import Lanes, chain_views
from specpool.draft.base import DraftTree, Links, chain_links
from specpool.draft.branches import Branches, new_candidates
from specpool.draft.side_by_side import Ask, Drafting, DraftPart, Level
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
                level = yield Ask(drafts[-1], positions[:, step], view, level.hidden)
                drafts.append(level.ids[:, 0])
                levels.append(level)
        nodes = torch.stack([part.root_tokens, *drafts], 1)
        links = self._links.get(nodes.shape)
        if links is None:
            size = *nodes.shape, nodes.device
            links = self._links[nodes.shape] = chain_links(*size)
        p = None
        if part.wants_p:
            of_drafts = [each.p[:, 0] for each in levels if each.p is not None]
            p = torch.stack([torch.ones_like(of_drafts[0]), *of_drafts], 1).cumprod(1)
        return DraftTree(nodes, *links, p=p)


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
    device = part.root_tokens.device
    candidates = new_candidates(batch, shape, device)
    each = torch.arange(batch, device=device).unsqueeze(1)  # [B, 1]
    scores = None
    for step in range(num_steps):
        assert level.p is not None
        likeliest = level.p[:, :topk].contiguous(), level.ids[:, :topk].contiguous()
        ids, parents, scores = kernels.select_topk(step, *likeliest, scores, *candidates)
        if step == num_steps - 1:
            break
        # The lane of the last step that each branch continues. Step 0 has one lane per row.
        origins = each.expand(-1, topk) if step == 0 else each * topk + parents
        hidden = level.hidden
        if hidden is not None:
            hidden = hidden.index_select(0, origins.reshape(-1))
        if first and step == 0:  # every branch continues the root
            parents = torch.zeros_like(parents)
        positions = (lanes.starts + (step + first)).unsqueeze(1).expand(-1, topk).reshape(-1)
        level = yield Ask(ids, positions, branches.view(step + first, parents), hidden)
    num_nodes = shape.num_draft_tokens
    tokens, depths, mask, first_child, next_sibling, _ = kernels.build_tree(
        *candidates, part.root_tokens, topk=topk, num_draft_tokens=num_nodes
    )
    p = None
    if part.wants_p:  # of the candidates that became nodes, in their order
        of_all = candidates[0]
        best = of_all.argsort(dim=1, descending=True, stable=True)[:, : num_nodes - 1]
        p = torch.ones(batch, num_nodes, device=device)
        p[:, 1:] = of_all.gather(1, best.sort(1).values)
    return DraftTree(tokens, depths, mask, first_child, next_sibling, p)
