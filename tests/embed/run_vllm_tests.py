"""Run vLLM's own tests of its core, with its block pool and with ours; print and record both.

    PYTHONPATH=. .venv/bin/python tests/embed/run_vllm_tests.py .engines/vllm/source [LEVEL]

A run at level `speculative` of which each difference has its reason is recorded in
`benches/results`; `tests/kits/figure_tables.py --write` then writes it into docs/vllm.md.
The argument is a checkout of vLLM, or its source as `make engines` unpacks it. vLLM is told that it
was built for a CPU, and finds the configuration of one small model. Tests that need a GPU, another
model or the network fail with both. Each run takes minutes.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from lab.engines.releases import ROOT
from lab.engines.vllm_home import MODEL, write_home
from specpool.cli.results import machine

ENGINE = ROOT / ".engines" / "vllm"
LEVELS = ("blocks", "speculative")
#: Why a test cannot pass here, by its name or the error that it gives: see docs/vllm.md.
BY_NATURE = {
    "fake_free_list": "it reads the links of vLLM's own list",
    "they are of no pool": "it frees blocks of no pool, which is refused here",
    "it is not of this pool": "it caches blocks of no pool, which is refused here",
    "test_eagle_identical_prompt_hit": "its hit is a block longer here",
    "nobody holds it and it is not cached": "its hit is a block that holds nothing",
}
#: The first start takes minutes where nothing is in the caches: it is none of a test's time.
WARM = f"from vllm.config import ModelConfig; ModelConfig(model={MODEL!r})"
#: Written beside the run: a plug-in of pytest that switches ours on before any test is imported.
SWITCH = """
from specpool.plugins.vllm import pool, speculative
pool.install()
if {level!r} == "speculative":
    speculative.install()
"""


def outcomes(checkout: Path, level: str | None, folder: Path) -> dict[str, str]:
    """Run the tests; return "passed", "skipped" or the first line of the error of each."""
    folder = folder / str(level)
    folder.mkdir()
    write_home(folder, "0.33.0")
    report = folder / f"{level}.xml"
    (folder / "specpool_switch.py").write_text(SWITCH.format(level=level), "utf-8")
    path = os.pathsep.join(map(str, [ENGINE, folder, checkout]))
    switch = ["-p", "specpool_switch"] if level else []
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SPECPOOL_VLLM_FAULTS": "raise"}
    settings |= {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    options = ["-c", os.devnull, "--rootdir", str(checkout), "--noconftest", "-q", "--tb=line"]
    options += ["-p", "no:cacheprovider", "--continue-on-collection-errors", "--timeout", "120"]
    tests = ["-m", "pytest", *options, *switch, f"--junitxml={report}", "tests/v1/core"]
    for arguments in (["-c", WARM], tests):
        subprocess.run(
            [sys.executable, *arguments],
            cwd=checkout,
            env=os.environ | settings,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if fault is not None:
            lines = (fault.get("message") or fault.text or "failed").strip().splitlines()
            found[name] = lines[0] if lines else "failed"
        else:
            found[name] = "passed" if case.find("skipped") is None else "skipped"
    return found


def main(checkout: str, level: str = "speculative") -> int:
    """Print a line for each file, then each difference; return 1 if one has another reason."""
    if level not in LEVELS:
        raise SystemExit(f"the level must be one of {', '.join(LEVELS)}, got {level}")
    with tempfile.TemporaryDirectory() as folder:
        own = outcomes(Path(checkout).resolve(), None, Path(folder))
        ours = outcomes(Path(checkout).resolve(), level, Path(folder))
    files = sorted({name.partition("::")[0] for name in own | ours})
    print(f"{'file':42} {'own':>6} {'ours':>6} {'failed with both':>17}")
    for file in files:
        names = [name for name in own | ours if name.startswith(file + "::")]
        passed = [sum(found.get(name) == "passed" for name in names) for found in (own, ours)]
        both = sum(is_failed(own.get(name)) and is_failed(ours.get(name)) for name in names)
        print(f"{file:42} {passed[0]:6} {passed[1]:6} {both:17}")
    passed = [sum(value == "passed" for value in found.values()) for found in (own, ours)]
    print(f"{'all':42} {passed[0]:6} {passed[1]:6}")
    unexplained, reasons = 0, Counter[str]()
    for name in sorted(own | ours):
        if (own.get(name) == "passed") == (ours.get(name) == "passed"):
            continue
        said = f"{name} {ours.get(name)}"
        why = next((why for part, why in BY_NATURE.items() if part in said), None)
        print(f"{name}: {why or f'own: {own.get(name)}; ours: {ours.get(name)}'}")
        reasons[why or ""] += own.get(name) == "passed"
        unexplained += why is None and own.get(name) == "passed"
    if level == "speculative" and not unexplained:
        result = {"name": "tests/v1/core", "value": passed[1], "reference_value": passed[0]}
        path = ROOT / "benches" / "results" / f"{datetime.date.today()}-cpu-vllm-tests.json"
        content = {"machine": machine("cpu"), "results": [result | {"reasons": reasons}]}
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"{unexplained} tests pass with vLLM's own pool alone, and nobody knows why")
    return int(unexplained > 0)


def is_failed(outcome: str | None) -> bool:
    """Return whether a test failed or could not be collected."""
    return outcome not in ("passed", "skipped")


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
