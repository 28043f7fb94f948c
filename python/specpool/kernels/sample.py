"""Launchers of `cuda/sample.cu`: the seeded draw. Twins: `specpool.kernels.twins`, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from specpool.kernels import with_twin as twins
from specpool.kernels.checks import (
    THREADS,
    blocks,
    ceil_pow2,
    device_of,
    expect,
    i32,
    number,
    output,
)
from specpool.kernels.launch import launch
from specpool.kernels.with_twin import with_twin

MAX_VOCAB = 1 << 19
"""Most columns of the logits, for sums to be exact."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@with_twin(twins.uniform)
def uniform(seeds: Tensor, positions: Tensor, *, out: Tensor | None = None) -> Tensor:
    """float64 [n] in [0, 1): the draw of each (seed, position); seeds as int64 or uint64 [n]."""
    device = device_of("seeds", seeds)
    n = expect("seeds", seeds, (torch.int64, torch.uint64), (None,), device).shape[0]
    expect("positions", positions, torch.int64, (n,), device)
    u = output("out", out, torch.float64, (n,), device)
    # uint64 has the same bytes; torch knows little more of it.
    args = (seeds.view(torch.int64), positions, u, i32(n))
    launch("uniform", blocks(n), (THREADS,), args)
    return u


@with_twin(twins.sample_tokens)
def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    u: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draws one token per row by inverse CDF over token ids.

    Args:
        logits: float32, float16 or bfloat16 [n, V], V at most 2^19.
        temperature: float32 [n], in [0, inf); 0, or less than 2^-100, = argmax.
        top_k: int32 [n]; 0 = all.
        top_p: float32 [n], in (0, 1]; 1 = all.
        u: float64 [n], in [0, 1).
        out: int64 [n].

    Returns:
        int64 [n]; -1 where a row holds a NaN, +inf, or nothing but -inf, or its parameters are out
        of range.
    """
    device = device_of("logits", logits)
    n, vocab = expect("logits", logits, _DTYPES, (None, None), device).shape
    number("columns of logits", vocab, 1, MAX_VOCAB)
    expect("temperature", temperature, torch.float32, (n,), device)
    expect("top_k", top_k, torch.int32, (n,), device)
    expect("top_p", top_p, torch.float32, (n,), device)
    expect("u", u, torch.float64, (n,), device)
    tokens = output("out", out, torch.int64, (n,), device)
    block = (min(max(ceil_pow2(vocab) // 4, 64), 1024),)
    kind = i32(_DTYPES.index(logits.dtype))
    args = (logits, kind, i32(vocab), temperature, top_k, top_p, u, tokens)
    launch("sample_tokens", (n,), block, args)
    return tokens
