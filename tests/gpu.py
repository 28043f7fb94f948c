"""One run on a CUDA machine: what most likely breaks first, then tests, benches and the sanitizer.

It needs Python, torch, CuPy and pytest there, and a wheel in dist/ unless specpool is installed; no
Rust and no network. Each part has its own limit, and all end within the budget. Everything that is
printed goes to OUT/all.log, results to OUT. `--dry` runs on a CPU: it checks that every part finds
what it would run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SANITIZER = ["compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no", "--tool"]


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
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.selection]
        if self.tool:
            return [*SANITIZER, self.tool, *pytest, "--timeout", "0"]
        return [*pytest, "-n", str(self.workers)]


_DEVICE = "tests/device/test_device_"
_KERNELS = [f"{_DEVICE}{name}.py" for name in ("moves", "reads", "sample", "tables", "tree")]
_FLASHINFER = [f"tests/attention/test_flashinfer{name}.py" for name in ("", "_graphs")]
PARTS = {
    "probe": Part(60, module=["benches.probe"]),
    "memory": Part(30, ["-k", "their_memory", f"{_DEVICE}graphs.py"]),
    "kernels": Part(90, ["-k", "cuda", *_KERNELS, f"{_DEVICE}scenarios.py"], 8),
    "attention": Part(60, ["-k", "cuda", f"{_DEVICE}attention.py"], 4),
    "engine": Part(100, ["-k", "cuda", f"{_DEVICE}graphs.py", f"{_DEVICE}worker.py"], 8),
    "lossless": Part(
        120,
        ["-m", "not full", "tests/engine/test_lossless.py"],
        12,
        environment={"SPECPOOL_TEST_DEVICE": "cuda"},
    ),
    "flashinfer": Part(
        80,
        ["-k", "cuda", *_FLASHINFER],
        needs=("flashinfer",),
    ),
    "bench_kernels": Part(
        90, module=["benches.kernels", "--device", "cuda", "--repeats", "7", "--write", "OUT"]
    ),
    "bench_graphs": Part(60, module=["benches.graphs", "--repeats", "49", "--write", "OUT"]),
    "memcheck": Part(
        90,
        ["-k", "cuda", f"{_DEVICE}moves.py", f"{_DEVICE}tree.py"],
        tool="memcheck",
        needs=("compute-sanitizer",),
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    "racecheck": Part(
        60,
        ["-k", "cuda", f"{_DEVICE}tree.py"],
        tool="racecheck",
        needs=("compute-sanitizer",),
    ),
}


def missing(part: Part) -> list[str]:
    """Return what the part needs and this machine lacks."""
    return [
        name
        for name in part.needs
        if shutil.which(name) is None and importlib.util.find_spec(name) is None
    ]


def installed(folder: str) -> dict[str, str]:
    """Return the environment in which the parts run, with the wheel of dist/ if there is one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    wheels = sorted((ROOT / "dist").glob("specpool-*.whl"))
    if importlib.util.find_spec("specpool") is None:
        if not wheels:
            sys.exit("specpool is not installed, and dist/ has no wheel: run `make build` first")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--target", folder, str(wheels[-1])], check=True)
        environment["PYTHONPATH"] = folder
    return environment


def run(name: str, part: Part, seconds: float, out: Path, environment: dict[str, str]) -> bool:
    """Run a part, write what it prints to the log, and print its end."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            part.command(out),
            cwd=ROOT,
            env=environment | part.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        text, code = done.stdout, str(done.returncode)
    except subprocess.TimeoutExpired as late:
        text, code = late.stdout or b"", f"stopped after {seconds:.0f} s"
    head = f"== {name}: {code}, {time.monotonic() - start:.0f} s"
    lines = text.decode(errors="replace").splitlines()
    with (out / "all.log").open("a") as log:
        print(head, *lines, sep="\n", file=log)
    print(head, *lines[-40 if name == "probe" else -8 :], sep="\n", flush=True)
    return code == "0"


def nothing_to_run(names: list[str]) -> list[str]:
    """Return the parts that find no test or no module; one collection on a CPU finds all tests."""
    sys.path.insert(0, str(ROOT))
    files = {word for name in names for word in PARTS[name].selection if word.endswith(".py")}
    there = sorted(file for file in files if (ROOT / file).exists())
    pytest = [sys.executable, "-m", "pytest", "-q", "--collect-only", *there]
    lines = subprocess.run(pytest, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    tests = [line for line in lines.splitlines() if "::" in line]

    def finds(part: Part) -> bool:
        if part.module:
            return importlib.util.find_spec(part.module[0]) is not None
        words = part.selection
        word = words[words.index("-k") + 1] if "-k" in words else ""
        each = [
            [t for t in tests if t.startswith(file) and word in t]
            for file in words
            if ".py" in file
        ]
        return all(each)

    return [name for name in names if not finds(PARTS[name])]


def main() -> int:
    """Run the parts that are asked for; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--seconds", type=float, default=540, help="the budget of all parts")
    parser.add_argument("--dry", action="store_true", help="check the parts on a CPU")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}: {', '.join(PARTS)}")
    if options.dry:
        broken = nothing_to_run(names)
        print(f"gpu: {len(names)} parts" + (f", nothing to run in {broken}" if broken else ""))
        return int(bool(broken))
    options.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory() as folder:
        environment = installed(folder)
        for name in names:
            part, left = PARTS[name], end - time.monotonic()
            if lacks := missing(part):
                print(f"== {name}: left out, there is no {', '.join(lacks)}")
            elif left < 5:
                print(f"== {name}: left out, the {options.seconds:.0f} s are over")
                failed.append(name)
            elif not run(name, part, min(part.seconds, left), options.out, environment):
                failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
