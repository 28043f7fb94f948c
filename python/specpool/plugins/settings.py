"""The settings of a plug-in: words in environment variables."""

from __future__ import annotations

import os

#: What to do with a wrong free: keep its block from everybody and go on, or raise.
ON_FAULT = ("quarantine", "raise")


def setting(name: str, allowed: tuple[str, ...]) -> str:
    """Return the value of an environment variable; the first allowed one if it is not set.

    Raises:
        SystemExit: the value is none of those allowed.
    """
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise SystemExit(f"specpool: {name}={value!r} is not one of {', '.join(allowed)}")
    return value
