"""Build a kernel into a shared library with g++; builds are cached by their content's hash."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import source
from .errors import CompileError

HERE = Path(__file__).parent
CXX = "g++"
KEEP_DAYS = 30

_COMMON = (
    "-std=c++17 -gdwarf-4 -fPIC -fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing".split()
)
_NUMERIC = ["-ffp-contract=off"]
_UNDEFINED = "alignment,bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero"
# No libtsan or libubsan is linked: runtime/checker.cpp answers the calls that these flags plant.
_BUILDS = {
    "fast": ["-O2"],
    "check": [
        "-O1",
        "-DHOST_CHECK",
        f"-fsanitize=thread,{_UNDEFINED}",
        "--param=tsan-distinguish-volatile=1",
        "-fno-tree-sra",
    ],
}
_LEFT_OUT = {"fast": "checker.cpp", "check": "unchecked.cpp"}


@dataclass(frozen=True)
class Variable:
    """A variable of the kernel file that lives in memory."""

    name: str
    offset: int  # in the library
    size: int  # bytes
    shared: bool  # `__shared__`, else a `__device__` global


@dataclass(frozen=True)
class Build:
    """A library on disk."""

    library: Path
    variables: list[Variable]


def unavailable() -> str:
    """Why kernels cannot run here; empty if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"kernels run on Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    missing = [tool for tool in (CXX, "nm", "c++filt", "addr2line") if not shutil.which(tool)]
    return (
        f"kernels need {', '.join(missing)} to run on the CPU: apt install g++" if missing else ""
    )


def build(
    text: str, kind: str, *, name_expressions: Sequence[str] = (), options: Sequence[str] = ()
) -> Build:
    """Compiles `text` (see `source.read`), or finds an earlier build of the same.

    Raises:
        CompileError: g++ refuses it.
    """
    exports = [f'HOST_EXPORT({e.name}, "{e.name}", {e.name})' for e in source.entries(text)]
    exports += [f'HOST_EXPORT({symbol(e)}, "{e}", {e})' for e in name_expressions]
    unit = "\n".join([source.for_host(text), '#line 1 "exports"', *exports, ""])
    command = [*_BUILDS[kind], *_COMMON, *_NUMERIC, *options]
    library = _cache() / f"{_key(kind, *command, unit)}.so"
    described = library.with_suffix(".json")
    with _turn(library):
        if not (library.exists() and described.exists()):
            _compile(unit, kind, command, library, described)
    variables = [Variable(**v) for v in json.loads(described.read_text(encoding="utf-8"))]
    return Build(library, variables)


def symbol(name_expression: str) -> str:
    """A C identifier for a name expression such as `copy<int, 4>`."""
    return f"expression_{hashlib.sha256(name_expression.encode()).hexdigest()[:16]}"


def places(library: Path, text: str) -> str:
    """`text` with each `{pc:1f}` replaced by file and line, of the `.cu` if code is inlined."""

    def place(match: re.Match[str]) -> str:
        out = _run(["addr2line", "-i", "-s", "-e", str(library), match[1]]).splitlines()
        headers = {path.name for path in HERE.glob("device/*.h")}
        of_kernel = [line for line in out if line.split(":")[0] not in headers]
        return (of_kernel or out)[0].split(" ")[0]

    return re.sub(r"\{pc:([0-9a-f]+)\}", place, text)


def _compile(unit: str, kind: str, command: list[str], library: Path, described: Path) -> None:
    objects = [str(path) for path in runtime(kind)]
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        file, kernels, out = (Path(directory, name) for name in ("unit.cpp", "unit.o", "unit.so"))
        file.write_text(unit, encoding="utf-8")
        cuda = str(HERE / "device" / "cuda.h")
        _run([CXX, *command, "-include", cuda, "-c", str(file), "-o", str(kernels)])
        _run([CXX, "-shared", "-Wl,-Bsymbolic", "-o", str(out), str(kernels), *objects])
        variables = json.dumps([asdict(v) for v in _variables(kernels, out)])
        Path(directory, "variables").write_text(variables, encoding="utf-8")
        os.replace(Path(directory, "variables"), described)
        os.replace(out, library)


def runtime(kind: str) -> list[Path]:
    """The runtime's object files."""
    files = [f for f in sorted(HERE.glob("runtime/*.cpp")) if f.name != _LEFT_OUT[kind]]
    return [_object(file) for file in files]


def _object(file: Path) -> Path:
    result = _cache() / f"{_key(file.name)}.o"
    with _turn(result):
        if not result.exists():
            _forget_old()
            with tempfile.TemporaryDirectory(dir=result.parent) as directory:
                out = Path(directory, result.name)
                _run([CXX, "-O2", *_COMMON, "-c", str(file), "-o", str(out)])
                os.replace(out, result)
    return result


def _variables(kernels: Path, library: Path) -> list[Variable]:
    symbols = {
        line.split()[-1] for line in _run(["nm", "--defined-only", str(kernels)]).splitlines()
    }
    variables = []
    for line in _run(["nm", "-S", "--defined-only", str(library)]).splitlines():
        fields = line.split()
        if len(fields) != 4 or fields[2] not in "bBdDuvV" or fields[3] not in symbols:
            continue
        if not fields[3].startswith("host_kernel_"):
            variables.append((int(fields[0], 16), int(fields[1], 16), fields[3]))
    mangled = [name for *_, name in variables]
    plain = _run(["c++filt", *mangled]).splitlines() if mangled else []
    # _ZZ: a variable in a function that outlives it; kernels have none but __shared__ ones.
    return [
        Variable(name, offset, size, symbol.startswith("_ZZ"))
        for (offset, size, symbol), name in zip(variables, plain, strict=True)
    ]


@functools.cache
def _cache() -> Path:
    """A directory of this user's, created if need be."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root, "specpool-cuda-host")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="specpool-cuda-host-"))


def _forget_old() -> None:
    oldest = time.time() - KEEP_DAYS * 86400
    for file in _cache().glob("*.*"):
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except OSError:  # another process was first
            pass


@contextlib.contextmanager
def _turn(result: Path) -> Iterator[None]:
    """Lets one process build `result` while others wait for it."""
    import fcntl  # Windows has none; there the tests must get as far as the reason to skip

    with open(result.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join([_own_files(), *parts]).encode()).hexdigest()[:24]


@functools.cache
def _own_files() -> str:
    """Everything but the kernel that a build depends on."""
    files: Iterable[Path] = [
        HERE / "abi.h",
        *sorted(HERE.glob("*/*.h")),
        *sorted(HERE.glob("*/*.cpp")),
    ]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return "\0".join([_run([CXX, "--version"]), *texts])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
