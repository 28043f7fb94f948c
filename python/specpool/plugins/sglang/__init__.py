"""The plug-in for SGLang: its KV pages come from `specpool.BlockPool`. See docs/sglang.md.

SGLang loads it by the entry point `sglang.srt.plugins`. It does nothing unless `SPECPOOL_SGLANG` is
set. Nothing here imports SGLang before SGLang calls `register`.
"""

from __future__ import annotations

import logging

from specpool.plugins.settings import ON_FAULT, setting
from specpool.plugins.status import status_of
from specpool.plugins.switch import refusals, switch_on

_log = logging.getLogger("specpool.plugins.sglang")

LEVELS = ("off", "pages", "reserve", "rows")
#: What to do if SGLang does otherwise than a level needs: let its own code serve, or end the
#: process.
ON_DRIFT = ("own", "exit")


def register() -> None:
    """Switch the plug-in on, as the environment asks.

    SGLang's loader logs what a plug-in raises and goes on without it. What must not be lost ends
    the process. If SGLang has changed, or cannot be imported, its own code serves.

    Raises:
        SystemExit: a setting is unknown; or SGLang has changed and `SPECPOOL_SGLANG_DRIFT` is exit.
    """
    level = setting("SPECPOOL_SGLANG", LEVELS)
    if level == "off":
        return
    on_drift = setting("SPECPOOL_SGLANG_DRIFT", ON_DRIFT)
    setting("SPECPOOL_SGLANG_FAULTS", ON_FAULT)
    from specpool.plugins.sglang import drift

    parts = {"rows": ("rows",), "pages": ("allocator", "history")}
    parts["reserve"] = (*parts["pages"], "reserve")
    if not switch_on(
        "SGLang",
        "SGLang's own allocator",
        [f"{__name__}.{part}" for part in parts[level]],
        lambda: drift.differences(level),
        on_drift,
        _log,
    ):
        status_of("sglang").decide(level, refusals["SGLang"])
        return
    status_of("sglang").decide(level, [])
    if level == "rows":
        _log.warning("specpool: SGLang's rows and KV pages are those of specpool's ledger")
    else:
        _log.warning("specpool: SGLang's KV pages come from specpool's pool")
    if level == "reserve":
        _log.warning("specpool: a round of EAGLE reserves what it can write")
