"""`specpool doctor`: whether a plug-in serves in an engine here, and what it has done so far."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from specpool.checks import check_choice
from specpool.errors import ConfigError
from specpool.plugins.status import status_folder, version_of
from specpool.record.terminal import printable

#: The engines by their packages: the name, the group of entry points, the environment variable.
ENGINES = {
    "vllm": ("vLLM", "vllm.general_plugins", "SPECPOOL_VLLM"),
    "sglang": ("SGLang", "sglang.srt.plugins", "SPECPOOL_SGLANG"),
}
#: Seconds for an engine's import and the look at its code.
TRY_SECONDS = 300


def doctor(engine: str, *, level: str | None, json: bool) -> bool:
    """Print what is known; return whether the plug-in is on, and no free was wrong.

    Args:
        engine: of `ENGINES`.
        level: try this level in a process of its own, instead of looking at those that run.
        json: print JSON.

    Raises:
        ConfigError: the engine or the level is unknown; there is neither the engine nor a process.
    """
    check_choice("engine", engine, tuple(ENGINES))
    name, group, variable = ENGINES[engine]
    if level is not None:
        check_choice("level", level, _levels(engine))
    is_here = importlib.util.find_spec(engine) is not None
    if level is not None and not is_here:
        raise ConfigError(f"{name} is not installed here: there is nothing to try")
    statuses = [_tried(engine, level)] if level else _read(status_folder(), engine)
    if not is_here and not statuses:
        raise ConfigError(f"{name} is not installed here, and no process of it has the plug-in")
    here = {
        "engine": name,
        "version": version_of(engine) or ("unknown" if is_here else "not installed here"),
        "entry point": _entry_point(group),
        "setting": f"{variable}={os.environ.get(variable) or 'off'}",
    }
    if json:
        print(json_module.dumps({"here": here, "processes": statuses}))
    else:
        lines = [f"{key}: {value}" for key, value in here.items()]
        for status in statuses:
            lines += ["", *_told(status)]
        if not statuses:
            lines += ["", f"no process of {name} has the plug-in: set {variable} and start it"]
        print("\n".join(map(printable, lines)))
    return bool(statuses) and all(
        not status["refusals"] and not status["wrong_frees"] for status in statuses
    )


def _levels(engine: str) -> tuple[str, ...]:
    from specpool.plugins import sglang, vllm

    return {"vllm": vllm.LEVELS, "sglang": sglang.LEVELS}[engine][1:]


def _entry_point(group: str) -> str:
    entries = [entry for entry in metadata.entry_points(group=group) if entry.name == "specpool"]
    return f"{group}: {entries[0].value}" if entries else f"none in {group}: install specpool here"


def _read(folder: Path | None, engine: str) -> list[dict[str, Any]]:
    """Return the status of each process, the latest first. A broken file is left out."""
    statuses = []
    for path in [] if folder is None else folder.glob(f"{engine}-*.json"):
        try:
            status = json_module.loads(path.read_text("utf-8"))
            status["runs"] = "ended" not in status and _runs(int(status["process"]))
            _told(status)  # whether it has all fields
        except (OSError, ValueError, KeyError, TypeError):
            print(f"{printable(str(path))} cannot be read", file=sys.stderr)
            continue
        statuses.append(status)
    return sorted(statuses, key=lambda status: -status["written"])


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _tried(engine: str, level: str) -> dict[str, Any]:
    """Return the status of a process that does nothing but load the plug-in at a level."""
    name, _, variable = ENGINES[engine]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"import specpool.plugins.{engine} as p; p.register()"],
            env={**os.environ, variable: level, "SPECPOOL_STATUS": folder},
            capture_output=True,
            text=True,
            timeout=TRY_SECONDS,
            check=False,
        )
        statuses = _read(Path(folder), engine)
    if not statuses:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"{name} with {variable}={level} ended with {done.returncode}: {last}")
    return statuses[0] | {"tried": True}


def _told(status: dict[str, Any]) -> list[str]:
    """Return what a status says, a line each."""
    refusals = status["refusals"]
    state = "the engine's own code serves" if refusals else f"on at level {status['level']}"
    if not status.get("tried"):
        end = "runs" if status["runs"] else "has ended"
        state += f" since {_time(status['since'])}; {end}, last word {_time(status['written'])}"
    lines = [f"process {status['process']} ({status['command']}): {state}"]
    lines.append(f"  {status['engine']} {status['version'] or '?'}, specpool {status['specpool']}")
    lines += [f"  refused: {line}" for line in refusals]
    for pool in status["pools"]:
        counts = f"{pool['blocks']} blocks, {pool['free']} free, {pool['quarantined']} quarantined"
        lines.append(f"  pool: {counts}")
    lines += [f"  {name}: {count:g}" for name, count in status["gains"].items()]
    lines.append(f"  wrong frees: {status['wrong_frees']}")
    for free in status["latest"]:
        names = {"owner": free["owner"], "by": free["request"], "called from": free["caller"]}
        known = "".join(f", {key} {value}" for key, value in names.items() if value)
        report = f"; specpool inspect {free['report']}" if free["report"] else ""
        lines.append(f"    {free['at']} {free['refusal']}{known}{report}")
    lines += [f"  left to the engine: {text}" for text in status["left_alone"]]
    return lines


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
