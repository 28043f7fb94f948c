"""Amounts of memory, as people write and read them: `80GiB`, `24G`, `8589934592`."""

from __future__ import annotations

import re
from fractions import Fraction

from specpool.errors import ConfigError

_PREFIXES = "KMGTP"
_MOST = 1 << 60


def parse_bytes(name: str, text: str) -> int:
    """Bytes: a number, and a unit or none; `GiB` and `Gi` are 2^30, `GB` and `G` are 10^9.

    Raises:
        ConfigError: another form, or more than 2^60.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTPkmgtp])(i?))?[Bb]?\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{name} must be bytes, such as 80GiB (2^30), 24G (10^9) or 8589934592, "
            f"got {text!r:.80}"
        )
    number, prefix, binary = match.groups()
    power = 0 if prefix is None else _PREFIXES.index(prefix.upper()) + 1
    num_bytes = int(Fraction(number) * (1024 if binary else 1000) ** power)
    if num_bytes > _MOST:
        raise ConfigError(f"{name} must be at most 2^60 bytes, got {text!r:.80}")
    return num_bytes


def show_bytes(num_bytes: int) -> str:
    """In the greatest binary unit that leaves at least 1."""
    for power, unit in reversed(list(enumerate(("B", "KiB", "MiB", "GiB", "TiB")))):
        if abs(num_bytes) >= 1024**power or power == 0:
            return f"{num_bytes / 1024**power:,.4g} {unit}"
    raise AssertionError
