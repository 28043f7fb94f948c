"""`python -m lab.engines.server`: hunts in one release, in a process that has imported it once.

`command` starts it with the release on the path, and gives it a job as JSON. Each worker is a fork
and runs its cases one after another; what breaks a law is sent back, sorted, and made smaller.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.engines import shim
from lab.engines.case import Case
from lab.engines.device import SETUP, Finding
from lab.engines.known import KnownFault, known_fault, ordered
from lab.engines.limit import within_limit
from lab.engines.shrink import shrunk


@dataclasses.dataclass(frozen=True)
class Engine:
    """What runs the cases of one engine."""

    generate: Callable[[int, str], Case]
    run: Callable[[Case], list[Finding]]
    plain: dict[str, Any]  # settings that a reader expects
    families: tuple[str, ...]


def load(engine: str) -> Engine:
    """Import an engine, and return what runs its cases."""
    logging.disable(logging.CRITICAL)
    shim.install()
    if engine == "vllm":
        from lab.engines.vllm_cases import FAMILIES, PLAIN, vllm_case
        from lab.engines.vllm_loop import run_vllm

        return Engine(vllm_case, run_vllm, PLAIN, FAMILIES)
    if engine == "sglang":
        from lab.engines import sglang_cases as cases

        if importlib.util.find_spec("sglang.srt.mem_cache.chunk_cache"):  # until 0.5.21
            from lab.engines.sglang_past import run_sglang as run_past

            return Engine(cases.past_case, run_past, cases.PLAIN, cases.PAST_FAMILIES)
        from lab.engines.sglang_loop import run_sglang

        return Engine(cases.newest_case, run_sglang, cases.PLAIN, cases.FAMILIES)
    raise ValueError(f"engine must be vllm or sglang, got {engine!r}")


def guarded(release: str, run: Callable[[Case], list[Finding]]) -> Callable[[Case], list[Finding]]:
    """Return `run` with a finding where a case hangs, and the finding that counts in front."""

    def run_within(case: Case) -> list[Finding]:
        return ordered(release, case, within_limit(run, case))

    return run_within


def hunt(release: str, job: dict[str, Any], engine: Engine) -> Iterator[dict[str, Any]]:
    """Run seeds for some CPU seconds in each process; yield each alarm, then the counts.

    Raises:
        SystemExit: there is no such family, or not in this release.
    """
    if job["family"] not in engine.families:
        families = ", ".join(engine.families)
        raise SystemExit(f"family must be one of {families}, got {job['family']!r}")
    run, jobs = guarded(release, engine.run), job["jobs"]
    pipes = []
    for worker in range(jobs):
        here, there = os.pipe()
        if not os.fork():
            os.close(here)
            with open(there, "w", encoding="utf-8") as out:
                _work(release, job, engine, run, range(worker, 1 << 40, jobs), out)
            os._exit(0)
        os.close(there)
        pipes.append(open(here, encoding="utf-8"))
    counts: dict[str, Any] = {"cases": 0, "cpu": 0.0, "known": {}}
    refusals: list[str] = []
    for pipe in pipes:
        with pipe:
            for told in map(json.loads, pipe):
                if "alarm" in told:
                    yield told
                elif "refused" in told:
                    refusals.append(told["refused"])
                else:
                    counts["cases"] += told["cases"]
                    counts["cpu"] += told["cpu"]
                    for name, number in told["known"].items():
                        counts["known"][name] = counts["known"].get(name, 0) + number
    for _ in pipes:
        os.wait()
    if refusals:
        raise SystemExit(f"family {job['family']!r} does not run in {release}: {refusals[0]}")
    yield counts


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its forks that have ended."""
    return sum(os.times()[:4])


def _work(
    release: str,
    job: dict[str, Any],
    engine: Engine,
    run: Callable[[Case], list[Finding]],
    seeds: range,
    out: Any,
) -> None:
    start, cases, known = _cpu_seconds(), 0, dict[str, int]()
    for at in seeds:
        if _cpu_seconds() - start > job["seconds"] or at >= job["cases"]:
            break
        case = engine.generate(job["seed"] + at, job["family"])
        findings = run(case)
        cases += 1
        if not findings:
            continue
        if findings[0].law == SETUP:
            print(json.dumps({"refused": findings[0].text}), file=out, flush=True)
            return
        fault: KnownFault | None = known_fault(release, case, findings[0])
        if fault is not None and not job["known"]:
            known[fault.thread] = known.get(fault.thread, 0) + 1
        else:
            told = {"alarm": dataclasses.asdict(findings[0]), "seed": case.seed}
            print(json.dumps(told), file=out, flush=True)
    cpu = _cpu_seconds() - start
    print(json.dumps({"cases": cases, "cpu": cpu, "known": known}), file=out, flush=True)


def main() -> None:
    """Take a job from the command line, and print what comes of it, one JSON object a line."""
    release, job = sys.argv[1], json.loads(sys.argv[2])
    engine = load(release.partition("-")[0])
    if "replay" in job:
        case = Case.read(Path(job["replay"]))
        for finding in guarded(release, engine.run)(case):
            print(json.dumps({"alarm": dataclasses.asdict(finding), "seed": case.seed}))
        return
    first: dict[tuple[str, str], int] = {}
    for told in hunt(release, job, engine):
        if "alarm" in told:
            first.setdefault((told["alarm"]["law"], told["alarm"]["where"]), told["seed"])
        print(json.dumps(told), flush=True)
    for (law, where), seed in sorted(first.items()):
        case, run = engine.generate(seed, job["family"]), guarded(release, engine.run)
        findings = run(case)
        if not findings or (findings[0].law, findings[0].where) != (law, where):
            print(json.dumps({"unsteady": [law, where], "seed": seed}), flush=True)
            continue
        fault_of = functools.partial(known_fault, release)
        small, finding = shrunk(case, findings[0], run, fault_of, engine.plain, job["shrink"])
        told = {"shrunk": dataclasses.asdict(small), "finding": dataclasses.asdict(finding)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
