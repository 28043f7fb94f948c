"""Every kernel through NVRTC, for the GPUs of three generations and both CUDA majors."""

import re
from collections import Counter
from pathlib import Path

import pytest

import cuda_host
import nvrtc
from cuda_host import source
from paths import ROOT
from specpool.kernels import launch

PLANTED = Path(cuda_host.__file__).parent / "planted"
LAWS = PLANTED / "laws.cu"
KERNELS = [
    *sorted((ROOT / "cuda").glob("*.cu")),
    PLANTED / "move_rows.cu",
    PLANTED / "prefix_sum.cu",
]
# Kernels that move KV: all their bytes must go 16 at a time where alignment allows.
MOVES = source.entries((ROOT / "cuda" / "moves.cu").read_text())

archs = pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])


def compiler_of(cuda):
    if cuda not in nvrtc.installed():
        wheel = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}[cuda]
        pytest.skip(f"no NVRTC of CUDA {cuda}: pip install {wheel}")
    return nvrtc.installed()[cuda]


@pytest.fixture(params=[12, 13], ids=["cuda12", "cuda13"])
def compiler(request):
    return compiler_of(request.param)


def cells():
    """What the kernels are compiled for; `make test` takes one of them."""
    for cuda in (12, 13):
        for arch in ("sm_80", "sm_90", "sm_100"):
            marks = () if (cuda, arch) == (13, "sm_90") else pytest.mark.full
            yield pytest.param((cuda, arch), id=f"cuda{cuda}-{arch}", marks=marks)


@pytest.fixture(scope="module", params=cells())
def cell(request):
    cuda, arch = request.param
    return compiler_of(cuda), arch


@pytest.fixture(scope="module")
def shipped(cell):
    """The module that is shipped, which has all kernels: its compilation takes seconds."""
    compiler, arch = cell
    return compiler.compile(launch.source(), arch)


@pytest.fixture
def disassembler():
    if not nvrtc.nvdisasm():
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")


def compiled(compiler, file, arch, **options):
    return compiler.compile(source.read(source.with_headers(file)), arch, **options)


def assert_fits(program):
    for name, usage in program.usage.items():
        assert (usage.stack, usage.spill_stores, usage.spill_loads) == (0, 0, 0), (name, usage)
        assert usage.shared <= 48 << 10


def test_the_module_that_is_shipped_has_every_kernel_and_each_fits_in_its_registers(shipped):
    assert sorted(shipped.usage) == sorted(launch.entries())
    assert_fits(shipped)


@pytest.mark.full
@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_every_file_compiles_alone(cell, file):
    compiler, arch = cell
    program = compiled(compiler, file, arch)
    names = [entry.name for entry in source.entries(file.read_text())]
    assert sorted(program.usage) == sorted(names) and names
    assert_fits(program)


def assert_moves_by_16_bytes(program, kernel):
    accesses = program.accesses(kernel)
    assert accesses["LDG", 128] and accesses["STG", 128], accesses
    assert not any(name in ("LD", "ST") for name, _ in accesses), "the address space is not known"


@pytest.mark.sample(3)
@pytest.mark.parametrize("kernel", [entry.name for entry in MOVES])
def test_moves_go_by_16_bytes(shipped, disassembler, kernel):
    """With several loads under way: one at a time waits for the memory, which took a page read
    four times as long as it need.
    """
    assert_moves_by_16_bytes(shipped, kernel)
    assert shipped.in_flight(kernel) >= 4


def test_the_planted_move_goes_by_16_bytes(cell, disassembler):
    compiler, arch = cell
    program = compiled(compiler, PLANTED / "move_rows.cu", arch)
    assert_moves_by_16_bytes(program, "move_rows_kernel")


def test_logits_are_read_by_16_bytes(shipped, disassembler):
    """Several loads under way; few registers, so that 1,024 threads run at once on a processor."""
    kernel = "sample_tokens_kernel"
    assert shipped.accesses(kernel)["LDG", 128] and shipped.in_flight(kernel) >= 4
    assert shipped.usage[kernel].registers <= 64


