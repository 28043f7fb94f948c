"""`python -m lab engines`: hunts faults in a release of an engine, or replays a written case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from lab.engines.case import Case
from lab.engines.device import Finding
from lab.engines.releases import ROOT, release_path
from lab.engines.report import write_report
from specpool.errors import ConfigError

#: Where `make engines` has the packages that the releases import.
PACKAGES = ROOT / ".engines"


def tell(
    release: str, job: dict[str, Any], module: str = "lab.engines.server"
) -> Iterator[dict[str, Any]]:
    """Run a job in a process that has the release on its path; yield what it tells.

    Args:
        release: such as vllm-0.33.0.
        job: what `module` is to do.
        module: what runs, with the release and the job as its arguments.
    """
    engine, _, version = release.partition("-")
    with tempfile.TemporaryDirectory() as folder:
        path = [release_path(release), Path(folder), PACKAGES / engine, ROOT]
        path.append(ROOT / "tests" / "embed")  # SGLang's loop and device
        settings = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": folder,
            "HF_HUB_OFFLINE": "1",
        }
        if engine == "vllm":
            from lab.engines.vllm_home import write_home

            write_home(Path(folder), version)
        server = [sys.executable, "-m", module, release, json.dumps(job)]
        yield from printed_objects(server, Path(folder), release, settings)


def printed_objects(
    command: list[str], folder: Path, name: str, settings: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Run a command; yield the JSON objects that it prints.

    Its errors go to a file: a pipe that nobody reads would fill, and stop it.

    Raises:
        ConfigError: it fails; the end of its errors is in the message.
    """
    errors = folder / "errors"
    with (
        errors.open("w", encoding="utf-8") as written,
        subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise ConfigError(f"{name} does not run:\n{errors.read_text('utf-8')[-2000:]}")


def hunt(
    *,
    release: str,
    family: str,
    seed: int,
    seconds: float,
    cases: float,
    jobs: int,
    known: bool,
    out: Path | None,
    record: Path | None,
) -> bool:
    """Hunt, print what was found, and append a line of it to a record.

    Returns whether nothing unknown was found.
    """
    job = {
        "family": family,
        "seed": seed,
        "seconds": seconds,
        "cases": int(cases),
        "jobs": jobs,
        "known": known,
        "shrink": 120.0,
    }
    console = Console(highlight=False, soft_wrap=True)
    alarms: Counter[tuple[str, str]] = Counter()
    seeds: list[tuple[str, str, int]] = []
    for told in tell(release, job):
        if "alarm" in told:
            alarms[told["alarm"]["law"], told["alarm"]["where"]] += 1
            seeds.append((told["alarm"]["law"], told["alarm"]["where"], told["seed"]))
        elif "cases" in told:
            if record is not None:
                line = {"release": release, "family": family, "seed": seed, **told, "alarms": seeds}
                with record.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(line) + "\n")
            console.print(
                f"{release}, {family}: {told['cases']} cases in {told['cpu']:.0f} CPU s, "
                f"{alarms.total()} {'' if known else 'unknown '}alarms"
            )
            for thread, number in told["known"].items():
                console.print(f"  {number} cases meet a known fault: {thread}")
            for (law, where), number in alarms.most_common():
                console.print(f"  {number} times: {law}, at {where}")
        elif "shrunk" in told:
            case, finding = Case.of(told["shrunk"]), Finding(**told["finding"])
            console.print(f"  {finding.law}: {finding.text}")
            for verb in case.verbs:
                console.print(f"    {verb}")
            if out is not None:
                console.print(f"    in {write_report(out, release, case, finding)}")
        else:
            console.print(f"  seed {told['seed']} does not break the same law twice")
    return not alarms


def replay(*, release: str, path: Path) -> bool:
    """Replay a written case, and print what it breaks; return whether it breaks nothing."""
    found = list(tell(release, {"replay": str(path.resolve())}))
    for told in found:
        print(f"{told['alarm']['law']}, at {told['alarm']['where']}: {told['alarm']['text']}")
    if not found:
        print(f"{release} keeps every law in {path}")
    return not found
