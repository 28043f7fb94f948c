"""The kernels of `cuda/attend.cu` beside an oracle in float64, and their twin.

The order of a product's sums is the tensor core's own, so results are not compared by bits but to
the bound that rounding allows: weights and results have 16 bits, all else is float32.
"""

import numpy as np
import pytest
import torch

from kernel_kit import i32
from specpool import kernels
from specpool.errors import ShapeError
from specpool.kernels import attend as launcher
from specpool.kernels.paged_cells import PagedCells

DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the most that rounding changes a number


class Lanes:
    """Random lanes on shuffled pages, and on the host who sees what.

    Slots that no query of a lane sees are NaN: a kernel that reads one shows it.
    """

    def __init__(
        self,
        lens,
        q_lens,
        *,
        page_size=4,
        dim=64,
        kv_heads=2,
        group=2,
        dtype=torch.bfloat16,
        window=None,
        own=0,
        columns=None,
        seed=0,
    ):
        rng = np.random.default_rng([seed, page_size, dim, group, len(lens), max(lens)])
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
        self.lens, self.q_lens, self.window, self.dtype = lens, q_lens, window, dtype
        self.page_size, self.group = page_size, group
        lanes, most = len(lens), max(q_lens)
        columns = columns or max(-(-max(lens) // page_size), 1) + 1
        num_pages = 1 + lanes * columns + -(-lanes * own // page_size)
        pages = 1 + rng.permutation(num_pages - 1)
        self.pages = i32(pages[: lanes * columns].reshape(lanes, columns))
        rest = (pages[lanes * columns :, None] * page_size + np.arange(page_size)).reshape(-1)
        self.own_slots = i32(rng.permutation(rest)[: lanes * own].reshape(lanes, own))
        self.sees_own = rng.random((lanes, most, own)) < 0.4
        if own:
            self.sees_own[:, np.arange(most), np.arange(most) % own] = True
        bits = self.sees_own.astype(np.uint64) << np.arange(own, dtype=np.uint64)
        self.sees = bits.sum(2, dtype=np.uint64).view(np.int64)
        self.own = own
        shape = (num_pages * page_size, kv_heads, dim)
        self.keys, self.values = (torch.randn(shape, generator=generator) for _ in range(2))
        live = torch.zeros(shape[0], dtype=torch.bool)
        self.slots = []
        for lane, length in enumerate(lens):
            cells = np.arange(max(min(length, columns * page_size), 0))
            slots = self.pages[lane, cells // page_size] * page_size + cells % page_size
            self.slots.append(np.append(slots, self.own_slots[lane]).astype(np.int64))
            first = 0 if window is None else max(length - q_lens[lane] + 1 - window, 0)
            live[self.slots[-1][first:]] = q_lens[lane] > 0
        self.keys[~live] = self.values[~live] = torch.nan
        self.keys, self.values = self.keys.to(dtype), self.values.to(dtype)
        self.q = torch.randn(sum(q_lens), kv_heads * group, dim, generator=generator).to(dtype)

    def cells(self, put, slack=0):
        tree = {"own_slots": put(self.own_slots), "sees": put(self.sees)} if self.own else {}
        return PagedCells(
            pages=put(self.pages),
            page_size=self.page_size,
            lens=put(i32(self.lens)),
            q_starts=put(i32(np.cumsum([0, *self.q_lens]))),
            num_queries=max(self.q_lens),
            most_cells=max(max(self.lens), 0) + self.own + slack,
            **tree,
        )

    def expected(self, scaling):
        """The result in float64, and the most that rounding may change of it."""
        out, bound = [], []
        for lane, (length, num_queries) in enumerate(zip(self.lens, self.q_lens, strict=True)):
            start = sum(self.q_lens[:lane])
            slots = torch.from_numpy(self.slots[lane])
            keys, values = (
                buffer[slots].double().repeat_interleave(self.group, 1)
                for buffer in (self.keys, self.values)
            )
            num_paged = len(slots) - self.own
            for i in range(num_queries):
                last = length - (0 if self.own else num_queries - 1 - i)
                sees = torch.zeros(len(slots), dtype=torch.bool)
                first = 0 if self.window is None else max(last - self.window, 0)
                sees[first : max(min(last, num_paged), 0)] = True
                if self.own:
                    sees[num_paged:] = torch.from_numpy(self.sees_own[lane, i])
                q = self.q[start + i].double()
                scores = torch.einsum("hd,nhd->hn", q, keys[sees]) * scaling
                weights = scores.softmax(1) if sees.any() else scores
                out.append(torch.einsum("hn,nhd->hd", weights, values[sees]))
                magnitude = torch.einsum("hn,nhd->hd", weights, values[sees].abs())
                unit = 1.02 * UNIT[self.dtype] + 1e-4
                tiny = len(slots) * 2.0**-24
                bound.append(unit * (magnitude + out[-1].abs()) + tiny * 4)
        return torch.stack(out), torch.stack(bound)


def check(kit, lanes, scaling=0.125, slack=0):
    """One run of the kernel, against the oracle; what is no lane's stays."""
    out = kit.out(tuple(lanes.q.shape), lanes.dtype)
    q, keys, values = kit.put(lanes.q), kit.put(lanes.keys), kit.put(lanes.values)
    cells = lanes.cells(kit.put, slack)
    result = kernels.attend_pages(
        q, keys, values, cells, scaling=scaling, window=lanes.window, out=out
    )
    assert result is out
    expected, bound = lanes.expected(scaling)
    error = (out.cpu().double() - expected).abs()
    assert (error <= bound).all(), (error - bound).max()
    again = torch.empty_like(out)
    kernels.attend_pages(q, keys, values, cells, scaling=scaling, window=lanes.window, out=again)
    assert torch.equal(out, again)


SHAPES = {
    "plain": ([37, 0, 1, 70], [1, 1, 1, 1]),
    "chain": ([37, 4, 21], [4, 4, 4]),
    "ragged": ([37, 9, 18, 3], [3, 1, 0, 2]),
}


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_causal_queries(kit, shape, dim, dtype):
    if kit.is_checked and (dim > 64 or shape == "plain"):
        pytest.skip("check mode runs small cases")
    check(kit, Lanes(*SHAPES[shape], dim=dim, dtype=dtype))


@pytest.mark.sample(14)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups_and_page_sizes(kit, group, page_size):
    if kit.is_checked and group != 3:
        pytest.skip("check mode runs small cases")
    check(kit, Lanes([21, 5], [2, 2], group=group, page_size=page_size, kv_heads=1))


@pytest.mark.sample(10)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [(5, 4), (9, 7), (16, 4), (17, 5)], ids=str)
def test_several_tiles_and_blocks_of_rows(kit, rows, dim):
    """Up to 16, 32 and 64 rows share a block; more take several blocks."""
    queries, group = rows
    if kit.is_checked and (dim != 64 or queries != 9):
        pytest.skip("check mode runs small cases")
    check(kit, Lanes([33, 20], [queries, 2], dim=dim, group=group, kv_heads=1))


@pytest.mark.sample(8)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 5])
def test_parts_are_joined(kit, queries, dim):
    """Law: lanes of several parts, of one and of none, whatever the host allows for."""
    if kit.is_checked and dim != 64:
        pytest.skip("check mode runs small cases")
    lens = [150, 64, queries] if kit.is_checked else [300, 64, 129, queries]
    check(kit, Lanes(lens, [queries] * len(lens), dim=dim, kv_heads=1, page_size=16), slack=100)


@pytest.mark.sample(8)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3])
def test_many_parts_are_joined_by_several_threads(kit, group, dim):
    if kit.is_checked and (dim != 64 or group == 1):
        pytest.skip("check mode runs small cases")
    lens = [600, 64] if kit.is_checked else [3000, 0, 600, 64]
    check(kit, Lanes(lens, [1] * len(lens), dim=dim, kv_heads=1, group=group, page_size=64))


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 5, 40, 500])
@pytest.mark.parametrize("queries", [1, 4])
def test_windows(kit, queries, window, dtype):
    if kit.is_checked and (window != 5 or queries == 1):
        pytest.skip("check mode runs small cases")
    lens = [90, 17, 4] if kit.is_checked else [200, 17, 90, 4]
    check(kit, Lanes(lens, [queries] * len(lens), window=window, dtype=dtype, kv_heads=1))


