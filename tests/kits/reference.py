"""Slow, plain oracles. They share no code with specpool."""

from __future__ import annotations

from collections.abc import Iterable

# --- Sizing, and where drafts lie (docs/contract.md, Sizing and Layouts) ---


def ceil_align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def is_holey(page_size: int, topk: int, layout: str) -> bool:
    return layout == "holey" and page_size > 1 and topk > 1


def alloc_len(P: int, S: int, K: int, N: int, hosts_drafts: bool = True, layout="holey") -> int:
    if not hosts_drafts:
        return N
    if is_holey(P, K, layout):
        return max(-(-(P - 1 + S) // P) * P * K, N)
    return max(S * K, N)


def draft_position(s: int, P: int, S: int, layout: str, branch: int, step: int) -> int:
    """The position of a draft of a round from the root `s` (docs/contract.md, Layouts)."""
    if layout == "dense":
        return s + branch * S + step
    last = s % P
    base = s - last
    n = -(-(last + S) // P)
    return base + branch * n * P + last + step


def footprint(s: int, P: int, S: int, K: int, N: int, hosts_drafts=True, layout="holey") -> int:
    """One past the last slot that a round from the root `s` writes, by where its drafts lie."""
    if not hosts_drafts or S == 0:
        return s + N
    end = draft_position(s, P, S, layout, K - 1, S - 1) + 1
    if is_holey(P, K, layout):
        end = ceil_align(end, P)  # A whole page is the last branch's own.
    return max(s + N, end)


def need_exact(lo: int, hi: int, *geometry, **options) -> int:
    return max(footprint(s, *geometry, **options) for s in range(lo, hi + 1))


def reachable(shapes: Iterable[tuple[int, int, int]], L: int, D: int) -> set[tuple[int, int]]:
    """Every (lo, hi) that a row with r < L and at most D rounds in flight can have."""
    accepts = {min(S + 1, N) for S, _, N in shapes}
    states = set()
    for r in range(1, L):
        sums = {0}
        for k in range(D + 1):
            states |= {(r + k, r + total) for total in sums}
            sums = {total + a for total in sums for a in accepts}
    return states
