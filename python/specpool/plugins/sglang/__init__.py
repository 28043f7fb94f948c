"""The plug-in for SGLang: its KV pages come from `specpool.BlockPool`. See docs/sglang.md.

SGLang loads it by the entry point `sglang.srt.plugins`. It does nothing unless `SPECPOOL_SGLANG` is
set. Nothing here imports SGLang before SGLang calls `register`.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger("specpool.plugins.sglang")

LEVELS = ("off", "pages", "reserve", "rows")
ON_DRIFT = ("own", "exit", "trust")


def register() -> None:
    """Switch the plug-in on, as the environment asks.

    SGLang's loader logs what a plug-in raises and goes on without it. What must not be lost ends
    the process.

    Raises:
        SystemExit: a setting is unknown; or SGLang has changed and `SPECPOOL_SGLANG_DRIFT` is exit.
    """
    level = _setting("SPECPOOL_SGLANG", LEVELS)
    if level == "off":
        return
    on_drift = _setting("SPECPOOL_SGLANG_DRIFT", ON_DRIFT)
    from specpool.plugins.sglang import drift

    found = drift.differences(level, bodies=on_drift != "trust")
    if not found:
        if level == "rows":
            from specpool.plugins.sglang import rows

            rows.install()
            _log.warning("specpool: SGLang's rows and KV pages are those of specpool's ledger")
            return
        from specpool.plugins.sglang import allocator, history

        allocator.install()
        history.install()
        _log.warning("specpool: SGLang's KV pages come from specpool's pool")
        if level == "reserve":
            from specpool.plugins.sglang import reserve

            reserve.install()
            _log.warning("specpool: a round of EAGLE reserves what it can write")
    elif on_drift == "exit":
        raise SystemExit(f"specpool: SGLang is not as known: {'; '.join(found)}")
    else:
        _log.error("specpool: SGLang's own allocator serves: %s", "; ".join(found))


def _setting(name: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise SystemExit(f"specpool: {name}={value!r} is not one of {', '.join(allowed)}")
    return value
