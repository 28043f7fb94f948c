"""The host runner's own laws (tests/kits/cuda_host): what runs, and one mistake at a time."""

import gc
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import cuda_host
from cuda_host import (
    CHECK,
    FAST,
    ArgumentError,
    CompileError,
    DivergenceError,
    HostModule,
    KernelError,
    LaunchError,
    LivelockError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    ReadOnlyError,
    TrapError,
    UndefinedError,
    UninitialisedError,
    VirtualBuffer,
    register,
    source,
    toolchain,
)
from paths import ROOT, TESTS
from planted_kernels import PLANTED, line_of

pytestmark = pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable())

LAWS = PLANTED / "laws.cu"
CUDA = ROOT / "cuda"
COPY = "copy_kernel<long long, 3>"

runs = pytest.mark.parametrize(("kind", "order"), FAST + CHECK)
kinds = pytest.mark.parametrize("kind", ["fast", "check"])


def laws(name, kind="check", order="forward", **options):
    module = HostModule(LAWS, kind=kind, order=order, name_expressions=[COPY], **options)
    return module.get_function(name)


def zeros(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def mistake(kernel):
    return line_of(LAWS, "MISTAKE", f"void {kernel}(")


# --- correct kernels in every order -------------------------------------------------------------


@runs
def test_collectives_of_a_warp(kind, order):
    v = np.random.default_rng(0).integers(0, 100, 32).astype(np.uint32)
    out = zeros(14, 32, dtype=np.uint32)
    laws("warp_kernel", kind, order)((1,), (32,), (out, v))
    lane = np.arange(32)
    bits = np.uint32(1) << lane.astype(np.uint32)
    same = [int(bits[v % 5 == x % 5].sum()) for x in v]
    counts = [int(x).bit_count() for x in v]
    lowest = [int(x & -x).bit_length() for x in v.astype(int)]
    expected = [
        np.full(32, v[5]),
        v[lane // 8 * 8 + (lane + 1) % 8],
        v[np.where(lane < 3, lane, lane - 3)],
        v[np.where(lane % 16 + 3 > 15, lane, lane + 3)],
        v[lane ^ 6],
        np.full(32, bits[v % 2 == 1].sum()),
        np.full(32, 7 in v),
        np.full(32, 1),
        same,
        np.full(32, v.sum()),
        np.full(32, (v.astype(np.int32) - 50).min().astype(np.uint32)),
        np.full(32, v.max()),
        np.full(32, np.bitwise_or.reduce(v)),
        [
            n + 100 * (32 - int(x).bit_length()) + 10000 * low + 1000000 * n
            for x, n, low in zip(v, counts, lowest, strict=True)
        ],
    ]
    assert np.array_equal(out, np.array(expected).astype(np.uint32))


@runs
def test_atomics_and_counting_barriers(kind, order):
    i, u, f = zeros(1), zeros(1, dtype=np.uint32), zeros(1, dtype=np.float32)
    ll, most, barriers = zeros(1, dtype=np.uint64), zeros(2), zeros(3)
    laws("atomics_kernel", kind, order)((3,), (64,), (i, u, f, ll, most, barriers))
    total = 192 * 191 // 2
    assert (i[0], u[0], f[0], ll[0]) == (total, 0xFFFFFFFF, 96.0, 192 << 33)
    assert most.tolist() == [191, total]
    assert barriers.tolist() == [3210] * 3


@kinds
def test_orders_of_threads_and_blocks(kind):
    turns = {}
    for order in ("forward", "reverse", 1, 2):
        counter, turn = zeros(1), zeros(4 * 64)
        laws("order_kernel", kind, order)((4,), (64,), (counter, turn))
        assert sorted(turn) == list(range(256))
        turns[order] = turn.tolist()
    assert turns["forward"] == list(range(256))
    assert turns["reverse"] == list(range(255, -1, -1))
    assert turns[1] != turns[2]


@kinds
def test_scalars_arrive_with_their_own_types(kind):
    out = zeros(6, dtype=np.float64)
    args = (np.bool_(True), np.int32(-5), np.uint32(4_000_000_000), np.int64(-(1 << 40)))
    laws("scalars_kernel", kind)((1,), (1,), (out, *args, np.float32(0.5), np.float64(0.1)))
    assert out.tolist() == [1.0, -5.0, 4e9, -float(1 << 40), 0.5, 0.1]


@kinds
def test_a_name_expression_instantiates_a_template(kind):
    source = np.arange(12, dtype=np.int64)
    out = np.zeros_like(source)
    laws(COPY, kind)((1,), (8,), (out, source, np.int32(4)))
    assert np.array_equal(out, source)


@runs
def test_bit_casts_globals_and_memcpy(kind, order):
    out, content = zeros(4, dtype=np.float32), zeros(21, dtype=np.int8)
    values = torch.tensor([1.5, -2.0, 3.0, 0.25], dtype=torch.bfloat16)
    bits = values.view(torch.int16).to(torch.int32).bitwise_and(0xFFFF)
    kernel = laws("odds_kernel", kind, order)
    kernel((1,), (4,), (out, content, bits), shared_mem=32)
    expected = values.float().numpy()[::-1] + 4 + [2, 3, 5, 7] + 0.5 + [0, 1, 2, 2]
    assert np.array_equal(out, expected.astype(np.float32))
    words = [int.from_bytes(content[5 * t + 1 : 5 * t + 5].tobytes(), "little") for t in range(4)]
    assert words == [0x3F800000 + t for t in range(4)]
    assert content[0] > 0


@kinds
def test_float_functions(kind):
    v = np.array([1.5, -2.25, 1e-3, 80.0, np.nan, -np.inf], np.float32)
    out = zeros(12, 6, dtype=np.float32)
    laws("floats_kernel", kind)((1,), (6,), (out, v, np.int32(6)))
    with np.errstate(all="ignore"):
        a = np.abs(v)
        expected = [np.exp(v), np.exp2(v), np.exp(v), np.log(a), np.log(a), np.sqrt(a), a**-0.5]
    expected += [np.floor(v), np.fmax(v, 0.5), np.isnan(v), np.isinf(v), np.fmax(v, 1)]
    np.testing.assert_allclose(out, np.array(expected), rtol=1e-5)


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_on_tensor_cores_and_what_goes_into_them(kind, order, dtype):
    """Law: `multiply` spreads three matrices over a warp as PTX says; `pack` rounds as torch."""
    name = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}[dtype]
    text = f"""
    extern "C" __global__ void product_kernel(float* out, const float* a, const float* b) {{
        const int g = threadIdx.x / 4, t = threadIdx.x % 4;
        unsigned words[4];
        for (int i = 0; i < 4; i++) {{
            const float* at = a + 16 * (g + i % 2 * 8) + 2 * t + i / 2 * 8;
            words[i] = {name}::pack(at[0], at[1]);
        }}
        const float *top = b + 16 * t + g, *bottom = top + 64;
        const unsigned b0 = {name}::pack(top[0], top[8]), b1 = {name}::pack(bottom[0], bottom[8]);
        float sum[4] = {{1, 1, 1, 1}};
        {name}::multiply(sum, words, b0, b1);
        for (int i = 0; i < 4; i++) out[8 * (g + i / 2 * 8) + 2 * t + i % 2] = sum[i];
    }}
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(16, 16, generator=generator) * 10.0 ** torch.arange(-8.0, 8.0)
    a[0, :3] = torch.tensor([1e-7, 65519.0, 2049.0])  # below normal halves, and between two
    b = torch.randn(16, 8, generator=generator) * 10.0 ** -torch.arange(-8.0, 8.0).unsqueeze(1)
    a, b = a.clamp(-6e4, 6e4), b.clamp(-6e4, 6e4)
    out = torch.zeros(16, 8)
    module = HostModule((CUDA / "tensor.cuh").read_text() + text, kind=kind, order=order)
    module.get_function("product_kernel")((1,), (32,), (out, a, b))
    expected = 1 + a.to(dtype).double() @ b.to(dtype).double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-5)


@runs
def test_a_volatile_flag_within_a_block(kind, order):
    flag = zeros(1)
    laws("wait_kernel", kind, order)((1,), (2,), (flag,))
    assert flag[0] == 1


# --- one mistake at a time ----------------------------------------------------------------------


def assert_found(error, name, grid, block, args, *, order="forward", shared_mem=0):
    with pytest.raises(error) as caught:
        laws(name, order=order)(grid, block, args, shared_mem=shared_mem)
    assert ("laws.cu", mistake(name)) in caught.value.places, caught.value
    return caught.value


@pytest.mark.parametrize("index", [-1, 4, 1 << 40])
def test_a_store_outside_its_array(index):
    backing = zeros(6)
    error = assert_found(
        OutOfBoundsError, "store_kernel", (1,), (1,), (backing[1:5], np.int64(index))
    )
    assert "argument 0 has 16 bytes" in str(error)
    assert not backing.any()


def test_a_store_between_two_arrays_that_touch():
    pool = zeros(32, dtype=np.uint8)
    with register(pool[:8], pool[8:16]), pytest.raises(OutOfBoundsError):
        laws("far_kernel")((1,), (1,), (pool.ctypes.data, np.int32(0), np.int64(16)))


def test_a_store_to_a_read_only_array():
    array = zeros(4)
    array.flags.writeable = False
    assert_found(ReadOnlyError, "store_kernel", (1,), (1,), (array, np.int64(1)))


def test_two_blocks_race():
    error = assert_found(RaceError, "blocks_race_kernel", (2,), (1,), (zeros(1),))
    assert "block (0,0,0)" in str(error) and "block (1,0,0)" in str(error)
    laws("blocks_race_kernel")((1,), (1,), (zeros(1),))
    module = HostModule(
        LAWS, kind="check", name_expressions=[COPY], check_races=False, order="reverse"
    )
    module.get_function("blocks_race_kernel")((2,), (1,), (zeros(1),))


@pytest.mark.parametrize("order", ["forward", "reverse", 5])
def test_syncwarp_orders_the_lanes_of_its_mask_only(order):
    laws("lanes_kernel", order=order)((1,), (64,), (zeros(4), np.uint32(0b111)))
    for mask in (0b11, 0b101, 1 << 31):
        kernel = laws("lanes_kernel", order=order)
        with pytest.raises((RaceError, UninitialisedError)) as caught:
            kernel((1,), (64,), (zeros(4), np.uint32(mask)))
        assert mistake("lanes_kernel") in caught.value.lines


@pytest.mark.parametrize("order", ["forward", "reverse", 5])
@pytest.mark.parametrize("threads", [2, 32, 96])
@pytest.mark.parametrize("writer", [0, 1])
def test_a_write_races_with_any_earlier_read(order, threads, writer):
    args = (zeros(threads), zeros(1), np.int32(writer))
    assert_found(RaceError, "readers_kernel", (1,), (threads,), args, order=order)


def test_a_thread_does_not_race_with_itself():
    laws("readers_kernel")((1,), (1,), (zeros(1), zeros(1), np.int32(0)))


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_plain_load_races_with_an_atomic(order):
    args = (zeros(1), zeros(1))
    assert_found(RaceError, "half_atomic_kernel", (1,), (2,), args, order=order)


@pytest.mark.parametrize("order", ["forward", "reverse", 7])
def test_atomics_do_not_hide_a_plain_store(order):
    assert_found(RaceError, "late_counter_kernel", (2,), (32,), (zeros(1),), order=order)


def test_an_atomic_on_uninitialised_shared_memory():
    assert_found(UninitialisedError, "shared_counter_kernel", (1,), (32,), (zeros(1),))


def test_shared_memory_is_new_in_every_block():
    laws("stale_kernel")((2,), (1,), (zeros(2), np.int32(2)))
    args = (zeros(2), np.int32(1))
    assert_found(UninitialisedError, "stale_kernel", (2,), (1,), args)
    laws("stale_kernel", "fast")((2,), (1,), args)
    assert args[0].view(np.uint32).tolist() == [1, 0xA5A5A5A5]


def test_dynamic_shared_memory_ends():
    laws("dynamic_kernel")((1,), (1,), (zeros(1), np.int32(3)), shared_mem=16)
    args = (zeros(1), np.int32(4))
    assert_found(OutOfBoundsError, "dynamic_kernel", (1,), (1,), args, shared_mem=16)


def test_a_local_array_ends():
    assert_found(OutOfBoundsError, "local_kernel", (1,), (1,), (zeros(1), np.int32(16)))


def test_a_misaligned_vector():
    content = zeros(64, dtype=np.uint8)
    late = (-content.ctypes.data % 16) + 4
    assert_found(MisalignedError, "vector_kernel", (1,), (1,), (content[late : late + 32],))
    odd = (-content.ctypes.data % 4) + 1
    assert_found(MisalignedError, "odd_atomic_kernel", (1,), (1,), (content[odd : odd + 8],))


def test_a_mask_without_the_caller():
    assert_found(DivergenceError, "masks_kernel", (1,), (32,), (zeros(32, dtype=np.uint32),))


def test_two_branches_in_one_collective():
    assert_found(DivergenceError, "branches_kernel", (1,), (32,), (zeros(32),))


def test_a_wait_for_a_later_block():
    with pytest.raises(LivelockError):
        laws("livelock_kernel")((2,), (1,), (zeros(1),))


def test_arithmetic_that_has_no_result():
    args = (zeros(2), np.int32(0))
    assert_found(UndefinedError, "divide_kernel", (1,), (1,), args)
    with pytest.raises(UndefinedError) as caught:
        laws("divide_kernel", "fast")((1,), (1,), args)
    assert caught.value.line == mistake("divide_kernel")


def test_asserts_and_assumptions():
    assert_found(TrapError, "assert_kernel", (1,), (1,), (zeros(2),))
    assert_found(TrapError, "assume_kernel", (1,), (1,), (zeros(2),))


def test_a_launch_after_an_error_is_a_fresh_one():
    out = zeros(1)
    kernel = laws("dynamic_kernel")
    with pytest.raises(OutOfBoundsError):
        kernel((1,), (64,), (out, np.int32(1)), shared_mem=4)
    kernel((1,), (1,), (out, np.int32(1)), shared_mem=8)
    assert out[0] == 1


def test_a_wild_store_of_the_fast_build_is_an_error_with_its_line():
    with pytest.raises(OutOfBoundsError) as caught:
        laws("store_kernel", "fast")((1,), (1,), (zeros(1), np.int64(1 << 44)))
    assert caught.value.line == mistake("store_kernel")


# --- offsets beyond 2^31 ------------------------------------------------------------------------


@kinds
def test_an_offset_beyond_2_to_the_31(kind):
    buffer = VirtualBuffer(5 << 30)
    window = buffer.window(3 << 30, 16)
    args = (buffer, np.int32(3 << 10), np.int64(1 << 20))
    laws("far_kernel", kind)((1,), (1,), args)
    assert window[:4].view(np.int32)[0] == 1
    with register(buffer):
        laws("far_kernel", kind)((1,), (1,), (buffer.address, *args[1:]))
    assert window[:4].view(np.int32)[0] == 2
    with pytest.raises(OutOfBoundsError):
        laws("far_kernel", kind)((1,), (1,), (buffer, np.int32(1 << 10), np.int64(1 << 20)))


def test_an_offset_in_32_bits_overflows():
    buffer = VirtualBuffer(5 << 30)
    buffer.window(3 << 30, 16)
    args = (buffer, np.int32(3 << 10), np.int32(1 << 20))
    assert_found(UndefinedError, "overflow_kernel", (1,), (1,), args)
    with pytest.raises(OutOfBoundsError):
        laws("overflow_kernel", "fast")((1,), (1,), args)


def test_a_window_keeps_its_buffer():
    window = VirtualBuffer(5 << 30).window(4 << 30, 8)
    gc.collect()
    window[:] = 3
    assert window.sum() == 24


def test_a_window_lies_in_its_buffer():
    with pytest.raises(ValueError, match="of 4096 bytes"):
        VirtualBuffer(4096).window(4090, 16)


# --- arguments and launches ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {1: 1},  # packed as int64
        {2: 1.5},
        {1: np.int64(1)},
        {1: np.float32(1)},
        {4: np.int32(1)},
        {3: np.float64(1)},
        {0: np.float32(1)},
        {1: np.zeros(1, np.int32)},
        {0: np.zeros(6, np.float32)},
        {0: np.zeros(6, np.int64)},
        {0: torch.zeros(6)},
        {3: None},
        {3: "3"},
    ],
)
def test_an_argument_that_the_kernel_would_misread(wrong):
    args = [zeros(6, dtype=np.float64), np.bool_(True), np.int32(0), np.uint32(0), np.int64(0)]
    args += [np.float32(0), np.float64(0)]
    for i, arg in wrong.items():
        args[i] = arg
    with pytest.raises(ArgumentError, match=rf"scalars_kernel, argument {next(iter(wrong))}: "):
        laws("scalars_kernel", "fast")((1,), (1,), args)
    assert not any(a.any() for a in args if isinstance(a, np.ndarray))


def test_too_few_arguments():
    with pytest.raises(ArgumentError, match="takes 2 arguments, 1 were given"):
        laws("store_kernel", "fast")((1,), (1,), (zeros(1),))


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [
        ((0,), (1,), 0),
        ((1,), (0,), 0),
        ((1, 65536), (1,), 0),
        ((1,), (1025,), 0),
        ((1,), (1, 1, 65), 0),
        ((1, 1, 1, 1), (1,), 0),
        ((-1,), (1,), 0),
        ((1,), (1,), (48 << 10) + 1),
        ((1,), (1,), -1),
    ],
)
def test_a_launch_that_a_gpu_refuses(grid, block, shared):
    with pytest.raises(LaunchError):
        laws("store_kernel", "fast")(grid, block, (zeros(1), np.int64(0)), shared_mem=shared)


def test_launch_bounds_and_shared_memory_limits():
    args = [zeros(1), zeros(1, dtype=np.uint32), zeros(1, dtype=np.float32)]
    args += [zeros(1, dtype=np.uint64), zeros(2), zeros(3)]
    with pytest.raises(LaunchError, match="65 threads a block, 64 allowed"):
        laws("atomics_kernel", "fast")((1,), (65,), args)
    kernel = laws("dynamic_kernel")
    kernel.max_dynamic_shared_size_bytes = 64 << 10
    kernel((1,), (1,), (zeros(1), np.int32((16 << 10) - 1)), shared_mem=64 << 10)


def test_shared_memory_is_counted_for_each_kernel():
    """Law: what one kernel keeps in shared memory leaves the others as much as before."""
    text = """
    __device__ int* both(int i) { __shared__ int cells[4 << 10]; return &cells[i]; }
    extern "C" __global__ void one(int* x) {
        __shared__ int own[8 << 10];
        own[*x] = 1;
        *x = own[x[1]] + *both(*x);
    }
    extern "C" __global__ void other(int* x) { *both(*x) = 1; *x = *both(x[1]); }
    """
    module = HostModule(text)
    for name, left in (("one", 0), ("other", 32)):
        assert module.get_function(name).max_dynamic_shared_size_bytes == left << 10
    with pytest.raises(LaunchError, match="0 allowed"):
        module.get_function("one")((1,), (1,), (zeros(1),), shared_mem=4)


def test_names_and_sources():
    with pytest.raises(KeyError, match="there are"):
        laws("copy_kernel")
    with pytest.raises(CompileError, match=r"own\.cu:2"):
        HostModule('extern "C" __global__ void f() {\n  nonsense;\n}', filename="own.cu")
    module = HostModule([PLANTED / "move_rows.cu", PLANTED / "prefix_sum.cu"])
    assert list(module.entries) == ["move_rows_kernel", "prefix_sum_kernel"]
    assert module.get_function("prefix_sum_kernel").max_threads_per_block == 1024


def test_entries_and_dynamic_shared_memory_are_found_in_the_text():
    text = """
    // extern "C" __global__ void in_a_comment(
    /* extern "C" __global__ void in_another( */
    extern "C" __global__ void plain_kernel(int* x) {}
    extern "C" __launch_bounds__(128) __global__ void before_kernel(int* x) {}
    extern "C" __global__ void
    __launch_bounds__(256, 2) after_kernel(int* x) {}
    extern "C" __global__ void __launch_bounds__(THREADS) named_kernel(int* x) {}
    template <int N> __global__ void template_kernel(int* x) {}
    """
    assert [(entry.name, entry.max_threads) for entry in source.entries(text)] == [
        ("plain_kernel", 1024),
        ("before_kernel", 128),
        ("after_kernel", 256),
        ("named_kernel", 1024),
    ]
    for alignment in ("", "__align__(16) ", "alignas(16) "):
        text = f"extern __shared__ {alignment}unsigned char bytes[];"
        pointer = "unsigned char* const bytes = (unsigned char*)host_dynamic_shared();"
        assert source.for_host(text) == pointer


def test_overlapping_buffers():
    array = zeros(8)
    with register(array[:6], array[2:]):
        laws("store_kernel")((1,), (1,), (array[:1], np.int64(7)))
    with register(array[:6], read_only=True), pytest.raises(ValueError, match="overlap"):
        laws("store_kernel")((1,), (1,), (array[4:], np.int64(0)))


def test_strided_views_and_empty_arrays():
    array = np.zeros((4, 4), np.int32)
    laws("store_kernel")((1,), (1,), (array[::-1][::2], np.int64(0)))
    with pytest.raises(OutOfBoundsError):
        laws("store_kernel")((1,), (1,), (zeros(0), np.int64(0)))
    with pytest.raises(KernelError):
        laws("store_kernel")((1,), (1,), (torch.zeros(0, 3, dtype=torch.int32), np.int64(0)))


def test_two_processes_build_the_same_module_at_once(tmp_path, monkeypatch):
    script = (
        "import sys, numpy as np, cuda_host\n"
        "text = 'extern \"C\" __global__ void f(int* x) {\\n*x = 5;\\n}'\n"
        "x = np.zeros(1, np.int32)\n"
        "cuda_host.HostModule(text).get_function('f')((1,), (1,), (x,))\n"
        "assert x[0] == 5\n"
    )
    cache = tmp_path / "specpool-cuda-host"
    cache.mkdir()
    for file in toolchain.runtime("fast"):
        shutil.copy(file, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "kits"))
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    left = {path.suffix for path in cache.iterdir()}
    assert left == {".json", ".lock", ".o", ".so"}


def test_no_compiler_is_one_sentence(monkeypatch, tmp_path):
    assert cuda_host.unavailable() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "need g++" in cuda_host.unavailable()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in cuda_host.unavailable()
