"""Kernels of `cuda/moves.cu` beside their twins: compaction, tails, parents, gather and scatter."""

import numpy as np
import pytest
import torch

from kernel_kit import Batch, array, i32, i64, put_place
from specpool import kernels as device
from specpool.errors import ShapeError
from specpool.kernels import launch
from specpool.kernels import twin_moves as moves
from specpool.kernels import twins as kernels
from specpool.kernels.twin_moves import PageBlocked

# Bytes of a slot from 6 to 96, of which few are a multiple of 16: every width of access.
SHAPES = [
    ((2, 3), torch.float32),
    ((3,), torch.bfloat16),
    ((6, 8), torch.float16),
    ((7,), torch.float8_e4m3fn),
    ((2, 8), torch.float8_e5m2),
]


def random_bytes(rng, shape, dtype):
    content = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    return torch.from_numpy(content).view(dtype)


class Cache:
    """Buffers of every dtype, per token and page-blocked, on the device and beside the twin's."""

    def __init__(self, kit, batch, shapes=SHAPES):
        rng, p = np.random.default_rng([9, batch.p]), batch.p
        self.kit, self.p = kit, p
        if batch.size > 8:
            shapes = shapes[::3]
        self.twins = [random_bytes(rng, (batch.num_slots, *tail), dtype) for tail, dtype in shapes]
        self.buffers = [kit.var(twin) for twin in self.twins]
        if batch.size < 9:
            # Keys, then scales of another width, page by page; and all layers in one tensor.
            blocked = random_bytes(rng, (batch.num_slots // p, p * (6 + 1)), torch.float16)
            self.twins.append(PageBlocked(blocked, p, (6, 1)))
            self.buffers.append(PageBlocked(kit.var(blocked), p, (6, 1)))
        self.fields = device.Fields.of(self.buffers, p)

    def check(self):
        for got, want in zip(self.buffers, self.twins, strict=True):
            got, want = (b.data if isinstance(b, PageBlocked) else b for b in (got, want))
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


def batches(kit):
    for page_size in kit.page_sizes:
        for size in kit.batches:
            yield Batch(page_size, size, topk=4, num_steps=3, num_nodes=8)


@pytest.mark.sample(7)
@pytest.mark.parametrize("width", [4, 12])
def test_scenario_15_and_17_compaction_equals_gather_then_scatter(kit, width):
    """Lanes 1 to 8 and 257 with N != S + 1; 12 places are moved in two turns (sgl#40734)."""
    for batch in batches(kit):
        batch = Batch(batch.p, batch.size, num_nodes=8 if width == 4 else 30)
        cache, index = Cache(kit, batch), batch.walks(width)
        device.compact_accepted(
            cache.fields, *put_place(kit, batch), kit.put(index), num_draft_tokens=batch.n
        )
        moves.compact_accepted(cache.twins, *batch.place, index, num_draft_tokens=batch.n)
        cache.check()


def test_wide_slots_are_compacted_in_parts(kit):
    """Slots of 128 accesses at batch 1: several blocks share a slot, each its own columns."""
    batch = Batch(4, 1, num_nodes=30)
    cache = Cache(kit, batch, [((8, 64), torch.float32), ((33,), torch.float32)])
    index = i32([[0, 5, 9, 17, 28, 29]])
    place = put_place(kit, batch)
    device.compact_accepted(cache.fields, *place, kit.put(index), num_draft_tokens=batch.n)
    moves.compact_accepted(cache.twins, *batch.place, index, num_draft_tokens=batch.n)
    cache.check()


def test_prefix_tails(kit):
    for batch in batches(kit):
        cache = Cache(kit, batch)
        sizes = {"num_steps": batch.s, "topk": batch.k}
        device.duplicate_prefix_tail(cache.fields, *put_place(kit, batch), **sizes)
        moves.duplicate_prefix_tail(cache.twins, *batch.place, **sizes)
        cache.check()


@pytest.mark.parametrize("layout", ["holey", "dense"])
def test_parents_drafts(kit, layout):
    """Branches swap and share parents; the dense layout too."""
    for batch in batches(kit):
        if batch.size > 8 and layout == "dense":
            continue
        cache, parents = Cache(kit, batch), batch.parents()
        sizes = {"num_steps": batch.s, "step": 2}
        device.copy_parent_drafts(
            cache.fields, *put_place(kit, batch), kit.put(parents), **sizes, layout=layout
        )
        src, dst = kernels.branch_copy_moves(*batch.place, parents, **sizes, layout=layout)
        moves.move_kv(cache.twins, src, dst)
        cache.check()


def test_moves_are_gather_then_scatter(kit):
    """Swaps, chains, cycles over many slots; disjoint ones as copies."""
    for page_size in kit.page_sizes:
        batch = Batch(page_size, 3 if kit.is_checked else 8)
        for n in (0, 1, 7, min(batch.num_slots // 2, 300)):
            cache = Cache(kit, batch)
            src = batch.rng.permutation(batch.num_slots)[:n]
            dst = batch.rng.permutation(batch.num_slots)[:n]
            device.move_kv(cache.fields, kit.put(i32(src)), kit.put(i32(dst)))
            moves.move_kv(cache.twins, i64(src), i64(dst))
            cache.check()
            pages = batch.rng.permutation(batch.num_slots)
            src, dst = pages[:n], pages[n : 2 * n]
            device.move_kv(cache.fields, kit.put(i32(src)), kit.put(i32(dst)), disjoint=True)
            moves.move_kv(cache.twins, i64(src), i64(dst))
            cache.check()


def test_more_moves_than_a_block_can_hold(kit):
    if kit.is_checked:
        return
    batch = Batch(64, 8, most=600)
    cache = Cache(kit, batch, SHAPES[:2])
    for n in (2816, 2817):
        src = batch.rng.permutation(batch.num_slots)[:n]
        dst = batch.rng.permutation(batch.num_slots)[:n]
        device.move_kv(cache.fields, kit.put(i32(src)), kit.put(i32(dst)))
        moves.move_kv(cache.twins, i64(src), i64(dst))
        cache.check()


def test_gather_and_scatter(kit):
    for page_size in kit.page_sizes:
        batch = Batch(page_size, 3)
        cache = Cache(kit, batch)
        twins = cache.twins[:-1]
        fields = device.Fields.of(cache.buffers[:-1], page_size)
        slots = batch.rng.integers(0, batch.num_slots, 19)
        got = device.gather_kv(fields, kit.put(i32(slots)))
        want = moves.gather_kv(twins, i64(slots))
        for one, other in zip(got.buffers, want, strict=True):
            assert torch.equal(one.cpu().view(-1), other.view(torch.uint8).view(-1))
        # Into given buffers, of other alignments, between guard words.
        given = [kit.out((19, width), torch.uint8) for width in fields.widths]
        device.gather_kv(fields, kit.put(i32(slots)), out=device.Fields.of(given, 1))
        assert all(torch.equal(a, b) for a, b in zip(given, got.buffers, strict=True))
        slots = batch.rng.permutation(batch.num_slots)[:19]
        device.scatter_kv(fields, kit.put(i32(slots)), got)
        moves.scatter_kv(twins, i64(slots), want)
        cache.check()


def test_pages_of_several_groups_are_one_launch(kit):
    """Law: as if each copy came after the one before; a copy of a copy is a launch of its own."""
    caches = {0: Cache(kit, Batch(4, 3)), 2: Cache(kit, Batch(16, 3), SHAPES[1:])}
    groups = {group: cache.fields for group, cache in caches.items()}
    chains = [
        ([], 0),
        ([(0, 1, 2, 3)], 1),
        ([(0, 1, 2, 4), (2, 1, 2, 13), (0, 3, 4, 1), (2, 1, 3, 16), (0, 5, 6, 0)], 1),
        ([(0, 1, 2, 3), (0, 2, 3, 4), (2, 2, 3, 2)], 2),  # reads what was written
        ([(0, 3, 4, 3), (2, 2, 1, 4), (0, 1, 3, 2)], 2),  # writes what was read
        ([(2, 1, 2, 3), (0, 1, 2, 1), (2, 3, 2, 2)], 2),  # writes twice
    ]
    for copies, launches in chains:
        if kit.kind != "cuda":
            kit.backend.launches.clear()
        device.copy_pages(groups, i32(copies).reshape(-1, 4))
        for group, src, dst, tokens in copies:
            cache, offsets = caches[group], np.arange(tokens)
            moves.move_kv(cache.twins, src * cache.p + offsets, dst * cache.p + offsets)
        for cache in caches.values():
            cache.check()
        assert kit.kind == "cuda" or kit.backend.launches == ["copy_slots_kernel"] * launches


def test_page_copies_out_of_range_copy_nothing(kit):
    cache = Cache(kit, Batch(4, 1))
    pages = cache.fields.num_slots // 4
    for copy, message in [
        ((1, 1, 2, 3), r"copies\[1\] names group 1, there are \[0\]"),
        (
            (0, pages, 2, 3),
            rf"source page of copies\[1\] must be in \[0, {pages - 1}\], got {pages}",
        ),
        ((0, 1, -1, 3), "target page of copies"),
        ((0, 1, 2, 5), r"tokens of copies\[1\] must be in \[0, 4\], got 5"),
    ]:
        with pytest.raises(ShapeError, match=message):
            device.copy_pages({0: cache.fields}, i32([(0, 1, 2, 3), copy]))
    cache.check()


def test_all_layers_in_one_tensor(kit):
    """Fields of [layers, 2, slots, heads, dim], one launch for all."""
    batch = Batch(4, 3)
    rng = np.random.default_rng(0)
    twin = random_bytes(rng, (3, 2, batch.num_slots, 2, 5), torch.bfloat16)
    kv = kit.var(twin)
    fields = device.Fields.of([kv], 4, slot_dim=2)
    assert len(fields.widths) == 6
    index = batch.walks(4)
    if kit.kind != "cuda":
        kit.backend.launches.clear()
    device.compact_accepted(fields, *put_place(kit, batch), kit.put(index), num_draft_tokens=8)
    if kit.kind != "cuda":
        assert kit.backend.launches == ["compact_accepted_kernel"]
    moves.compact_accepted([twin], *batch.place, index, num_draft_tokens=8, slot_dim=2)
    assert torch.equal(kv.cpu().view(torch.uint8), twin.view(torch.uint8))


def test_accesses_are_as_wide_as_alignment_allows(kit):
    backing = kit.var(np.zeros(4096, np.uint8))
    found = []
    for offset, shape, dtype in [
        (0, (4, 8, 16), torch.bfloat16),
        (8, (4, 8, 16), torch.bfloat16),
        (0, (4, 6), torch.float32),
        (0, (4, 3), torch.float32),
        (2, (4, 3), torch.bfloat16),
        (0, (4, 7), torch.uint8),
    ]:
        size = int(np.prod(shape)) * dtype.itemsize
        view = backing[offset : offset + size].view(dtype).view(*shape)
        found += device.Fields.of([view], 1).vecs
    assert found == [16, 8, 8, 4, 2, 1]


def test_no_work_is_no_launch(kit):
    batch = Batch(4, 1)
    cache = Cache(kit, batch)
    table, p, rows, roots = put_place(kit, batch)
    none = kit.put(i32([]))
    if kit.kind != "cuda":
        kit.backend.launches.clear()
    device.move_kv(cache.fields, none, none)
    device.move_kv(cache.fields, none, none, disjoint=True)
    device.gather_kv(cache.fields, none)
    place = table, p, none, none
    parents, index = kit.put(np.zeros((0, 4), np.int32)), kit.put(np.zeros((0, 4), np.int32))
    device.compact_accepted(cache.fields, *place, index, num_draft_tokens=8)
    device.duplicate_prefix_tail(cache.fields, *place, num_steps=3, topk=4)
    device.copy_parent_drafts(cache.fields, *place, parents, num_steps=3, step=1)
    place = table, p, rows, roots
    first = kit.put(i32([[0]]))
    device.compact_accepted(cache.fields, *place, first, num_draft_tokens=8)
    device.duplicate_prefix_tail(cache.fields, *place, num_steps=3, topk=1)
    device.copy_parent_drafts(
        cache.fields, *place, kit.put(i32([[0, 0, 0, 0]])), num_steps=3, step=0
    )
    cache.check()
    if kit.kind != "cuda":
        assert kit.backend.launches == []


def test_whatever_the_device_arrays_hold_no_byte_outside_the_slots_is_touched(kit):
    """Rows, roots, slots, pages and node ids that are none move nothing."""
    wild = i32([-(2**31), -1, 0, 1, 2, 3, 5, 7, 40, 2**31 - 1])
    rng = np.random.default_rng(4)
    for page_size in (1, 4):
        batch = Batch(page_size, 1)
        batch.num_slots = 8 * page_size
        cache = Cache(kit, batch)
        table = kit.put(rng.choice(wild, (9, 4)))
        # One lane, or one move, at a time: two that write one slot are a race.
        for _ in range(30):
            place = table, page_size, kit.put(rng.choice(wild, 1)), kit.put(rng.choice(wild, 1))
            index, parents = kit.put(rng.choice(wild, (1, 4))), kit.put(rng.choice(wild, (1, 4)))
            src, dst = kit.put(rng.choice(wild, 1)), kit.put(rng.choice(wild, 1))
            device.compact_accepted(cache.fields, *place, index, num_draft_tokens=8)
            device.move_kv(cache.fields, src, dst)
            device.move_kv(cache.fields, src, dst, disjoint=True)
            if not kit.is_checked:  # rows that name one page twice race with themselves
                device.duplicate_prefix_tail(cache.fields, *place, num_steps=3, topk=4)
                device.copy_parent_drafts(cache.fields, *place, parents, num_steps=3, step=2)
        # Nothing may write the sink's page, except moves that name its slots.
        kit.check()
        cache = Cache(kit, batch)
        sink = [array(b.view(torch.uint8)[:page_size]).copy() for b in cache.buffers[:-1]]
        for _ in range(30):
            place = table, page_size, kit.put(rng.choice(wild, 1)), kit.put(rng.choice(wild, 1))
            index = kit.put(rng.choice(wild, (1, 4)))
            device.compact_accepted(cache.fields, *place, index, num_draft_tokens=8)
        for before, buffer in zip(sink, cache.buffers[:-1], strict=True):
            assert np.array_equal(before, array(buffer.view(torch.uint8)[:page_size]))


def test_nodes_of_other_lanes_move_nothing(kit):
    """N = 4 of a row that holds more: ids below, at and beyond the lane's own, and late -1s."""
    batch = Batch(4, 2, num_nodes=16)
    cache = Cache(kit, batch)
    index = i32([[0, 4, 5, -1, 7], [4, 3, 8, -1, 2**31 - 1]])
    device.compact_accepted(
        cache.fields, *put_place(kit, batch), kit.put(index), num_draft_tokens=4
    )
    cache.check()


def test_slots_are_judged_by_the_shortest_buffer(kit):
    """Buffers of different lengths: a slot that one of them has not moves in none."""
    twin = torch.arange(60, dtype=torch.int32).view(20, 3)
    long, short = kit.var(twin), kit.var(twin[:10].contiguous())
    fields = device.Fields.of([long, short], 1)
    device.move_kv(fields, kit.put(i32([3, 12, 4])), kit.put(i32([7, 2, 15])))
    for buffer in (long, short):
        expected = twin[: len(buffer)].clone()
        expected[7] = twin[3]
        assert torch.equal(buffer.cpu(), expected)
    args = (fields.table, np.int32(1), np.int32(10), kit.put(i32([9, 10])), kit.put(i32([0, 1])))
    launch.launch(
        "move_slots", (1, 2), (4, 2), (*args, np.int32(2)), shared_mem=128, touches=fields.buffers
    )
    assert torch.equal(long[:2].cpu(), twin[[9, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_keys_and_values_are_written_into_their_slots(kit, dtype):
    """Of unlike widths, from rows of their own and from parts of wider ones; others stay."""
    rng = np.random.default_rng(3)
    for tokens in kit.batches:
        for k_tail, v_tail in (((2, 8), (2, 8)), ((3,), (1, 32)), ((2, 700), (2, 8))):
            num_slots = tokens + 5
            twin_buffers = [
                random_bytes(rng, (num_slots, *tail), dtype) for tail in (k_tail, v_tail)
            ]
            buffers = [kit.var(twin.clone()) for twin in twin_buffers]
            slots = torch.from_numpy(rng.permutation(num_slots)[:tokens])
            wide = random_bytes(rng, (tokens, 2 * int(np.prod(k_tail))), dtype)
            k = wide[:, : int(np.prod(k_tail))].unflatten(1, k_tail)
            v = random_bytes(rng, (tokens, *v_tail), dtype)
            on_device = kit.put(wide)[:, : int(np.prod(k_tail))].unflatten(1, k_tail)
            columns = kit.put(slots.repeat_interleave(3)).view(tokens, 3)
            device.write_kv(*buffers, on_device, kit.put(v), columns[:, 1])
            for buffer, twin, part in zip(buffers, twin_buffers, (k, v), strict=True):
                twin.view(torch.uint8)[slots] = part.contiguous().view(torch.uint8)
                assert torch.equal(buffer.cpu().view(torch.uint8), twin.view(torch.uint8))


def test_tokens_without_a_slot_are_not_written(kit):
    buffers = [kit.var(torch.zeros(4, 2)) for _ in range(2)]
    rows = [kit.put(torch.ones(4, 2)) for _ in range(2)]
    device.write_kv(*buffers, *rows, kit.put(torch.tensor([-1, 4, 1 << 40, 2])))
    assert all(buffer.sum(1).tolist() == [0, 0, 2, 0] for buffer in buffers)


def test_tokens_of_another_form_are_refused():
    buffer, row = torch.zeros(4, 2), torch.zeros(3, 2)
    slots = torch.arange(3)
    with pytest.raises(
        ShapeError, match=r"v must be torch.float32 \[3, 2\] on cpu, got .*\[3, 1\]"
    ):
        device.write_kv(buffer, buffer, row, row[:, :1], slots)
    with pytest.raises(ShapeError, match=r"slots must be torch\.int64"):
        device.write_kv(buffer, buffer, row, row, slots.int())
    with pytest.raises(ShapeError, match=r"v_buffer must be .* \[4, 2\]"):
        device.write_kv(buffer, buffer[:3], row, row, slots)
