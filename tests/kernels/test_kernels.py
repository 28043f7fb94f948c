"""Slots, draft cells and masks: recorded figures, slow twins, scenarios 13 to 22."""

import json

import numpy as np
import pytest

import kernel_reference as ref
import reference
from paths import VECTORS
from specpool import _core
from specpool.errors import ShapeError
from specpool.kernels import twins as kernels

PAGE_SIZES = [1, 2, 3, 4, 16, 64]
TOPK = [1, 2, 4, 8]


def i32(values):
    return np.asarray(values, np.int32)


class Round:
    """A random batch whose rows hold everything that a round of S, K, N writes, in any layout."""

    def __init__(self, page_size, topk, batch, seed=0, num_steps=None):
        rng = np.random.default_rng([seed, page_size, topk, batch])
        self.rng, self.p, self.k, self.batch = rng, page_size, topk, batch
        self.s = num_steps or int(rng.integers(1, 6))
        self.n = int(rng.integers(1, 10))
        self.roots = i32(rng.integers(0, 3 * page_size + 8, batch))
        if batch > 2:
            self.roots[0] -= self.roots[0] % page_size  # nothing to copy
        columns = ref.row_pages(self.roots.tolist(), self.s, topk, self.n, page_size)
        self.table = ref.make_table(rng, batch + 2, columns)
        self.rows = i32(1 + rng.permutation(batch + 2)[:batch])
        self.num_slots = int(self.table.max() + 1) * page_size

    @property
    def place(self):
        return self.table, self.p, self.rows, self.roots

    def slot(self, lane, position):
        return ref.slot(self.table, self.p, self.rows[lane], position)

    def cell(self, lane, layout, branch, step):
        root = int(self.roots[lane])
        return reference.draft_position(root, self.p, self.s, layout, branch, step)


def grid(test):
    for name, values in (("page_size", PAGE_SIZES), ("topk", TOPK)):
        test = pytest.mark.parametrize(name, values)(test)
    return test


def rounds(page_size, topk):
    return [Round(page_size, topk, batch) for batch in (1, 2, 3, 5, 8)]


# --- slots ---


