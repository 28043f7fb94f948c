"""Kernels of `cuda/reads.cu` beside their twins; the recorded reads; scenario 13."""

import json

import numpy as np
import pytest

from kernel_kit import Batch, array, i32, put_place
from paths import VECTORS
from specpool import kernels as device
from specpool.errors import ShapeError
from specpool.kernels import launch
from specpool.kernels import twins as kernels


def ancestors_of(batch, step):
    """int32 [n, K, S] after random selections up to `step`, by the twin."""
    ancestors = np.zeros((batch.size, batch.k, batch.s), np.int32)
    own = np.broadcast_to(i32(range(batch.k)), (batch.size, batch.k)).copy()
    for j in range(step + 1):
        kernels.advance_ancestors(ancestors, own if j == 0 else batch.parents(), j)
    return ancestors


@pytest.mark.sample(4)
@pytest.mark.parametrize(("topk", "layout"), [(1, "dense"), (4, "dense"), (4, "holey")])
def test_reads_by_branch_and_by_ancestors(kit, topk, layout):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            batch = Batch(page_size, size, topk=topk, most=page_size + 8)
            sizes = {"num_steps": 3, "topk": topk, "layout": layout}
            place = put_place(kit, batch)
            for step in (0, 2) if size < 9 else (2,):
                need = device.read_capacity(batch.roots, num_steps=3, topk=topk)
                own = [None] if size < 9 else []
                for ancestors in [*own, ancestors_of(batch, step)]:
                    expected = kernels.draft_read_indices(
                        *batch.place, **sizes, step=step, ancestors=ancestors
                    )
                    out = kit.out((size * topk + 1,)), kit.out((need,))
                    given = None if ancestors is None else kit.put(ancestors)
                    indptr, indices = device.draft_read_indices(
                        *place, **sizes, step=step, ancestors=given, hi=batch.roots, out=out
                    )
                    assert np.array_equal(array(indptr), expected[0])
                    assert np.array_equal(array(indices)[: expected[0][-1]], expected[1])
                    rest = array(indices)[expected[0][-1] :].view(np.uint8)
                    assert (rest == 0xA5).all()


def test_recorded_reads(kit):
    """vectors/draft_reads.json; row 0 there is a real row: shifted by one."""
    cases = json.loads((VECTORS / "draft_reads.json").read_text())["cases"]
    for case in cases[:2] if kit.is_checked else cases:
        p, k, s = case["page_size"], case["topk"], case["num_steps"]
        table = i32(case["page_table"])
        table = kit.put(np.concatenate([np.zeros_like(table[:1]), table]))
        rows, roots = kit.put(i32(case["rows"]) + i32(1)), i32(case["seq_lens"])
        layout = "holey" if p > 1 and k > 1 else "dense"
        for step in range(s):
            indptr, indices = device.draft_read_indices(
                table, p, rows, kit.put(roots), num_steps=s, topk=k, step=step, layout=layout,
                hi=roots,
            )  # fmt: skip
            assert indptr.tolist() == case["kv_indptr"][step]
            assert indices[: indptr[-1]].tolist() == case["kv_indices"][step]


def test_pages_of_branches(kit):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            for topk in (1, 4):
                batch = Batch(page_size, size, topk=topk)
                for step in (0, 2):
                    sizes = {"num_steps": 3, "topk": topk, "step": step}
                    expected = kernels.branch_pages(*batch.place, **sizes)
                    out = kit.out(expected.shape)
                    device.branch_pages(*put_place(kit, batch), **sizes, hi=batch.roots, out=out)
                    assert np.array_equal(array(out), expected)
                    wide = kit.out((size * topk, expected.shape[1] + 3))
                    device.branch_pages(*put_place(kit, batch), **sizes, hi=batch.roots, out=wide)
                    assert np.array_equal(array(wide)[:, : expected.shape[1]], expected)
                    assert not wide[:, expected.shape[1] :].any()


def test_ancestors_advance(kit):
    for size in kit.batches:
        for topk in (1, 2, 8):
            batch = Batch(4, size, topk=topk, num_steps=5)
            expected = batch.rng.integers(0, 99, (size, topk, 5)).astype(np.int32)
            ancestors = kit.var(expected.copy())
            for step in range(5):
                parents = batch.parents()
                device.advance_ancestors(ancestors, kit.put(parents), step)
                kernels.advance_ancestors(expected, parents, step)
                assert np.array_equal(array(ancestors), expected)


