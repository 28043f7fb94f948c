"""`switch_on`: puts a plug-in's parts into an engine, or says why the engine's own code serves."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from specpool.errors import one_line
from specpool.plugins import notice

#: For each engine why its own code serves, a line each.
refusals: dict[str, list[str]] = {}


def switch_on(
    engine: str,
    fallback: str,
    names: Sequence[str],
    differences: Callable[[], list[str]],
    on_drift: str,
    log: logging.Logger,
) -> bool:
    """Install a plug-in's parts if the engine is as they need it; return whether that was done.

    An engine's import may raise anything, for example because a driver is missing. All parts are
    imported before the first one changes the engine.

    Args:
        engine: the engine's name.
        fallback: the part of the engine that serves otherwise.
        names: modules with a function `install`, in their order.
        differences: returns how the engine differs from what the parts need, a line each.
        on_drift: one of `ON_DRIFT`.
        log: gets the reason.

    Raises:
        SystemExit: the engine differs and `on_drift` is "exit"; or a part failed to install after
            others had changed the engine.
    """
    try:
        reasons = differences()
        parts = [] if reasons else [importlib.import_module(name) for name in names]
    except Exception as error:
        reasons = [one_line(error)]
    if reasons:
        if on_drift == "exit":
            raise SystemExit(f"specpool: {engine} is not as known: {'; '.join(reasons)}")
        refusals[engine] = reasons
        notice.own_code_serves(engine, f"specpool: {fallback} serves: {'; '.join(reasons)}", log)
        return False
    for part in parts:
        try:
            part.install()
        except Exception as error:
            raise SystemExit(
                f"specpool: {part.__name__} cannot be installed: {one_line(error)}; a part of "
                f"{engine} is replaced already"
            ) from None
    notice.ours_serves(engine)
    return True
