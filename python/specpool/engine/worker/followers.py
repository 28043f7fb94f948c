"""`Followers`: the drafters that keep KV, which follow every text that may be drafted.

Any of them can draft a row's next round, whoever drafted the last one.
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
        each = [(i, one) for i, one in enumerate(drafters) if not one.reads_tokens]
        self._readers = [(i, one) for i, one in each if isinstance(one, Reader)]
        self._others = [one for _, one in each if not isinstance(one, Reader)]
        self._patient = [one for one in self._others if isinstance(one, Patient)]
        self.wants_features = bool(self._others)
        self.feature_layers = feature_layers(drafters)
        # Host array: rows for which `Patient.write` was called and `catch_up` is still due.
        self._late = np.zeros(num_rows + 1, np.bool_)

    def __bool__(self) -> bool:
        return bool(self._readers or self._others)

    def prefill(
        self, rows: Int32, lanes: Lanes, tokens: Tensor, after: Tensor, output: TargetOutput
    ) -> None:
        """Follow a prefill step.

        Args:
            rows: int32 [B], the rows of the lanes, on the host.
            lanes: B lanes.
            tokens: int64 [T], at the lanes' positions.
            after: int64 [T], at the positions that follow.
            output: of these tokens.
        """
        for _, reader in self._readers:
            reader.read(lanes, tokens)
        for one in self._others:
            one.extend(lanes, after, self._features(one, output))
        self._late[rows] = False

    def plain_round(self, lanes: Lanes, roots: Tensor, drawn: Tensor, output: TargetOutput) -> None:
        """Follow a plain round from its `roots` to the tokens `drawn`, int64 [B] each."""
        for _, reader in self._readers:
            reader.read(lanes, roots)
        for one in self._others:
            follow = one.write if isinstance(one, Patient) else one.extend
            follow(lanes, drawn, self._features(one, output))

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
        for part, mine in zip(parts, verdicts, strict=True) if self._readers else ():
            accepted, nodes, _ = _accepted(part.lanes, mine)
            tokens = part.tree.tokens.view(-1).index_select(0, nodes)
            for index, reader in self._readers:
                if part.chains_of == index:
                    reader.keep(accepted, tokens, part.num_steps)
                else:
                    reader.read(accepted, tokens)
        if not self._others:
            return
        accepted, nodes, after = _accepted(lanes, verdict)
        for one in self._others:
            features = self._features(one, output).index_select(0, nodes)
            if accepted.padding is not None:
                # Padding may carry another lane's NaN. Zero it: padding is written to the sink, and
                # every lane reads the sink, masked.
                features = features.masked_fill(accepted.padding.unsqueeze(1), 0)
            one.extend(accepted, after.clamp(min=0), features)

    def catch_up(self, plan: Plan, state: RowState) -> None:
        """Write the KV that plain rounds put off, for rows that draft again."""
        if not self._patient:
            return
        late = self._late[plan.rows] & (plan.shapes > 0)
        if late.any():
            lanes = state.lanes(plan.rows, plan.lo, plan.hi).filter(late)
            roots = state.root_tokens.index_select(0, lanes.rows)
            for one in self._patient:
                one.catch_up(lanes, roots)

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
        mine = tuple(drafter.feature_layers)
        if not mine or output.features is None:
            return output.hidden
        if mine == self.feature_layers:
            return output.features
        of_layers = output.features.view(len(output.features), len(self.feature_layers), -1)
        places = [self.feature_layers.index(layer) for layer in mine]
        return of_layers[:, places].flatten(1)


def feature_layers(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the target layers whose inputs some drafter reads, each once."""
    return tuple(dict.fromkeys(layer for one in drafters for layer in one.feature_layers))


def _accepted(lanes: Lanes, verdict: Verdict) -> tuple[Lanes, Tensor, Tensor]:
    """Return the accepted nodes as lanes, with their node indices, int64 [T], and tokens.

    On a CPU each lane has exactly its accepted nodes. On a GPU the host does not know the lengths,
    so every lane is padded to S + 1.
    """
    where = (lanes.rows, lanes.seq_lens)
    width = verdict.tokens.shape[1]
    if runs_kernels(lanes.rows.device):
        padded = Lanes(*where, width, verdict.accept_len)
        return padded, verdict.nodes.view(-1), verdict.tokens.view(-1)
    lens = verdict.accept_len.numpy()
    kept = np.arange(width) < lens[:, None]
    nodes, tokens = upload(
        lanes.rows.device, verdict.nodes.numpy()[kept], verdict.tokens.numpy()[kept]
    )
    widths = int(lens[0]) if len(lens) == 1 else lens
    return Lanes(*where, widths), nodes, tokens
