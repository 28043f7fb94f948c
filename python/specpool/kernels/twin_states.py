"""The CPU twins of `specpool.kernels.states`, in torch, in the kernels' own order of operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.kernels.state_lanes import StateLanes

_WARP = 32


@dataclass(frozen=True, slots=True)
class _LaneSequence:
    """What one lane reads: its records that count, and then its own tokens.

    Attributes:
        src: the slot to read.
        dst: the slot to write; 0 if nothing is folded.
        num_folded: how many elements are folded.
        num_past: how many elements are records.
        indices: of each element, in an array of tokens.
        seen: bool [N, N], what each own token sees; None if they are a chain.
    """

    src: int
    dst: int
    num_folded: int
    num_past: int
    indices: list[int]
    seen: list[list[bool]] | None

    def restarts(self, element: int) -> list[int] | None:
        """Return the nodes between the root's state and this one; None if it goes on as it is."""
        node = element - self.num_past
        if node <= 0 or self.seen is None or self.seen[node][node - 1]:
            return None
        return [other for other in range(node) if self.seen[node][other]]

    def index(self, node: int) -> int:
        """Return the index of an own token."""
        return self.indices[self.num_past + node]


def _lane_sequences(lanes: StateLanes) -> Iterator[_LaneSequence]:
    for (src, dst, begin, end, record, records, token, tokens, first_seen), root in zip(
        lanes.spans.tolist(), lanes.roots.tolist(), strict=True
    ):
        past = min(max(root - begin, 0), records)
        folded = min(max(end - begin, 0), past + tokens) if dst else 0
        seen = None
        if lanes.seen is not None and first_seen >= 0:
            mask = lanes.seen[first_seen : first_seen + tokens * tokens]
            seen = mask.view(tokens, tokens).tolist()
        first_token = lanes.num_records + token
        indices = [*range(record, record + past), *range(first_token, first_token + tokens)]
        yield _LaneSequence(src, dst, folded, past, indices, seen)


def convolve_lanes(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lanes: StateLanes,
    *,
    out: Tensor,
) -> Tensor:
    """Convolve lane after lane; see `specpool.kernels.states.convolve_lanes`."""
    width, state_width = weight.shape[1], state.shape[2]
    taps, numbers = weight.float(), inputs.float()
    for lane in _lane_sequences(lanes):
        window = [*state[lane.src].float().clone().unbind(1)]  # `dst` may be the same slot
        window = [torch.zeros_like(numbers[0])] * max(width - state_width, 0) + window
        root = window
        for element in range(len(lane.indices) + 1):
            if element == lane.num_folded and lane.dst:
                state[lane.dst] = torch.stack(window[len(window) - state_width :], 1).to(
                    state.dtype
                )
            if element == len(lane.indices):
                break
            if element == lane.num_past:
                root = window
            path = lane.restarts(element)
            if path is not None:
                window = root + [numbers[lane.index(node)] for node in path]
            index = lane.indices[element]
            window = [*window, numbers[index]][-max(width, state_width) :]
            products = [
                column * taps[:, tap] for tap, column in enumerate(window[len(window) - width :])
            ]
            total = products[0]
            for product in products[1:]:
                total = total + product
            out[index] = (total if bias is None else total + bias.float()).to(out.dtype)
    return out


def scan_lanes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    lanes: StateLanes,
    *,
    is_delta: bool,
    is_normed: bool,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Scan lane after lane; see `specpool.kernels.states.scan_lanes`."""
    heads_of_key = v.shape[1] // k.shape[1]

    def keys(heads: Tensor, factor: float) -> Tensor:
        numbers = heads.float()
        if is_normed:
            squares = _sum_rows((numbers * numbers).unsqueeze(2)) + 1e-6
            # torch's own root of float32 may be off by a bit; NumPy's is rounded to the nearest.
            numbers = numbers * (1.0 / torch.from_numpy(np.sqrt(squares.numpy())))
        numbers = numbers * torch.tensor(factor, dtype=torch.float32)
        return numbers.repeat_interleave(heads_of_key, 0).unsqueeze(2)

    values = v.float()
    for lane in _lane_sequences(lanes):
        matrix = root = state[lane.src].float().clone()  # [heads, rows, columns]
        added: list[Tensor] = []  # by own token
        for element in range(len(lane.indices) + 1):
            if element == lane.num_folded and lane.dst:
                state[lane.dst] = matrix.to(state.dtype)
            if element == len(lane.indices):
                break
            if element == lane.num_past:
                root = matrix
            path = lane.restarts(element)
            if path is not None:
                matrix = root
                for node in path:
                    index = lane.index(node)
                    matrix = matrix * decay[index, :, None, None]
                    matrix = matrix + keys(k[index], 1.0) * added[node]
            index = lane.indices[element]
            matrix = matrix * decay[index, :, None, None]
            key, value = keys(k[index], 1.0), values[index]
            if is_delta:
                value = value - _sum_rows(matrix * key)
            value = (value * beta[index].unsqueeze(1)).unsqueeze(1)
            matrix = matrix + key * value
            if element >= lane.num_past:
                added.append(value)
                out[index] = _sum_rows(matrix * keys(q[index], scale))
    return out


def _sum_rows(products: Tensor) -> Tensor:
    """Sum [heads, rows, columns] over its rows in the order of a warp of the kernel."""
    heads, rows, columns = products.shape
    padded = products.new_zeros(heads, -(-rows // _WARP) * _WARP, columns)
    padded[:, :rows] = products
    total = torch.zeros_like(padded[:, :_WARP])
    for part in torch.split(padded, _WARP, 1):
        total = total + part
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
