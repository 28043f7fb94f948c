"""Says which code serves an engine: in its metrics, and each hour in its log if it is not ours."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import Any

#: Seconds between two lines of the log.
PERIOD_SECONDS = 3600.0
METRIC = "specpool_plugin_serves"


def ours_serves(engine: str) -> None:
    """Set the metric of this process to 1."""
    _set(engine, 1)


def own_code_serves(engine: str, line: str, log: logging.Logger) -> None:
    """Log a line now and each hour, as long as the process lives, and set the metric to 0.

    Args:
        engine: the engine's name.
        line: what serves, and why.
        log: gets the line as an error.
    """
    log.error("%s", line)
    _set(engine, 0)
    threading.Thread(target=_repeat, args=(line, log), name="specpool notice", daemon=True).start()


def _repeat(line: str, log: logging.Logger) -> None:
    pause = threading.Event()
    while not pause.wait(PERIOD_SECONDS):
        log.error("%s", line)


def _set(engine: str, value: int) -> None:
    gauge = _gauge()
    if gauge is not None:
        gauge.labels(engine=engine).set(value)


@cache
def _gauge() -> Any:
    """Return the gauge in the registry that the engines' servers publish.

    It is None without Prometheus, or if something else has the name there. Of several processes the
    least value is published: one that runs without the plug-in is seen.
    """
    text = "1 if the plug-in's memory serves in this process, 0 if the engine's own does"
    try:
        from prometheus_client import Gauge

        return Gauge(METRIC, text, ["engine"], multiprocess_mode="min")
    except (ImportError, ValueError):
        return None
