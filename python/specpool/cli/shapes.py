"""Draft shapes on the command line."""

from __future__ import annotations

from specpool._core import Shape
from specpool.errors import ConfigError


def parse_shape(text: str | None) -> Shape | None:
    """`SxKxN` or a chain's depth; `none` and `0` draft nothing.

    Raises:
        ConfigError: another form, or a shape that EAGLE cannot build.
    """
    if text is None:
        return None
    if text in ("none", "0"):
        return Shape.none()
    try:
        numbers = [int(part) for part in text.split("x")]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        return Shape.eagle(numbers[0], 1, numbers[0] + 1)
    if len(numbers) == 3:
        return Shape.eagle(*numbers)
    raise ConfigError(f"a shape is SxKxN (such as 4x4x16) or a chain's depth (3), got {text!r}")