@pytest.mark.sample(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("own", [5, 16, 64])
def test_trees(kit, own, dim, dtype):
    """Law: a query sees the prefix and the own cells of its bits, which may lie anywhere."""
    if kit.is_checked and (own != 5 or dim != 64):
        pytest.skip("check mode runs small cases")
    lens, queries = [37, 0, 16, -5], [min(own, 16), 3, min(own, 9), 1]
    check(kit, Lanes(lens, queries, own=own, dim=dim, dtype=dtype, kv_heads=1, group=3))


@pytest.mark.parametrize("page", [-1, -(2**31), 5000, 2**31 - 1])
def test_a_page_that_does_not_exist_is_the_sink(kit, page):
    lanes = Lanes([20], [2], kv_heads=1)
    lanes.keys, lanes.values = lanes.keys.nan_to_num(), lanes.values.nan_to_num()
    pages = lanes.pages.copy()
    pages[0, 1] = page
    cells = lanes.cells(kit.put)
    broken = PagedCells(kit.put(pages), 4, cells.lens, cells.q_starts, 2, 20)
    given = [kit.put(part) for part in (lanes.q, lanes.keys, lanes.values)]
    out = kernels.attend_pages(*given, broken, scaling=0.1)
    pages[0, 1] = 0
    lanes.keys[1:4], lanes.values[1:4] = lanes.keys[0], lanes.values[0]  # each cell is slot 0
    given = [kit.put(part) for part in (lanes.q, lanes.keys, lanes.values)]
    sink = PagedCells(kit.put(pages), 4, cells.lens, cells.q_starts, 2, 20)
    assert torch.equal(out, kernels.attend_pages(*given, sink, scaling=0.1))


@pytest.mark.parametrize(("length", "q_len"), [(-5, 1), (2**31 - 1, 1), (50, 2), (1, 3)])
def test_a_length_that_no_page_has_reads_no_other_memory(kit, length, q_len):
    lanes = Lanes([16], [q_len], kv_heads=1, columns=4, page_size=4)
    lanes.keys, lanes.values = lanes.keys.nan_to_num(), lanes.values.nan_to_num()
    given = [kit.put(part) for part in (lanes.q, lanes.keys, lanes.values)]
    starts = kit.put(i32([0, q_len]))
    cells = PagedCells(kit.put(lanes.pages), 4, kit.put(i32([length])), starts, q_len, 16)
    out = kit.out(tuple(lanes.q.shape), lanes.dtype)
    kernels.attend_pages(*given, cells, scaling=0.1, out=out)
    assert out.isfinite().all()
    if length < 0:
        assert not out.any()


@pytest.mark.parametrize("own", [0, 6])
@pytest.mark.parametrize("window", [None, 7])
def test_the_twin(own, window):
    lanes = Lanes([37, 0, 9], [3, 2, 0], own=own, window=None if own else window)
    lanes.keys, lanes.values = lanes.keys.nan_to_num(), lanes.values.nan_to_num()
    cells = lanes.cells(torch.from_numpy)
    out = kernels.attend_pages(
        lanes.q, lanes.keys, lanes.values, cells, scaling=0.125, window=lanes.window
    )
    expected, bound = lanes.expected(0.125)
    assert ((out.double() - expected).abs() <= bound).all()


def test_wrong_arguments_are_named():
    lanes, tree = Lanes([20], [2]), Lanes([20], [2], own=3)
    cells = lanes.cells(torch.from_numpy)
    names = ("q", "k_buffer", "v_buffer", "cells")
    given = dict(zip(names, (lanes.q, lanes.keys, lanes.values, cells), strict=True))
    narrow = {name: given[name][..., :32].contiguous() for name in names[:3]}
    wide = {name: torch.cat([given[name], given[name][:, :1]], 1) for name in names[1:3]}
    odd = torch.zeros(lanes.q.numel() + 1, dtype=lanes.dtype)[1:].view(lanes.q.shape)
    for changed, match in (
        ({"q": lanes.q.float()}, "q must be"),
        ({"k_buffer": lanes.keys.half()}, "k_buffer must be"),
        ({"v_buffer": lanes.values[:5]}, "v_buffer must be"),
        (narrow, "head_dim must be 64, 128 or 256, got 32"),
        (wide, "4 query heads must be a multiple of 3 KV heads"),
        ({"scaling": 0.0}, "scaling must be a finite number above 0, got 0.0"),
        ({"scaling": -1.0}, "scaling must be a finite number above 0, got -1.0"),
        ({"scaling": float("nan")}, "scaling must be a finite number above 0, got nan"),
        ({"window": 0}, r"window must be in \[1, "),
        ({"out": lanes.q[:1]}, "out must be"),
        ({"q": odd}, "q must begin at a multiple of 16 bytes, got one 2 bytes behind"),
        ({"cells": tree.cells(torch.from_numpy), "window": 5}, "window 5 needs causal queries"),
    ):
        with pytest.raises(ShapeError, match=match):
            kernels.attend_pages(**{**given, "scaling": 0.1, **changed})
    fields = {name: getattr(cells, name) for name in PagedCells.__dataclass_fields__}
    for changed, match in (
        ({"pages": cells.pages.long()}, "pages must be"),
        ({"lens": cells.lens[:0]}, "lens must be"),
        ({"q_starts": cells.lens}, "q_starts must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"sees": torch.zeros(1, 2, dtype=torch.int64)}, "own_slots and sees go together"),
    ):
        with pytest.raises(ShapeError, match=match):
            PagedCells(**{**fields, **changed})


@pytest.mark.parametrize(
    ("blocks", "cells", "parts"), [(8, 1500, 24), (64, 1500, 9), (512, 1500, 2), (1024, 8192, 1)]
)
def test_the_host_chooses_the_parts_by_bounds(blocks, cells, parts):
    assert launcher._num_parts(blocks, cells) == parts