@grid
def test_slots_equal_slow_twin(page_size, topk):
    for r in rounds(page_size, topk):
        width = r.table.shape[1] * page_size
        positions = i32(r.rng.integers(0, width, r.batch))
        expected = [r.slot(lane, position) for lane, position in enumerate(positions)]
        assert kernels.slots_at(r.table, page_size, r.rows, positions).tolist() == expected

        lens = i32([r.rng.integers(0, width - start + 1) for start in positions])
        expected = [
            r.slot(lane, position)
            for lane in range(r.batch)
            for position in range(positions[lane], positions[lane] + lens[lane])
        ]
        slots = kernels.slot_ranges(r.table, page_size, r.rows, positions, lens)
        assert slots.dtype == np.int64 and slots.tolist() == expected

        indptr, indices, last = kernels.page_csr(r.table, page_size, r.rows, lens)
        for lane, length in enumerate(lens):
            pages = indices[indptr[lane] : indptr[lane + 1]].tolist()
            assert pages == r.table[r.rows[lane], : -(-length // page_size)].tolist()
            used = page_size * (len(pages) - 1) + last[lane] if pages else last[lane]
            assert used == length and last[lane] <= page_size


def test_scenario_21_slots_are_64_bit():
    """Slots up to 2^31 - 1, whose byte offsets pass 2^31 in any buffer (sgl#9344)."""
    table = i32([[0, 0], [2**31 // 512 - 1, 7]])
    assert kernels.slots_at(table, 512, i32([1]), i32([511])).tolist() == [2**31 - 1]
    with pytest.raises(ShapeError, match=r"page_table\[1, 0\] must be in \[0, 2097152\)"):
        kernels.slots_at(table, 1024, i32([1]), i32([0]))


@pytest.mark.parametrize(
    ("rows", "positions", "message"),
    [
        ([3], [0], r"rows\[0\] must be in \[0, 3\), got 3"),
        ([-1], [0], r"rows\[0\] must be in \[0, 3\), got -1"),
        ([1], [8], "position 8 of row 1 is outside the row's 8 slots"),
        ([1], [-1], "position -1 of row 1 is outside"),
        ([1, 2], [0], r"positions must have shape \[2\], got \[1\]"),
        ([[1]], [[0]], "rows must be a C-contiguous 1-dimensional NumPy array of int32"),
    ],
)
def test_bad_places(rows, positions, message):
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    with pytest.raises(ShapeError, match=message):
        kernels.slots_at(table, 4, i32(rows), i32(positions))


def test_bad_tables_and_ranges():
    table, one = np.arange(6, dtype=np.int32).reshape(3, 2), i32([1])
    for page_size in (0, -4, 2**31):
        with pytest.raises(ShapeError, match=r"page_size must be in \[1, 2\^31\)"):
            kernels.slots_at(table, page_size, one, one)
    with pytest.raises(ShapeError, match=r"page_table must be .* got int64 of shape"):
        kernels.slots_at(table.astype(np.int64), 4, one, one)
    with pytest.raises(ShapeError, match="not contiguous"):
        kernels.slots_at(table[:, ::2], 4, one, one)
    with pytest.raises(ShapeError, match=r"page_table\[1, 0\] must be .* got -9"):
        kernels.slots_at(i32([[0], [-9]]), 4, one, one)
    with pytest.raises(ShapeError, match=r"lens\[0\] must be 0 or more, got -1"):
        kernels.slot_ranges(table, 4, one, one, i32([-1]))
    with pytest.raises(ShapeError, match="position 8 of row 1 is outside the row's 8 slots"):
        kernels.slot_ranges(table, 4, one, one, i32([8]))
    with pytest.raises(ShapeError, match="position 8 of row 1 is outside"):
        kernels.page_csr(table, 4, one, i32([9]))
    assert kernels.slot_ranges(table, 4, one, i32([8]), i32([0])).tolist() == []


def test_table_delta_is_all_or_nothing():
    table = np.zeros((3, 2), np.int32)
    kernels.apply_table_delta(table, i32([1, 2]), i32([0, 1]), i32([5, 6]))
    assert table.tolist() == [[0, 0], [5, 0], [0, 6]]
    before = table.copy()
    for entry, message in [
        ((0, 0, 1), r"rows\[1\] must be in \[1, 3\), got 0"),
        ((3, 0, 1), r"rows\[1\] must be in \[1, 3\), got 3"),
        ((1, 2, 1), r"columns\[1\] must be in \[0, 2\), got 2"),
        ((1, 1, -1), r"pages\[1\] must be 0 or more, got -1"),
    ]:
        rows, columns, pages = (
            i32([good, bad]) for good, bad in zip((1, 0, 9), entry, strict=True)
        )
        with pytest.raises(ShapeError, match=message):
            kernels.apply_table_delta(table, rows, columns, pages)
    assert (table == before).all()
    table.flags.writeable = False
    with pytest.raises(ShapeError, match="page_table is written in place and must be writable"):
        kernels.apply_table_delta(table, i32([1]), i32([0]), i32([1]))


# --- draft cells ---


@pytest.mark.parametrize("layout", ["dense", "holey"])
@grid
def test_drafts_are_written_where_the_contract_says(page_size, topk, layout):
    for r in rounds(page_size, topk):
        sizes = {"num_steps": r.s, "topk": topk, "layout": layout}
        positions = kernels.draft_write_positions(r.roots, page_size=page_size, **sizes)
        slots = kernels.draft_write_slots(*r.place, **sizes)
        for lane in range(r.batch):
            for branch in range(topk):
                for step in range(r.s):
                    position = r.cell(lane, layout, branch, step)
                    assert positions[lane, branch, step] == position
                    assert slots[lane, branch, step] == r.slot(lane, position)
        assert len(set(slots.ravel())) == slots.size


def test_draft_read_vectors():
    """Equal to upstream's reading by branch, bit for bit; row 0 is real here: shifted by one."""
    for case in json.loads((VECTORS / "draft_reads.json").read_text())["cases"]:
        p, k, s = case["page_size"], case["topk"], case["num_steps"]
        table = i32(case["page_table"])
        table = np.concatenate([np.zeros_like(table[:1]), table])
        rows, roots = i32(case["rows"]) + i32(1), i32(case["seq_lens"])
        layout = "holey" if p > 1 and k > 1 else "dense"
        for step in range(s):
            indptr, indices = kernels.draft_read_indices(
                table, p, rows, roots, num_steps=s, topk=k, step=step, layout=layout
            )
            assert indptr.tolist() == case["kv_indptr"][step]
            assert indices.tolist() == case["kv_indices"][step]


def selections(r):
    """Random parents per step and lane, with swaps and shared parents; step 0 as select_topk's."""
    own = np.broadcast_to(i32(range(r.k)), (r.batch, r.k))
    later = [i32(r.rng.integers(0, r.k, (r.batch, r.k))) for _ in range(r.s - 1)]
    return [np.ascontiguousarray(own), *later]


@pytest.mark.parametrize("layout", ["dense", "holey"])
@grid
def test_reads_by_ancestors_follow_every_path(page_size, topk, layout):
    """Indices and masks alike; without ancestors each branch reads its own cells."""
    for r in rounds(page_size, topk):
        sizes = {"num_steps": r.s, "topk": topk, "layout": layout}
        ancestors = np.full((r.batch, topk, r.s), -9, np.int32)
        chosen = selections(r)
        for step in range(r.s):
            kernels.advance_ancestors(ancestors, chosen[step], step)
            for exact in (True, False):
                given = ancestors if exact else None
                indptr, indices = kernels.draft_read_indices(
                    *r.place, step=step, ancestors=given, **sizes
                )
                own_mask, own_positions = kernels.draft_visibility(
                    r.roots, step=step, page_size=page_size, ancestors=given, **sizes
                )
                mask = kernels.attention_mask(
                    r.roots,
                    np.full(r.batch, topk, np.int32),
                    r.table.shape[1] * page_size,
                    own_mask=own_mask,
                    q_positions=np.repeat(r.roots[:, None] + i32(step), topk, 1),
                    own_positions=own_positions,
                )
                for lane in range(r.batch):
                    root = int(r.roots[lane])
                    paths = ref.cell_paths([c[lane].tolist() for c in chosen[: step + 1]])
                    for branch in range(topk):
                        path = paths[branch] if exact else [branch] * (step + 1)
                        cells = [r.cell(lane, layout, b, j) for j, b in enumerate(path)]
                        seen = [*range(root), *cells]
                        at = lane * topk + branch
                        reads = indices[indptr[at] : indptr[at + 1]]
                        assert reads.tolist() == [r.slot(lane, c) for c in seen]
                        assert np.flatnonzero(mask[lane, branch]).tolist() == sorted(seen)
                        stands = own_positions[lane, [c - root for c in cells]]
                        assert stands.tolist() == list(range(root, root + step + 1))


def test_scenario_13_read_indices_need_room_for_every_branch():
    """K * (sum(seq) + bs*S), not sum(seq): one less is refused, guard words stand (sgl#27338)."""
    r = Round(1, 8, 2, num_steps=3)
    sizes = {"num_steps": 3, "topk": 8, "layout": "dense"}
    need = 8 * (int(r.roots.sum()) + 2 * 3)
    buffer = np.full(need + 2, -7, np.int32)
    for step in range(3):
        expected = kernels.draft_read_indices(*r.place, step=step, **sizes)
        indptr, indices = kernels.draft_read_indices(*r.place, step=step, **sizes, out=buffer[1:-1])
        assert (indptr == expected[0]).all()
        assert (indices[: indptr[-1]] == expected[1]).all() and indices.base is buffer
        assert buffer[0] == buffer[-1] == -7
    buffer[:] = -7
    with pytest.raises(ShapeError, match=rf"out must hold .* = {need} slots, it holds {need - 1}"):
        kernels.draft_read_indices(*r.place, step=0, **sizes, out=buffer[: need - 1])
    assert (buffer == -7).all()


@grid
def test_whole_pages_hold_each_branch_after_the_copies(page_size, topk):
    """Tail copies and parent copies make whole pages read as the true path (sgl#27360)."""
    for r in rounds(page_size, topk):
        kv = np.full(r.num_slots, -1)  # what each slot holds: a name for the token
        for lane in range(r.batch):
            for position in range(r.roots[lane]):
                kv[r.slot(lane, position)] = 1000 * (lane + 1) + position
        prefix = kv.copy()
        sizes = {"num_steps": r.s, "topk": topk}
        slots = kernels.draft_write_slots(*r.place, **sizes, layout="holey")
        src, dst = kernels.prefix_tail_moves(*r.place, **sizes)
        assert not np.isin(dst, slots).any() and len(set(dst)) == len(dst)
        assert (kv[dst] == -1).all()  # never over a prefix
        kv[dst] = kv[src]
        paths = np.zeros((r.batch, topk, 0), int)
        for step, parents in enumerate(selections(r)):
            src, dst = kernels.branch_copy_moves(*r.place, parents, num_steps=r.s, step=step)
            kv[dst] = kv[src]
            names = 10**6 * (step + 1) + np.arange(r.batch * topk).reshape(r.batch, topk)
            kv[slots[:, :, step]] = names
            before = np.take_along_axis(paths, parents[:, :, None].astype(int), 1)
            paths = np.concatenate([before, names[:, :, None]], 2)
            pages = kernels.branch_pages(*r.place, **sizes, step=step)
            for lane in range(r.batch):
                root = int(r.roots[lane])
                prefix_names = [1000 * (lane + 1) + position for position in range(root)]
                for branch in range(topk):
                    line = pages[lane * topk + branch]
                    length = root + step + 1
                    read = [
                        kv[line[i // page_size] * page_size + i % page_size] for i in range(length)
                    ]
                    assert read == [*prefix_names, *paths[lane, branch]]
                    assert not line[-(-length // page_size) :].any()
        assert (kv[prefix >= 0] == prefix[prefix >= 0]).all()


def test_scenario_19_the_worked_example_of_sgl_7725():
    """P=4, S=5, a prefix of 7 at slots 4..10, K=8: [8,9,10] to [16,17,18], [24,25,26], ..."""
    table = np.arange(20, dtype=np.int32).reshape(1, 20)
    table = np.concatenate([np.zeros_like(table), table + 1])
    sizes = {"num_steps": 5, "topk": 8}
    src, dst = kernels.prefix_tail_moves(table, 4, i32([1]), i32([7]), **sizes)
    assert src.tolist() == [8, 9, 10] * 7
    assert dst.reshape(7, 3).tolist() == [[8 * b + 8, 8 * b + 9, 8 * b + 10] for b in range(1, 8)]
    for root, k in [(8, 8), (4, 8), (0, 8), (7, 1)]:  # a full tail, or no other branch
        moves = kernels.prefix_tail_moves(table, 4, i32([1]), i32([root]), num_steps=5, topk=k)
        assert [m.size for m in moves] == [0, 0]
    # P > S: one page per branch.
    src, dst = kernels.prefix_tail_moves(table, 8, i32([1]), i32([9]), num_steps=3, topk=3)
    assert (src.tolist(), dst.tolist()) == ([16, 16], [24, 32])


def test_scenario_20_no_draft_is_written_outside_the_rows_own_pages():
    """A page that the row does not hold is refused before anything is written."""
    r = Round(4, 4, 2, num_steps=3)
    r.table[r.rows[1], (int(r.roots[1]) + 3) // 4 :] = 0
    sizes = {"num_steps": 3, "topk": 4}
    row = r.rows[1]
    with pytest.raises(
        ShapeError, match=rf"of row {row} has no page: page_table\[{row}, \d+\] is 0"
    ):
        kernels.draft_write_slots(*r.place, **sizes, layout="holey")
    r.roots[1] = r.roots[1] // 4 * 4 + 1
    with pytest.raises(ShapeError, match="has no page"):
        kernels.prefix_tail_moves(*r.place, **sizes)
    parents = i32([[1, 0, 2, 3]] * 2)
    with pytest.raises(ShapeError, match="has no page"):
        kernels.branch_copy_moves(*r.place, parents, num_steps=3, step=2)


@pytest.mark.parametrize("bad", [2**63, -(2**80), 1.5, "4", None])
def test_no_number_of_64_bits(bad):
    """A scalar that is none gives specpool's error, not Python's OverflowError or TypeError."""
    r = Round(4, 2, 2, num_steps=3)
    table, _, rows, roots = r.place
    slots = np.zeros(1, np.int64)
    sizes = {"num_steps": 3, "topk": 2, "layout": "holey"}
    for call in (
        lambda: kernels.slots_at(table, bad, rows, roots),
        lambda: kernels.draft_write_slots(*r.place, **{**sizes, "topk": bad}),
        lambda: _core.check_slots("slots", slots, bad),
        lambda: _core.attention_mask(rows, rows, bad),
    ):
        with pytest.raises(ShapeError, match="whole number of 64 bits"):
            call()


def test_bad_draft_arguments():
    r = Round(4, 2, 2, num_steps=3)
    sizes = {"num_steps": 3, "topk": 2, "layout": "holey"}
    ancestors = np.zeros((2, 2, 3), np.int32)

    def refused(message, function, *arguments, **named):
        with pytest.raises(ShapeError, match=message):
            function(*arguments, **named)

    refused("layout must be 'dense' or 'holey', got 'other'", kernels.draft_write_slots, *r.place,
            **{**sizes, "layout": "other"})  # fmt: skip
    for name, value in [("num_steps", 0), ("topk", -1), ("topk", 1 << 30), ("num_steps", 1 << 20)]:
        named = {**sizes, name: value}
        refused("num_steps|topk", kernels.draft_write_slots, *r.place, **named)
    refused(r"roots\[0\] must be 0 or more", kernels.draft_write_slots, *r.place[:3], i32([-1, 3]),
            **sizes)  # fmt: skip
    refused("leaves no room", kernels.draft_write_positions, i32([2**31 - 1]), page_size=4, **sizes)
    refused("is outside the row's", kernels.draft_write_slots, *r.place[:3], i32([9999, 3]),
            **sizes)  # fmt: skip
    reads = kernels.draft_read_indices
    refused(r"step must be in \[0, 3\), got 3", reads, *r.place, step=3, **sizes)
    refused(r"ancestors must have shape", reads, *r.place, step=0, **sizes,
            ancestors=ancestors[:1])  # fmt: skip
    refused("ancestors must have more than 1 columns", reads, *r.place, step=1, **sizes,
            ancestors=np.zeros((2, 2, 1), np.int32))  # fmt: skip
    refused(r"ancestors\[0, 0, 0\] must be in \[0, 2\), got 2", reads, *r.place, step=0, **sizes,
            ancestors=ancestors + i32(2))  # fmt: skip
    bad = i32([[0, 1], [0, 2]])
    refused(r"branch_parents\[1, 1\] must be in \[0, 2\), got 2", kernels.advance_ancestors,
            ancestors, bad, 1)  # fmt: skip
    assert not ancestors.any()
    refused(r"step must be in \[0, 3\)", kernels.advance_ancestors, ancestors, bad, 3)
    refused("branch_parents must have shape", kernels.branch_copy_moves, *r.place, bad[:1],
            num_steps=3, step=1)  # fmt: skip


# --- compaction ---


def accept(r, width):
    """Random walks: ascending nodes from the root, as flat ids."""
    index = np.full((r.batch, width), -1, np.int32)
    for lane in range(r.batch):
        count = int(r.rng.integers(1, min(width, r.n) + 1))
        rest = 1 + r.rng.permutation(r.n - 1)[: count - 1]
        index[lane, :count] = lane * r.n + np.sort(np.append(0, rest))
    return index


@grid
def test_scenario_15_and_17_compaction_equals_gather_then_scatter(page_size, topk):
    """N != S + 1 in batches, sources and targets overlapping (sgl#27545, sgl#40734)."""
    for r in rounds(page_size, topk):
        for width in (1, 3, r.n + 2):
            index = accept(r, width)
            src, dst = kernels.compact_moves(*r.place, index, num_draft_tokens=r.n)
            moves = []
            for lane in range(r.batch):
                for at, node in enumerate(index[lane][index[lane] >= 0] - lane * r.n):
                    if at != node:
                        root = int(r.roots[lane])
                        moves.append((r.slot(lane, root + node), r.slot(lane, root + at)))
            assert list(zip(src, dst, strict=True)) == moves


def test_scenario_14_compaction_reads_exactly_its_entries():
    """K=4, S=3, N=8, bs=3: bs * (S+1) entries; what lies round them is never read (sgl#26866)."""
    r = Round(4, 4, 3, num_steps=3)
    r.n = 8
    r.table = ref.make_table(r.rng, 5, 40)
    guarded = np.full((5, 4), 2**31 - 1, np.int32)
    guarded[1:4] = accept(r, 4)
    kernels.compact_moves(*r.place, guarded[1:4], num_draft_tokens=8)
    with pytest.raises(ShapeError, match=r"accept_index must have shape \[3, 4\], got \[4, 4\]"):
        kernels.compact_moves(*r.place, guarded[1:], num_draft_tokens=8)


def test_scenario_22_padded_lanes_move_nothing():
    """bs padded from 5 to 8: lanes of row 0 move nothing, whatever their entries (sgl#13740)."""
    r = Round(4, 4, 5, num_steps=3)
    rows, roots = np.append(r.rows, i32([0, 0, 0])), np.append(r.roots, i32([1, 2, 3]))
    index = np.concatenate([accept(r, 4), np.full((3, 4), 99, np.int32)])
    pairs = [
        (
            kernels.compact_moves(*r.place, index[:5], num_draft_tokens=r.n),
            kernels.compact_moves(r.table, 4, rows, roots, index, num_draft_tokens=r.n),
        ),
        (
            kernels.prefix_tail_moves(*r.place, num_steps=3, topk=4),
            kernels.prefix_tail_moves(r.table, 4, rows, roots, num_steps=3, topk=4),
        ),
    ]
    for unpadded, padded in pairs:
        for a, b in zip(unpadded, padded, strict=True):
            assert (a == b).all() and (b >= 4).all()
    sink = kernels.draft_write_slots(
        r.table, 4, i32([0]), i32([9]), num_steps=3, topk=4, layout="holey"
    )
    assert (sink < 4).all()  # padded lanes write page 0


@pytest.mark.parametrize(
    "index", [[0, 4, -1], [0, 2, 1], [0, -1, 2], [1, 2, 3], [-2, 1, 2], [0, 0, 1]]
)
def test_accept_entries_that_are_no_walk(index):
    table = ref.make_table(np.random.default_rng(0), 2, 5)
    with pytest.raises(ShapeError, match=r"accept_index\[0, \d\] must be a node of the lane"):
        kernels.compact_moves(table, 4, i32([1]), i32([3]), i32([index]), num_draft_tokens=4)


# --- masks ---


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_masks_equal_slow_twin(window):
    rng = np.random.default_rng(window or 0)
    for _ in range(40):
        kept = {"window": window, "sink": int(rng.choice([0, 0, 1, 2, 4, 9]))}
        n, q, w = (int(x) for x in rng.integers(1, 6, 3))
        starts, q_lens = i32(rng.integers(0, 7, n)), i32(rng.integers(0, q + 1, n))
        columns = int(starts.max()) + max(q, w) + int(rng.integers(0, 3))
        mask = kernels.attention_mask(starts, q_lens, columns, num_queries=q, **kept)
        expected = ref.attention_mask(starts, q_lens, columns, num_queries=q, **kept)
        assert (mask == expected).all()
        bias = kernels.attention_bias(starts, q_lens, columns, num_queries=q, **kept)
        assert (bias == np.where(expected, np.float32(0), np.float32(-np.inf))).all()
        own = rng.random((n, q, w)) < 0.5
        q_positions = i32(starts[:, None] + rng.integers(0, 5, (n, q)))
        own_positions = i32(starts[:, None] + rng.integers(0, 5, (n, w)))
        for extra in (
            {},
            {"q_positions": q_positions},
            {"q_positions": q_positions, "own_positions": own_positions},
        ):
            mask = kernels.attention_mask(starts, q_lens, columns, own_mask=own, **kept, **extra)
            expected = ref.attention_mask(starts, q_lens, columns, own_mask=own, **kept, **extra)
            assert (mask == expected).all()


def test_windows_go_by_node_position():
    """Siblings stand at one position: slot order would cut the window one token too early."""
    parents = i32([[-1, 0, 0, 0]])
    depths, tree_mask, *_ = kernels.tree_from_parents(parents)
    mask = kernels.attention_mask(
        i32([4]),
        i32([4]),
        8,
        own_mask=tree_mask,
        q_positions=4 + depths,
        own_positions=4 + depths,
        window=3,
    )
    assert np.flatnonzero(mask[0, 3]).tolist() == [3, 4, 7]


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (([1], [2], 2), {}, "lane 0 has 2 queries from column 1"),
        (([1], [2], 9), {"num_queries": 1}, "lane 0 has 2 queries"),
        (([3], [0], 2), {}, r"starts\[0\] must be in \[0, 2\], got 3"),
        (([-1], [0], 2), {}, r"starts\[0\] must be 0 or more"),
        (([1], [-1], 2), {}, r"q_lens\[0\] must be 0 or more"),
        (([1], [1], 0), {}, "num_columns must be 1 or more"),
        (([1], [1], -5), {}, "num_columns must be 1 or more"),
        (([1], [1], 9), {"window": 0}, "window must be 1 or more, got 0"),
        (([1], [1, 2], 9), {}, "q_lens must have shape"),
        (([1], [1], 2), {"own_mask": np.ones((1, 1, 2), bool)}, r"own_mask\[0, 0, 1\] is column 2"),
        (([1], [1], 9), {"own_mask": np.ones((2, 1, 2), bool)}, "own_mask must have shape"),
        (([1], [1], 9), {"own_mask": np.ones((1, 1, 2), np.uint8)}, "own_mask must be .* of bool"),
        (([1], [1], 9), {"q_positions": i32([1])}, "q_positions must be a C-contiguous 2-dim"),
        (([0], [1], 2**40), {}, "mask of .* elements is too large"),
    ],
)
def test_bad_masks(arguments, named, message):
    starts, q_lens, columns = arguments
    with pytest.raises(ShapeError, match=message):
        kernels.attention_mask(i32(starts), i32(q_lens), columns, **named)
