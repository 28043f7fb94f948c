"""Laws of the index buffers: flashinfer is told to read exactly what the view reads."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paths import VECTORS
from specpool import Shape, ShapeError, kernels
from specpool.engine.attention import AttentionView, TokenReads
from specpool.engine.attention.flashinfer.page_indices import (
    MAX_MASK,
    DecodeIndices,
    PageCSR,
    PrefillIndices,
    check_mask_size,
    flat_mask,
    indices_of,
    page_csr,
    token_csr,
)
from specpool.engine.attention.lanes import Lanes
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.draft.branches import DenseBranches, HoleyBranches
from specpool.engine.memory.kv_cache import KVCache

QUICK = settings(max_examples=200, deadline=None)


def i32(values) -> np.ndarray:
    return np.array(values, np.int32)


def slots_of(pages: PageCSR) -> list[list[int]]:
    """The slots that each reader reads, by the layout that flashinfer documents."""
    found = []
    for n, last in enumerate(pages.kv_last_page_len.tolist()):
        start, end = pages.kv_indptr[n : n + 2].tolist()
        ids, size = pages.kv_indices[start:end].tolist(), pages.page_size
        cells = [page * size + offset for page in ids for offset in range(size)]
        found.append(cells[: (len(ids) - 1) * size + last])
    return found


def test_the_worked_example() -> None:
    """P = 4, lanes of 7 and 1 cells; page 0 pads."""
    pages = page_csr(torch.tensor([[5, 2], [9, 0]]), i32([7, 1]), 4)
    assert pages.kv_indptr.tolist() == [0, 2, 3]
    assert pages.kv_indices.tolist() == [5, 2, 9]
    assert pages.kv_last_page_len.tolist() == [3, 1]
    assert pages.kv_lens.tolist() == [7, 1]
    for array in (pages.kv_indptr, pages.kv_indices, pages.kv_last_page_len):
        assert array.dtype == torch.int32


@QUICK
@given(data=st.data())
def test_pages_hold_each_lanes_first_cells(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    num_lanes, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    lens = data.draw(
        st.lists(st.integers(1, columns * page_size), min_size=num_lanes, max_size=num_lanes)
    )
    table = np.random.default_rng(len(lens)).permutation(99)[: num_lanes * columns]
    table = table.reshape(num_lanes, columns)
    pages = page_csr(torch.from_numpy(table), i32(lens), page_size)
    assert pages.kv_lens.tolist() == lens
    assert slots_of(pages) == [
        [int(table[lane, i // page_size]) * page_size + i % page_size for i in range(size)]
        for lane, size in enumerate(lens)
    ]


@QUICK
@given(
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 10),
)
def test_a_window_keeps_the_last_tokens(lens: list[int], window: int | None) -> None:
    indptr = i32([0, *np.cumsum(lens)])
    slots = torch.arange(100, 100 + int(indptr[-1]) + 3, dtype=torch.int32)  # capacity is more
    pages = token_csr(TokenReads(indptr, slots), window)
    every = [list(range(100 + a, 100 + b)) for a, b in pairwise(indptr.tolist())]
    assert slots_of(pages) == [one if window is None else one[-window:] for one in every]
    assert pages.page_size == 1


@QUICK
@given(data=st.data())
def test_a_mask_is_flattened_lane_after_lane(data: st.DataObject) -> None:
    num_lanes, queries, width = (data.draw(st.integers(1, 4)) for _ in range(3))
    sizes = {"min_size": num_lanes, "max_size": num_lanes}
    q_lens = data.draw(st.lists(st.integers(0, queries), **sizes).filter(any))
    kv_lens = data.draw(st.lists(st.integers(1, width), **sizes))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    mask = rng.random((num_lanes, queries, width)) < 0.5
    expected = [
        seen
        for lane, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True))
        for row in mask[lane, :q_len, :kv_len].tolist()
        for seen in row
    ]
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    for given_mask in (mask, bias):
        flat = flat_mask(torch.from_numpy(given_mask), i32(q_lens), i32(kv_lens))
        assert flat.dtype == torch.bool and flat.tolist() == expected


@pytest.mark.parametrize("lens", [[0, 3], [3, 9], [3]])
def test_lengths_without_pages_are_refused(lens: list[int]) -> None:
    with pytest.raises(
        ShapeError, match=rf"kv_lens of 2 lanes must be in 1\.\.=8, got {len(lens)}"
    ):
        page_csr(torch.ones(2, 2, dtype=torch.int32), i32(lens), 4)


def lanes_of_two() -> PageCSR:
    return page_csr(torch.tensor([[5, 2], [9, 0]]), i32([7, 1]), 4)


@pytest.mark.parametrize(
    "mask", [torch.ones(23), torch.ones(22).bool(), torch.ones(24).bool(), torch.ones(1, 23).bool()]
)
def test_a_mask_of_another_length_is_refused(mask: torch.Tensor) -> None:
    """flashinfer asks for no length: it would read past the end."""
    qo_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)
    PrefillIndices(lanes_of_two(), qo_indptr, torch.ones(3 * 7 + 2 * 1).bool())
    with pytest.raises(ShapeError, match=r"custom_mask must be bool \[23\]"):
        PrefillIndices(lanes_of_two(), qo_indptr, mask)
    with pytest.raises(ShapeError, match="qo_indptr has 2 entries, kv_indptr 3"):
        PrefillIndices(lanes_of_two(), qo_indptr[:2], None)


def test_what_a_plan_reads_on_the_host_is_there() -> None:
    """A plan copies what is elsewhere, and waits for it."""
    pages = lanes_of_two()
    host = (pages.kv_indptr, pages.kv_last_page_len, torch.tensor([0, 3, 5], dtype=torch.int32))
    names = ("kv_indptr", "kv_last_page_len", "qo_indptr")
    for at, name in enumerate(names):
        given_arrays = list(host)
        given_arrays[at] = host[at].to("meta")
        with pytest.raises(ShapeError, match=f"{name} must be int32 on the host, got .* on meta"):
            indptr, last, qo_indptr = given_arrays
            PrefillIndices(PageCSR(4, indptr, pages.kv_indices, last), qo_indptr, None)
    with pytest.raises(ShapeError, match="ends at 3: there are 2 kv_indices"):
        PageCSR(4, host[0], pages.kv_indices[:2], host[1])


def test_int32_counts_the_entries_of_a_mask() -> None:
    q_lens, kv_lens = i32([1 << 14, 1]), i32([1 << 17, 1])
    message = rf"16385 queries over up to 131072 cells has {2**31 + 1} entries, at most {MAX_MASK} "
    with pytest.raises(ShapeError, match=message):
        check_mask_size(q_lens, kv_lens)
    assert check_mask_size(i32([1 << 14]), i32([(1 << 17) - 1])) == 2**31 - 2**14


@pytest.mark.parametrize(
    ("options", "window", "kind", "is_masked"),
    [
        ({"is_causal": True, "q_lens": 1}, None, DecodeIndices, False),
        ({"is_causal": True, "q_lens": 1}, 7, DecodeIndices, False),  # hides nothing
        ({"is_causal": True, "q_lens": 1}, 6, DecodeIndices, False),
        ({"is_causal": True, "q_lens": 2}, None, PrefillIndices, False),
        ({"is_causal": True, "q_lens": [1, 2]}, None, PrefillIndices, False),
        ({"is_causal": True, "q_lens": 2}, 6, PrefillIndices, False),
        ({"is_causal": False, "q_lens": 2}, 6, PrefillIndices, True),
        ({"is_causal": False, "q_lens": 1}, None, PrefillIndices, True),
        ({"is_causal": False, "q_lens": 2}, None, PrefillIndices, True),
    ],
)
def test_a_mask_is_built_only_where_order_does_not_say_it(options, window, kind, is_masked) -> None:
    most = options["q_lens"] if isinstance(options["q_lens"], int) else 2
    view = AttentionView(
        page_size=4,
        write_slots=torch.arange(4),
        read_pages=torch.tensor([[5, 2], [9, 0]]),
        mask_for=lambda window: torch.ones(2, most, 8, dtype=torch.bool),
        kv_lens=i32([7, 2]),
        **options,
    )
    indices = indices_of(view, window)
    assert type(indices) is kind
    assert (getattr(indices, "custom_mask", None) is not None) == is_masked
    # A window of cells is one of positions only where the queries follow one another.
    assert indices.window == (window if window == 6 and not is_masked else None)


class Recorded:
    """A recorded page table with single slots as one group."""

    def __init__(self, table: np.ndarray, page_size: int) -> None:
        # Row 0 there is a real row: shifted by one.
        table = np.concatenate([np.zeros_like(table[:1]), table])
        self.device, self.tables = torch.device("cpu"), [torch.from_numpy(table)]
        self.page_sizes, self.windows, self.chunks = [page_size], [None], [None]
        self.sinks, self.num_sinks = [0], [0]
        self.reader, self.attend_with, self.scratch = None, None, None
        self.most_pages = lambda *args: None
        # Each slot's number, in itself: a copied prefix says where it came from.
        num_slots = (int(table.max()) + 1) * page_size
        self.buffers = [torch.arange(num_slots, dtype=torch.int32).view(-1, 1, 1)]

    def pages_of(self, *args):
        return KVCache.pages_of(self, *args)


def test_drafts_read_what_is_recorded() -> None:
    """vectors/draft_reads.json, as each step's view tells flashinfer; by branch, as upstream."""
    for case in json.loads((VECTORS / "draft_reads.json").read_text())["cases"]:
        p, k, s = case["page_size"], case["topk"], case["num_steps"]
        cache = Recorded(i32(case["page_table"]), p)
        roots, rows = i32(case["seq_lens"]), torch.tensor(case["rows"], dtype=torch.int32) + 1
        lanes = Lanes(rows, SeqLens(torch.from_numpy(roots), roots, roots), 1)
        shape = Shape(s, k, 1 + s)
        branches: DenseBranches | HoleyBranches
        if p > 1 and k > 1:
            fields = kernels.Fields.of(cache.buffers, p)
            branches = HoleyBranches(cache, 0, lanes, shape, fields, exact=False)
        else:
            branches = DenseBranches(cache, 0, lanes, shape, exact=False)
        parents = torch.zeros(len(roots), k, dtype=torch.int32)
        for step in range(s):
            indices = indices_of(branches.view(step, parents), None)
            assert isinstance(indices, DecodeIndices)
            indptr, slots = case["kv_indptr"][step], case["kv_indices"][step]
            expected = [slots[start:end] for start, end in pairwise(indptr)]
            found = slots_of(indices.pages)
            assert [cache.buffers[0][one].flatten().tolist() for one in found] == expected
            if isinstance(branches, DenseBranches):
                assert indices.pages.kv_indptr.tolist() == indptr
                assert indices.pages.kv_indices.tolist() == slots
