"""The launch seam and the checks before a launch: bad input, shipping, CuPy without a GPU."""

import contextlib
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from kernel_kit import Kit, i32
from paths import ROOT
from specpool import _core
from specpool import kernels as device
from specpool.errors import ConfigError, OrderError, ShapeError
from specpool.kernels import launch, transfer
from specpool.kernels.twin_moves import PageBlocked

CUDA = ROOT / "cuda"


# --- what is shipped ----------------------------------------------------------------------------


def test_the_package_holds_the_kernels_as_they_are():
    names = sorted(path.name for path in CUDA.glob("*.cu*"))
    assert sorted(_core.KERNEL_FILES) == names and _core.KERNEL_FILES[0] == "common.cuh"
    for name in names:
        assert _core.kernel_source(name) == (CUDA / name).read_text()
    with pytest.raises(KeyError, match=r"no kernel file .*moves.* there are"):
        _core.kernel_source("moves")


def test_every_kernel_has_a_launcher():
    text = "".join(path.read_text() for path in (ROOT / "python/specpool/kernels").glob("*.py"))
    launched = set(re.findall(r'launch\(\s*"(\w+)"', text))
    assert {f"{name}_kernel" for name in launched} == set(launch.entries())
    for path in CUDA.glob("*.cu"):
        assert (ROOT / "python/specpool/kernels" / f"{path.stem}.py").exists()


def test_import_loads_neither_cupy_nor_torch(tmp_path):
    script = "import sys, specpool; assert not {'cupy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
    script = "import sys, specpool.kernels; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


def test_an_sdist_has_the_kernels(tmp_path):
    maturin = Path(sys.executable).with_name("maturin")
    if not maturin.exists():
        pytest.skip("no maturin beside this Python")
    command = [maturin, "sdist", "--out", tmp_path]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {Path(name).parts[1:] for name in content.getnames()}
    assert {("cuda", name) for name in _core.KERNEL_FILES} <= names


# --- without CuPy, and with one that only writes down what it is told ----------------------------


class FakeTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda:1")


def on_gpu(array):
    return torch.from_numpy(array).as_subclass(FakeTensor)


class FakeCupy(types.ModuleType):
    """Enough of CuPy 14.0.0 to see what would be launched, where and how often it was built.

    Like that version, it has no `Stream.from_external`.
    """

    __version__ = "14.0.0"

    def __init__(self, error=None):
        super().__init__("cupy")
        self.built, self.launched, self.entered, self.error = [], [], [], error
        self.cuda = types.SimpleNamespace(Device=self.on)

    def on(self, index):
        return self._entry(("device", index))

    def _entry(self, what):
        cupy = self

        class Entry:
            def __enter__(self):
                cupy.entered.append(what)

            def __exit__(self, *error):
                cupy.entered.remove(what)

        return Entry()

    def RawModule(self, *, code, options):  # noqa: N802 - CuPy's name
        if self.error:
            raise self.error
        self.built.append((code, options, list(self.entered)))
        return types.SimpleNamespace(get_function=self._function)

    def _function(self, name):
        def kernel(grid, block, args, *, shared_mem, stream):
            where = (*self.entered, ("stream", stream.ptr))
            self.launched.append((name, grid, block, args, shared_mem, where))

        kernel.num_regs = 32
        return kernel


