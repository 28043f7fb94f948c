"""Kernels of `cuda/tables.cu` beside their twins."""

import numpy as np
import torch

from kernel_kit import Batch, array, i32, put_place
from specpool import kernels as device
from specpool.kernels import launch, tables
from specpool.kernels import twins as kernels


def test_table_deltas(kit):
    for size in kit.batches:
        batch = Batch(4, size)
        cells = [(r, c) for r in range(1, len(batch.table)) for c in range(batch.table.shape[1])]
        chosen = batch.rng.permutation(len(cells))[: 3 * size]
        rows, columns = (i32(line) for line in np.array(cells)[chosen].T)
        pages = i32(batch.rng.integers(0, 99, len(rows)))
        table = kit.var(batch.table)
        device.apply_table_delta(table, kit.put(rows), kit.put(columns), kit.put(pages))
        kernels.apply_table_delta(batch.table, rows, columns, pages)
        assert np.array_equal(array(table), batch.table)


def test_entries_outside_the_table_are_left(kit):
    """Row 0 is one of them: it stays padding."""
    table = kit.var(np.zeros((3, 2), np.int32))
    rows, columns, pages = (
        i32([0, -1, 3, 1, 2, 1, 2]),
        i32([0, 0, 0, -1, 2, 1, 0]),
        i32(range(1, 8)),
    )
    pages[-1] = -7
    device.apply_table_delta(table, *(kit.put(part) for part in (rows, columns, pages)))
    assert table.tolist() == [[0, 0], [0, 6], [0, 0]]


def test_deltas_of_several_tables_are_one_launch(kit):
    """Each table as its own delta says; tables without news are not touched."""
    for size in kit.batches:
        batches = [Batch(4, size, seed=seed) for seed in range(3)]
        deltas, tables = [], [kit.var(batch.table) for batch in batches]
        for batch in batches:
            cells = [
                (r, c) for r in range(1, len(batch.table)) for c in range(batch.table.shape[1])
            ]
            chosen = batch.rng.permutation(len(cells))[: 0 if batch is batches[1] else size + 2]
            rows, columns = (i32(line) for line in np.array(cells)[chosen].T)
            deltas.append((rows, columns, i32(batch.rng.integers(0, 99, len(rows)))))
            kernels.apply_table_delta(batch.table, *deltas[-1])
        if kit.kind != "cuda":
            kit.backend.launches.clear()
        device.apply_table_deltas(tables, deltas)
        for table, batch in zip(tables, batches, strict=True):
            assert np.array_equal(array(table), batch.table)
        none = (i32([]),) * 3
        device.apply_table_deltas(tables, [none, none, none])
        assert kit.kind == "cuda" or kit.backend.launches == ["apply_table_deltas_kernel"]


def test_entries_of_no_table_are_left(kit):
    """What the device's entries hold is not trusted: each is checked against its own table."""
    one, other = kit.var(np.zeros((3, 2), np.int32)), kit.var(np.zeros((2, 5), np.int32))
    wrong = [(0, 0), (-1, 0), (3, 0), (1, -1), (1, 5), (2, 1), (1, 4), (1, 1)]
    rows, columns = (i32(line) for line in np.array(wrong).T)
    pages = i32(range(1, 9))
    for pages[-1] in (-7, 8):
        device.apply_table_deltas([one, other], [(rows, columns, pages), (rows, columns, pages)])
    assert one.tolist() == [[0, 0], [0, 8], [0, 6]]
    assert other.tolist() == [[0] * 5, [0, 8, 0, 0, 7]]
    described = np.zeros(2, tables._CELLS)
    described["base"], described["num_rows"] = [one.data_ptr(), other.data_ptr()], [3, 2]
    described["pages_per_row"] = [2, 5]
    entries = kit.put(i32([[-1, 2, 2**31 - 1, 1], [1] * 4, [0] * 4, [4] * 4]))
    args = (kit.put(described.view(np.uint8)), np.int32(2), entries, np.int32(4))
    launch.launch("apply_table_deltas", (1,), (32,), args, touches=(one, other))
    assert one[1].tolist() == [0, 8] and other[1].tolist() == [4, 8, 0, 0, 7]


def test_slots_of_positions(kit):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            batch = Batch(page_size, size)
            positions = i32(batch.rng.integers(0, batch.table.shape[1] * page_size, size))
            slots = device.slots_at(
                kit.put(batch.table), page_size, kit.put(batch.rows), kit.put(positions),
                out=kit.out((size,)),
            )  # fmt: skip
            expected = kernels.slots_at(batch.table, page_size, batch.rows, positions)
            assert np.array_equal(array(slots), expected)


def test_ragged_ranges_and_pages(kit):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            batch = Batch(page_size, size)
            width = batch.table.shape[1] * page_size
            starts = i32(batch.rng.integers(0, width, size))
            lens = i32([batch.rng.integers(0, width - start + 1) for start in starts])
            table, _, rows, _ = put_place(kit, batch)
            total = int(lens.sum())
            out = kit.out((total,))
            device.slot_ranges(
                table, page_size, rows, kit.put(starts), kit.put(lens), hi=lens, out=out
            )
            expected = kernels.slot_ranges(batch.table, page_size, batch.rows, starts, lens)
            assert np.array_equal(array(out), expected)

            lens = i32(batch.rng.integers(0, width + 1, size))
            expected = kernels.page_csr(batch.table, page_size, batch.rows, lens)
            pages = [kit.out((size + 1,)), kit.out(expected[1].shape), kit.out((size,))]
            device.page_csr(table, page_size, rows, kit.put(lens), hi=lens, out=pages)
            for got, want in zip(pages, expected, strict=True):
                assert np.array_equal(array(got), want)


