"""The place of this process among the ranks that a launcher started. It imports no torch."""

from __future__ import annotations

import os

from specpool.errors import ConfigError

#: The environment's variable with a secret that all ranks of a group must have.
KEY_VARIABLE = "SPECPOOL_RANKS_KEY"
#: The environment's variable with the seconds that a rank waits for the others in a collective.
TIMEOUT_VARIABLE = "SPECPOOL_RANKS_TIMEOUT"
_TIMEOUT = 120
_MOST_RANKS = 1 << 10


def world_of_environment() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a launcher.

    Raises:
        ConfigError: the environment's RANK and WORLD_SIZE are not such numbers, or it does not say
            where the ranks meet.
    """
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    fits = all(text.isascii() and text.isdigit() and len(text) < 6 for text in (rank, world))
    if not fits or not int(rank) < int(world) <= _MOST_RANKS:
        raise ConfigError(
            f"RANK must be below WORLD_SIZE, at most {_MOST_RANKS}, got {rank!r:.40} and "
            f"{world!r:.40}"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(world) > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world}, but {' and '.join(missing)} are not set")
    timeout_of_environment()
    return int(rank), int(world)


def timeout_of_environment() -> int:
    """Return the seconds that a rank waits for the others.

    Raises:
        ConfigError: the variable has no such number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(_TIMEOUT))
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= 86400):
        raise ConfigError(f"{TIMEOUT_VARIABLE} must be seconds in [1, 86400], got {text!r:.40}")
    return int(text)


def local_world(world: int) -> int:
    """Return how many of the ranks are on this machine, as far as the launcher says it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(text), world) if text.isascii() and text.isdigit() and int(text) else world
