"""`shape_of`: parses `--shape`."""

from __future__ import annotations

from specpool._core import Shape
from specpool.engine.shape_names import parse_shape


def shape_of(text: str | None) -> Shape | None:
    """Return the shape that `--shape` names; None if it was not given.

    Raises:
        ConfigError: the text has another form, or EAGLE cannot build the shape.
    """
    return None if text is None else parse_shape("--shape", text)
