"""What one step hands to the next, on the device and indexed by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool.arrays import Int32
from specpool.attention.lanes import Lanes
from specpool.attention.seq_lens import SeqLens
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import Download, upload
from specpool.scheduler.requests.request import Request


class RowState:
    """Per row: its length, its root token, and how its tokens are drawn.

    A step gathers by lane and scatters at its end, so the host need not know what it wrote.

    Attributes:
        seq_lens: int32 [num_rows + 1], positions with KV: where the root stands.
        root_tokens: int64 [num_rows + 1], the newest token, which has no KV yet.
    """

    def __init__(
        self,
        num_rows: int,
        max_nodes: int,
        device: torch.device,
        *,
        needs_host_lengths: bool = False,
    ) -> None:
        """Nothing is known of any row.

        Args:
            num_rows: besides row 0.
            max_nodes: of a row's tree in one step, at most.
            device: of the state.
            needs_host_lengths: before each round the host waits for the lengths.
        """

        def state(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows + 1, dtype=dtype, device=device)

        self.device = device
        self.seq_lens, self.root_tokens = state(torch.int32), state(torch.int64)
        # Where no kernel runs, the host reads the lengths themselves.
        late = needs_host_lengths and runs_kernels(device)
        self._needs_host_lengths = needs_host_lengths
        self._copy = Download(self.seq_lens) if late else None
        self._temperature, self._top_p = state(torch.float32), state(torch.float32)
        self._top_k, self._seeds = state(torch.int32), state(torch.int64)
        # Temperature, top_k, top_p and draw that take the likeliest token, for any step's nodes
        zeros = torch.zeros(num_rows * max_nodes, dtype=torch.float32, device=device)
        self._greedy = (zeros, zeros.int(), zeros + 1, zeros.double())
        self._greedy_of: dict[int, tuple[Tensor, ...]] = {}  # the first of them, by their number

    def lanes(self, rows: Int32, lo: Int32, hi: Int32) -> Lanes:
        """Lanes that go on where their rows stand, one token each.

        The device's lengths are clamped into [lo, hi], which the ledger has reserved for.
        """
        if lo.tolist() == hi.tolist():  # the host knows
            on_device, starts = upload(self.device, rows, lo)
            return Lanes(on_device, SeqLens(starts, lo, lo), 1)
        on_device, least, most = upload(self.device, rows, lo, hi)
        starts = torch.clamp(self.seq_lens.index_select(0, on_device), least, most)
        copy = self._copy
        lens = SeqLens(starts, lo, hi, None if copy is None else lambda: copy.array()[rows])
        if self._needs_host_lengths:
            lens.refresh_seq_lens_cpu(sync=True)
        return Lanes(on_device, lens, 1)

    def lanes_within(self, rows: Tensor, least: Tensor, most: Tensor, bound: int) -> Lanes:
        """As `lanes`, for a graph: rows and bounds, int32 [B] each, are known on the device alone.

        The host reckons with roots in `[0, bound]`.
        """
        starts = torch.clamp(self.seq_lens.index_select(0, rows), least, most)
        lo = np.zeros(len(rows), np.int32)
        return Lanes(rows, SeqLens(starts, lo, np.full_like(lo, bound)), 1)

    def put(self, lanes: Lanes, seq_lens: Tensor, root_tokens: Tensor) -> None:
        """What the rows have come to: int32 [B], int64 [B]. Right after verify."""
        rows = lanes.index
        self.seq_lens.index_copy_(0, rows, seq_lens)
        # -1 where the logits were not finite: the row's next round may be on its way already, and
        # what is no token would fail the whole forward.
        self.root_tokens.index_copy_(0, rows, root_tokens.clamp(min=0))
        if self._copy is not None:  # on its way before draft-extend is launched
            self._copy = Download(self.seq_lens)

    def put_params(self, lanes: Lanes, requests: Sequence[Request]) -> None:
        """How the tokens of these rows are drawn from now on."""
        params = [request.params for request in requests]
        top_p = np.array([p.top_p for p in params], np.float32)
        values = upload(
            self.device,
            np.array([p.temperature for p in params], np.float32),
            np.maximum(top_p, np.finfo(np.float32).tiny),  # 1e-50 is above 0, in float32 it is 0
            np.array([p.top_k for p in params], np.int32),
            np.array([request.seed for request in requests], np.uint64).view(np.int64),
        )
        rows = lanes.index
        state = (self._temperature, self._top_p, self._top_k, self._seeds)
        for rows_state, value in zip(state, values, strict=True):
            rows_state.index_copy_(0, rows, value)

    def draw(self, lanes: Lanes, logits: Tensor, positions: Tensor, *, greedy: bool) -> Tensor:
        """The target's own token at each node: greedy, or drawn with the row's seed.

        Args:
            lanes: B of them.
            logits: [B * n, V], n nodes per lane.
            positions: int32 [B, n], of the tokens that are drawn.
            greedy: every lane takes the likeliest token.

        Returns:
            int64 [B, n]; -1 where the logits are not finite.
        """
        size = positions.numel()
        if greedy:
            parameters = self._greedy_of.get(size)
            if parameters is None:
                parameters = tuple(parameter[:size] for parameter in self._greedy)
                self._greedy_of[size] = parameters
        else:
            each = lanes.rows.repeat_interleave(positions.shape[1], output_size=size)
            temperature, top_p, top_k, seeds = (
                state.index_select(0, each)
                for state in (self._temperature, self._top_p, self._top_k, self._seeds)
            )
            uniforms = kernels.uniform(seeds, positions.reshape(-1).long())
            parameters = (temperature, top_k, top_p, uniforms)
        return kernels.sample_tokens(logits, *parameters).view(positions.shape)
