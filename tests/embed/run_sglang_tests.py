"""Run SGLang's own unit tests with its own memory and with the plug-in's, and print what differs.

`python tests/embed/run_sglang_tests.py CHECKOUT` after `make engines`; CHECKOUT is a checkout of
SGLang at the release that `.engines` has, of which only `test/registered` is read. The tests are
those whose text names an allocator, the radix cache or a session. Nothing of it is kept.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = HERE.parent.parent / ".engines" / "sglang"
LEVELS = ("off", "pages", "reserve", "rows")
NAMES = re.compile(
    r"TokenToKVPoolAllocator|UnifiedRadixCache|StreamingSession|allocation_sizing|alloc_for_extend"
)


def files_of(checkout: Path) -> list[Path]:
    """The test files that touch an allocator and need no server."""
    folder = checkout / "test" / "registered" / "unit"
    if not folder.is_dir():
        raise SystemExit(f"{folder} is no folder: CHECKOUT must be a checkout of SGLang")
    found = sorted(folder.rglob("test_*.py"))
    return [path for path in found if NAMES.search(path.read_text(errors="replace"))]


def outcomes(path: Path, level: str, seconds: float) -> dict[str, str]:
    """Run a file in a new process; return how each test ended."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(path.parent)]
        command += ["-q", "-p", "no:cacheprovider", "-p", "sglang_level", f"--junitxml={report}"]
        places = (str(ENGINE), str(HERE))
        settings = {"PYTHONPATH": os.pathsep.join(places), "SPECPOOL_SGLANG": level}
        try:
            subprocess.run(
                [*command, str(path)],
                env=os.environ | settings | {"SPECPOOL_SGLANG_DRIFT": "exit"},
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"the file": "timeout"}
        if not report.exists():
            return {"the file": "no report"}
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _end(case) for case in cases}


def _end(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        if case.find(kind) is not None:
            return kind
    return "passed"


def main() -> int:
    """Print a line for each file, and each test that passes with SGLang's own memory only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="a part of the files' names")
    parser.add_argument("--seconds", type=float, default=600, help="the most that a file may take")
    asked = parser.parse_args()
    print(f"{'passed of all':60}" + "".join(f"{level:>14}" for level in LEVELS))
    lost: list[str] = []
    for path in files_of(asked.checkout):
        if asked.only not in path.name:
            continue
        ends = {level: outcomes(path, level, asked.seconds) for level in LEVELS}
        counts = [
            f"{sum(end == 'passed' for end in found.values())} of {len(found)}"
            for found in ends.values()
        ]
        print(f"{path.name:60}" + "".join(f"{count:>14}" for count in counts), flush=True)
        lost += [
            f"{level}: {path.name}::{name} is {ends[level].get(name, 'missing')}"
            for level in LEVELS[1:]
            for name, end in ends["off"].items()
            if end == "passed" and ends[level].get(name) != "passed"
        ]
    print("\n".join(lost) or "every test that passes with SGLang's own memory passes with ours")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
