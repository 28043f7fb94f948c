"""Parse and show amounts of memory, such as `80GiB`, `24G` or `8589934592`."""

from __future__ import annotations

import re
from fractions import Fraction

from specpool.checks import shown
from specpool.errors import ConfigError

_PREFIXES = "KMGTP"
_MOST = 1 << 60


def parse_bytes(name: str, text: str) -> int:
    """Return the bytes of a number with an optional unit: `GiB`, `Gi` = 2^30; `GB`, `G` = 10^9.

    Raises:
        ConfigError: the text has another form, or is above 2^60; the message begins with `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTPkmgtp])(i?))?[Bb]?\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{name} must be bytes, such as 80GiB (2^30), 24G (10^9) or 8589934592, "
            f"got {shown(text)}"
        )
    number, prefix, binary = match.groups()
    power = 0 if prefix is None else _PREFIXES.index(prefix.upper()) + 1
    num_bytes = int(Fraction(number) * (1024 if binary else 1000) ** power)
    if num_bytes > _MOST:
        raise ConfigError(f"{name} must be at most 2^60 bytes, got {shown(text)}")
    return num_bytes


def show_bytes(num_bytes: int) -> str:
    """Format bytes in the greatest binary unit that gives at least 1, such as `1.5 GiB`."""
    for power, unit in reversed(list(enumerate(("B", "KiB", "MiB", "GiB", "TiB")))):
        if abs(num_bytes) >= 1024**power or power == 0:
            return f"{num_bytes / 1024**power:,.4g} {unit}"
    raise AssertionError