def test_slots_of_drafts(kit):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            for topk, layout in ((1, "dense"), (4, "dense"), (4, "holey"), (8, "holey")):
                batch = Batch(page_size, size, topk=topk)
                sizes = {"num_steps": 3, "topk": topk, "layout": layout}
                out = kit.out((size, topk, 3))
                device.draft_write_slots(*put_place(kit, batch), **sizes, out=out)
                expected = kernels.draft_write_slots(*batch.place, **sizes)
                assert np.array_equal(array(out), expected)


def test_results_are_allocated_where_none_is_given(kit):
    batch = Batch(4, 3)
    table, p, rows, roots = put_place(kit, batch)
    assert device.slots_at(table, p, rows, roots).tolist() == (
        kernels.slots_at(*batch.place).tolist()
    )
    lens = i32([1, 5, 0])
    slots = device.slot_ranges(table, p, rows, roots, kit.put(lens), hi=lens)
    expected = kernels.slot_ranges(*batch.place, lens)
    assert slots.tolist() == expected.tolist()
    indptr, indices, last = device.page_csr(table, p, rows, kit.put(lens))
    expected = kernels.page_csr(batch.table, p, batch.rows, lens)
    assert indptr.tolist() == expected[0].tolist() and last.tolist() == expected[2].tolist()
    assert indices[: indptr[-1]].tolist() == expected[1].tolist()


def test_no_lane_is_no_launch(kit):
    batch = Batch(4, 1)
    table, none = kit.put(batch.table), kit.put(i32([]))
    if kit.kind != "cuda":
        kit.backend.launches.clear()
    device.apply_table_delta(table, none, none, none)
    assert device.slots_at(table, 4, none, none).shape == (0,)
    assert device.slot_ranges(table, 4, none, none, none).shape == (0,)
    assert device.page_csr(table, 4, none, none)[0].tolist() == [0]
    assert device.draft_write_slots(
        table, 4, none, none, num_steps=3, topk=2, layout="dense"
    ).shape == (0, 2, 3)
    if kit.kind != "cuda":
        assert kit.backend.launches == []


def test_scenario_21_slots_up_to_2_to_the_31(kit):
    """The last slot that int32 can name; a page beyond it is none (sgl#9344)."""
    table = kit.put(i32([[0, 0], [2**31 // 512 - 1, 2**31 // 512]]))
    rows, positions = kit.put(i32([1, 1])), kit.put(i32([511, 512]))
    assert device.slots_at(table, 512, rows, positions).tolist() == [2**31 - 1, 0]


def test_whatever_the_device_arrays_hold_nothing_is_touched_but_the_outputs(kit):
    """Rows, positions, lengths and pages that are none lead to the sink (checked: to no stray)."""
    wild = [-(2**31), -1, 0, 1, 2, 3, 5, 7, 2**31 - 1]
    rng = np.random.default_rng(0)
    for page_size in (1, 4, 64):
        table = i32(rng.choice(wild, (4, 3)))
        table[2] = [1, 2, 3]
        rows, positions, lens = (i32(rng.choice(wild, 40)) for _ in range(3))
        place = kit.put(table), page_size, kit.put(rows)
        slots = array(device.slots_at(*place, kit.put(positions), out=kit.out((40,))))
        for lane in range(40):
            is_place = 0 <= rows[lane] < 4 and 0 <= positions[lane] < 3 * page_size
            page = int(table[rows[lane], positions[lane] // page_size]) if is_place else 0
            page = page if 0 <= page and (page + 1) * page_size <= 2**31 else 0
            assert 0 <= slots[lane] < (page + 1) * page_size
            assert slots[lane] // page_size == page
        device.draft_write_slots(
            *place, kit.put(positions), num_steps=3, topk=4, layout="holey",
            out=kit.out((40, 4, 3)),
        )  # fmt: skip
        args = (*place[:1], i32(4)[()], i32(3)[()], i32(page_size)[()], place[2])
        lanes = kit.put(positions), kit.put(lens)
        launch.launch("slot_ranges", (40, 2), (64,), (*args, *lanes, kit.out((50,)), np.int32(50)))
        indptr = kit.out((41,))
        launch.launch(
            "page_csr", (40,), (64,),
            (*args, lanes[1], indptr, kit.out((50,)), kit.out((40,)), np.int32(50)),
        )  # fmt: skip
        assert (indptr >= 0).all() and (indptr <= 50).all() and (indptr.diff() >= 0).all()
        cells = kit.var(i32(rng.integers(1, 9, (4, 3))))
        first = cells[0].clone()
        entry = rows[:9], i32(rng.choice(wild, 9)), i32(rng.choice(wild, 9))
        if not kit.is_checked:  # two entries of one cell are a race that the checker reports
            device.apply_table_delta(cells, *(kit.put(part) for part in entry))
        assert torch.equal(cells[0], first) and (cells >= 0).all()
