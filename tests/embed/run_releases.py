"""Which releases of SGLang and vLLM each level of the plug-ins accepts, as it would at their load.

`make engine-releases` runs this, which fetches the releases of the package index into
`.engines/releases`, only their Python. Each is imported in a process of its own on the libraries
that `make engines` has installed for the newest one. The verdicts go into a file of
`benches/results`, of which `tests/kits/figure_tables.py --write` makes the tables of docs/sglang.md
and docs/vllm.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.engines.releases import ROOT, fetch, release_path

ENGINES = ROOT / ".engines"
#: The first release of each engine that is tried, and the levels.
FIRST = {"sglang": (0, 5, 15), "vllm": (0, 26)}
LEVELS = {"sglang": ("pages", "reserve", "rows"), "vllm": ("blocks", "speculative")}
#: What each release imports, whatever it is: imported once.
SHARED = ("torch", "torch._dynamo", "transformers", "fastapi", "openai", "aiohttp", "zmq", "psutil")
#: Seconds of CPU that a release may take.
SECONDS = 600
#: Modules that hold `differences`.
CHECKS = {"sglang": "specpool.plugins.sglang.drift", "vllm": "specpool.plugins.vllm.releases"}


def versions(engine: str) -> list[str]:
    """Return the releases of the package index from the first one on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = re.search(r"Available versions: (.*)", done.stdout)
    assert listed is not None, done.stdout
    names = [
        name for name in listed[1].split(", ") if _key(name)[: len(FIRST[engine])] >= FIRST[engine]
    ]
    return sorted(names, key=_key)


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def tried(engine: str, folder: Path) -> list[dict[str, Any]]:
    """Import a release in a child of this process; return the verdict of each level."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        sys.path.insert(0, str(folder))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        os.write(writer, json.dumps([verdict(engine, level) for level in LEVELS[engine]]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    if said:
        verdicts: list[dict[str, Any]] = json.loads(said)
        return verdicts
    line = "the process ended without a word"
    return [{"level": level, "differences": [line], "seconds": 0} for level in LEVELS[engine]]


def verdict(engine: str, level: str) -> dict[str, Any]:
    """Return in what the engine of this process differs from what a level needs, as at its load."""
    start = time.thread_time()
    try:
        check = importlib.import_module(CHECKS[engine])
        start = time.thread_time()
        lines = check.differences(level)
    except Exception as error:  # as `switch_on` does
        lines = [" ".join(f"{type(error).__name__}: {error}".split())]
    return {"level": level, "differences": lines, "seconds": time.thread_time() - start}


def register_twice() -> None:
    """Let an old release register models that Transformers has had itself since then."""
    from transformers import AutoConfig

    original = AutoConfig.register
    AutoConfig.register = staticmethod(
        lambda *args, **named: original(*args, **named | {"exist_ok": True})
    )


def all_of(engine: str, jobs: int) -> list[dict[str, Any]]:
    """Try all releases of an engine in children of this process, which imports what they share."""
    for name in SHARED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    register_twice()
    results = []
    listed = versions(engine)
    names = [f"{engine}-{version}" for version in listed]
    fetch(names)
    folders = [release_path(name) for name in names]
    workers = multiprocessing.get_context("fork").Pool(jobs)
    verdicts = workers.imap(functools.partial(tried, engine), folders, chunksize=1)
    for version, levels in zip(listed, verdicts, strict=True):
        for said in levels:
            lines = said["differences"]
            result = {"name": f"{engine} {version}: {said['level']}", "differences": lines}
            results.append(result | {"value": said["seconds"], "unit": "s"})
            print(
                f"{result['name']}: {lines[0] if lines else 'accepted'}",
                file=sys.stderr,
                flush=True,
            )
    return results


def main() -> None:
    """Try all releases, print a line for each verdict, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(LEVELS), help="print its verdicts as JSON alone")
    parser.add_argument("--jobs", type=int, default=1, help="releases of an engine at a time")
    asked = parser.parse_args()
    if asked.engine:
        print(json.dumps(all_of(asked.engine, asked.jobs)))
        return
    from specpool.cli.results import machine

    runs = []
    for engine in LEVELS:
        path = os.pathsep.join(map(str, [ENGINES / engine, ROOT]))
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu"}
        settings |= {"VLLM_LOGGING_LEVEL": "CRITICAL"}
        command = [sys.executable, __file__, "--engine", engine, "--jobs", str(asked.jobs)]
        runs.append(subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE))
    results = []
    for run in runs:
        said, _ = run.communicate()
        if run.returncode:
            raise SystemExit(f"{run.args} ended with {run.returncode}")
        results += json.loads(said.splitlines()[-1])
    path_of_record = ROOT / "benches" / "results" / f"{datetime.date.today()}-cpu-releases.json"
    content = {"machine": machine("cpu"), "results": results}
    path_of_record.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
