"""`HeadDrafter`: the trees of a drafter that reads the target's features.

A round hands one feature per row to the next round, on the device. A subclass says how a forward of
its model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specpool._core import Shape
from specpool.engine.attention import View
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import DraftTree
from specpool.engine.draft.branches import Branches, DenseBranches, HoleyBranches, draft_window
from specpool.engine.draft.expansion import Chains, check_shapes, draft_trees
from specpool.engine.draft.side_by_side import Ask, ByParts, DraftPart, Level, run_side_by_side
from specpool.engine.memory.kv_cache import KVCache, LayerKV
from specpool.errors import ConfigError


class Head(Protocol):
    """The model of a `HeadDrafter`; `EagleHead` and `MtpLayer` have these attributes."""

    @property
    def hidden_size(self) -> int:
        """The width h of the feature that a forward gives to the next one."""

    @property
    def draft_vocab_size(self) -> int:
        """The tokens that the head can propose."""

    def best(self, hidden: Tensor) -> Tensor:
        """Return the most probable token of each result of a forward [n, h], int64 [n]."""

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [n, k] and tokens int64 [n, k], best first."""


class HeadDrafter(ByParts):
    """What drafters with a head share: their attachment, and their trees.

    The next round computes the top-K probabilities and ids from the row's feature, with the K of
    its own shape. So no state is sized by the widest shape.
    """

    reads_tokens = False
    head: Head
    layers: tuple[LayerKV, ...]
    _exact: bool
    _attached = False

    def attach(
        self, cache: KVCache, first_layer: int, group: int, layout: str, shapes: Sequence[Shape]
    ) -> None:
        """Take the cache; see `Drafter.attach`. A drafter keeps state per row, for one engine only.

        Raises:
            ConfigError: the drafter is attached already, the head knows fewer tokens than topk, or
                EAGLE cannot build a shape.
        """
        if self._attached:
            raise ConfigError(
                "this drafter is attached to another engine: make a new one of the same head"
            )
        check_shapes(shapes, self.head.draft_vocab_size, "the draft head knows")
        self._attached = True
        self._cache, self._group, self._layout = cache, group, layout
        self._last_position = cache.max_context_len - 1
        self._chains = Chains(cache, group, 0)
        self._window = draft_window(cache, group)
        self._layer_ids = list(range(first_layer, first_layer + len(self.layers)))
        self._fields = cache.fields(self._layer_ids)
        num_rows = cache.tables[group].shape[0]
        self._hidden = torch.zeros(
            num_rows, self.head.hidden_size, dtype=cache.dtype, device=cache.device
        )

    def propose_parts(self, parts: Sequence[DraftPart]) -> list[DraftTree]:
        """Propose the trees of each part; see `SideBySide.propose_parts`."""
        topk = max(part.shape.topk for part in parts)
        rows = [part.lanes.rows for part in parts]
        hidden = self._hidden.index_select(0, rows[0] if len(rows) == 1 else torch.cat(rows))

        def level_of(hidden: Tensor) -> Level:
            if topk > 1:
                return Level(*self.head.topk(hidden, topk), hidden)
            return Level(None, self.head.best(hidden).unsqueeze(1), hidden)

        def run(ask: Ask) -> Level:
            assert ask.hidden is not None
            return level_of(self._draft(ask.tokens, ask.hidden, ask.positions, ask.view))

        roots, drafting, first = level_of(hidden), [], 0
        for part, of_part in zip(parts, rows, strict=True):
            level = roots.part(first, len(of_part)) if len(parts) > 1 else roots
            first += len(of_part)
            if part.shape.topk == 1:
                drafting.append(self._chains.draft(part, level))
            else:
                branches = self._branches(part.lanes, part.shape)
                drafting.append(draft_trees(part, level, branches, 0))
        return run_side_by_side(drafting, run)

    def _branches(self, lanes: Lanes, shape: Shape) -> Branches:
        if self._layout == "holey":
            fields = self._fields
            return HoleyBranches(self._cache, self._group, lanes, shape, fields, self._exact)
        return DenseBranches(self._cache, self._group, lanes, shape, self._exact)

    def _draft(self, tokens: Tensor, hidden: Tensor, positions: Tensor, view: View) -> Tensor:
        """Run the whole head over one view; return the features [T, h] of the next step."""
        raise NotImplementedError