@pytest.fixture
def gpu(monkeypatch):
    """A torch with a GPU, as far as the seam looks."""
    monkeypatch.setattr(launch, "_cuda", launch.CudaBackend())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def current_stream(device):  # torch 2.9: no `__cuda_stream__`
        return types.SimpleNamespace(cuda_stream=0x5EA1 + device.index)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_raw_stream", None)

    def install(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(torch.cuda, "device", lambda device: cupy.on(device.index))
        return cupy

    return install


def slots(n=3):
    table, lanes = on_gpu(np.ones((2, 2), np.int32)), on_gpu(np.ones(n, np.int32))
    return launch.launch("slots_at", (n,), (256,), (table, np.int32(2), None, lanes), shared_mem=16)


def test_cupy_gets_addresses_and_typed_scalars_on_torchs_stream(gpu):
    cupy = gpu(FakeCupy())
    slots(), slots()
    ((code, _, entered),) = cupy.built
    assert code == launch.source() and entered == [("device", 1)]
    assert "#include" not in code
    name, grid, block, args, shared, entered = cupy.launched[1]
    assert (name, grid, block, shared) == ("slots_at_kernel", (3,), (256,), 16)
    assert [type(arg) for arg in args] == [int, np.int32, int, int] and args[2] == 0
    assert entered == (("device", 1), ("stream", 0x5EA2))
    slots(0)
    assert len(cupy.launched) == 2


def test_a_current_device_is_not_switched_to_and_the_stream_is_read_each_time(gpu, monkeypatch):
    cupy = gpu(FakeCupy())
    device.prepare(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    streams = iter([7, 7, 9])
    monkeypatch.setattr(launch, "_raw_stream", lambda index: next(streams) * index)
    slots(), slots(), slots()
    entered = [launched[-1] for launched in cupy.launched]
    assert entered == [(("stream", address),) for address in (7, 7, 9)]


def test_prepare_builds_once_and_a_capture_does_not(gpu, monkeypatch):
    cupy = gpu(FakeCupy())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(OrderError, match=r"call specpool\.kernels\.launch\.prepare before"):
        slots()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device.prepare(torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    slots()
    assert len(cupy.built) == 1 and len(cupy.launched) == 1


def test_an_event_stands_behind_the_work_of_its_own_device(gpu, monkeypatch):
    """The thread's current device may be another: its stream runs none of this work."""
    recorded = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: types.SimpleNamespace(record=recorded.append))
    event = transfer.mark(torch.device("cuda:1"))
    assert event is not None and [stream.cuda_stream for stream in recorded] == [0x5EA2]
    assert transfer.mark(torch.device("cpu")) is None


def test_a_missing_cupy_is_one_sentence(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ConfigError, match=r"need CuPy: pip install 'specpool\[cuda12\]'$"):
        slots()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("cudaErrorInsufficientDriver: too old\nmore lines"), "too old"),
        # CuPy for CUDA 12 beside a torch for CUDA 13, whose libraries it does not find.
        (
            RuntimeError("CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: no file\n"),
            "libnvrtc.so.12",
        ),
        (ImportError("libcudart.so.12: cannot open shared object file"), "libcudart.so.12"),
    ],
    ids=["old driver", "another CUDA major", "another CUDA major at import"],
)
def test_a_cupy_that_cannot_build_is_one_sentence(gpu, monkeypatch, error, says):
    gpu(FakeCupy(error))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        slots()
    (first, *_) = str(error).splitlines()
    assert str(caught.value) == (
        f"CuPy 14.0.0 cannot build the kernels for cuda:1 ({first}): "
        "pip install 'specpool[cuda13]', or install a newer driver"
    )


def test_cpu_tensors_go_to_the_twin():
    table, lanes = torch.tensor([[0, 0], [5, 7]]).int(), torch.ones(2, dtype=torch.int32)
    positions = torch.tensor([1, 6]).int()
    assert device.slots_at(table, 4, lanes, positions).tolist() == [21, 30]
    out = torch.zeros(2, dtype=torch.int32)
    assert device.slots_at(table, 4, lanes, positions, out=out) is out and out.tolist() == [21, 30]
    ragged = torch.zeros(9, dtype=torch.int32)
    device.slot_ranges(table, 4, lanes, positions, lanes + 1, hi=[4, 4], out=ragged)
    assert ragged.tolist() == [21, 22, 30, 31, 0, 0, 0, 0, 0]
    with pytest.raises(ShapeError, match=r"out must hold \[2\], got \[1\]"):
        device.slots_at(table, 4, lanes, positions, out=out[:1])
    with pytest.raises(ShapeError, match="out must hold 3 tensors, got 1"):
        device.page_csr(table, 4, lanes, positions, out=[out])
    with pytest.raises(ShapeError, match="8"):  # a twin sees values, and refuses them
        device.slots_at(table, 4, lanes, positions + 2)
    with pytest.raises(ShapeError, match="one device, CUDA or cpu: one is on meta"):
        device.slots_at(table.to("meta"), 4, lanes, lanes)


