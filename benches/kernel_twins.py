"""The CPU twins' side of `bench_kernels.py`: large moves beside torch and memcpy, and the tree."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from benches.candidates import Candidates
from specpool.cli.results import Result, interleaved
from specpool.kernels import twin_moves as moves
from specpool.kernels.twins import build_tree, compact_moves

MOST_US = 60.0  # select, organize and build of 8 trees with N = 16
TREES = ((5, 4, 16), (5, 8, 16), (5, 8, 64))
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class HostSizes:
    """Buffers of one case: `layers` of [num_slots, *tail]; `moved` slots of each are moved."""

    layers: int = 16
    num_slots: int = 8192
    tail: tuple[int, ...] = (8, 128)
    moved: int = 2048
    page_size: int = 64


def keep_freed_memory() -> None:
    """Tells glibc to give nothing back, so that fresh pages are no part of any side's figure."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks come from the heap,
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: which keeps what it has


def _ms(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def _torch_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def move_results(sizes: HostSizes, dtype: torch.dtype, paged: bool, repeats: int) -> list[Result]:
    """Each move beside an index_select of the same slots, and beside a memcpy of the same bytes.

    Args:
        sizes: of the buffers.
        dtype: of the buffers.
        paged: whole pages in random order, or single slots in random order.
        repeats: turns.
    """
    rng = np.random.default_rng(0)
    p, n = sizes.page_size if paged else 1, sizes.moved
    pages = rng.permutation(np.arange(1, sizes.num_slots // p))
    slots = (pages[:, None] * p + np.arange(p)).ravel()
    src, dst = slots[:n].copy(), slots[n : 2 * n].copy()
    chained = slots[n // 2 : n // 2 + n].copy()  # half of what is read is written too
    shape = (sizes.num_slots, *sizes.tail)
    # Ones, since unwritten memory of zeros is one page of the machine's.
    buffers = [torch.ones(shape).to(dtype) for _ in range(sizes.layers)]
    values = moves.gather_kv(buffers, src)
    index = torch.from_numpy(src)
    num_bytes = sum(value.nbytes for value in values)
    flat = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)]

    def select_into() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            torch.index_select(_torch_bytes(buffer), 0, index, out=_torch_bytes(value))

    def select() -> list[torch.Tensor]:
        return [_torch_bytes(buffer).index_select(0, index) for buffer in buffers]

    runs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: flat[0].copy_(flat[1]),
        "index_select": select,
        "index_select into memory at hand": select_into,
        "gather_kv": partial(moves.gather_kv, buffers, src),
        "scatter_kv": partial(moves.scatter_kv, buffers, src, values),
        "move_kv": partial(moves.move_kv, buffers, src, dst),
        "move_kv, overlapping": partial(moves.move_kv, buffers, src, chained),
    }
    timed = _timed(runs, repeats)
    kind = f"{num_bytes / 1e6:.0f} MB of {str(dtype).removeprefix('torch.')}"
    how = f"{kind}, pages of {p} slots" if paged else f"{kind}, single slots"
    results = []
    for name in ("gather_kv", "scatter_kv", "move_kv", "move_kv, overlapping"):
        beside = "index_select" if name == "gather_kv" else "index_select into memory at hand"
        for reference in (beside, "memcpy"):
            results.append(Result(f"{name}, {how}", timed[name], "ms", reference, timed[reference]))
    return results


def compact_results(sizes: HostSizes, repeats: int) -> list[Result]:
    """`compact_accepted` of lanes with 64 nodes and 5 moves each, planning included."""
    rng = np.random.default_rng(0)
    p, nodes, width = sizes.page_size, 64, 6
    columns = 1 + math.ceil(nodes / p)
    lanes = (sizes.num_slots // p - 1) // columns
    pages = rng.permutation(np.arange(1, lanes * columns + 1, dtype=np.int32))
    table = np.concatenate([np.zeros((1, columns), np.int32), pages.reshape(lanes, columns)])
    rows, roots = np.arange(1, lanes + 1, dtype=np.int32), rng.integers(0, p, lanes, np.int32)
    walks = np.sort(rng.permuted(np.tile(np.arange(7, nodes), (lanes, 1)), axis=1)[:, : width - 1])
    first = nodes * np.arange(lanes)[:, None]
    accept_index = (first + np.pad(walks, ((0, 0), (1, 0)))).astype(np.int32)
    layout = (table, p, rows, roots, accept_index)
    buffers = [torch.ones(sizes.num_slots, *sizes.tail).bfloat16() for _ in range(sizes.layers)]
    index = torch.from_numpy(compact_moves(*layout, num_draft_tokens=nodes)[0])
    values = [buffer.index_select(0, index) for buffer in buffers]
    num_bytes = sum(value.nbytes for value in values)
    flat = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)]

    def select_into() -> None:
        for buffer, value in zip(buffers, values, strict=True):
            torch.index_select(buffer, 0, index, out=value)

    ours = partial(moves.compact_accepted, buffers, *layout, num_draft_tokens=nodes)
    runs: dict[str, Callable[[], object]] = {
        "memcpy": lambda: flat[0].copy_(flat[1]),
        "index_select into memory at hand": select_into,
        "compact_accepted": ours,
    }
    timed = _timed(runs, repeats)
    name = f"compact_accepted, {num_bytes / 1e6:.0f} MB of bfloat16, {lanes} lanes, P={p}"
    return [
        Result(name, timed["compact_accepted"], "ms", reference, timed[reference])
        for reference in ("index_select into memory at hand", "memcpy")
    ]


def _timed(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for run in runs.values():
        run()
    medians = interleaved([partial(_ms, run) for run in runs.values()], repeats)
    return dict(zip(runs, medians, strict=True))


def tree_results(batch: int, repeats: int) -> list[Result]:
    """Select of all steps, organize and build of a batch, together."""
    results = []
    for num_steps, topk, nodes in TREES:
        rng = np.random.default_rng(0)
        shapes = [(batch if step == 0 else batch * topk, topk) for step in range(num_steps)]
        p = [np.sort(rng.random(shape, np.float32))[:, ::-1].copy() for shape in shapes]
        ids = [rng.integers(0, 128_000, shape) for shape in shapes]
        round_ = partial(_tree, batch, num_steps, topk, nodes, p, ids)
        round_()
        us = 1e3 * interleaved([partial(_ms, round_)], 50 * repeats)[0]
        name = f"select, organize, build: {batch} trees, S={num_steps}, K={topk}, N={nodes}"
        results.append(Result(name, us, "us", "target for N=16, at most", MOST_US))
    return results


def _tree(
    batch: int, num_steps: int, topk: int, nodes: int, p: list[np.ndarray], ids: list[np.ndarray]
) -> None:
    candidates = Candidates.empty(batch, num_steps=num_steps, topk=topk)
    scores = None
    for step in range(num_steps):
        _, _, scores = candidates.select(step, p[step], ids[step], scores)
    parent_list, top_scores_index, _ = candidates.organize(nodes)
    build_tree(parent_list, top_scores_index, topk=topk)


def twin_results(sizes: HostSizes, repeats: int) -> list[Result]:
    """All of them."""
    results = []
    for dtype in DTYPES:
        for paged in (False, True):
            results += move_results(sizes, dtype, paged, repeats)
    many = replace(sizes, num_slots=4 * sizes.num_slots)
    return results + compact_results(many, repeats) + tree_results(8, repeats)
