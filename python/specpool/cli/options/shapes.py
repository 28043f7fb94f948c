"""`--shape` on the command line."""

from __future__ import annotations

from specpool._core import Shape
from specpool.shape_names import parse_shape


def shape_of(text: str | None) -> Shape | None:
    """The shape that `--shape` names; None where it was not given.

    Raises:
        ConfigError: another form, or a shape that EAGLE cannot build.
    """
    return None if text is None else parse_shape("--shape", text)
