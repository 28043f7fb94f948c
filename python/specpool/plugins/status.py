"""What a plug-in does in this process, in a file for `specpool doctor`.

The file is `ENGINE-PROCESS.json` in the folder that the environment variable `SPECPOOL_STATUS`
names, by default one of this user's in the folder for temporary files; `off` writes none. It is
written when the plug-in is switched on or refused, at a wrong free, and every few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import specpool
from specpool import BlockPool
from specpool.errors import SpecpoolError
from specpool.plugins.wrong_free import WrongFree

#: Seconds between two writes.
PERIOD = 5.0
#: Wrong frees of a process that get a report, and a line in the file. The others are counted.
MOST_REPORTS = 16
#: Files of processes that have ended are deleted after so many seconds.
KEPT_SECONDS = 7 * 86400

_statuses: dict[str, EngineStatus] = {}


def version_of(package: str) -> str:
    """Return the version of an installed package; an empty text if none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


class WatchedPool(Protocol):
    """A pool, and those of its blocks that are in quarantine."""

    core: BlockPool
    blocks: dict[int, str]


def status_folder() -> Path | None:
    """Return the folder of the files; None if there are to be none."""
    name = os.environ.get("SPECPOOL_STATUS")
    if name == "off":
        return None
    return Path(name) if name else Path(tempfile.gettempdir()) / f"specpool-{_user()}"


def status_of(engine: str) -> EngineStatus:
    """Return the status of an engine's plug-in in this process."""
    if engine not in _statuses:
        _statuses[engine] = EngineStatus(engine)
    return _statuses[engine]


class EngineStatus:
    """What one plug-in does in this process."""

    def __init__(self, engine: str) -> None:
        self.log = logging.getLogger(f"specpool.plugins.{engine}")
        self.left_alone: list[str] = []  # what the engine's own code does, and why
        self.gains: dict[str, Callable[[], float]] = {}  # what it counts, by its name
        self.wrong_free_ct = 0
        self._pools: WeakSet[WatchedPool] = WeakSet()
        self._frees: list[dict[str, str]] = []
        self._metrics: Any = None
        self._writer: int | None = None  # the process whose thread writes the file
        self._facts: dict[str, Any] = {"engine": engine}
        self._folder: Path | None = None  # once it is known
        self._has_failed = False

    def decide(self, level: str, refusals: list[str]) -> None:
        """Note that the plug-in is on at a level, or why it is not, and write that."""
        self._facts |= {
            "level": level,
            "version": version_of(str(self._facts["engine"])),
            "refusals": refusals,
            "since": time.time(),
            "specpool": specpool.__version__,
            "command": " ".join(sys.argv)[:80],
        }
        self.write()

    def leave_alone(self, text: str) -> None:
        """Log, once, that the engine itself does something which the plug-in could do."""
        if text not in self.left_alone:
            self.left_alone.append(text)
            self.log.warning("specpool: %s", text)

    def watch(self, pool: WatchedPool) -> None:
        """Count a pool's blocks in the file, which is written every few seconds from now on."""
        self._pools.add(pool)
        if self._metrics is None:
            self._metrics = _Metrics.of(str(self._facts["engine"]))
        if self._writer != os.getpid() and status_folder() is not None:
            self._writer = os.getpid()
            threading.Thread(target=self._write_often, name="specpool-status", daemon=True).start()
            Finalize(None, self._end, exitpriority=0)

    def note(self, wrong: WrongFree, write_report: Callable[[str, WrongFree], None]) -> None:
        """Count a wrong free, log it, and have its report written."""
        self.wrong_free_ct += 1
        report = ""
        if len(self._frees) < MOST_REPORTS:
            report = self._reported(wrong, write_report)
            named = {"owner": wrong.owner, "request": wrong.request}
            named |= {"caller": wrong.frames[0] if wrong.frames else ""}
            line = {"refusal": wrong.refusal, **named, "report": report}
            self._frees.append({"at": time.strftime("%Y-%m-%dT%H:%M:%S"), **line})
        self.log.error("specpool: %s%s", wrong.tag, f"; report {report}" if report else "")
        if self._metrics is not None:
            self._metrics.wrong_frees.inc()
            self._metrics.quarantined.set(sum(len(pool.blocks) for pool in self._pools))
        self.write()

    def _reported(self, wrong: WrongFree, write_report: Callable[[str, WrongFree], None]) -> str:
        folder = self._ready_folder()
        if folder is None:
            return ""
        engine, number = self._facts["engine"], self.wrong_free_ct
        path = folder / f"{engine}-{os.getpid()}-wrong-free-{number}.log"
        try:
            path.unlink(missing_ok=True)  # of an earlier process with this number
            write_report(str(path), wrong)
        except (OSError, SpecpoolError) as error:
            self.log.error("specpool: no report of a wrong free: %s", error)
            return ""
        return str(path)

    def write(self) -> None:
        """Write the file. What goes wrong is logged once, and nothing else happens."""
        folder = self._ready_folder()
        if folder is None:
            return
        path = folder / f"{self._facts['engine']}-{os.getpid()}.json"
        try:
            new = path.with_suffix(f".{threading.get_ident()}.new")
            new.write_text(json.dumps(self._now()), "utf-8")
            new.replace(path)
        except OSError as error:
            self._fail(error)

    def _now(self) -> dict[str, Any]:
        pools = [
            {
                "blocks": pool.core.num_blocks,
                "free": pool.core.available(),
                "quarantined": len(pool.blocks),
            }
            for pool in list(self._pools)
        ]
        return {
            **self._facts,
            "process": os.getpid(),
            "written": time.time(),
            "pools": pools,
            "gains": {name: count() for name, count in self.gains.items()},
            "wrong_frees": self.wrong_free_ct,
            "latest": self._frees,
            "left_alone": self.left_alone,
        }

    def _ready_folder(self) -> Path | None:
        """Return the folder, which is this user's alone; None if there is none to be had."""
        folder = self._folder = self._folder or status_folder()
        if folder is None or self._has_failed:
            return None
        try:
            if not folder.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            seen = folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != _user():
                raise OSError(f"{folder} is not a folder of user {_user()}")
            _forget_old(folder)
        except OSError as error:
            self._fail(error)
            return None
        return folder

    def _fail(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self.log.warning("specpool: no status for `specpool doctor`: %s", error)

    def _write_often(self) -> None:
        process = os.getpid()
        while self._writer == process:
            time.sleep(PERIOD)
            self.write()

    def _end(self) -> None:
        if self._writer == os.getpid():
            self._writer = None
            self._facts["ended"] = time.time()
            self.write()


class _Metrics:
    """The metrics, in the registry that the engine's own are in."""

    def __init__(self, engine: str, client: Any) -> None:
        self.wrong_frees = client.Counter(
            f"specpool_{engine}_wrong_frees", "Frees that the pool refused."
        )
        self.quarantined = client.Gauge(
            f"specpool_{engine}_quarantined_blocks",
            "Blocks that were freed wrongly and are kept out.",
            multiprocess_mode="livesum",
        )

    @staticmethod
    def of(engine: str) -> _Metrics | None:
        """Return them; None without Prometheus' client, or if another copy has them."""
        try:
            import prometheus_client

            return _Metrics(engine, prometheus_client)
        except (ImportError, ValueError):
            return None


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _forget_old(folder: Path) -> None:
    """Delete files that nobody has written for long."""
    oldest = time.time() - KEPT_SECONDS
    for path in folder.glob("*-*.json"):
        if path.stat().st_mtime < oldest:
            for report in folder.glob(f"{path.stem}-wrong-free-*.log"):
                report.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
