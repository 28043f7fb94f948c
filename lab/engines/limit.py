"""`within_limit`: runs a case for at most `CASE_SECONDS` of its process's CPU time."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lab.engines.case import Case
from lab.engines.device import Finding

#: CPU seconds after which a case hangs; a process that is stopped or waits for a core uses none.
CASE_SECONDS = 30.0


class HangError(BaseException):
    """A case took longer than `CASE_SECONDS`: no loop takes it for an engine's exception."""


def _stop(*_: Any) -> None:
    raise HangError


def within_limit(run: Callable[[Case], list[Finding]], case: Case) -> list[Finding]:
    """Run a case; return what it broke, or that it hangs.

    The time of a fork of this process is not counted: a fork needs a limit of its own.
    """
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
    try:
        return run(case)
    except HangError:
        return [Finding("progress", "hang", f"the case runs for {CASE_SECONDS:g} CPU s")]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
