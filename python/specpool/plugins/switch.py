"""`switch_on`: puts a plug-in's parts into an engine, or says why the engine's own code serves."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from specpool.errors import one_line


def switch_on(
    engine: str,
    own: str,
    names: Sequence[str],
    differences: Callable[[], list[str]],
    on_drift: str,
    log: logging.Logger,
) -> bool:
    """Install the parts of a plug-in if the engine is as known; return whether they are installed.

    An engine's import may raise anything, for example because a driver is missing. All parts are
    imported before the first one changes the engine.

    Args:
        engine: the engine's name.
        own: what of the engine serves otherwise.
        names: modules with a function `install`, in their order.
        differences: returns in what the engine differs from what is known, a line each.
        on_drift: one of `ON_DRIFT`.
        log: gets the reason.

    Raises:
        SystemExit: the engine differs and `on_drift` is "exit"; or a part failed to install, so
            that a half of the engine is changed.
    """
    try:
        found = differences()
        parts = [] if found else [importlib.import_module(name) for name in names]
    except Exception as error:
        found = [one_line(error)]
    if found:
        if on_drift == "exit":
            raise SystemExit(f"specpool: {engine} is not as known: {'; '.join(found)}")
        log.error("specpool: %s serves: %s", own, "; ".join(found))
        return False
    for part in parts:
        try:
            part.install()
        except Exception as error:
            raise SystemExit(
                f"specpool: {part.__name__} cannot be installed: {one_line(error)}; a part of "
                f"{engine} is replaced already"
            ) from None
    return True
