"""Checks of single values, for all folders of the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

from specpool.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_int(name: str, value: object, least: int, most: int) -> None:
    """Raise `ConfigError` unless `value` is an int in `[least, most]`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} must be an integer in [{least}, {most}], got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_fields(kind: type[DataclassInstance], given: Iterable[str]) -> None:
    """Raise `ConfigError` unless these are names of the dataclass's fields."""
    names = [each.name for each in fields(kind)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            meant = f": did you mean {close[0]!r}?" if close else ";"
            raise ConfigError(
                f"{kind.__name__} has no field {name!r}{meant} the fields are {', '.join(names)}"
            )
