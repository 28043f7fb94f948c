"""Runs on a CUDA machine: what most likely breaks first, then tests, benches and the sanitizer.

They need Python, torch, CuPy, pytest and what `NEEDS` lists, and a wheel in dist/ unless specpool
is installed; no Rust and no network. What is missing of NEEDS is said first, with what goes without
it. Each part has its own limit, and ends with all its processes. The parts of one stage end within
the budget of one run, so that `--parts STAGE` is one run. What a part prints goes to OUT/all.log as
it comes, results to OUT. `--dry` runs on a CPU: it checks that every part finds what it would run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool"]


NEEDS = {  # what a part imports, and what happens without it
    "cupy": "no kernel is built: every part fails",
    "transformers": "only the kernels' tests, their bench and the sanitizer run",
    "msgspec": "only the kernels' bench runs",
    "flashinfer": "its tests are left out",
    "hypothesis": "flashinfer's tests are left out",
    "llguidance": "the tests of forms are skipped",
    "xdist": "tests run one by one, so that the limits may end a part early (pytest-xdist)",
    "pytest_timeout": "a test that hangs ends with its part (pytest-timeout)",
    "matplotlib": "results are written without pictures",
    "compute-sanitizer": "memcheck and racecheck are left out",
}


def has(name: str) -> bool:
    """Return whether this machine has a module or program."""
    return shutil.which(name) is not None or importlib.util.find_spec(name) is not None


def pytest_command() -> list[str]:
    """Return how pytest starts here: without a plug-in, its key of pyproject.toml is unknown."""
    # pytest-benchmark warns of xdist, and warnings are errors.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if not has("pytest_timeout"):
        unknown = "ignore:Unknown config option:pytest.PytestConfigWarning"
        command += ["-o", "addopts=-ra --strict-markers", "-W", unknown]
    return command


@dataclass(frozen=True)
class Part:
    """One step of the run.

    Attributes:
        seconds: its limit.
        selection: arguments of pytest that choose its tests.
        workers: pytest's processes; 0 = in its own.
        module: a module to run instead of pytest, with its arguments.
        tool: a tool of compute-sanitizer that pytest runs under.
        needs: packages and programs without which the part is left out.
        environment: further environment variables.
    """

    seconds: int
    selection: list[str] = field(default_factory=list)
    workers: int = 0
    module: list[str] = field(default_factory=list)
    tool: str = ""
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, out: Path) -> list[str]:
        """Return the command line; results go to `out`."""
        if self.module:
            return [sys.executable, "-m", *(str(out) if a == "OUT" else a for a in self.module)]
        pytest = [*pytest_command(), *self.selection]
        if self.tool:
            endless = ["--timeout", "0"] if has("pytest_timeout") else []
            return [*SANITIZER, self.tool, *pytest, *endless]
        return [*pytest, "-n", str(self.workers)] if has("xdist") else pytest


_DEVICE = "tests/device/test_device_"
_WORKERS = 8  # processes take turns on one card, each with a context and libraries of its own
# What takes minutes under the sanitizer: large vocabularies and batches of 257.
_LONG = "vocabulary or more_moves or compaction or tails or parents"
_KERNELS = [
    *(
        f"{_DEVICE}{name}.py"
        for name in (
            "attend",
            "layers",
            "sample",
            "moves",
            "tree",
            "tables",
            "reads",
            "states",
            "scenarios",
        )
    ),
    "tests/models/test_fused_layers.py",
    "tests/draft/test_check_tree.py",
    "tests/memory/test_host_memory.py",
]
_FLASHINFER = [f"tests/attention/test_flashinfer{name}.py" for name in ("", "_graphs")]
PARTS = {
    # The first process on a bare machine: cold imports, the kernels' build, two engines.
    "probe": Part(150, module=["benches.probe"]),
    "kernels": Part(240, ["-k", "cuda", *_KERNELS], _WORKERS),
    "engine": Part(
        150,
        ["-k", "cuda", f"{_DEVICE}graphs.py", f"{_DEVICE}worker.py"],
        _WORKERS,
        needs=("transformers",),
    ),
    "attention": Part(
        90, ["-k", "cuda", f"{_DEVICE}attention.py"], _WORKERS, needs=("transformers",)
    ),
    "requests": Part(
        100, ["-k", "cuda", f"{_DEVICE}requests.py"], _WORKERS, needs=("transformers",)
    ),
    "memory": Part(40, ["-k", "their_memory", f"{_DEVICE}graphs.py"], needs=("transformers",)),
    "lossless": Part(
        160,
        ["-m", "not full", "tests/engine/test_lossless.py"],
        _WORKERS,
        needs=("transformers",),
        environment={"SPECPOOL_TEST_DEVICE": "cuda"},
    ),
    "bench_kernels": Part(
        240, module=["benches.kernels", "--device", "cuda", "--repeats", "7", "--write", "OUT"]
    ),
    "bench_graphs": Part(
        270, module=["benches.graphs", "--repeats", "49", "--write", "OUT"], needs=("transformers",)
    ),
    "memcheck": Part(  # in one process: the tools take longer to start than the tests to run
        150,
        [
            "-k",
            f"cuda and not ({_LONG})",
            *(f"{_DEVICE}{n}.py" for n in ("attend", "sample", "moves", "tree")),
        ],
        tool="memcheck",
        needs=("compute-sanitizer",),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    "racecheck": Part(
        360,
        [
            "-k",
            f"cuda and not ({_LONG})",
            *(f"{_DEVICE}{n}.py" for n in ("attend", "sample", "moves", "tree")),
        ],
        tool="racecheck",
        needs=("compute-sanitizer",),
    ),
    "hybrids": Part(  # transformers 5.23 or later
        300,
        ["-k", "every_family", "-m", "not full", "tests/models/test_recurrent.py"],
        _WORKERS,
        needs=("transformers",),
        environment={"SPECPOOL_TEST_DEVICE": "cuda"},
    ),
    "flashinfer": Part(  # it compiles its kernels at first use
        300,
        ["-k", "cuda", *_FLASHINFER],
        needs=("flashinfer", "hypothesis", "transformers"),
    ),
}
STAGES = {  # what one run takes, in the order in which they teach most
    "first": ("probe", "kernels"),
    "tests": ("engine", "attention", "requests", "memory", "lossless"),
    "benches": ("bench_kernels", "bench_graphs"),
    "sanitizer": ("memcheck", "racecheck"),
    "hybrids": ("hybrids",),
    "flashinfer": ("flashinfer",),
}
BUDGET = 540  # seconds of one run
GRACE = 5  # seconds in which an interrupted part may report


def missing(part: Part) -> list[str]:
    """Return what the part needs and this machine lacks."""
    return [name for name in part.needs if not has(name)]


def installed(folder: str) -> dict[str, str]:
    """Return the environment in which the parts run, with the wheel of dist/ if there is one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    wheels = sorted((ROOT / "dist").glob("specpool-*.whl"))
    if importlib.util.find_spec("specpool") is None:
        if not wheels:
            sys.exit("specpool is not installed, and dist/ has no wheel: run `make build` first")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--target", folder, str(wheels[-1])], check=True)
        # What was brought along on this path is there for the parts, too.
        paths = [folder, os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


@contextlib.contextmanager
def processes_of(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own; behind the block nothing of it runs.

    A process that it started and left behind would go on using the card beside the next part.
    """
    # A job in a shell's background ignores interrupts, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(name: str, part: Part, seconds: float, out: Path, environment: dict[str, str]) -> bool:
    """Run a part, which prints into the log, and print its last lines and its end.

    A part that reaches its limit is interrupted, so that pytest names what failed until then.
    """
    start = time.monotonic()
    with (out / "all.log").open("ab+", buffering=0) as log:
        log.write(f"== {name} begins\n".encode())
        first = log.tell()
        how = {"cwd": ROOT, "env": environment | part.environment, "stdout": log, "stderr": log}
        with processes_of(part.command(out), **how) as process:
            try:
                code = str(process.wait(seconds))
            except subprocess.TimeoutExpired:
                code = f"stopped after {seconds:.0f} s"
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        head = f"== {name}: {code}, {time.monotonic() - start:.0f} s"
        log.seek(first)
        lines = log.read().decode(errors="replace").splitlines()
        log.write(f"{head}\n".encode())
    print(head, *lines[-40 if name == "probe" else -8 :], sep="\n", flush=True)
    return code == "0"


def nothing_to_run(names: list[str]) -> list[str]:
    """Return the parts that find no test or no module; one collection on a CPU finds all tests."""
    sys.path.insert(0, str(ROOT))
    files = {word for name in names for word in PARTS[name].selection if word.endswith(".py")}
    there = sorted(file for file in files if (ROOT / file).exists())
    tests: list[str] = []
    if there:  # without a file, pytest would collect all tests
        pytest = [*pytest_command(), "--collect-only", *there]
        done = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, check=False)
        tests = [line for line in done.stdout.splitlines() if "::" in line]

    def finds(part: Part) -> bool:
        if part.module:
            return importlib.util.find_spec(part.module[0]) is not None
        words = part.selection
        word = words[words.index("-k") + 1].split(" and ")[0] if "-k" in words else ""
        each = [
            [t for t in tests if t.startswith(file) and word in t]
            for file in words
            if ".py" in file
        ]
        return all(each)

    return [name for name in names if not finds(PARTS[name])]


def end_with_part() -> None:
    """Let a termination of this process end the part that runs, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def main() -> int:
    """Run the parts that are asked for; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts",
        default=",".join(STAGES),
        help=f"names of parts or of stages, with commas: {', '.join([*STAGES, *PARTS])}",
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--seconds", type=float, default=BUDGET, help="the budget of all parts")
    parser.add_argument("--dry", action="store_true", help="check the parts on a CPU")
    options = parser.parse_args()
    words = [STAGES.get(word, (word,)) for word in options.parts.split(",")]
    names = [*dict.fromkeys(name for stage in words for name in stage)]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: {', '.join([*STAGES, *PARTS])}")
    for name in NEEDS:
        if not has(name):
            print(f"there is no {name}: {NEEDS[name]}")
    if options.dry:
        imported = {"hypothesis", "transformers"}  # by the tests' files
        names = [name for name in names if not imported & set(missing(PARTS[name]))]
        broken = nothing_to_run(names)
        print(f"gpu: {len(names)} parts" + (f", nothing to run in {broken}" if broken else ""))
        return int(bool(broken))
    longest = sum(PARTS[name].seconds for name in names if not missing(PARTS[name]))
    if longest > options.seconds:
        print(
            f"the limits of these parts add up to {longest} s, the budget is "
            f"{options.seconds:.0f} s: the last ones may be left out; --parts takes a stage of "
            f"{', '.join(STAGES)}",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        environment = installed(folder)
        for name in names:
            part, left = PARTS[name], end - time.monotonic()
            if lacks := missing(part):
                print(f"== {name}: left out, there is no {', '.join(lacks)}", flush=True)
            elif left < 5:
                print(f"== {name}: left out, the {options.seconds:.0f} s are over")
                failed.append(name)
            elif not run(name, part, min(part.seconds, left), options.out, environment):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return int(bool(failed))


if __name__ == "__main__":
    end_with_part()
    sys.exit(main())
