"""`DeviceLanes`: what the lanes of a forward read, record and fold if kernels run its mixers.

The host knows what is folded and where records lie. How many records lie between a lane's state and
its root, and where its own tokens are recorded, follows from the root's position on the device. So
the host need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.arrays import Int32
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.models.lane_states import StateFolds
from specpool.engine.models.recurrent import RecurrentState
from specpool.kernels.state_lanes import StateLanes
from specpool.kernels.transfer import upload


@dataclass(frozen=True, slots=True)
class DeviceLanes:
    """What the lanes of a forward of T tokens read of their states, record and fold.

    Attributes:
        state: the slots and rings.
        lanes: the sequences, of records and then of the T tokens.
        records: int64 [n], places in the ring that the lanes may read.
        recorded: int64 [m], the forward's tokens that are recorded.
        places: int64 [m], where in the ring.
    """

    state: RecurrentState
    lanes: StateLanes
    records: Tensor
    recorded: Tensor
    places: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.lanes.num_tokens

    @classmethod
    def build(
        cls,
        state: RecurrentState,
        folds: StateFolds,
        roots: SeqLens,
        widths: Int32,
        masks: Sequence[tuple[int, Tensor]] = (),
    ) -> DeviceLanes:
        """Build them without waiting for the device.

        Args:
            state: the slots and rings.
            folds: of B lanes.
            roots: the position of each lane's first token. A lane that folds own tokens has a
                length that the host knows.
            widths: int32 [B], the tokens of each lane, which follow one another in the forward.
            masks: for lanes that follow one another and whose tokens are trees, the first lane and
                bool [b, N, N], what each node sees.
        """
        ring_len, device = state.ring_len, roots.on_device.device
        num_records = np.maximum(roots.hi - folds.begin, 0)
        # Own tokens that are folded; from there on tokens are recorded.
        num_folded = np.where(folds.dst > 0, np.maximum(folds.end - roots.hi, 0), 0)
        first_seen, first = np.full(len(widths), -1, np.int32), 0
        for lane, mask in masks:
            size = mask[0].numel()
            first_seen[lane : lane + len(mask)] = first + size * np.arange(len(mask))
            first += mask.numel()
        lane_of_record, offset = _ragged(np.zeros_like(num_records), num_records)
        records = folds.rows[lane_of_record].astype(np.int64) * ring_len
        records += (folds.begin[lane_of_record] + offset) % ring_len
        lane_of_token, offset = _ragged(num_folded, widths)
        firsts = np.cumsum(widths, dtype=np.int64) - widths
        record_places, recorded, lane_index, row_places, offsets = upload(
            device,
            records,
            firsts[lane_of_token] + offset,
            lane_of_token,
            folds.rows[lane_of_token].astype(np.int64) * ring_len,
            offset,
        )
        positions = roots.on_device.index_select(0, lane_index) + offsets
        seen = torch.cat([mask.reshape(-1) for _, mask in masks]) if masks else None
        lanes = StateLanes.build(
            src=folds.src,
            dst=folds.dst,
            begin=folds.begin,
            end=folds.end,
            num_records=num_records,
            num_tokens=widths,
            roots=roots.on_device,
            seen=seen,
            first_seen=first_seen,
        )
        return cls(state, lanes, record_places, recorded, row_places + positions % ring_len)


def _ragged(begin: Int32, end: Int32) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranges `[begin, end)` of all lanes: the lane and the number of each, int64."""
    counts = np.maximum(end - begin, 0)
    lanes = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return lanes, np.arange(len(lanes)) - firsts[lanes] + begin[lanes]
