"""The plug-in for vLLM: its KV blocks come from `specpool.BlockPool`. See docs/vllm.md.

vLLM loads it by the entry point `vllm.general_plugins`, in each of its processes. It does nothing
unless `SPECPOOL_VLLM` is set. Nothing here imports vLLM before vLLM calls `register`.
"""

from __future__ import annotations

import logging

from specpool.plugins.drift import ON_DRIFT
from specpool.plugins.settings import ON_FAULT, setting
from specpool.plugins.status import status_of
from specpool.plugins.switch import refusals, switch_on

_log = logging.getLogger("specpool.plugins.vllm")

LEVELS = ("off", "blocks", "speculative")

_POOL = "specpool.plugins.vllm.pool"
#: The level of the first call of this process that asked for one.
_calls: list[str] = []


def register() -> None:
    """Switch the plug-in on, as the environment asks; a second call changes nothing.

    vLLM does not catch what a plug-in raises, and each of its processes calls this. If vLLM has
    changed, or cannot be imported, its own code serves.

    Raises:
        SystemExit: a setting is unknown; or vLLM has changed and `SPECPOOL_VLLM_DRIFT` is exit.
    """
    level = setting("SPECPOOL_VLLM", LEVELS)
    on_drift = setting("SPECPOOL_VLLM_DRIFT", ON_DRIFT)
    setting("SPECPOOL_VLLM_FAULTS", ON_FAULT)
    if level == "off" or _calls:
        return
    _calls.append(level)
    from specpool.plugins.vllm import releases

    parts = (_POOL, f"{__name__}.speculative") if level == "speculative" else (_POOL,)
    if not switch_on(
        "vLLM",
        "vLLM's own block pool",
        parts,
        lambda: releases.differences(level),
        on_drift,
        _log,
    ):
        status_of("vllm").decide(level, refusals["vLLM"])
        return
    status_of("vllm").decide(level, [])
    _log.warning("specpool: vLLM's KV blocks come from specpool's pool")
    if level == "speculative":
        _log.warning("specpool: a round reserves what it can write, and keeps a proved hit")
