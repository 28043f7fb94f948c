"""Compiles kernels with NVRTC for any GPU, without a GPU or a driver, and reads what came out.

Through ctypes rather than cuda-core: so the libraries of two CUDA majors work in one process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What CuPy passes for a RawModule, but for include paths, which the kernels do without.
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")

_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, "
    r"(?P<spill_stores>\d+) bytes spill stores, (?P<spill_loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers"
    r"(?:, used (?P<barriers>\d+) barriers)?"
    r"(?:, \d+ bytes cumulative stack size)?"
    r"(?:, (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
_WIDE_LOAD = re.compile(r"\bLDG\.E[.\w]*\.128[.\w]* R(\d+),")
_REGISTER = re.compile(r"\bR(\d+)\b")
_ACCESS = re.compile(r"\b(LDG|STG|LD|ST)\.E((?:\.\w+)*)")


class CompileError(RuntimeError):
    """NVRTC refused the kernel; the text is its log, with file and line."""


@dataclass(frozen=True)
class Usage:
    """What ptxas reports about one kernel."""

    registers: int  # per thread
    stack: int  # bytes per thread
    spill_stores: int  # bytes per thread
    spill_loads: int
    shared: int  # bytes per block, without dynamic ones
    barriers: int


@dataclass(frozen=True)
class Program:
    """A compiled file: machine code, and per kernel (by the name asked for) its use of the GPU."""

    cubin: bytes
    usage: dict[str, Usage]
    lowered: dict[str, str]  # name expression -> symbol

    def accesses(self, kernel: str) -> Counter[tuple[str, int]]:
        """How many instructions of a kernel access memory: by (LDG, STG, LD or ST, bits).

        LDG and STG know that the address is global; LD and ST find out at run time.
        """
        return global_accesses(self.assembly(kernel))

    def in_flight(self, kernel: str) -> int:
        """The most 16-byte loads that a kernel issues before it touches what one of them loads."""
        return loads_in_flight(self.assembly(kernel))

    def assembly(self, kernel: str) -> str:
        """The machine instructions of a kernel as text."""
        return disassembled(self.cubin)[self.lowered.get(kernel, kernel)]


class Nvrtc:
    """One NVRTC library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def __repr__(self) -> str:
        return f"cuda{self.version[0]}"

    @functools.cache  # noqa: B019 - there are two of them, for the life of the process
    def compile(
        self,
        text: str,
        arch: str,
        *,
        name_expressions: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> Program:
        """Compiles to machine code.

        Args:
            text: as `cuda_host.source.read` gives it.
            arch: such as `sm_90`.
            name_expressions: instances of kernel templates.
            options: in addition to CuPy's.

        Raises:
            CompileError: the text is wrong, or this NVRTC does not know the architecture.
        """
        nvrtc, program = self._library, ctypes.c_void_p()
        self._check(
            nvrtc.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
            )
        )
        try:
            for expression in name_expressions:
                self._check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
            all_options = (*OPTIONS, *options, f"-arch={arch}", "--ptxas-options=-v")
            array = (ctypes.c_char_p * len(all_options))(*[o.encode() for o in all_options])
            failed = nvrtc.nvrtcCompileProgram(program, len(all_options), array)
            log = self._bytes("ProgramLog", program).decode().rstrip("\0")
            if failed:
                raise CompileError(log or nvrtc.nvrtcGetErrorString(failed).decode())
            lowered = {e: self._lowered(program, e) for e in name_expressions}
            names = {symbol: e for e, symbol in lowered.items()}
            usage = {names.get(name, name): used for name, used in usage_of(log).items()}
            return Program(self._bytes("CUBIN", program), usage, lowered)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _lowered(self, program: ctypes.c_void_p, expression: str) -> str:
        symbol = ctypes.c_char_p()
        self._check(
            self._library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol))
        )
        return (symbol.value or b"").decode()

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError(self._library.nvrtcGetErrorString(result).decode())


@functools.cache
def installed() -> dict[int, Nvrtc]:
    """The libraries among the installed wheels, by CUDA's major version."""
    libraries = [Nvrtc(p) for root in _nvidia() for p in root.glob("*/lib/libnvrtc.so.[0-9]*")]
    return {nvrtc.version[0]: nvrtc for nvrtc in libraries}


def nvdisasm() -> str | None:
    """The disassembler among the installed wheels or on the path."""
    paths = [str(p) for root in _nvidia() for p in root.glob("*/bin/nvdisasm")]
    return paths[0] if paths else shutil.which("nvdisasm")


def usage_of(log: str) -> dict[str, Usage]:
    """Per kernel (symbol), what a log with `--ptxas-options=-v` says."""
    return {
        match["name"]: Usage(
            **{k: int(v or 0) for k, v in match.groupdict().items() if k != "name"}
        )
        for match in _USAGE.finditer(log)
    }


@functools.cache
def disassembled(cubin: bytes) -> dict[str, str]:
    """Machine instructions as text, per kernel (symbol)."""
    tool = nvdisasm()
    if not tool:
        raise FileNotFoundError("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command: Sequence[str] = (tool, "--print-code", file.name)
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *sections = re.split(r"^//-+ \.text\.(\w+) +-+$", text, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


def global_accesses(assembly: str) -> Counter[tuple[str, int]]:
    """Counts loads and stores by (instruction, bits)."""
    return Counter((name, _bits(suffixes)) for name, suffixes in _ACCESS.findall(assembly))


def loads_in_flight(assembly: str) -> int:
    """The most loads of 16 bytes before an instruction that names a register of one of them."""
    max_loads, waiting = 0, set[int]()
    for line in assembly.splitlines():
        registers = {int(number) for number in _REGISTER.findall(line)}
        load = _WIDE_LOAD.search(line)
        first = int(load[1]) if load else -1
        loaded = set(range(first, first + 4)) if load else set()
        if registers - {first} & waiting or loaded & waiting:
            waiting = set()
        waiting |= loaded
        max_loads = max(max_loads, len(waiting) // 4)
    return max_loads


def _bits(suffixes: str) -> int:
    for suffix in suffixes.split("."):
        if suffix in ("U8", "S8", "U16", "S16", "64", "128", "256"):
            return int(suffix.lstrip("US"))
    return 32


def _nvidia() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
