"""`BlockDrafter`: one forward of a block drafter (DFlash) proposes the tokens of all depths.

Draft KV cell p of a row is made of the target's features at p alone. In a round the block, the root
and S masks, writes its own keys and values to the S + 1 cells from the root's position on. They are
temporary: `extend` writes those that become final anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import AttentionView, JoinedView, View, attend
from specpool.engine.attention.lanes import Lanes, own_view
from specpool.engine.attention.writes import write_kv
from specpool.engine.draft.base import DraftTree
from specpool.engine.draft.branches import draft_window
from specpool.engine.draft.expansion import BestPaths, Chains, check_shapes
from specpool.engine.draft.side_by_side import ByParts, DraftPart, Level
from specpool.engine.memory.kv_cache import KVCache, LayerKV
from specpool.engine.models import TargetModel
from specpool.engine.models.block.head import BlockHead
from specpool.errors import ConfigError


class BlockDrafter(ByParts):
    """A drafter with a block head.

    The masks of a block know nothing of each other's tokens, so the probability of a path is the
    product of those of its tokens. A tree has up to K tokens of each depth under each path.
    """

    reads_tokens = False

    def __init__(self, head: BlockHead) -> None:
        """Draft with `head`."""
        self.head = head
        self.layers = tuple(LayerKV(heads, dim, dim) for heads, dim in head.layer_kv)
        self.feature_layers = head.feature_layers
        self._attached = False

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str], target: TargetModel) -> BlockDrafter:
        """Load a block drafter for `target`.

        Args:
            source: a folder or a hub name.
            target: gives the head its embedding and output matrix.

        Raises:
            CheckpointError: the checkpoint cannot be read, or does not fit the target.
        """
        return cls(BlockHead.from_pretrained(source, target))

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `Drafter.attach`.

        Raises:
            ConfigError: the drafter is attached already, a shape has more steps than a block has
                masks, the vocabulary is smaller than topk, or a shape's trees cannot be selected
                level by level.
        """
        if self._attached:
            raise ConfigError(
                "this drafter is attached to another engine: make a new one of the same head"
            )
        check_shapes(shapes, self.head.draft_vocab_size, "the target knows")
        max_steps = max(shape.num_steps for shape in shapes)
        if max_steps >= self.head.block_size:
            raise ConfigError(
                f"a shape has {max_steps} steps, a block of {self.head.block_size} tokens drafts "
                f"at most {self.head.block_size - 1}"
            )
        self._attached = True
        self._cache, self._group = cache, group
        self._last_position = cache.max_context_len - 1
        self._chains = Chains(cache, group, 0)
        layers = range(first_layer, first_layer + len(self.layers))
        self._kv = [(cache.keys[i], cache.values[i]) for i in layers]
        of_group = draft_window(cache, group)
        self._windows = [
            min((window for window in (layer_window, of_group) if window is not None), default=None)
            for layer_window in self.head.config.windows
        ]
        self.head.reserve_positions(cache.max_context_len)

    def extend(self, lanes: Lanes, tokens: Tensor, features: Tensor) -> None:
        """Write draft KV; see `Drafter.extend`. The tokens are not read."""
        slots = lanes.slots(self._cache, self._group)
        layer_kv = self.head.context(features, self._clamped(lanes.positions))
        for (keys, values), (k, v) in zip(self._kv, layer_kv, strict=True):
            write_kv(keys, values, slots, k, v)

    def propose_parts(self, parts: Sequence[DraftPart]) -> list[DraftTree]:
        """Propose the trees of each part; see `SideBySide.propose_parts`."""
        blocks = [Lanes(p.lanes.rows, p.lanes.seq_lens, p.shape.num_steps + 1) for p in parts]
        tokens = [self.head.block(part.root_tokens, part.shape.num_steps) for part in parts]
        hidden = self._forward(blocks, torch.cat(tokens))
        trees, first = [], 0
        for part, block_tokens in zip(parts, tokens, strict=True):
            of_part = hidden[first : first + len(block_tokens)]
            first += len(block_tokens)
            masks = of_part.view(len(part.root_tokens), -1, hidden.shape[1])[:, 1:]
            trees.append(self._tree(part, masks))
        return trees

    def _tree(self, part: DraftPart, hidden: Tensor) -> DraftTree:
        """Build the trees of a part from what its masks' rows predict, [B, S, h]."""
        num_lanes, num_steps, _ = hidden.shape
        topk = part.shape.topk
        if topk == 1:
            return self._chain(part, hidden)
        p, ids = self.head.topk(hidden.flatten(0, 1), topk)
        p, ids = p.view(num_lanes, num_steps, topk), ids.view(num_lanes, num_steps, topk)
        paths = BestPaths(part)
        paths.add(Level(p[:, 0], ids[:, 0]))
        for step in range(1, num_steps):  # the same tokens follow each of the K paths
            level = (table[:, step, None].expand(-1, topk, -1) for table in (p, ids))
            paths.add(Level(*(table.flatten(0, 1) for table in level)))
        return paths.trees()

    def _chain(self, part: DraftPart, hidden: Tensor) -> DraftTree:
        """Build the chains of a part from what its masks' rows predict, [B, S, h]."""
        drafts = self.head.best(hidden.flatten(0, 1)).view(hidden.shape[:2])
        return self._chains.trees(torch.cat([part.root_tokens.unsqueeze(1), drafts], 1))

    def _forward(self, blocks: Sequence[Lanes], tokens: Tensor) -> Tensor:
        """Run the blocks of all parts, int64 [T]; return [T, h]."""
        views: dict[bool, View] = {}
        causal = self.head.config.causal
        for is_causal in set(causal):
            of_parts = [self._view(block, causal=is_causal) for block in blocks]
            views[is_causal] = of_parts[0] if len(of_parts) == 1 else JoinedView(of_parts)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._kv[layer]
            view, window = views[causal[layer]], self._windows[layer]
            scaling = q.shape[-1] ** -0.5
            return attend(view, keys, values, q, k, v, scaling=scaling, window=window)

        positions = torch.cat([block.positions for block in blocks])
        return self.head.forward(tokens, self._clamped(positions), attention)

    def _view(self, block: Lanes, *, causal: bool) -> AttentionView:
        """Return the view in which a block sees its row's context and its own tokens."""
        num_lanes, width = len(block.seq_lens), block.widths
        assert isinstance(width, int)
        sees = torch.ones(width, width, dtype=torch.bool, device=self._cache.device)
        positions = block.positions.view(num_lanes, width).int()
        return own_view(
            self._cache,
            self._group,
            block,
            block.slots(self._cache, self._group),
            (sees.tril() if causal else sees).expand(num_lanes, -1, -1).contiguous(),
            positions,
            positions,
        )

    def _clamped(self, positions: Tensor) -> Tensor:
        return positions.clamp(max=self._last_position).long()
