"""Scenarios 14 and 16 to 22 of the kernels (13 and 15: test_device_reads, test_device_tree)."""

import numpy as np
import pytest
import torch

import kernel_reference as ref
from cuda_host import VirtualBuffer, register
from kernel_kit import Batch, array, i32, put_place
from ledger_kit import end, make, prefill, start
from specpool import Shape
from specpool import kernels as device
from specpool.kernels import twin_moves as moves
from specpool.kernels import twins as kernels
from specpool.kernels.twin_moves import PageBlocked


def kv_of(kit, num_slots, width=6, dtype=torch.bfloat16, seed=0):
    """A buffer [num_slots, width] and its bytes before."""
    rng = np.random.default_rng(seed)
    content = torch.from_numpy(rng.integers(0, 256, (num_slots, width * dtype.itemsize), np.uint8))
    return kit.var(content.view(dtype)), content


def bytes_of(buffer):
    return buffer.cpu().view(torch.uint8)


def test_scenario_14_compaction_reads_exactly_its_entries(kit):
    """K=4 S=3 N=8, 3 lanes: bs * (S + 1) entries; what follows them are guards (sgl#26866).

    In the checked runs one entry more is an out-of-bounds read; here the guards, taken as nodes,
    would move something.
    """
    batch = Batch(4, 3, topk=4, num_steps=3, num_nodes=8)
    kv, before = kv_of(kit, batch.num_slots)
    index = i32([[0, 2, -1, -1], [8, 9, 12, -1], [16, 17, 18, 19]])
    device.compact_accepted(
        device.Fields.of([kv], 4), *put_place(kit, batch), kit.put(index), num_draft_tokens=8
    )
    moves.compact_accepted([before], *batch.place, index, num_draft_tokens=8)
    assert torch.equal(bytes_of(kv), before)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_scenario_16_scattered_accepts_touch_nothing_else(kit, page_size):
    """Nodes {0, 2, 5, 9} of 16: each lands in its place, every other token stands (sgl#15360)."""
    table = ref.make_table(np.random.default_rng(page_size), 3, -(-80 // page_size))
    rows, roots = i32([2, 3]), i32([13, 62])
    kv, before = kv_of(kit, int(table.max() + 1) * page_size)
    index = i32([[0, 2, 5, 9, -1], [16, 17, 18, -1, -1]])
    device.compact_accepted(
        device.Fields.of([kv], page_size), kit.put(table), page_size, kit.put(rows),
        kit.put(roots), kit.put(index), num_draft_tokens=16,
    )  # fmt: skip
    source = list(range(len(before)))
    for place, node in enumerate([0, 2, 5, 9]):
        source[ref.slot(table, page_size, 2, 13 + place)] = ref.slot(table, page_size, 2, 13 + node)
    assert torch.equal(bytes_of(kv), before[source])


@pytest.mark.parametrize("width", [3, 16, 40])
def test_scenario_17_sources_and_targets_overlap(kit, width):
    """3 <- 5, 5 <- 9, and a walk of 20 places that shift by one: no source is overwritten early."""
    table = np.concatenate([np.zeros((1, 10), np.int32), 1 + np.arange(10, dtype=np.int32)[None]])
    for nodes, n in (([0, 2, 3, 5, 6, 9], 10), ([0, *range(2, 21)], 21)):
        kv, before = kv_of(kit, 44, width, torch.uint8)
        index = np.full((1, 21), -1, np.int32)
        index[0, : len(nodes)] = nodes
        device.compact_accepted(
            device.Fields.of([kv], 4), kit.put(table), 4, kit.put(i32([1])), kit.put(i32([5])),
            kit.put(index), num_draft_tokens=n,
        )  # fmt: skip
        expected = before.clone()
        expected[9 : 9 + len(nodes)] = before[[9 + node for node in nodes]]
        assert torch.equal(bytes_of(kv), expected)


def test_scenario_18_page_blocked_buffers_move_token_by_token(kit):
    """Keys then scales per page, compared per token: no page checksum sees it (sgl#31218)."""
    p, pages = 64, 4
    data = kit.var(np.random.default_rng(0).integers(0, 256, (pages, p * (6 + 1)), np.uint8))
    blocked = PageBlocked(data, p, (6, 1))
    before = [field.cpu().clone() for field in blocked.fields()]
    src, dst = [70, 71, 64, 130], [64, 70, 200, 71]
    fields = device.Fields.of([blocked], p)
    device.move_kv(fields, kit.put(i32(src)), kit.put(i32(dst)))
    source = list(range(p * pages))
    for s, d in zip(src, dst, strict=True):
        source[d] = s
    for field, old in zip(blocked.fields(), before, strict=True):
        for slot in range(p * pages):
            now = field[slot // p, slot % p].cpu()
            assert torch.equal(now, old[source[slot] // p, source[slot] % p])


@pytest.mark.parametrize(("num_steps", "page_size"), [(5, 4), (3, 16)])
def test_scenario_19_the_worked_example_of_sgl_7725(kit, num_steps, page_size):
    """P=4, S=5, 7 tokens in slots 4..10, K=8: [8, 9, 10] goes to 16.., 24.., ..; and P > S."""
    p, s, k = page_size, num_steps, 8
    columns = 2 + 3 * k
    table = np.concatenate(
        [np.zeros((1, columns), np.int32), 1 + np.arange(columns, dtype=np.int32)[None]]
    )
    for root in (7, 8 * p):
        kv, before = kv_of(kit, (columns + 1) * p)
        place = kit.put(table), p, kit.put(i32([1])), kit.put(i32([root]))
        device.duplicate_prefix_tail(device.Fields.of([kv], p), *place, num_steps=s, topk=k)
        expected, last = before.clone(), root % p
        base, pages = root - last + p, -(-(last + s) // p)
        for branch in range(1, k):
            start = base + branch * pages * p
            expected[start : start + last] = before[base : base + last]
        if (p, root) == (4, 7):
            assert torch.equal(expected[16:19], before[8:11])
            assert torch.equal(expected[24:27], before[8:11])
        assert torch.equal(bytes_of(kv), expected)
        if last == 0:
            assert torch.equal(expected, before)


def test_scenario_20_a_shared_tail_keeps_its_bytes(kit):
    """Admitted on 10 tokens of a cached prefix of 12: its tail is copied, then 100 rounds write.

    Drafts, verify windows, tails and compaction go to the row's own pages; the cache stands.
    """
    ledger = make(Shape.eagle(3, 4, 8), layout="holey", context=512)
    first = prefill(ledger, 12)
    second = ledger.admit(prefix=ledger.pin_prefix(first, 12), length=10)
    kv, before = kv_of(kit, (ledger.groups[0].num_pages + 1) * 4)
    fields, rng = device.Fields.of([kv], 4), np.random.default_rng(0)
    cached = kernels.slot_ranges(ledger.full_table(0), 4, i32([first]), i32([0]), i32([12]))
    plan = ledger.prepare_extend([second], [11])
    ledger.launch(plan.step)
    ((_, src, dst, tokens),) = plan.page_copies.tolist()
    assert src * 4 == cached[8] and tokens == 2
    copied = np.arange(tokens, dtype=np.int32)
    read, written = kit.put(src * 4 + copied), kit.put(dst * 4 + copied)
    device.move_kv(fields, read, written, disjoint=True)
    assert torch.equal(bytes_of(kv)[dst * 4 + copied], before[cached[8:10]])
    ledger.complete(plan.step)

    def write(slots):
        noise = rng.integers(0, 256, (slots.numel(), 12), np.uint8)
        kv[slots.view(-1).long()] = torch.from_numpy(noise).view(kv.dtype).to(kit.device)

    for _ in range(5 if kit.is_checked else 100):
        root = int(ledger.resolved_len[second])
        step = start(ledger, second)
        place = kit.put(ledger.full_table(0)), 4, kit.put(i32([second])), kit.put(i32([root]))
        device.duplicate_prefix_tail(fields, *place, num_steps=3, topk=4)
        write(device.draft_write_slots(*place, num_steps=3, topk=4, layout="holey"))
        parents = kit.put(i32(rng.integers(0, 4, (1, 4))))
        device.copy_parent_drafts(fields, *place, parents, num_steps=3, step=2)
        write(device.slot_ranges(*place, kit.put(i32([8])), hi=[8]))
        nodes = np.sort(rng.permutation(7)[: rng.integers(4)]) + 1
        index = np.append(i32([0]), i32([*nodes, *[-1] * (3 - len(nodes))]))[None]
        device.compact_accepted(fields, *place, kit.put(index), num_draft_tokens=8)
        end(ledger, step, 1 + len(nodes))
        assert torch.equal(bytes_of(kv)[cached], before[cached])


def buffers_beyond_2_to_the_31(kit, width, slots):
    """A tensor of 3 GiB of addresses on the host, or of memory on a GPU; windows on `slots`."""
    num_slots = (3 << 30) // width
    if kit.kind == "cuda":
        kv = torch.zeros(num_slots, width, dtype=torch.uint8, device=kit.device)
        return kv, {slot: kv[slot] for slot in slots}, []
    buffer = VirtualBuffer(num_slots * width)
    windows = {slot: torch.from_numpy(buffer.window(slot * width, width)) for slot in slots}
    import ctypes

    content = (ctypes.c_uint8 * buffer.size).from_address(buffer.address)
    kv = torch.from_numpy(np.ctypeslib.as_array(content)).view(num_slots, width)
    return kv, windows, [buffer]


@pytest.mark.parametrize("width", [1024, 96])
def test_scenario_21_offsets_are_64_bit(kit, width):
    """Slots whose byte offsets pass 2^31 in every move; only those slots exist (sgl#9344)."""
    p, page = 4, (3 << 30) // width // 4 - 9  # the first of the last nine pages
    assert page * p * width > 2**31
    columns = 8
    table = i32(np.zeros((2, columns)))
    table[1] = page + np.arange(columns)
    slots = range(page * p, (page + columns) * p)
    kv, windows, buffers = buffers_beyond_2_to_the_31(kit, width, slots)
    rng = np.random.default_rng(width)
    for window in windows.values():
        window.copy_(torch.from_numpy(rng.integers(0, 256, width, np.uint8)))

    def now():
        return torch.stack([windows[slot].cpu() for slot in slots])

    fields, expected = device.Fields.of([kv], p), now()
    assert not any(fields.num_slots * w < 2**31 for w in fields.widths)
    place = kit.put(table), p, kit.put(i32([1])), kit.put(i32([6]))
    local = i32([[0] * columns, range(columns)]), p, i32([1]), i32([6])
    with register(*buffers, name="far"):
        index = i32([[0, 2, 5, 9]])
        device.compact_accepted(fields, *place, kit.put(index), num_draft_tokens=16)
        # The twin moves the same bytes at slots from 0 on; page 0 is no sink there.
        local[0][:] += 1
        shifted = torch.cat([torch.zeros(p, width, dtype=torch.uint8), expected])
        moves.compact_accepted([shifted], *local, index, num_draft_tokens=16)
        assert torch.equal(now(), shifted[p:])
        device.duplicate_prefix_tail(fields, *place, num_steps=2, topk=3)
        moves.duplicate_prefix_tail([shifted], *local, num_steps=2, topk=3)
        assert torch.equal(now(), shifted[p:])
        parents = i32([[1, 0, 1]])
        device.copy_parent_drafts(fields, *place, kit.put(parents), num_steps=2, step=1)
        moves.copy_parent_drafts([shifted], *local, parents, num_steps=2, step=1)
        assert torch.equal(now(), shifted[p:])
        src, dst = i32([3, 9, 4]), i32([9, 4, 20])
        first = np.int32(page * p)
        device.move_kv(fields, kit.put(src + first), kit.put(dst + first))
        shifted[p:][dst] = shifted[p:][src].clone()
        assert torch.equal(now(), shifted[p:])
        gathered = device.gather_kv(fields, kit.put(src + first))
        assert torch.equal(gathered.buffers[0].cpu(), shifted[p:][src])
        device.scatter_kv(fields, kit.put(np.flip(src).copy() + first), gathered)
        shifted[p:][np.flip(src).copy()] = gathered.buffers[0].cpu()
        assert torch.equal(now(), shifted[p:])


def test_scenario_22_padded_lanes_move_nothing(kit):
    """5 lanes padded to 8: rows 0 with stale roots and nodes touch neither slot 0 nor page 0."""
    batch = Batch(4, 5, topk=4, num_steps=3, num_nodes=8)
    batch.rows[:] = np.arange(1, 6)
    kv, before = kv_of(kit, batch.num_slots)
    fields = device.Fields.of([kv], 4)
    index = np.concatenate([batch.walks(4), 8 * i32([[5], [6], [7]]) + i32([[0, 2, 5, 7]])])
    rows, roots = np.append(batch.rows, i32([0] * 3)), np.append(batch.roots, i32([3, 7, 0]))
    place = kit.put(batch.table), 4, kit.put(rows), kit.put(roots)
    parents = i32(batch.rng.integers(0, 4, (8, 4)))
    sizes = {"num_steps": 3, "topk": 4}
    device.duplicate_prefix_tail(fields, *place, **sizes)
    device.copy_parent_drafts(fields, *place, kit.put(parents), num_steps=3, step=2)
    device.compact_accepted(fields, *place, kit.put(index), num_draft_tokens=8)
    moves.duplicate_prefix_tail([before], *batch.place, **sizes)
    moves.copy_parent_drafts([before], *batch.place, parents[:5], num_steps=3, step=2)
    moves.compact_accepted([before], *batch.place, index[:5], num_draft_tokens=8)
    assert torch.equal(bytes_of(kv), before)
    assert array(kv.view(torch.uint8)[:4]).any()
