"""`Forward`: runs the target once, for one step or for a prefill and a round together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specpool._core import Plan
from specpool.arrays import Int64
from specpool.engine.attention import AttentionBatch, AttentionView, JoinedView, View
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.draft.base import DraftTree
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models.device_lanes import DeviceLanes
from specpool.engine.models.lane_states import LaneStates, StateFolds
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.models.target import TargetModel
from specpool.engine.models.target_output import TargetOutput

# Chunks of prompts with more tokens go through the mixers' own forward, which takes them in chunks
# and not one after the other.
_MAX_SCANNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One step's part of a forward: the tokens that the target is to read.

    Attributes:
        lanes: the lanes of the tokens.
        tokens: int64 [T].
        positions: int64 [T], the tokens' positions, all within the context.
        views: a view for each group.
        logits_at: int64 [n], tokens whose logits are wanted; None means all.
        wants_features: whether a drafter reads the inputs of the captured layers.
        wants_hidden: whether the hidden states of tokens without logits are read.
        trees: the trees of lanes that follow one another; none if all lanes' tokens are chains.
    """

    lanes: Lanes
    tokens: Tensor
    positions: Tensor
    views: Mapping[int, AttentionView]
    logits_at: Tensor | None
    wants_features: bool
    wants_hidden: bool = False
    trees: Sequence[DraftTree] = ()


class Forward:
    """A runner of passes through the target, over the pages of its layers."""

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        target_groups: Sequence[int],
        *,
        feature_layers: Sequence[int],
        state: RecurrentState | None,
    ) -> None:
        """Run `target`.

        Args:
            target: the model.
            cache: holds the target's layers first, then the drafter's.
            target_groups: the group of each of the target's layers.
            feature_layers: the layers whose inputs the drafter reads (`Drafter.feature_layers`).
            state: the slots and rings of the target's mixers; None if there are none.
        """
        self._target, self._cache = target, cache
        self.groups = list(target_groups)
        # (number, keys, values, group) of each layer with attention.
        layers = zip(target.kv_layers, cache.keys, cache.values, target_groups, strict=False)
        self._layers = list(layers)  # `zip` stops before the drafter's layers
        self._feature_layers = tuple(feature_layers)
        self._state = state

    def run(self, passes: Sequence[Pass], plans: Sequence[Plan]) -> list[TargetOutput]:
        """Run one forward for all passes, with their tokens in order; return each one's output.

        `plans` are those of the passes; none in the capture of a graph.
        """
        wants_features = any(part.wants_features for part in passes)
        # Captured features cost hooks in every forward.
        self._target.capture(self._feature_layers if wants_features else ())
        wants_hidden = any(part.wants_hidden for part in passes)
        forward = partial(self._target.forward, wants_hidden=wants_hidden)
        if self._state is not None:
            forward = partial(forward, states=self._states(self._state, passes, plans))
        if len(passes) == 1:
            (part,) = passes
            batch = self._batch(part.views)
            return [forward(part.tokens, part.positions, batch, part.logits_at)]
        logits_at, first = [], 0
        for part in passes:
            tokens = torch.arange(len(part.tokens), device=part.tokens.device)
            logits_at.append(first + (tokens if part.logits_at is None else part.logits_at))
            first += len(part.tokens)
        views = {
            group: JoinedView([part.views[group] for part in passes]) for group in passes[0].views
        }
        joined = forward(
            torch.cat([part.tokens for part in passes]),
            torch.cat([part.positions for part in passes]),
            self._batch(views),
            torch.cat(logits_at),
        )
        outputs = []
        first_token = first_logits = 0
        for part, at in zip(passes, logits_at, strict=True):
            tokens_of = slice(first_token, first_token + len(part.tokens))
            logits_of = slice(first_logits, first_logits + len(at))
            first_token, first_logits = tokens_of.stop, logits_of.stop
            features = None if joined.features is None else joined.features[tokens_of]
            outputs.append(
                TargetOutput(joined.logits[logits_of], joined.hidden[tokens_of], features)
            )
        return outputs

    def _states(
        self, state: RecurrentState, passes: Sequence[Pass], plans: Sequence[Plan]
    ) -> list[LaneStates | DeviceLanes]:
        """Return what the lanes of all passes read of their states."""
        mixers = self._target.mixers
        assert mixers is not None
        if len(passes) > 1 and mixers.has_kernels and len({*map(_is_long, passes)}) > 1:
            return [
                self._states_of(state, [part], [plan])
                for part, plan in zip(passes, plans, strict=True)
            ]
        return [self._states_of(state, passes, plans)]

    def _states_of(
        self, state: RecurrentState, passes: Sequence[Pass], plans: Sequence[Plan]
    ) -> LaneStates | DeviceLanes:
        """Return what the lanes of these passes read, all by kernels or all without."""
        trees: list[tuple[int, DraftTree]] = []  # the first lane of each
        first = 0
        for part in passes:
            lane = first
            for tree in part.trees:
                if not tree.is_chain:
                    trees.append((lane, tree))
                lane += len(tree.tokens)
            first += len(part.lanes.seq_lens)
        lens = SeqLens.merge([part.lanes.seq_lens for part in passes])
        widths = np.concatenate(
            [
                np.broadcast_to(np.asarray(part.lanes.widths, np.int32), len(part.lanes.seq_lens))
                for part in passes
            ]
        )
        folds, mixers = StateFolds.of_plans(plans), self._target.mixers
        assert mixers is not None
        if mixers.has_kernels and not all(map(_is_long, passes)):
            masks = [(lane, tree.mask) for lane, tree in trees]
            return DeviceLanes.build(state, folds, lens, widths, masks)
        assert lens.is_exact
        paths: dict[int, Int64] = {}
        for lane, tree in trees:
            paths |= enumerate(tree.paths(), lane)
        return LaneStates.build(state, folds, lens.hi, widths, paths, self._cache.device)

    def _batch(self, views: Mapping[int, View]) -> AttentionBatch:
        """Return the pages that each layer with attention reads and writes, by its group's view."""
        layers = {layer: (keys, values, views[g]) for layer, keys, values, g in self._layers}
        return AttentionBatch(list(views.values()), layers)


def _is_long(part: Pass) -> bool:
    """Return whether a pass has a long chunk of a prompt, and nothing of unknown length."""
    is_known = part.lanes.seq_lens.is_exact and not part.trees
    return is_known and int(np.max(part.lanes.widths)) > _MAX_SCANNED
