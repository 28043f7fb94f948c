"""Takes each guard of `guards.py` away, in a copy, and requires its scenario's tests to fail.

`python tests/scenarios/run_guards.py [--only 33 76]` builds one debug binding per guard.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from guards import GUARDS, Guard, ledger_scenarios

ROOT = Path(__file__).resolve().parents[2]
TESTS = ["tests/kits/ledger_kit.py", "tests/kits/fake_device.py", "tests/kits/reference.py"]
MODULE = "_core.abi3.so" if os.name != "nt" else "_core.pyd"
# As a release build: an overflow must be caught by the law's test, not by a debug assertion.
BUILD = {
    "CARGO_INCREMENTAL": "1",
    "CARGO_PROFILE_DEV_DEBUG": "0",
    "CARGO_PROFILE_DEV_OVERFLOW_CHECKS": "false",
    "CARGO_PROFILE_DEV_DEBUG_ASSERTIONS": "false",
    "RUSTFLAGS": "-Awarnings",
}


class Copy:
    """A copy of the sources that can be built and tested with an edit or without."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {**os.environ, **BUILD, "CARGO_TARGET_DIR": str(root / "target")}
        self.env |= {"PYO3_PYTHON": sys.executable, "PYTHONPATH": str(root / "python")}
        for name in ("Cargo.toml", "Cargo.lock", "rust", "cuda", "python"):
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
                shutil.copytree(source, root / name, ignore=ignored)
            else:
                shutil.copy(source, root / name)
        (root / "tests").mkdir()
        for path in [*map(ROOT.joinpath, TESTS), *ledger_scenarios(ROOT / "tests" / "scenarios")]:
            shutil.copy(path, root / "tests" / path.name)

    def build(self) -> None:
        """Builds the binding and puts it beside the package."""
        command = ["cargo", "build", "--quiet", "--package", "specpool-py"]
        subprocess.run(command, cwd=self.root, env=self.env, check=True)
        suffix = {"linux": "so", "darwin": "dylib", "win32": "dll"}[sys.platform]
        prefix = "" if sysconfig.get_platform().startswith("win") else "lib"
        built = self.root / "target" / "debug" / f"{prefix}_core.{suffix}"
        shutil.copy(built, self.root / "python" / "specpool" / MODULE)

    def test(self, select: str) -> tuple[int, str]:
        """Runs the scenarios that `select` names: pytest's exit code and the first failure."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "--timeout", "60"]
        command += ["-p", "no:cacheprovider", "--rootdir", str(self.root), "-k", select, "tests"]
        done = subprocess.run(command, cwd=self.root, env=self.env, capture_output=True, text=True)
        reasons = re.findall(r"^E +(.+)$", done.stdout, re.MULTILINE)
        return done.returncode, reasons[0] if reasons else done.stdout[-2000:]

    def without(self, guard: Guard) -> tuple[int, str]:
        """Run the guard's scenario without the guard."""
        kept = {edit.path: None for edit in guard.edits}
        source = self.root / "rust" / "specpool-core" / "src"
        texts = {path: (source / path).read_text(encoding="utf-8") for path in kept}
        try:
            for edit in guard.edits:
                edit.apply(self.root)
            self.build()
            return self.test(f"scenario_{guard.number:02d}_")
        finally:
            for path, text in texts.items():
                (source / path).write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = [guard.number for guard in GUARDS]
    parser.add_argument("--only", type=int, nargs="+", default=numbers, help="numbers of scenarios")
    only = parser.parse_args().only
    if unknown := [str(number) for number in only if number not in numbers]:
        parser.error(f"no guard is numbered {', '.join(unknown)}")
    guards = [guard for guard in GUARDS if guard.number in only]
    started, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="specpool-guards-") as folder:
        copy = Copy(Path(folder))
        copy.build()
        code, reason = copy.test("scenario")
        if code:
            print(f"the scenarios fail with every guard in place: {reason}")
            return 1
        print(f"{'number':>6}  {'guard':<58} {'file':<20} {'caught':<6}  first failure")
        for guard in guards:
            code, reason = copy.without(guard)
            caught = {0: "NO", 1: "yes"}.get(code, f"error {code}")
            missed += caught != "yes"
            files = ", ".join(dict.fromkeys(edit.path for edit in guard.edits))
            line = f"{guard.number:>6}  {guard.name:<58} {files:<20} {caught:<6}"
            print(f"{line}  {reason[:100]}", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{len(guards) - missed} of {len(guards)} guards caught, {minutes:.1f} minutes")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
