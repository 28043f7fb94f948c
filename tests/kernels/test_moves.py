"""Moves of KV in torch: any dtype, overlaps, page-blocked buffers, and no stray byte."""

import subprocess
import sys

import numpy as np
import pytest

import kernel_reference as ref

torch = pytest.importorskip("torch")

from specpool import _core  # noqa: E402
from specpool.errors import ShapeError  # noqa: E402
from specpool.kernels import twin_moves as moves  # noqa: E402
from specpool.kernels import twins as kernels  # noqa: E402 - after the skip

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


def i32(values):
    return np.asarray(values, np.int32)


def i64(values):
    return np.asarray(values, np.int64)


def buffer(shape, dtype, seed=0):
    """Random bytes of any dtype, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def same(a, b):
    """Equal byte by byte."""
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_are_gather_then_scatter_in_every_dtype(dtype):
    """Swaps, chains and a head size of 3, in several buffers and in one with all layers."""
    src, dst = i64([1, 0, 3, 4, 5]), i64([0, 1, 4, 5, 6])
    plain = [buffer((8, 2, 3), dtype, 1), buffer((8, 5), dtype, 2)]
    stacked = buffer((3, 2, 8, 2, 3), dtype, 3)
    before = [b.clone() for b in [*plain, stacked]]
    moves.move_kv(plain, src, dst)
    moves.move_kv([stacked], src, dst, slot_dim=2)
    source = list(range(8))
    for s, d in zip(src, dst, strict=True):
        source[d] = int(s)
    for now, old in zip(plain, before, strict=False):
        for slot in range(8):
            assert same(now[slot], old[source[slot]])
    for slot in range(8):
        assert same(stacked[:, :, slot], before[2][:, :, source[slot]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_are_inverse(dtype):
    buffers = [buffer((9, 4), dtype, 1), buffer((9, 2, 2), dtype, 2)]
    slots = i64([7, 2, 5])
    values = moves.gather_kv(buffers, slots)
    assert [v.dtype for v in values] == [dtype, dtype]
    assert same(
        values[0], torch.stack([buffers[0].view(torch.uint8)[s] for s in slots]).view(dtype)
    )
    fresh = [buffer(b.shape, dtype, 9) for b in buffers]
    before = [f.clone() for f in fresh]
    moves.scatter_kv(fresh, slots, values)
    for now, old, origin in zip(fresh, before, buffers, strict=True):
        for slot in range(9):
            assert same(now[slot], origin[slot] if slot in slots else old[slot])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_scenario_16_scattered_accepts_touch_nothing_else(page_size):
    """Nodes {0, 2, 5, 9} of 16: each lands in its place, every other token stands (sgl#15360)."""
    rng = np.random.default_rng(page_size)
    table = ref.make_table(rng, 3, -(-80 // page_size))
    rows, roots = i32([2, 3]), i32([13, 62])
    kv = [buffer((int(table.max() + 1) * page_size, 2, 3), torch.bfloat16, seed) for seed in (1, 2)]
    before = [b.clone() for b in kv]
    index = i32([[0, 2, 5, 9, -1], [16, 17, 18, -1, -1]])
    moves.compact_accepted(kv, table, page_size, rows, roots, index, num_draft_tokens=16)
    source = list(range(len(kv[0])))
    for at, node in enumerate([0, 2, 5, 9]):
        source[ref.slot(table, page_size, 2, 13 + at)] = ref.slot(table, page_size, 2, 13 + node)
    for now, old in zip(kv, before, strict=True):
        assert same(now, old[source])


def test_scenario_18_page_blocked_buffers_move_token_by_token():
    """Keys then scales per page: compared per token, no page checksum sees it (sgl#31218)."""
    p, pages = 64, 4
    data = buffer((pages, p * (6 + 1)), torch.uint8)
    keys, scales = data[:, : p * 6].view(pages, p, 6), data[:, p * 6 :].view(pages, p, 1)
    before = keys.clone(), scales.clone()
    src, dst = i64([64, 65, 190, 3]), i64([65, 64, 66, 255])
    moves.move_kv([moves.PageBlocked(data, p, (6, 1))], src, dst)
    source = list(range(pages * p))
    for s, d in zip(src, dst, strict=True):
        source[d] = int(s)
    for slot, origin in enumerate(source):
        for now, old in zip((keys, scales), before, strict=True):
            assert same(now[slot // p, slot % p], old[origin // p, origin % p])


def test_scenario_19_tails_and_parents_are_copied_in_the_buffers():
    p, s, k = 4, 5, 8
    table = np.concatenate([np.zeros((1, 20), np.int32), 1 + np.arange(20, dtype=np.int32)[None]])
    args = table, p, i32([1]), i32([7])
    kv = torch.arange(88).view(88, 1).clone()
    moves.duplicate_prefix_tail([kv], *args, num_steps=s, topk=k)
    for branch in range(1, 8):
        assert kv[8 * branch + 8 : 8 * branch + 11, 0].tolist() == [8, 9, 10]
    swapped = i32([[1, 0, 2, 3, 4, 5, 6, 6]])
    before = kv.clone()
    moves.copy_parent_drafts([kv], *args, swapped, num_steps=s, step=2)
    drafts = kernels.draft_write_slots(*args, num_steps=s, topk=k, layout="holey")[0, :, :2]
    assert (kv[drafts[[0, 1, 7]], 0] == before[drafts[[1, 0, 6]], 0]).all()
    untouched = np.setdiff1d(np.arange(88), drafts[[0, 1, 7]])
    assert (kv[untouched] == before[untouched]).all()


def test_scenario_20_shared_tail_pages_keep_their_bytes():
    """100 rounds of drafts on a prefix whose full pages are shared: their bytes never change."""
    rng = np.random.default_rng(0)
    table = ref.make_table(rng, 1, 40)
    shared = kernels.slot_ranges(table, 4, i32([1]), i32([0]), i32([8]))
    kv = buffer((164, 3), torch.float32)
    before = kv.clone()
    root = 8
    for _ in range(100):
        args = table, 4, i32([1]), i32([root])
        moves.duplicate_prefix_tail([kv], *args, num_steps=3, topk=4)
        slots = kernels.draft_write_slots(*args, num_steps=3, topk=4, layout="holey")
        kv[slots.ravel()] = 0
        nodes = np.sort(rng.permutation(7)[:3]) + 1
        index = i32([[0, *nodes]])
        moves.compact_accepted([kv], *args, index, num_draft_tokens=8)
        root = 8 + (root - 8 + 4) % 60
    assert same(kv[shared], before[shared])


def test_empty_work_launches_nothing():
    none = i64([])
    moves.move_kv([], i64([1]), i64([2]))
    with _Counting() as calls:
        moves.move_kv([torch.zeros(4, 2)], none, none)
        moves.scatter_kv([torch.zeros(4, 2)], none, [torch.zeros(0, 2)])
    assert not {name for name in calls.seen if "index" in name}
    assert moves.gather_kv([torch.zeros(4, 2)], none)[0].shape == (0, 2)


class _Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(str(function))
        return function(*args, **(kwargs or {}))


def test_index_tensors_are_taken_too():
    kv = torch.arange(4.0)[:, None].clone()
    moves.move_kv([kv], torch.tensor([1, 0]), torch.tensor([0, 1]))
    assert kv[:, 0].tolist() == [1, 0, 2, 3]
    assert moves.gather_kv([kv], torch.tensor([3]))[0].tolist() == [[3]]


@pytest.mark.parametrize("slot_dim", [0, 1])
def test_strided_and_contiguous_buffers_hold_the_same_afterwards(slot_dim):
    """torch moves the one, the core the other: long runs, overlaps both ways, chains, swaps."""
    rng = np.random.default_rng(slot_dim)
    shape = (40, 3, 5) if slot_dim == 0 else (2, 40, 5)
    for src, dst in [
        (np.arange(0, 30), np.arange(7, 37)),
        (np.arange(7, 37), np.arange(0, 30)),
        (rng.integers(0, 40, 25), rng.permutation(40)[:25]),
        (rng.permutation(40), rng.permutation(40)),
    ]:
        contiguous = buffer(shape, torch.bfloat16)
        strided = torch.zeros(*shape[:-1], 9, dtype=torch.bfloat16)[..., :5].copy_(contiguous)
        for kv in (contiguous, strided):
            moves.move_kv([kv], src, dst, slot_dim=slot_dim)
        assert same(contiguous, strided)
        slots = rng.permutation(40)[:25]
        values = moves.gather_kv([strided], src[:25], slot_dim=slot_dim)
        for kv in (contiguous, strided):
            moves.scatter_kv([kv], slots, values, slot_dim=slot_dim)
        assert same(contiguous, strided)


def test_a_slot_of_one_element_has_any_stride():
    kv = torch.arange(6.0).view(1, 6).t()
    moves.move_kv([kv], i64([0, 1]), i64([1, 2]))
    moves.scatter_kv([kv], i64([5, 4]), [torch.tensor([[9.0], [8.0]])])
    assert kv[:, 0].tolist() == [0, 0, 1, 3, 8, 9]


def test_the_core_takes_bytes_that_fit():
    content, one = np.zeros((1, 3, 4), np.uint8), i64([1])
    for buffers, message in [
        ([(content, [3])], r"a page must be whole slots of \[3\] bytes, 1 or more, got 4 bytes"),
        ([(content, [4]), (content[:, :1].copy(), [4])], r"src\[0\] must be in \[0, 1\), got 1"),
        ([(content[..., :2], [2])], "buffers must be a C-contiguous 3-dimensional"),
        ([(content, [4]), (content, [4])], "buffers shares memory with another argument"),
    ]:
        with pytest.raises(ShapeError, match=message):
            _core.move_slots(buffers, one, one)
    with pytest.raises(ShapeError, match=r"values must have shape \[1, 1, 4\], got \[1, 3, 4\]"):
        _core.scatter_slots([(content, [4])], one, [content + 1])
    with pytest.raises(ShapeError, match="values must have 1 arrays, got 0"):
        _core.scatter_slots([(content, [4])], one, [])
    assert not content.any()


def test_refused_moves_write_nothing():
    kv = [buffer((8, 2), torch.float32, 1), buffer((6, 2), torch.float32, 2)]
    before = [b.clone() for b in kv]
    one, two = i64([1]), i64([2])
    for src, dst, message in [
        (i64([1, 2]), one, "dst must have 2 elements, got 1"),
        (i64([7]), one, r"src\[0\] must be in \[0, 6\), got 7"),
        (one, i64([6]), r"dst\[0\] must be in \[0, 6\), got 6"),
        (one, i64([-1]), r"dst\[0\] must be in \[0, 6\), got -1"),
        (i64([0, 1]), i64([3, 3]), "dst names slot 3 twice"),
        (i32([1]), two, r"src must be .* int64, got int32"),
        (torch.tensor([1]), two, "both be NumPy arrays or both tensors"),
        (torch.tensor([1.0]), torch.tensor([1]), r"src must be int64 \[n\] on cpu"),
        (torch.tensor([1]), torch.tensor([1, 2]), "dst must have 1 elements, got 2"),
        (torch.tensor([7]), torch.tensor([1]), r"src\[0\] must be in \[0, 6\), got 7"),
        (torch.tensor([0, 1]), torch.tensor([3, 3]), "dst names slot 3 twice"),
    ]:
        with pytest.raises(ShapeError, match=message):
            moves.move_kv(kv, src, dst)
    with pytest.raises(ShapeError, match=r"slot_dim must be a dimension of \(8, 2\)"):
        moves.move_kv(kv, one, two, slot_dim=2)
    with pytest.raises(ShapeError, match=r"slots\[0\] must be in \[0, 6\)"):
        moves.gather_kv(kv, i64([6]))
    with pytest.raises(ShapeError, match=r"values\[1\] must be torch.float32 \(1, 2\)"):
        moves.scatter_kv(kv, one, [torch.zeros(1, 2), torch.zeros(1, 3)])
    with pytest.raises(ShapeError, match="values must have 2 tensors, got 1"):
        moves.scatter_kv(kv, one, [torch.zeros(1, 2)])
    with pytest.raises(ShapeError, match=r"data must be contiguous \[num_pages, 12\]"):
        moves.PageBlocked(torch.zeros(2, 13), 4, (2, 1))
    with pytest.raises(ShapeError, match="page_size and widths must be 1 or more"):
        moves.PageBlocked(torch.zeros(2, 0), 4, ())
    assert all(same(now, old) for now, old in zip(kv, before, strict=True))


def test_index_functions_import_without_torch():
    code = "import sys, specpool.kernels.twins; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