def test_scenario_13_read_indices_need_room_for_every_branch(kit):
    """P=1, K=8, two lanes near max_context: refused one short, on the host (sgl#27338)."""
    batch = Batch(1, 2, topk=8, num_steps=3, most=1000)
    batch.roots[:] = 990, 1000
    columns = 1000 + 8 * 3
    batch.table = np.arange(3 * columns, dtype=np.int32).reshape(3, columns) % 999 + 1
    batch.rows[:] = 1, 2
    sizes = {"num_steps": 3, "topk": 8, "layout": "dense"}
    need = 8 * (990 + 1000 + 2 * 3)
    place = put_place(kit, batch)
    out = kit.out((17,)), kit.out((need - 1,))
    message = rf"out.kv_indices must hold {need} elements, it holds {need - 1}"
    with pytest.raises(ShapeError, match=message):
        device.draft_read_indices(*place, **sizes, step=0, hi=batch.roots, out=out)
    assert (array(out[1]).view(np.uint8) == 0xA5).all()
    # Upper bounds of the roots count, as under overlap, not the roots.
    with pytest.raises(ShapeError, match=f"must hold {need + 8}"):
        device.draft_read_indices(
            *place, **sizes, step=0, hi=batch.roots + i32([0, 1]), out=(out[0], kit.out((need,)))
        )
    full = kit.out((17,)), kit.out((need,))
    indptr, indices = device.draft_read_indices(*place, **sizes, step=2, hi=batch.roots, out=full)
    expected = kernels.draft_read_indices(*batch.place, **sizes, step=2)
    assert indptr[-1] == need and np.array_equal(array(indices), expected[1])


def test_scenario_13_without_the_check_nothing_is_written_past_the_end(kit):
    """If a replay's bounds were wrong, the canaries stay and kv_indptr stops at the end."""
    batch = Batch(4, 3, topk=4, num_steps=3)
    place = put_place(kit, batch)
    table, p, rows, roots = place
    for capacity in (0, 1, 17):
        indptr, indices = kit.out((13,)), kit.out((capacity,))
        sizes = (np.int32(n) for n in (capacity, 3, 4, 2, 1))
        cells = (table, *(np.int32(n) for n in (*table.shape, p)))
        args = (*cells, rows, roots, None, np.int32(0), indptr, indices, *sizes)
        launch.launch("draft_read_indices", (12, 3), (64,), args)
        assert indptr.max() <= capacity and (indptr.diff() >= 0).all()
        expected = kernels.draft_read_indices(
            *batch.place, num_steps=3, topk=4, step=2, layout="holey"
        )
        assert np.array_equal(array(indices), expected[1][:capacity])


def test_whatever_the_device_arrays_hold_nothing_is_touched_but_the_outputs(kit):
    wild = [-(2**31), -1, 0, 1, 2, 3, 9, 2**31 - 1]
    rng = np.random.default_rng(1)
    for page_size in (1, 4, 64):
        table = kit.put(i32(rng.choice(wild, (4, 3))))
        rows, roots = kit.put(i32(rng.choice(wild, 30))), kit.put(i32(rng.choice(wild, 30)))
        ancestors = i32(rng.choice(wild, (30, 4, 3)))
        out = kit.out((121,)), kit.out((4 * 3 * (30 + 3),))
        for step in (0, 2):
            args = (table, *(np.int32(n) for n in (4, 3, page_size)), rows, roots)
            sizes = (np.int32(n) for n in (out[1].shape[0], 3, 4, step, 1))
            launch.launch(
                "draft_read_indices", (120, 2), (64,),
                (*args, kit.put(ancestors), np.int32(3), *out, *sizes),
            )  # fmt: skip
            assert out[0].min() >= 0 and out[0].max() <= out[1].shape[0]
            pages = device.branch_pages(
                table, page_size, rows, roots, num_steps=3, topk=4, step=step,
                out=kit.out((120, 9 * page_size)), hi=[0] * 30,
            )  # fmt: skip
            assert pages.min() >= 0
        lines = kit.var(np.zeros((30, 4, 3), np.int32))
        device.advance_ancestors(lines, kit.put(i32(rng.choice(wild, (30, 4)))), 2)
        assert lines.min() >= 0 and lines.max() < 4
