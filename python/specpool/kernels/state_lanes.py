"""`StateLanes`: which states and tokens the kernels over recurrent layers read, lane by lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.arrays import Int32
from specpool.errors import ShapeError
from specpool.kernels.checks import device_of, expect
from specpool.kernels.launch import SHARED_BYTES
from specpool.kernels.transfer import upload

BLOCK_COLUMNS = 16
"""Columns of a state that a thread block scans; it keeps what each node adds to them."""
MAX_NODES = SHARED_BYTES // (4 * BLOCK_COLUMNS)
"""The most nodes of a tree."""


@dataclass(frozen=True, slots=True)
class StateLanes:
    """The lanes of one forward, for kernels over recurrent layers.

    Arrays of tokens hold the records of all lanes first, and then all lanes' own tokens.

    Attributes:
        spans: int32 [B, 9], `LaneSpan` of the kernels.
        roots: int32 [B], on the device: the position of each lane's first own token.
        seen: bool [M], the masks of all trees, one after the other; None if there are none.
        num_records: records of all lanes.
        num_tokens: own tokens of all lanes.
        max_nodes: nodes of the largest tree; 0 if there are none.
        max_slot: the greatest slot that a lane reads or writes.
    """

    spans: Tensor
    roots: Tensor
    seen: Tensor | None
    num_records: int
    num_tokens: int
    max_nodes: int
    max_slot: int

    @classmethod
    def build(
        cls,
        *,
        src: Int32,
        dst: Int32,
        begin: Int32,
        end: Int32,
        num_records: Int32,
        num_tokens: Int32,
        roots: Tensor,
        seen: Tensor | None = None,
        first_seen: Int32 | None = None,
    ) -> StateLanes:
        """Upload the lanes' numbers, int32 [B] each on the host.

        Args:
            src: slots to read; slot 0 holds zeros.
            dst: slots to write the state at `end` into; 0 folds nothing.
            begin: the position after each state in `src`.
            end: the position up to which the sequence is folded.
            num_records: records from `begin` on that the lane may need; those at its root or
                beyond do not count.
            num_tokens: own tokens, from the root on.
            roots: int32 [B], on the device.
            seen: bool [M], on the device: the masks [N, N] of trees, one after the other. A node
                sees its ancestors and itself, and parents precede children.
            first_seen: where each lane's mask begins; -1 if its tokens are a chain.

        Raises:
            ShapeError: sizes differ, a number is negative, a mask ends beyond `seen`, or a lane
                writes a slot that another one reads or writes: lanes run side by side.
        """
        device, size = device_of("roots", roots), len(src)
        first_seen = np.full(size, -1, np.int32) if first_seen is None else first_seen
        columns = {
            "src": src,
            "dst": dst,
            "begin": begin,
            "end": end,
            "num_records": num_records,
            "num_tokens": num_tokens,
            "first_seen": first_seen,
        }
        for name, column in columns.items():
            least = -1 if name == "first_seen" else 0
            if column.shape != (size,) or (size and int(column.min()) < least):
                raise ShapeError(
                    f"{name} must be int32 [{size}] and at least {least}, got {column.shape}"
                    f" {column.tolist()[:8]}"
                )
        expect("roots", roots, torch.int32, (size,), device)
        _check_apart(src, dst)
        trees = first_seen >= 0
        max_nodes = int(num_tokens[trees].max()) if trees.any() else 0
        ends = first_seen.astype(np.int64) + num_tokens.astype(np.int64) ** 2
        num_seen = 0 if seen is None else len(expect("seen", seen, torch.bool, (None,), device))
        if trees.any() and int(ends[trees].max()) > num_seen:
            raise ShapeError(f"masks end at {int(ends[trees].max())}, and seen has {num_seen}")
        if max_nodes > MAX_NODES:
            raise ShapeError(f"a tree must have at most {MAX_NODES} nodes, got {max_nodes}")
        spans = np.stack(
            [
                src,
                dst,
                begin,
                end,
                _firsts(num_records),
                num_records,
                _firsts(num_tokens),
                num_tokens,
                first_seen,
            ],
            1,
        )
        (uploaded,) = upload(device, spans.astype(np.int32))
        return cls(
            spans=uploaded,
            roots=roots,
            seen=seen,
            num_records=int(num_records.sum()),
            num_tokens=int(num_tokens.sum()),
            max_nodes=max_nodes,
            max_slot=int(max(src.max(), dst.max())) if size else 0,
        )

    @property
    def length(self) -> int:
        """The length of an array of tokens."""
        return self.num_records + self.num_tokens


def _check_apart(src: Int32, dst: Int32) -> None:
    """Check that no lane writes a slot of another; a lane may write the slot that it reads."""
    written = dst[dst > 0]
    slots, counts = np.unique(np.concatenate([src[src != dst], written]), return_counts=True)
    shared = slots[(counts > 1) & np.isin(slots, written)]
    if len(shared):
        raise ShapeError(
            "a slot that a lane writes must be of that lane alone, others use"
            f" {shared.tolist()[:8]}"
        )


def _firsts(counts: Int32) -> Int32:
    firsts: Int32 = (np.cumsum(counts, dtype=np.int64) - counts).astype(np.int32)
    return firsts