@pytest.mark.parametrize(("dim", "loads"), [(64, 4), (128, 12), (256, 12)])
def test_attention_multiplies_on_tensor_cores_while_it_reads(shipped, disassembler, dim, loads):
    """Keys and values go by 16 bytes, many under way; two blocks fit on a processor."""
    kernel = f"attend_{dim}_kernel"
    assert shipped.in_flight(kernel) >= loads
    assert shipped.usage[kernel].registers <= 255 and shipped.usage[kernel].shared <= 24 << 10
    products = Counter(re.findall(r"\bHMMA\.16816\.F32(\.BF16)?", shipped.assembly(kernel)))
    assert products[".BF16"] == products[""] == (dim + min(dim, 128)) // 8


# --- the reading of what NVRTC says -------------------------------------------------------------


@pytest.mark.sample(1)
@archs
def test_the_host_runner_offers_nothing_that_cuda_has_not(compiler, arch):
    expression = "copy_kernel<long long, 3>"
    program = compiled(compiler, LAWS, arch, name_expressions=(expression,))
    names = {entry.name for entry in source.entries(LAWS.read_text())}
    assert set(program.usage) == {*names, expression}


def test_stack_shared_memory_and_barriers_are_read(compiler):
    laws = compiled(compiler, LAWS, "sm_90").usage
    assert laws["local_kernel"].stack >= 16
    assert laws["shared_counter_kernel"].barriers == 1
    assert laws["shared_counter_kernel"].shared >= 4
    assert laws["store_kernel"] == nvrtc.Usage(
        laws["store_kernel"].registers, stack=0, spill_stores=0, spill_loads=0, shared=0, barriers=0
    )
    assert laws["store_kernel"].registers > 0


def test_spills_are_read(compiler):
    text = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x, int n) {\n'
        "  float v[48];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 48; i++) v[i] = x[i * n + threadIdx.x];\n"
        "  for (int k = 0; k < n; k++)\n"
        "#pragma unroll\n"
        "    for (int i = 0; i < 48; i++) v[i] = v[i] * v[(i + 7) % 48] + x[k];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 48; i++) x[i * n + threadIdx.x] = v[i];\n"
        "}\n"
    )
    usage = compiler.compile(text, "sm_80").usage["spill"]
    assert usage.spill_stores > 0 and usage.spill_loads > 0
    assert usage.registers <= 32


@pytest.mark.sample(1)
@archs
def test_narrow_and_generic_accesses_are_told_apart(compiler, disassembler, arch):
    expression = "copy_kernel<long long, 3>"
    laws = compiled(compiler, LAWS, arch, name_expressions=(expression,))
    assert laws.accesses(expression)["LDG", 64] == laws.accesses(expression)["STG", 64] == 3
    assert laws.accesses("store_kernel") == {("STG", 32): 1}
    text = (
        'extern "C" __global__ void generic(const long long* table, int n) {\n'
        "  int4* p = reinterpret_cast<int4*>(table[0]);\n"
        "  p[1] = p[n];\n"
        "}\n"
    )
    assert compiler.compile(text, "sm_80").accesses("generic")["LDG", 64] == 1
    program = compiler.compile(text, "sm_100").accesses("generic")
    assert program["LD", 128] + program["LDG", 128] == 1


def test_loads_under_way_end_where_one_is_used():
    lines = [
        "LDG.E.128 R4, desc[UR4][R2.64] ;",
        "@P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;",
        "IMAD R20, R3, 0x4, R21 ;",
        "STG.E.128 desc[UR4][R14.64], R4 ;",
        "LDG.E.128 R16, desc[UR4][R2.64] ;",
    ]
    assert nvrtc.loads_in_flight("\n".join(lines)) == 2
    used = [lines[0], "FADD R30, R7, R1 ;", lines[1]]
    assert nvrtc.loads_in_flight("\n".join(used)) == 1
    again = [lines[0], lines[0]]  # the second overwrites the first
    assert nvrtc.loads_in_flight("\n".join(again)) == 1


def test_an_error_names_file_and_line(compiler):
    text = source.read('extern "C" __global__ void f() {\n  nonsense;\n}\n', "own.cu")
    with pytest.raises(nvrtc.CompileError, match=r"own\.cu\(2\)"):
        compiler.compile(text, "sm_90")


def test_an_unknown_architecture(compiler):
    with pytest.raises(nvrtc.CompileError, match="arch"):
        compiler.compile("\n", "sm_1")
