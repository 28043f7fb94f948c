"""`Followers`: the drafters that keep KV, which follow every text that may be drafted.

Any of them can draft a row's next round, also if another drafted the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specpool._core import Plan
from specpool.arrays import Int32
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import Drafter, Patient, Reader
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.worker.part import Part
from specpool.engine.worker.row_state import RowState
from specpool.engine.worker.verify import Verdict
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import upload


class Followers:
    """The drafters that keep KV: each writes its draft KV of the tokens that the target has read.

    Attributes:
        wants_features: whether any of them reads the inputs of captured layers.
        feature_layers: the layers that a forward captures for them, each once.
    """

    def __init__(self, drafters: Sequence[Drafter], num_rows: int) -> None:
        """Follow with those of the engine's drafters that do not read the tokens on the host."""
        followers = [(i, drafter) for i, drafter in enumerate(drafters) if not drafter.reads_tokens]
        self._readers = [(i, drafter) for i, drafter in followers if isinstance(drafter, Reader)]
        self._kv_drafters = [drafter for _, drafter in followers if not isinstance(drafter, Reader)]
        self._patient = [drafter for drafter in self._kv_drafters if isinstance(drafter, Patient)]
        self.wants_features = bool(self._kv_drafters)
        self.feature_layers = feature_layers(drafters)
        # Host array: rows for which `Patient.write` was called and `catch_up` is still due.
        self._late = np.zeros(num_rows + 1, np.bool_)

    def __bool__(self) -> bool:
        return bool(self._readers or self._kv_drafters)

    def prefill(
        self, rows: Int32, lanes: Lanes, tokens: Tensor, next_tokens: Tensor, output: TargetOutput
    ) -> None:
        """Follow a prefill step.

        Args:
            rows: int32 [B], the rows of the lanes, on the host.
            lanes: B lanes.
            tokens: int64 [T], at the lanes' positions.
            next_tokens: int64 [T], at the positions that follow.
            output: of these tokens.
        """
        for _, reader in self._readers:
            reader.read(lanes, tokens)
        for drafter in self._kv_drafters:
            drafter.extend(lanes, next_tokens, self._features(drafter, output))
        self._late[rows] = False

    def plain_round(self, lanes: Lanes, roots: Tensor, drawn: Tensor, output: TargetOutput) -> None:
        """Follow a plain round from its `roots` to the tokens `drawn`, int64 [B] each."""
        for _, reader in self._readers:
            reader.read(lanes, roots)
        for drafter in self._kv_drafters:
            follow = drafter.write if isinstance(drafter, Patient) else drafter.extend
            follow(lanes, drawn, self._features(drafter, output))

    def draft_round(
        self,
        lanes: Lanes,
        parts: Sequence[Part],
        verdicts: Sequence[Verdict],
        verdict: Verdict,
        output: TargetOutput,
    ) -> None:
        """Follow a round with drafts.

        Args:
            lanes: all lanes.
            parts: the lanes by shape, with their trees.
            verdicts: one for each part.
            verdict: all of them joined.
            output: of all nodes.
        """
        for part, part_verdict in zip(parts, verdicts, strict=True) if self._readers else ():
            accepted, nodes, _ = _accepted(part.lanes, part_verdict)
            tokens = part.tree.tokens.view(-1).index_select(0, nodes)
            for index, reader in self._readers:
                if part.chains_of == index:
                    reader.keep(accepted, tokens, part.num_steps)
                else:
                    reader.read(accepted, tokens)
        if not self._kv_drafters:
            return
        accepted, nodes, next_tokens = _accepted(lanes, verdict)
        for drafter in self._kv_drafters:
            features = self._features(drafter, output).index_select(0, nodes)
            if accepted.padding is not None:
                # Padding may carry another lane's NaN. Zero it: padding is written to the sink, and
                # every lane reads the sink, masked.
                features = features.masked_fill(accepted.padding.unsqueeze(1), 0)
            drafter.extend(accepted, next_tokens.clamp(min=0), features)

    def catch_up(self, plan: Plan, state: RowState) -> None:
        """Write the KV that plain rounds put off, for rows that draft again."""
        if not self._patient:
            return
        late = self._late[plan.rows] & (plan.shapes > 0)
        if late.any():
            lanes = state.lanes(plan.rows, plan.lo, plan.hi).filter(late)
            roots = state.root_tokens.index_select(0, lanes.rows)
            for drafter in self._patient:
                drafter.catch_up(lanes, roots)

    def note(self, plan: Plan) -> None:
        """Record which rows owe a catch-up after a launched round."""
        if not self._patient:
            return
        if plan.shapes.any():
            self._late[plan.rows] = False
        elif plan.writes_draft:
            self._late[plan.rows] = True

    def _features(self, drafter: Drafter, output: TargetOutput) -> Tensor:
        """Return what a drafter reads: the inputs of its layers, or the last hidden state."""
        layers = tuple(drafter.feature_layers)
        if not layers or output.features is None:
            return output.hidden
        if layers == self.feature_layers:
            return output.features
        of_layers = output.features.view(len(output.features), len(self.feature_layers), -1)
        places = [self.feature_layers.index(layer) for layer in layers]
        return of_layers[:, places].flatten(1)


def feature_layers(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the target layers whose inputs some drafter reads, each once."""
    return tuple(dict.fromkeys(layer for drafter in drafters for layer in drafter.feature_layers))


def _accepted(lanes: Lanes, verdict: Verdict) -> tuple[Lanes, Tensor, Tensor]:
    """Return the accepted nodes as lanes, with their node indices, int64 [T], and tokens.

    On a CPU each lane has exactly its accepted nodes. On a GPU the host does not know the lengths,
    so every lane is padded to S + 1.
    """
    lane_starts = (lanes.rows, lanes.seq_lens)
    width = verdict.tokens.shape[1]
    if runs_kernels(lanes.rows.device):
        padded = Lanes(*lane_starts, width, verdict.accept_len)
        return padded, verdict.nodes.view(-1), verdict.tokens.view(-1)
    lens = verdict.accept_len.numpy()
    is_accepted = np.arange(width) < lens[:, None]
    nodes, tokens = upload(
        lanes.rows.device, verdict.nodes.numpy()[is_accepted], verdict.tokens.numpy()[is_accepted]
    )
    widths = int(lens[0]) if len(lens) == 1 else lens
    return Lanes(*lane_starts, widths), nodes, tokens
