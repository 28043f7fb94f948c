"""Launchers of `cuda/states.cu`: recurrent layers by lanes, each by the length that the device has.

A lane of a row reads the state in a slot, then the recorded inputs of the row since, then its own
tokens. How many records count, only the device needs to know: the host gives an upper bound. What
is certain is folded into a slot, and the state after later tokens is kept nowhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specpool.errors import ShapeError
from specpool.kernels import twin_states as twins
from specpool.kernels.checks import (
    TYPE_NUMBERS,
    device_of,
    expect,
    heads_of,
    i32,
    i64,
    number,
    output,
    packed_rows,
)
from specpool.kernels.launch import launch, runs_kernels
from specpool.kernels.state_lanes import BLOCK_COLUMNS, StateLanes

_MAX_WIDTH, _MAX_ROWS, _MAX_LANES = 8, 256, 65535
_THREADS = 128  # of a block


def convolve_lanes(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lanes: StateLanes,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve each lane's sequence along time, each channel alone, and fold its state.

    It is `causal_conv1d` without an activation. Products and sums are float32.

    Args:
        inputs: float32, float16 or bfloat16 [T, C], T of `lanes`; rows may be parts of wider ones.
        weight: [C, K] of the same dtype, K at most 8.
        bias: [C] of the same dtype, or None.
        state: float32, float16 or bfloat16 [slots, C, L], L at most 8: the last L inputs before a
            position. Slots `dst` are written.
        lanes: the sequences.
        out: [T, C] of the inputs' dtype; None means a new tensor of zeros.

    Returns:
        `out`; rows of records that do not count are not written.
    """
    device = device_of("inputs", inputs)
    if inputs.dtype not in TYPE_NUMBERS or inputs.ndim != 2 or len(inputs) != lanes.length:
        raise ShapeError(
            f"inputs must be float32, float16 or bfloat16 [{lanes.length}, channels], got"
            f" {inputs.dtype} {list(inputs.shape)}"
        )
    channels = inputs.shape[1]
    expect("weight", weight, inputs.dtype, (channels, None), device)
    width = number("the width of weight", weight.shape[1], 1, _MAX_WIDTH)
    if bias is not None:
        expect("bias", bias, inputs.dtype, (channels,), device)
    expect("state", state, tuple(TYPE_NUMBERS), (None, channels, None), device)
    state_width = number("the width of state", state.shape[2], 1, _MAX_WIDTH)
    _check_lanes(lanes, len(state), device)
    if out is None:
        out = torch.zeros(lanes.length, channels, dtype=inputs.dtype, device=device)
    convolved = output("out", out, inputs.dtype, (lanes.length, channels), device)
    if not runs_kernels(device):
        return twins.convolve_lanes(inputs, weight, bias, state, lanes, out=convolved)
    rows, stride = packed_rows(inputs)
    numbers = (
        lanes.num_records,
        lanes.num_tokens,
        len(state),
        channels,
        width,
        state_width,
        TYPE_NUMBERS[inputs.dtype],
        TYPE_NUMBERS[state.dtype],
    )
    launch(
        "convolve_lanes",
        (-(-channels // _THREADS), len(lanes.roots)),
        (_THREADS,),
        (convolved, rows, weight, bias, state, *_lane_args(lanes), i64(stride), *map(i32, numbers)),
    )
    return convolved


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
    is_normed: bool = False,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Run a recurrence over each lane's sequence, and fold its state S.

    For each token S = decay * S, then S += outer(k, u), and the output is scale * q S. u is
    beta * (v - k S) of a gated delta rule, or beta * v, as in Mamba-2 (q, k, v, beta are its C, B,
    x, dt there). All sums are float32, in the order of the tokens; a node of a tree computes what a
    chain of its path would.

    Args:
        q: float32, float16 or bfloat16 [T, Hk, D], T of `lanes`, D at most 256; the tokens may be
            parts of wider rows.
        k: likewise, of the same dtype and shape.
        v: likewise, [T, H, W], H a multiple of Hk: consecutive heads share a key.
        decay: float32 [T, H].
        beta: float32 [T, H].
        state: float32, float16 or bfloat16 [slots, H, D, W]; may be a transposed view of
            [slots, H, W, D]. Slots `dst` are written.
        lanes: the sequences.
        is_delta: whether u is that of a delta rule.
        is_normed: whether queries and keys are divided by their lengths first.
        scale: factor of the queries.
        out: float32 [T, H, W]; None means a new tensor of zeros.

    Returns:
        `out`; rows of records are not written.
    """
    device = device_of("q", q)
    sizes = (lanes.length, None)
    length, key_heads, rows = heads_of("q", q, tuple(TYPE_NUMBERS), sizes, device)
    if heads_of("k", k, (q.dtype,), sizes, device) != (length, key_heads, rows):
        raise ShapeError(f"k must be as q, {list(q.shape)}, got {list(k.shape)}")
    _, heads, columns = heads_of("v", v, (q.dtype,), sizes, device)
    number("the width of q", rows, 1, _MAX_ROWS)
    if not key_heads or heads % key_heads:
        raise ShapeError(f"v must have a multiple of q's {key_heads} heads, got {heads}")
    expect("decay", decay, torch.float32, (length, heads), device)
    expect("beta", beta, torch.float32, (length, heads), device)
    is_transposed = not state.is_contiguous()
    memory = state.transpose(2, 3) if is_transposed and state.ndim == 4 else state
    head_sizes = (columns, rows) if is_transposed else (rows, columns)
    expect("state", memory, tuple(TYPE_NUMBERS), (None, heads, *head_sizes), device)
    _check_lanes(lanes, len(state), device)
    number("the number of heads", heads, 0, _MAX_LANES)
    if out is None:
        out = torch.zeros(length, heads, columns, dtype=torch.float32, device=device)
    scanned = output("out", out, torch.float32, (length, heads, columns), device)
    options = {"is_delta": is_delta, "is_normed": is_normed}
    if not runs_kernels(device):
        return twins.scan_lanes(
            q, k, v, decay, beta, state, lanes, scale=scale, out=scanned, **options
        )
    (q_rows, q_stride), (k_rows, k_stride), (v_rows, v_stride) = map(packed_rows, (q, k, v))
    strides = (1, rows) if is_transposed else (columns, 1)
    numbers = (
        lanes.num_records,
        lanes.num_tokens,
        len(state),
        heads,
        key_heads,
        rows,
        columns,
        *strides,
        is_delta,
        is_normed,
    )
    launch(
        "scan_lanes",
        (-(-columns // BLOCK_COLUMNS), heads, len(lanes.roots)),
        (_THREADS,),
        (
            *(scanned, q_rows, k_rows, v_rows, decay, beta, memory, *_lane_args(lanes)),
            *map(i64, (q_stride, k_stride, v_stride)),
            *map(i32, numbers),
            np.float32(scale),
            *map(i32, (TYPE_NUMBERS[q.dtype], TYPE_NUMBERS[state.dtype], lanes.max_nodes)),
        ),
        shared_mem=4 * BLOCK_COLUMNS * lanes.max_nodes,
    )
    return scanned


def _check_lanes(lanes: StateLanes, num_slots: int, device: torch.device) -> None:
    number("the number of lanes", len(lanes.roots), 0, _MAX_LANES)
    number("the greatest slot of a lane", lanes.max_slot, 0, num_slots - 1)
    expect("spans", lanes.spans, torch.int32, (len(lanes.roots), 9), device)


def _lane_args(lanes: StateLanes) -> tuple[Tensor | np.generic | None, ...]:
    num_seen = 0 if lanes.seen is None else len(lanes.seen)
    return lanes.spans, lanes.roots, lanes.seen, i64(num_seen)
