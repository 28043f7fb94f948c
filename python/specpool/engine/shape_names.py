"""Parse and show names of shapes: `chain:3`, `tree:5x8x32`, `none`, or a chain's depth."""

from __future__ import annotations

import re

from specpool._core import Shape
from specpool.checks import shown
from specpool.errors import ConfigError

_FORMS = re.compile(
    r"(?:chain:)?(\d{1,7})|(?:tree:)?(\d{1,7})x(\d{1,7})x(\d{1,7})|(none)", re.ASCII
)


def chain(num_steps: int) -> Shape:
    """Return a chain of `num_steps` drafts; 0 means no drafting."""
    return Shape.eagle(num_steps, 1, num_steps + 1) if num_steps else Shape.none()


def name_of(shape: Shape) -> str:
    """Return the name of a shape, such as `chain:3`, which `parse_shape` reads."""
    if not shape.num_steps:
        return "none"
    if shape == Shape(shape.num_steps, 1, shape.num_steps + 1):
        return f"chain:{shape.num_steps}"
    return f"tree:{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}"


def depth_order(shape: Shape) -> tuple[int, int, int]:
    """Return a sort key: depth first, then number of nodes, then branches."""
    return shape.num_steps, shape.num_draft_tokens, shape.topk


def width_order(shape: Shape) -> tuple[int, int, int]:
    """Return a sort key: slots that a round may write, then number of nodes, then depth."""
    num_drafts = shape.num_steps * shape.topk
    return max(shape.num_draft_tokens, num_drafts), shape.num_draft_tokens, shape.num_steps


def parse_shape(name: str, value: object) -> Shape:
    """Return the shape that a name, or a chain's depth, stands for.

    Raises:
        ConfigError: the value has another form, or EAGLE cannot build the shape; the message begins
            with `name`.
    """
    is_depth = isinstance(value, int) and not isinstance(value, bool)
    match = _FORMS.fullmatch(str(value)) if is_depth or isinstance(value, str) else None
    if match is None:
        raise ConfigError(
            f"{name}: a shape is chain:S or its depth S, tree:SxKxN or SxKxN, or none, as in "
            f'"chain:3", 3, "tree:5x8x32", got {shown(value)}'
        )
    depth, *tree = match.groups()[:4]
    try:
        if depth is not None:
            return chain(int(depth))
        return Shape.eagle(*map(int, tree)) if tree[0] is not None else Shape.none()
    except ConfigError as error:
        raise ConfigError(f"{name}: {value!r} cannot be built: {error}") from None