@pytest.mark.parametrize("seed", range(20))
def test_gather_and_scatter_have_a_twin_too(seed):
    """Buffers of any form, as the kernel takes them; each field by its slots."""
    rng = np.random.default_rng(seed)
    page_size, pages = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    num_slots = page_size * pages

    def noise(*shape):
        return torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8))

    buffers = [
        noise(num_slots, 2, 6).view(torch.bfloat16),
        noise(3, num_slots, 5) if seed % 2 else noise(num_slots, 8).view(torch.float32),
        PageBlocked(noise(pages, page_size * 4), page_size, (3, 1)),
    ]
    if seed % 2:
        buffers = buffers[1:2]
    fields = device.Fields.of(buffers, page_size, slot_dim=seed % 2)
    before = [view.reshape(num_slots, -1).clone() for view in fields.views()]
    slots = i32(rng.permutation(num_slots)[: rng.integers(0, num_slots + 1)])
    read = device.gather_kv(fields, torch.from_numpy(slots))
    for values, view in zip(read.views(), before, strict=True):
        assert torch.equal(values.reshape(-1, view.shape[1])[: len(slots)], view[slots])
    to = rng.permutation(num_slots)[: len(slots)].astype(np.int32)
    device.scatter_kv(fields, torch.from_numpy(to), read)
    for view, old in zip(fields.views(), before, strict=True):
        old[to] = old[slots]
        assert torch.equal(view.reshape(num_slots, -1), old)
    for bad in ([num_slots], [-1]):
        with pytest.raises(ShapeError, match=str(bad[0])):
            device.gather_kv(fields, torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(ShapeError, match="0"):
        device.scatter_kv(fields, torch.zeros(2, dtype=torch.int32), fields.empty(2))


@pytest.mark.parametrize("where", ["cpu", "kernels"])
def test_arguments_may_be_given_by_name(where):
    table, lanes = torch.tensor([[0, 0], [5, 7]]).int(), torch.ones(2, dtype=torch.int32)
    buffer = torch.arange(8.0)
    with Kit("fast", "forward").running() if where == "kernels" else contextlib.nullcontext():
        named = {"page_size": 4, "rows": lanes, "positions": lanes}
        assert device.slots_at(page_table=table, **named).tolist() == [21, 21]
        assert device.slots_at(table, **named).tolist() == [21, 21]
        moved = {"src": lanes[:1], "dst": lanes[:1] + 1}
        device.move_kv(fields=device.Fields.of([buffer], 4), **moved)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'positions'"):
            device.slots_at(table, 4, lanes)
    assert buffer.tolist() == [0, 1, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("seed", range(20))
def test_many_arrays_travel_as_one(seed):
    """Do what `upload` does for another device, except the copy itself."""
    rng = np.random.default_rng(seed)
    kinds = [np.int32, np.int64, np.float32, np.float64, np.bool_, np.uint8]
    arrays = [
        rng.integers(0, 2, rng.integers(0, 4, rng.integers(1, 4))).astype(rng.choice(kinds))
        for _ in range(rng.integers(1, 9))
    ]
    spans = transfer.spans_of(arrays)
    packed = torch.full((spans[-1].stop,), 0xA5, dtype=torch.uint8)
    transfer.pack(arrays, spans, packed.numpy())
    for array, tensor in zip(arrays, transfer.unpack(arrays, spans, packed), strict=True):
        assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


# --- bad input: nothing is launched ---------------------------------------------------------------


class Nothing:
    """A back end that must not be reached."""

    def launch(self, entry, *args):
        raise AssertionError(f"{entry} was launched")


@pytest.fixture
def unreached():
    with launch.host_backend(Nothing()):
        yield


def t(shape, dtype=torch.int32):
    return torch.ones(shape, dtype=dtype)


TABLE, LANES = t((3, 2)), t(2)
PLACE = (TABLE, 4, LANES, LANES)
DRAFTS = {"num_steps": 3, "topk": 2}
READS = {**DRAFTS, "step": 0, "layout": "dense"}
KV = torch.zeros(12, 3)
META = torch.ones(2, dtype=torch.int32, device="meta")
CANDIDATES = (t((2, 6), torch.float32), t((2, 6), torch.int64), t((2, 5), torch.int64))
P, INDEX = t((2, 2), torch.float32), t((2, 2), torch.int64)
NODES, LINKS = t((2, 4), torch.int64), t((2, 4))
LOGITS, ROW_F, ROW_U = t((2, 9), torch.float32), t(2, torch.float32), t(2, torch.float64)


def fields(**options):
    return device.Fields.of([KV], 4, **options)


def values(n=2, width=3):
    return device.Fields.of([torch.zeros(n, width)], 1)


BAD = {
    "table dtype": (
        lambda: device.slots_at(t((3, 2), torch.int64), 4, LANES, LANES),
        r"page_table must be contiguous int32 \[any, any\] on cpu, got int64 \[3, 2\] on cpu",
    ),
    "table strides": (
        lambda: device.slots_at(t((2, 3)).T, 4, LANES, LANES),
        r"page_table must be .* got int32 \[3, 2\] on cpu, not contiguous",
    ),
    "table shape": (lambda: device.slots_at(t((0, 2)), 4, LANES, LANES), r"num_rows \+ 1"),
    "table kind": (
        lambda: device.slots_at(np.ones((3, 2), np.int32), 4, LANES, LANES),
        "page_table must be a tensor, got ndarray",
    ),
    "page size": (
        lambda: device.slots_at(TABLE, 0, LANES, LANES),
        r"page_size must be in \[1, 2147483647\], got 0",
    ),
    "page size kind": (
        lambda: device.slots_at(TABLE, 4.0, LANES, LANES),
        r"page_size must be an int, got float 4.0",
    ),
    "lanes": (
        lambda: device.slots_at(TABLE, 4, LANES, t(3)),
        r"positions must be contiguous int32 \[2\] on cpu, got int32 \[3\] on cpu",
    ),
    "device": (
        lambda: device.slots_at(TABLE, 4, META, LANES),
        r"rows must be contiguous int32 \[any\] on cpu, got int32 \[2\] on meta",
    ),
    "delta": (
        lambda: device.apply_table_delta(TABLE, LANES, LANES, t(1)),
        r"pages must be contiguous int32 \[2\]",
    ),
    "deltas": (
        lambda: device.apply_table_deltas([TABLE, TABLE], [(LANES.numpy(),) * 3]),
        "deltas must be 2, one for each table, got 1",
    ),
    "deltas shape": (
        lambda: device.apply_table_deltas([TABLE], [(i32([1, 1]), i32([1, 1]), i32([1]))]),
        r"deltas\[0\] must be three int32 arrays \[n\], got int32 \[2\], int32 \[2\], int32 \[1\]",
    ),
    "deltas device": (
        lambda: device.apply_table_deltas([TABLE, TABLE.to("meta")], [(i32([1]),) * 3] * 2),
        r"page_tables\[1\] must be on cpu, it is on meta",
    ),
    "out": (lambda: device.slots_at(*PLACE, out=t(3)), r"out must be contiguous int32 \[2\]"),
    "ranges too small": (
        lambda: device.slot_ranges(*PLACE, LANES, hi=[3, 4], out=t(6)),
        "out must hold 7 elements, it holds 6",
    ),
    "bounds shape": (
        lambda: device.slot_ranges(*PLACE, LANES, hi=[3]),
        r"hi must be ints \[2\] on the host, got int64 \(1,\)",
    ),
    "bounds value": (
        lambda: device.slot_ranges(*PLACE, LANES, hi=[3, 9]),
        r"hi\[1\] must be in \[0, 8\], got 9",
    ),
    "pages too small": (
        lambda: device.page_csr(*PLACE, hi=[5, 1], out=[t(3), t(2), t(2)]),
        "out.kv_indices must hold 3 elements, it holds 2",
    ),
    "pages out": (
        lambda: device.page_csr(*PLACE, out=[t(3)]),
        "out must hold kv_indptr, kv_indices, kv_last_page_len, got 1 tensors",
    ),
    "layout": (
        lambda: device.draft_write_slots(*PLACE, **DRAFTS, layout="tight"),
        "layout must be 'dense' or 'holey', got 'tight'",
    ),
    "topk": (
        lambda: device.draft_write_slots(*PLACE, num_steps=3, topk=0, layout="dense"),
        r"topk must be in \[1, 2147483647\], got 0",
    ),
    "too many": (
        lambda: device.draft_write_slots(*PLACE, num_steps=1 << 20, topk=1 << 20, layout="dense"),
        "2199023255552 elements are more than int32 can count",
    ),
    "step": (
        lambda: device.draft_read_indices(*PLACE, **{**READS, "step": 3}),
        r"step must be in \[0, 2\], got 3",
    ),
    "ancestors": (
        lambda: device.draft_read_indices(*PLACE, **{**READS, "step": 2}, ancestors=t((2, 2, 2))),
        r"columns of ancestors must be in \[3, 2147483647\], got 2",
    ),
    "reads one short": (
        lambda: device.draft_read_indices(*PLACE, **READS, hi=[4, 4], out=[t(5), t(27)]),
        "out.kv_indices must hold 28 elements, it holds 27",
    ),
    "branch pages": (
        lambda: device.branch_pages(*PLACE, **DRAFTS, step=0, hi=[7, 4], out=t((4, 1))),
        r"columns of out must be in \[2, 2147483647\], got 1",
    ),
    "ancestors step": (
        lambda: device.advance_ancestors(t((2, 2, 3)), t((2, 2)), 3),
        r"step must be in \[0, 2\], got 3",
    ),
    "no buffers": (lambda: device.Fields.of([], 4), "buffers must hold at least 1, got 0"),
    "slot dim": (lambda: fields(slot_dim=2), r"slot_dim must be a dimension of buffers\[0\]"),
    "buffer strides": (
        lambda: device.Fields.of([torch.zeros(3, 12).T], 4),
        r"buffers\[0\] must be contiguous from dimension 0 on, got shape \[12, 3\] with strides",
    ),
    "blocked pages": (
        lambda: device.Fields.of([PageBlocked(torch.zeros(3, 8), 4, (2,))], 8),
        r"buffers\[0\] must have pages of 8 slots, they have 4",
    ),
    "buffer device": (
        lambda: device.Fields.of([KV, torch.zeros(12, 3, device="meta")], 4),
        r"buffers\[1\] must be on cpu, it is on meta",
    ),
    "moves of int64": (
        lambda: device.move_kv(fields(), t(2, torch.int64), LANES),
        r"src must be contiguous int32 \[any\] on cpu, got int64 \[2\]",
    ),
    "moves of two lengths": (
        lambda: device.move_kv(fields(), LANES, t(3)),
        r"dst must be contiguous int32 \[2\]",
    ),
    "gather": (
        lambda: device.gather_kv(fields(), LANES, out=values(1)),
        r"out must be 2 slots or more of the fields' widths \[12\], got 1 of \[12\]",
    ),
    "scatter": (
        lambda: device.scatter_kv(fields(), LANES, values(2, 4)),
        r"values must be 2 slots or more of the fields' widths \[12\], got 2 of \[16\]",
    ),
    "another page size": (
        lambda: device.compact_accepted(
            fields(), TABLE, 8, LANES, LANES, t((2, 4)), num_draft_tokens=8
        ),
        "page_size must be the fields' 4, got 8",
    ),
    "accept index": (
        lambda: device.compact_accepted(fields(), *PLACE, t((3, 4)), num_draft_tokens=8),
        r"accept_index must be contiguous int32 \[2, any\] on cpu, got int32 \[3, 4\]",
    ),
    "node ids": (
        lambda: device.compact_accepted(fields(), *PLACE, t((2, 4)), num_draft_tokens=1 << 30),
        r"n \* num_draft_tokens must be in \[0, 2147483647\], got 2147483648",
    ),
    "tails": (
        lambda: device.duplicate_prefix_tail(fields(), *PLACE, num_steps=0, topk=2),
        r"num_steps must be in \[1, ",
    ),
    "parents": (
        lambda: device.copy_parent_drafts(fields(), *PLACE, t((1, 2)), num_steps=3, step=1),
        r"branch_parents must be contiguous int32 \[2, any\]",
    ),
    "drafts of a block": (
        lambda: device.copy_parent_drafts(fields(), *PLACE, t((2, 64)), num_steps=100, step=50),
        r"topk \* step must be in \[0, 2816\], got 3200",
    ),
    "candidates": (
        lambda: device.select_topk(0, P, INDEX, None, *CANDIDATES[:2], t((2, 4), torch.int64)),
        r"candidate_parents must be \[n, 1 \+ K \* S\] with K = 2, got \[2, 4\]",
    ),
    "candidate scores": (
        lambda: device.select_topk(0, P, INDEX, None, t((2, 5), torch.float32), *CANDIDATES[1:]),
        r"candidate_scores must be contiguous float32 \[2, 6\]",
    ),
    "later probabilities": (
        lambda: device.select_topk(1, P, INDEX, P, *CANDIDATES),
        r"topk_p must be contiguous float32 \[4, 2\]",
    ),
    "no scores": (
        lambda: device.select_topk(
            1, t((4, 2), torch.float32), t((4, 2), torch.int64), None, *CANDIDATES
        ),
        r"scores must be contiguous float32 \[2, 2\] on cpu, got NoneType None",
    ),
    "nodes": (
        lambda: device.build_tree(*CANDIDATES, INDEX[0], topk=2, num_draft_tokens=8),
        r"num_draft_tokens must be in \[1, 7\], got 8",
    ),
    "links": (
        lambda: device.verify_tree(NODES, LINKS, t((2, 3)), NODES, num_steps=3),
        r"next_sibling must be contiguous int32 \[2, 4\]",
    ),
    "steps": (
        lambda: device.verify_tree(NODES, LINKS, LINKS, NODES, num_steps=-1),
        r"num_steps must be in \[0, 2147483647\], got -1",
    ),
    "verify out": (
        lambda: device.verify_tree(NODES, LINKS, LINKS, NODES, num_steps=3, out=[t(2)]),
        "out must hold accept_index, accept_len, predict, got 1 tensors",
    ),
    "logits": (
        lambda: device.sample_tokens(LOGITS.double(), ROW_F, LANES, ROW_F, ROW_U),
        r"logits must be contiguous float32 or float16 or bfloat16 \[any, any\]",
    ),
    "vocabulary": (
        lambda: device.sample_tokens(
            t((1, (1 << 19) + 1), torch.float16), ROW_F[:1], LANES[:1], ROW_F[:1], ROW_U[:1]
        ),
        r"columns of logits must be in \[1, 524288\], got 524289",
    ),
    "draws": (
        lambda: device.sample_tokens(LOGITS, ROW_F, LANES, ROW_F, ROW_F),
        r"u must be contiguous float64 \[2\] on cpu, got float32",
    ),
    "window": (
        lambda: device.attention_bias(LANES, LANES, 8, num_queries=1, window=0),
        r"window must be in \[1, 2147483647\], got 0",
    ),
    "own positions": (
        lambda: device.attention_bias(LANES, LANES, 8, num_queries=2, own_mask=t((2, 2, 2)).bool()),
        "own_mask needs q_positions and own_positions",
    ),
    "visibility layout": (
        lambda: device.draft_visibility(LANES, **{**READS, "layout": "holey"}, page_size=4),
        "layout must be 'dense' on a device, got 'holey'",
    ),
    "visibility step": (
        lambda: device.draft_visibility(LANES, **{**READS, "step": 3}, page_size=4),
        r"step must be in \[0, 2\], got 3",
    ),
    "bytes of a slot": (
        lambda: device.Fields.of([torch.empty(2, 1 << 31, dtype=torch.uint8, device="meta")], 1),
        r"bytes of a slot must be in \[0, 2147483647\], got 2147483648",
    ),
    "probabilities": (lambda: device.likeliest(LOGITS.double(), 1), "p .* float32"),
    "more tokens than there are": (
        lambda: device.likeliest(LOGITS, LOGITS.shape[1] + 1),
        r"k must be in \[1, \d+\], got",
    ),
    "seeds": (
        lambda: device.uniform(LANES, INDEX[0]),
        r"seeds must be contiguous int64 or uint64 \[any\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_a_launch(case, unreached):
    call, message = BAD[case]
    with pytest.raises(ShapeError, match=message):
        call()


def greedy(logits, *, out=None):
    return device.sample_tokens(logits, ROW_F, LANES, ROW_F, ROW_U * 0, out=out)


# What a kernel refuses by its dtype, or because of another argument, on a CPU as well.
BAD_ON_CPU = {
    "an array": (lambda: device.slots_at(np.ones((3, 2), np.int32), 4, LANES, LANES), "a tensor"),
    "an array behind": (lambda: device.slots_at(TABLE, 4, LANES.numpy(), LANES), "a tensor"),
    "slots float": (lambda: device.move_kv(fields(), t(1) * 1.5, t(1) * 2.5), "src .* float32"),
    "slots bool": (lambda: device.move_kv(fields(), t(1).bool(), ~t(1).bool()), "src .* bool"),
    "slots list": (lambda: device.move_kv(fields(), [1], [2]), "src .* list"),
    "seeds": (lambda: device.uniform(ROW_U, INDEX[0]), "seeds .* float64"),
    "short seeds": (lambda: device.uniform(LANES, INDEX[0]), "seeds .* int32"),
    "logits int": (lambda: greedy(LOGITS.int()), "logits .* int32"),
    "logits double": (lambda: greedy(LOGITS.double()), "logits .* float64"),
    "out float": (lambda: greedy(LOGITS, out=t(2, torch.float32)), "out .* int64, got float32"),
    "page size": (
        lambda: device.compact_accepted(
            fields(), TABLE, 2, LANES, LANES, i32_tensor([[0, -1], [2, -1]]), num_draft_tokens=2
        ),
        "page_size must be the fields' 4, got 2",
    ),
}


def i32_tensor(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("case", BAD_ON_CPU)
def test_bad_input_is_refused_on_a_cpu_as_well(case):
    call, message = BAD_ON_CPU[case]
    with pytest.raises(ShapeError, match=message):
        call()


def test_outputs_are_all_checked_before_one_is_written_on_a_cpu():
    first = t((2, 4))
    outs = (first, t((2, 1)), t(8, torch.int64))
    with pytest.raises(ShapeError, match=r"out must hold \[2\], got \[2, 1\]"):
        device.verify_tree(NODES, LINKS * -1, LINKS * -1, NODES, num_steps=3, out=outs)
    assert (first == 1).all()


def test_the_twin_refuses_larger_vocabularies_too():
    from specpool.kernels import twins as kernels

    one = np.ones(1, np.float32)
    logits = np.zeros((1, (1 << 19) + 1), np.float32)
    with pytest.raises(ShapeError, match="logits must have 1 to 524288 columns, got 524289"):
        kernels.sample_tokens(logits, one, i32([0]), one, np.zeros(1))


def test_a_kit_sees_guards_and_inputs_that_changed():
    for change in ("guard", "input"):
        kit = Kit("fast", "forward")
        tensor = kit.put(i32([1, 2]))
        if change == "guard":
            tensor.as_strided((3,), (1,))[2] = 0
        else:
            tensor[0] = 5
        with pytest.raises(AssertionError):
            kit.check()


# --- how many blocks ----------------------------------------------------------------------------


class Recording:
    """A back end that computes nothing and writes down the grids."""

    def __init__(self):
        self.grids = {}

    def launch(self, entry, grid, block, args, shared_mem, touches):
        self.grids[entry.removesuffix("_kernel")] = grid


def grids_of(work):
    recording = Recording()
    with launch.host_backend(recording):
        work()
    return recording.grids


def test_a_page_read_of_one_row_fills_a_gpu():
    """2,048 tokens of a layer of 8 KV heads of 128, pages of 64: 32 pages of keys, 32 of values."""
    pages = [torch.empty(33, 64 * 8 * 128, dtype=torch.bfloat16) for _ in range(2)]
    fields = device.Fields.of(pages, 1)
    slots = torch.arange(1, 33, dtype=torch.int32)
    (grid,) = grids_of(lambda: device.gather_kv(fields, slots)).values()
    assert np.prod(grid) >= 2 * 132


def test_a_large_copy_goes_in_turns():
    fields = device.Fields.of([torch.empty(1 << 14, 8, dtype=torch.uint8) for _ in range(64)], 1)
    slots = torch.arange(1 << 14, dtype=torch.int32)
    (grid,) = grids_of(lambda: device.gather_kv(fields, slots)).values()
    assert np.prod(grid) <= 4096


def draft_layers(layers, tokens, page_size):
    """The KV of layers of 8 heads of 128 in 16 bits, and the page table of one row."""
    kv = torch.empty(layers, 2, tokens, 8, 128, dtype=torch.bfloat16)
    pages = torch.arange(tokens // page_size, dtype=torch.int32)
    fields = device.Fields.of([kv], page_size, slot_dim=2)
    return fields, torch.stack([torch.zeros_like(pages), pages]), page_size


@pytest.mark.parametrize("layers", [1, 2, 32, 80])
def test_moves_of_one_row_fill_a_gpu(layers):
    """Batch 1: a page, five accepted nodes, and the drafts of eight branches."""
    at = draft_layers(layers, 64 * 16, 64)
    one, root = torch.ones(1, dtype=torch.int32), torch.full((1,), 40, dtype=torch.int32)
    index = torch.arange(6, dtype=torch.int32).unsqueeze(0)
    parents = torch.zeros(1, 8, dtype=torch.int32)
    slots = torch.arange(64, dtype=torch.int32)

    def work():
        device.compact_accepted(*at, one, root, index, num_draft_tokens=64)
        device.duplicate_prefix_tail(*at, one, root, num_steps=5, topk=8)
        device.copy_parent_drafts(*at, one, root, parents, num_steps=5, step=4)
        device.move_kv(at[0], slots, slots.flip(0))
        device.gather_kv(at[0], slots)

    # A layer of 128 accesses per slot has no more parts than these.
    most = {"compact_accepted": 4, "copy_parent_drafts": 16, "move_slots": 16}
    most |= {"duplicate_prefix_tail": 7 * 32, "copy_slots": 32}
    grids = grids_of(work)
    assert grids.keys() == most.keys()
    for name, grid in grids.items():
        assert np.prod(grid) >= min(2 * 132, 2 * layers * most[name]), (name, grid)


def test_a_large_batch_is_split_no_further():
    at = draft_layers(32, 64 * 16, 64)
    rows, roots = torch.ones(64, dtype=torch.int32), torch.full((64,), 40, dtype=torch.int32)
    index = torch.zeros(64, 6, dtype=torch.int32)
    grids = grids_of(
        lambda: (
            device.compact_accepted(*at, rows, roots, index, num_draft_tokens=64),
            device.duplicate_prefix_tail(*at, rows, roots, num_steps=5, topk=8),
        )
    )
    assert grids == {"compact_accepted": (64, 64, 1), "duplicate_prefix_tail": (64 * 7, 64, 1)}


def test_a_copy_of_many_small_slots_gives_each_thread_four():
    """16 bytes a slot: 256 slots a block, and more than the blocks that a GPU runs at once."""
    n = 1 << 18
    fields = device.Fields.of([torch.empty(n, 16, dtype=torch.uint8) for _ in range(2)], 1)
    (grid,) = grids_of(lambda: device.gather_kv(fields, torch.zeros(n, dtype=torch.int32))).values()
    assert grid == (528, 2, 1)
    fields = device.Fields.of([torch.empty(n, 64, dtype=torch.uint8) for _ in range(2)], 1)
    (grid,) = grids_of(lambda: device.gather_kv(fields, torch.zeros(n, dtype=torch.int32))).values()
    assert grid == (n // 64 // 4, 2, 1)


def test_tails_of_all_layers_are_one_launch():
    at, launches = draft_layers(80, 64 * 16, 64), []
    rows, roots = torch.ones(64, dtype=torch.int32), torch.full((64,), 40, dtype=torch.int32)
    counting = types.SimpleNamespace(launch=lambda entry, *args: launches.append(entry))
    with launch.host_backend(counting):
        device.duplicate_prefix_tail(*at, rows, roots, num_steps=5, topk=8)
    assert launches == ["duplicate_prefix_tail_kernel"]


@pytest.mark.parametrize(
    ("n", "vocab", "threads"),
    [(1, 128_256, 1024), (132, 128_256, 1024), (133, 128_256, 512), (1, 300, 64), (1, 5000, 512)],
)
def test_few_rows_of_logits_have_larger_blocks(n, vocab, threads):
    launches = []
    counting = types.SimpleNamespace(launch=lambda entry, *args: launches.append((entry, *args)))
    logits = torch.empty(n, vocab, dtype=torch.bfloat16)
    zeros, ones = torch.zeros(n), torch.ones(n)
    with launch.host_backend(counting):
        device.sample_tokens(logits, zeros, zeros.int(), ones, zeros.double())
    ((entry, grid, block, *_),) = launches
    assert (entry, grid, block) == ("sample_tokens_kernel", (n,), (threads,))
