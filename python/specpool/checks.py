"""Checks of single values, for all folders of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from specpool.errors import ConfigError

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from _typeshed import DataclassInstance


def shown(value: object) -> str:
    """Return a value as errors show it: its first 80 characters."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not write an integer of more than 4300 digits
        return f"a {type(value).__name__} that is too long to show"


def split_url(name: str, text: str) -> SplitResult:
    """Return the parts of a URL; raise `ConfigError` if it or its port is not valid."""
    from urllib.parse import urlsplit

    try:
        url = urlsplit(text)
        _ = url.port  # it is parsed now
    except ValueError as error:
        raise ConfigError(f"{name}: {shown(text)} is no address: {error}") from None
    return url


def check_int(name: str, value: object, minimum: int, maximum: int) -> None:
    """Raise `ConfigError` unless `value` is an int in `[minimum, maximum]`."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ConfigError(
            f"{name} must be an integer in [{minimum}, {maximum}], got {shown(value)}"
        )


def check_number(name: str, value: object, minimum: float, maximum: float) -> None:
    """Raise `ConfigError` unless `value` is an int or float in `[minimum, maximum]`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum:  # type: ignore[operator]  # NaN fails
        raise ConfigError(
            f"{name} must be a number in [{minimum:g}, {maximum:g}], got {shown(value)}"
        )


def check_bool(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def did_you_mean(value: object, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `: did you mean 'x'?` with the choice most like `value`, or "" if none is like it."""
    close = (
        difflib.get_close_matches(value, [*choices], 1, cutoff) if isinstance(value, str) else ()
    )
    return f": did you mean {close[0]!r}?" if close else ""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(choices)}, got {shown(value)}"
            f"{did_you_mean(value, choices)}"
        )


def check_fields(kind: type[DataclassInstance], names: Iterable[str]) -> None:
    """Raise `ConfigError` unless these are names of the dataclass's fields."""
    known = [field.name for field in fields(kind)]
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known) or ";"
            raise ConfigError(
                f"{kind.__name__} has no field {name!r}{meant} the fields are {', '.join(known)}"
            )


#: The most bytes of a cache salt, in UTF-8.
MAX_SALT_BYTES = 256


def check_salt(salt: object) -> None:
    """Raise `ConfigError` unless `salt` is a string of at most `MAX_SALT_BYTES` bytes."""
    if not isinstance(salt, str):
        raise ConfigError(f"cache_salt must be a string, got {shown(salt)}")
    try:
        num_bytes = len(salt.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"cache_salt must be valid text, got a lone surrogate at position {error.start} of "
            f"{salt!r:.80}"
        ) from None
    if num_bytes > MAX_SALT_BYTES:
        raise ConfigError(f"cache_salt must be at most {MAX_SALT_BYTES} bytes, got {num_bytes}")
