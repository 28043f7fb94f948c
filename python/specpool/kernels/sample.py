"""Launchers of `cuda/sample.cu`: the seeded draw, and the likeliest tokens.

Twins: `specpool.kernels.twins`, equal bit for bit.
"""

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
from specpool.kernels.launch import launch, runs_kernels
from specpool.kernels.with_twin import with_twin

MAX_VOCAB = 1 << 19
"""The most columns of the logits: up to here the kernel's sums are exact."""

# Blocks of 512 threads that fill a GPU; fewer rows have blocks of twice as many.
_BLOCKS = 264

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@with_twin(twins.uniform)
def uniform(seeds: Tensor, positions: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Draw a number in [0, 1) for each (seed, position), float64 [n].

    Args:
        seeds: int64 or uint64 [n]; both read the same 64 bits.
        positions: int64 [n].
        out: float64 [n]; None means a new tensor.
    """
    device = device_of("seeds", seeds)
    n = expect("seeds", seeds, (torch.int64, torch.uint64), (None,), device).shape[0]
    expect("positions", positions, torch.int64, (n,), device)
    u = output("out", out, torch.float64, (n,), device)
    # torch supports little of uint64, so pass the same bytes as int64.
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
    min_p: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row by inverse CDF over token ids.

    Args:
        logits: float32, float16 or bfloat16 [n, V], V at most 2^19.
        temperature: float32 [n], in [0, inf); below 2^-100 = argmax.
        top_k: int32 [n]; 0 = all.
        top_p: float32 [n], in (0, 1]; 1 = all.
        u: float64 [n], in [0, 1).
        min_p: float32 [n], in [0, 1]; tokens that top-k and top-p keep are dropped if they are less
            likely than this share of the likeliest; None means 0.
        out: int64 [n].

    Returns:
        int64 [n]; -1 if a row holds a NaN, +inf, or nothing but -inf, or if its parameters are out
        of range.
    """
    device = device_of("logits", logits)
    n, vocab = expect("logits", logits, _DTYPES, (None, None), device).shape
    number("columns of logits", vocab, 1, MAX_VOCAB)
    expect("temperature", temperature, torch.float32, (n,), device)
    expect("top_k", top_k, torch.int32, (n,), device)
    expect("top_p", top_p, torch.float32, (n,), device)
    expect("u", u, torch.float64, (n,), device)
    if min_p is not None:
        expect("min_p", min_p, torch.float32, (n,), device)
    tokens = output("out", out, torch.int64, (n,), device)
    logits_args = (logits, i32(_DTYPES.index(logits.dtype)), i32(vocab))
    draw_args = (temperature, top_k, top_p, min_p, u)
    launch("sample_tokens", (n,), (_threads(n, vocab),), (*logits_args, *draw_args, tokens))
    return tokens


def likeliest(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most probable tokens of each row, best first.

    Among equally probable tokens the lower id comes first. One launch on a device; on a CPU a
    selection by integers of 8 bytes.

    Args:
        p: float32 [n, V], rows of a softmax: in [0, 1], or NaN throughout, which counts as 0. V at
            most 2^19.
        k: tokens to find, 1 to V.

    Returns:
        Probabilities float32 [n, k], and ids int64 [n, k].
    """
    device = device_of("p", p)
    n, vocab = expect("p", p, torch.float32, (None, None), device).shape
    number("columns of p", vocab, 1, MAX_VOCAB)
    number("k", k, 1, vocab)
    if not runs_kernels(device):
        return _likeliest_by_keys(p, k)
    top_p = torch.empty(n, k, dtype=torch.float32, device=device)
    ids = torch.empty(n, k, dtype=torch.int64, device=device)
    args = (p, i32(vocab), i32(k), top_p, ids)
    launch("likeliest", (n,), (_threads(n, vocab),), args)
    return top_p, ids


def _likeliest_by_keys(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do the work of the kernel in torch."""
    last = p.shape[-1] - 1
    # Floats >= 0 sort like their bits, so (bits, V - 1 - id) as int64 has no ties.
    keys = p.nan_to_num(nan=0.0).view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(last, -1, -1, device=p.device))
    top = keys.topk(k).values
    return (top >> 32).to(torch.int32).view(torch.float32), last - (top & 0xFFFFFFFF)


def _threads(n: int, vocab: int) -> int:
    """Return the size of a row's block: 16 logits or more a thread."""
    return min(max(ceil_pow2(vocab) // 16, 64), 1024 if n <= _BLOCKS // 2 else 512)
