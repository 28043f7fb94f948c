"""`Forward`: runs the target once, for one step or for a prefill and a round together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.attention import AttentionBatch, AttentionView, JoinedView, View
from specpool.attention.lanes import Lanes
from specpool.memory.kv_cache import KVCache
from specpool.models.target import TargetModel
from specpool.models.target_output import TargetOutput
from specpool.scheduler.request import Request
from specpool.worker.results import Outcome, PendingStep


@dataclass(frozen=True, slots=True)
class Pass:
    """One step's part of a forward: its tokens, and the function that takes the results.

    Attributes:
        requests: one per lane; empty for the lanes of a graph.
        lanes: the lanes of the tokens.
        tokens: int64 [T].
        positions: int64 [T], the tokens' positions, all within the context.
        views: a view for each group; empty if the target keeps a state, which reads lanes by width.
        logits_at: int64 [n], tokens whose logits are wanted; None = all.
        wants_features: whether a drafter reads the inputs of the captured layers.
        is_round: whether lanes keep only some of their tokens, by `Forward.keep` in `follow_up`.
        follow_up: takes the forward's results for these tokens; yields the host's outcome, once,
            and then does the work that only later steps need.
        done: see `PendingStep`.
    """

    requests: Sequence[Request]
    lanes: Lanes
    tokens: Tensor
    positions: Tensor
    views: Mapping[int, AttentionView]
    logits_at: Tensor | None
    wants_features: bool
    is_round: bool
    follow_up: Callable[[TargetOutput], Iterator[Outcome]]
    done: Sequence[bool] | None = None

    def deliver(self, output: TargetOutput) -> PendingStep:
        """Run `finish`, and start the copy to the host before the second half of it runs."""
        steps = self.follow_up(output)
        pending = PendingStep(self.requests, next(steps), self.done)
        next(steps, None)  # to its end
        return pending


class Forward:
    """A runner of passes through the target, over the pages of its layers."""

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        target_groups: Sequence[int],
        *,
        feature_layers: Sequence[int],
    ) -> None:
        """Run `target`.

        Args:
            target: the model.
            cache: holds the target's layers first, then the drafter's.
            target_groups: the group of each of the target's layers.
            feature_layers: the layers whose inputs the drafter reads (`Drafter.feature_layers`).
        """
        self._target, self._cache = target, cache
        self.groups = list(target_groups)
        # (number, keys, values, group) of each layer with attention.
        layers = zip(target.kv_layers, cache.keys, cache.values, target_groups, strict=False)
        self._layers = list(layers)  # `zip` stops before the drafter's layers
        self._feature_layers = tuple(feature_layers)

    def run(self, passes: Sequence[Pass]) -> list[PendingStep]:
        """Run one forward for all passes, with their tokens in order, then finish each pass."""
        if len(passes) == 1:
            return [passes[0].deliver(self._alone(passes[0]))]
        self._choose_features(passes)
        logits_at, first = [], 0
        for each in passes:
            size = len(each.tokens)
            at = torch.arange(size, device=each.tokens.device)
            logits_at.append(first + (at if each.logits_at is None else each.logits_at))
            first += size
        output = self._output(
            torch.cat([each.tokens for each in passes]),
            torch.cat([each.positions for each in passes]),
            {g: JoinedView([each.views[g] for each in passes]) for g in passes[0].views},
            torch.cat(logits_at),
        )
        pending, token, row = [], 0, 0  # first of each pass
        for each, at in zip(passes, logits_at, strict=True):
            tokens, rows = slice(token, token + len(each.tokens)), slice(row, row + len(at))
            token, row = tokens.stop, rows.stop
            features = None if output.features is None else output.features[tokens]
            part = TargetOutput(output.logits[rows], output.hidden[tokens], features)
            pending.append(each.deliver(part))
        return pending

    def steps(self, one: Pass) -> Iterator[Outcome]:
        """Run the forward of one pass and return the iterator of its `finish`."""
        return one.follow_up(self._alone(one))

    def keep(self, accept_len: Tensor) -> None:
        """Keep the first `accept_len` tokens of each lane, int32 [B].

        This class does nothing, because compaction moves the KV. `StateForward` cuts its states.
        """

    def _choose_features(self, passes: Sequence[Pass]) -> None:
        """Capture features only if a pass wants them, because they cost hooks in every forward."""
        wants_features = any(each.wants_features for each in passes)
        self._target.capture(self._feature_layers if wants_features else ())

    def _alone(self, one: Pass) -> TargetOutput:
        self._choose_features([one])
        return self._output(one.tokens, one.positions, one.views, one.logits_at)

    def _output(
        self,
        tokens: Tensor,
        positions: Tensor,
        views: Mapping[int, View],
        logits_at: Tensor | None,
    ) -> TargetOutput:
        return self._target.forward(
            tokens,
            positions,
            AttentionBatch(list(views.values()), self._kv(views)),
            logits_at,
        )

    def _kv(self, views: Mapping[int, View]) -> dict[int, tuple[Tensor, Tensor, View]]:
        """Return (keys, values, view) of each layer with attention."""
        return {layer: (keys, values, views[g]) for layer, keys, values, g in self._layers}
