"""Runs Python in a process of its own, and there the tests that need SGLang or vLLM."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paths import ROOT

HERE = ROOT / "tests" / "embed"
#: What `make engines` installs.
ENGINES = ROOT / ".engines"
SECONDS = 900


def run(*args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the settings of this process that are specpool's."""
    clean = {name: value for name, value in os.environ.items() if "SPECPOOL_" not in name}
    return subprocess.run(
        [sys.executable, *args],
        env=clean | settings,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def run_cases(engine: str, *files: str, chosen: str = "not full") -> None:
    """Run files of tests with an engine in the path; skip if it is not installed.

    Args:
        engine: a folder of `.engines`.
        files: names in `tests/embed`.
        chosen: which of the tests, by their marks.
    """
    if not (ENGINES / engine).exists():
        pytest.skip(f"{engine} is not installed: `make engines`")
    options = ["-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "-q", "-m", chosen]
    options += ["-p", "no:cacheprovider", "-o", "markers=full: run by `make test-full` only"]
    path = os.pathsep.join(map(str, [ENGINES / engine, ROOT]))
    done = run("-m", "pytest", *options, *(str(HERE / file) for file in files), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
