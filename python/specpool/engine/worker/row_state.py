"""`RowState`: the values that one step hands to the next, on the device and indexed by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from specpool import kernels
from specpool.arrays import Int32
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.scheduler.request import Request
from specpool.kernels.launch import runs_kernels
from specpool.kernels.transfer import Download, upload


class RowState:
    """The length, the root token and the sampling parameters of each row.

    A step gathers them by lane and scatters new ones at its end, so the host need not wait for
    them.

    Attributes:
        seq_lens: int32 [num_rows + 1], positions with KV; the root's position is the next.
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
        """Allocate the state, all zeros.

        Args:
            num_rows: rows without row 0.
            max_nodes: the most nodes of a row's tree in one step.
            device: where the state lies.
            needs_host_lengths: the host waits for the exact lengths before each round.
        """

        def state(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows + 1, dtype=dtype, device=device)

        self.device = device
        self.seq_lens, self.root_tokens = state(torch.int32), state(torch.int64)
        # On a CPU the host reads the lengths directly and needs no copy.
        late = needs_host_lengths and runs_kernels(device)
        self._needs_host_lengths = needs_host_lengths
        self._copy = Download(self.seq_lens) if late else None
        self._copies_lens = late
        self._temperature, self._top_p = state(torch.float32), state(torch.float32)
        self._min_p = state(torch.float32)
        self._top_k, self._seeds = state(torch.int32), state(torch.int64)
        # Temperature, top_k, top_p and uniform draws of greedy sampling, for a step's most nodes.
        zeros = torch.zeros(num_rows * max_nodes, dtype=torch.float32, device=device)
        self._greedy = (zeros, zeros.int(), zeros + 1, zeros.double())
        self._greedy_of: dict[int, tuple[Tensor, ...]] = {}  # the first n of each, by n

    def lanes(self, rows: Int32, lo: Int32, hi: Int32) -> Lanes:
        """Return lanes that start at their rows' lengths, with one token each.

        The device's lengths are clamped into [lo, hi], the range that the ledger has reserved for.

        Args:
            rows: int32 [B], on the host.
            lo: int32 [B], the least length of each row.
            hi: int32 [B], the greatest length of each row.
        """
        if lo.tolist() == hi.tolist():  # the host knows the lengths
            on_device, starts = upload(self.device, rows, lo)
            return Lanes(on_device, SeqLens(starts, lo, lo), 1)
        on_device, least, greatest = upload(self.device, rows, lo, hi)
        starts = torch.clamp(self.seq_lens.index_select(0, on_device), least, greatest)
        copy = self._copy
        lens = SeqLens(starts, lo, hi, None if copy is None else lambda: copy.array()[rows])
        if self._needs_host_lengths:
            lens.refresh_seq_lens_cpu(sync=True)
        return Lanes(on_device, lens, 1)

    def lanes_within(self, rows: Tensor, least: Tensor, greatest: Tensor, bound: int) -> Lanes:
        """Return lanes for a graph, whose rows and length bounds are on the device alone.

        `rows`, `least` and `greatest` are int32 [B] each. The host allows for any root position in
        `[0, bound]`.
        """
        starts = torch.clamp(self.seq_lens.index_select(0, rows), least, greatest)
        lo = np.zeros(len(rows), np.int32)
        return Lanes(rows, SeqLens(starts, lo, np.full_like(lo, bound)), 1)

    def put(self, lanes: Lanes, seq_lens: Tensor, root_tokens: Tensor) -> None:
        """Store the rows' new lengths, int32 [B], and roots, int64 [B], right after verify."""
        rows = lanes.index
        self.seq_lens.index_copy_(0, rows, seq_lens)
        # A token of -1 (logits not finite) becomes 0: the row's next round may be on its way
        # already, and an invalid token would fail the whole forward.
        self.root_tokens.index_copy_(0, rows, root_tokens.clamp(min=0))
        if self._copies_lens:  # start the copy before draft-extend is launched
            self._copy = Download(self.seq_lens)

    @contextlib.contextmanager
    def within_graph(self) -> Iterator[None]:
        """Start no copy of the lengths to the host within the block, the work of a graph."""
        before, self._copies_lens = self._copies_lens, False
        try:
            yield
        finally:
            self._copies_lens = before

    def forget_copy(self) -> None:
        """Drop the copy on the host: a replay has changed the lengths. The next read waits."""
        self._copy = None

    def put_params(self, lanes: Lanes, requests: Sequence[Request]) -> None:
        """Set the sampling parameters of the lanes' rows, one request per lane."""
        params = [request.params for request in requests]
        top_p = np.array([p.top_p for p in params], np.float32)
        values = upload(
            self.device,
            np.array([p.temperature for p in params], np.float32),
            np.maximum(top_p, np.finfo(np.float32).tiny),  # a positive top_p may round to 0 here
            np.array([p.min_p for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([request.seed for request in requests], np.uint64).view(np.int64),
        )
        rows = lanes.index
        state = (self._temperature, self._top_p, self._min_p, self._top_k, self._seeds)
        for rows_state, value in zip(state, values, strict=True):
            rows_state.index_copy_(0, rows, value)

    def draw(self, rows: Tensor, logits: Tensor, positions: Tensor, *, greedy: bool) -> Tensor:
        """Choose the target's own token at each node: the likeliest, or drawn with the row's seed.

        Temperature, top_k, top_p and min_p act here. Bias, penalties, forms and bans have changed
        the logits before (`Processors`).

        Args:
            rows: int32 [B], the rows of B lanes.
            logits: [B * n, V], n nodes per lane.
            positions: int32 [B, n], the position of each token to choose.
            greedy: every lane takes the likeliest token; False if by the rows' parameters.

        Returns:
            int64 [B, n]; -1 where the logits are not finite.
        """
        size, min_p = positions.numel(), None
        if greedy:
            parameters = self._greedy_of.get(size)
            if parameters is None:
                parameters = tuple(parameter[:size] for parameter in self._greedy)
                self._greedy_of[size] = parameters
        else:
            node_rows = rows.repeat_interleave(positions.shape[1], output_size=size)
            temperature, top_p, min_p, top_k, seeds = (
                state.index_select(0, node_rows)
                for state in (
                    self._temperature,
                    self._top_p,
                    self._min_p,
                    self._top_k,
                    self._seeds,
                )
            )
            uniforms = kernels.uniform(seeds, positions.reshape(-1).long())
            parameters = (temperature, top_k, top_p, uniforms)
        tokens = kernels.sample_tokens(logits, *parameters, min_p=min_p)
        return tokens.view(positions.shape)
