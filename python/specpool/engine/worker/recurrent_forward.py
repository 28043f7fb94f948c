"""`StateForward`: runs a target with recurrent layers, each lane from its row's saved state.

Recurrent layers mix the tokens of a sequence, so lanes of one width share a forward. A round starts
from the saved state and does not change it. After verify, the accepted tokens are run again from
the saved state, unless the round itself has computed the state after exactly those tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.arrays import Int32, Int64
from specpool.engine.attention.lanes import Lanes, causal_view
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.models.target import TargetModel
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.worker.forward import Forward, Pass
from specpool.errors import OrderError
from specpool.kernels.transfer import upload


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Lanes of one width: their rows and tokens, and their places in the pass."""

    rows: Tensor  # int64 [b]
    numbers: Int32  # [b], the same on the host
    starts: Int64  # [b], on the host: positions below have KV
    tokens: Tensor  # int64 [b, n]
    positions: Tensor  # int64 [b, n]
    lanes: Int64  # [b], on the host: their numbers in the pass
    places: Tensor  # int64 [b * n]: the tokens' indices in the pass

    def part(self, lanes: Int64, first: int, last: int) -> _Bundle:
        """Return the tokens `[first, last)` of some of the bundle's lanes."""
        (index,) = upload(self.rows.device, lanes)
        return _Bundle(
            self.rows[index],
            self.numbers[lanes],
            self.starts[lanes] + first,
            self.tokens[index, first:last],
            self.positions[index, first:last],
            self.lanes[lanes],
            self.places,
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """A bundle to verify, and the states after its first 1, 2, ... tokens, as far as computed."""

    bundle: _Bundle
    states: dict[int, list[Tensor]]  # by number of tokens


class StateForward(Forward):
    """A `Forward` that runs passes one after the other and saves a state for each row.

    After a round, `keep` says how many of its tokens stay.
    """

    def __init__(
        self,
        target: TargetModel,
        cache: KVCache,
        target_groups: Sequence[int],
        *,
        num_rows: int,
    ) -> None:
        """Run `target`, with its attention layers' KV in `cache` and a state for each row."""
        super().__init__(target, cache, target_groups, feature_layers=())
        self.state = RecurrentState(target.config, target.state_specs, num_rows, target.device)
        self._lens = np.zeros(num_rows + 1, np.int64)  # tokens that each row's state holds
        self._rounds: list[_Round] = []  # of the forward that is being finished

    def run(self, passes: Sequence[Pass]) -> list[TargetOutput]:
        """Run each pass by itself; see `Forward.run`."""
        self._rounds = []
        return [self._run(part) for part in passes]

    def keep(self, accept_len: Tensor) -> None:
        """Save each lane's state after its first `accept_len` tokens of the round, int32 [B]."""
        lens = accept_len.cpu().numpy()
        for verified in self._rounds:
            lens_of_bundle = lens[verified.bundle.lanes]
            for length in np.unique(lens_of_bundle).tolist():
                (lanes,) = np.nonzero(lens_of_bundle == length)
                self._keep(verified, lanes, length)
        self._rounds = []

    def _keep(self, verified: _Round, lanes: Int64, length: int) -> None:
        bundle = verified.bundle.part(lanes, 0, length)
        states = verified.states.get(length)
        if states is None:
            cache = self.state.lanes(bundle.rows, is_fresh=False)
            self._advance(bundle, cache)
            self._put(bundle, self.state.values(cache))
        else:
            (index,) = upload(bundle.rows.device, lanes)
            self._put(bundle, [state[index] for state in states])

    def _put(self, bundle: _Bundle, states: Sequence[Tensor]) -> None:
        self.state.put(bundle.rows, states)
        self._lens[bundle.numbers] = bundle.starts + bundle.tokens.shape[1]

    def _check(self, bundle: _Bundle) -> None:
        """Raise `OrderError` if a row's state does not hold exactly the tokens below its start."""
        held_lens = self._lens[bundle.numbers]
        (wrong,) = np.nonzero((held_lens != bundle.starts) & (bundle.starts > 0))
        if len(wrong):
            lane = wrong[0]
            raise OrderError(
                f"the state of row {bundle.numbers[lane]} holds {held_lens[lane]} tokens, and no "
                f"cut brings it back to {bundle.starts[lane]}: prefill the row from 0"
            )

    def _run(self, part: Pass) -> TargetOutput:
        by_bundle, places = [], []
        for bundle in _bundles(part):
            self._check(bundle)
            hidden, states = self._states(bundle, part.is_verify)
            by_bundle.append(hidden)
            places.append(bundle.places)
            if part.is_verify:
                self._rounds.append(_Round(bundle, states))
            else:
                self._put(bundle, states[bundle.tokens.shape[1]])
        hidden = torch.cat(by_bundle)[torch.cat(places).argsort()]
        wanted = hidden if part.logits_at is None else hidden.index_select(0, part.logits_at)
        return TargetOutput(self._target.compute_logits(wanted), hidden, None)

    def _states(self, bundle: _Bundle, is_verify: bool) -> tuple[Tensor, dict[int, list[Tensor]]]:
        """Run a bundle; return hidden states [b * n, h] and the states by number of tokens.

        The states after all n tokens are always among them. In a verify that runs token by token,
        so are the states after each token.
        """
        width = bundle.tokens.shape[1]
        is_fresh = not bundle.starts.any()
        cache = self.state.lanes(bundle.rows, is_fresh=is_fresh)
        if is_fresh or width == 1 or self._target.continues:
            hidden = self._advance(bundle, cache)
            return hidden, {width: self.state.values(cache)}
        all_lanes = np.arange(len(bundle.lanes))
        columns, states = [], {}
        for token in range(width):
            columns.append(self._advance(bundle.part(all_lanes, token, token + 1), cache))
            if is_verify or token + 1 == width:
                states[token + 1] = self.state.values(cache)
        return torch.stack(columns, 1).flatten(0, 1), states

    def _advance(self, bundle: _Bundle, cache: object) -> Tensor:
        """Run one forward, which advances `cache`; return hidden states [b * n, h]."""
        known = bundle.starts.astype(np.int32)
        (starts,) = upload(self._cache.device, known)
        lens = SeqLens(starts, known, known)
        lanes = Lanes(bundle.rows.int(), lens, bundle.tokens.shape[1])
        views = {group: causal_view(self._cache, group, lanes) for group in set(self.groups)}
        return self._target.forward_from(cache, bundle.tokens, bundle.positions, self._batch(views))


def _bundles(part: Pass) -> Iterator[_Bundle]:
    """Split the lanes of a pass by width, and apart by whether their row has a state yet."""
    numbers = part.lanes.rows.cpu().numpy()
    starts = part.lanes.seq_lens.hi.astype(np.int64)
    widths = np.broadcast_to(np.asarray(part.lanes.widths, np.int64), starts.shape)
    firsts = np.cumsum(widths) - widths
    kinds = np.stack([widths, starts > 0], 1)
    for width, has_state in np.unique(kinds, axis=0).tolist():
        (lanes,) = np.nonzero((widths == width) & ((starts > 0) == has_state))
        where = (firsts[lanes][:, None] + np.arange(width)).reshape(-1)
        index, places = upload(part.tokens.device, lanes, where)
        size = (len(lanes), width)
        yield _Bundle(
            rows=part.lanes.index[index],
            numbers=numbers[lanes],
            starts=starts[lanes],
            tokens=part.tokens[places].view(size),
            positions=part.positions[places].view(size),
            lanes=lanes,
            places=places,
        )
