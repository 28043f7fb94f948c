"""`RequestState`: a request as plain values, for another rank or another engine to run it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from specpool._core import Shape
from specpool.engine.sampling_params import SamplingParams

Natural = Annotated[int, msgspec.Meta(ge=0)]
#: Steps, top-k and draft tokens of a shape.
ShapeSizes = tuple[Natural, Natural, Natural]


class RequestState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every receiver of a request needs; subclasses add what only theirs needs.

    Attributes:
        params: sampling and stop options.
        prompt_len: tokens of the prompt.
        seed: of its draws.
        priority: the greater comes first.
        shape: the shape that it drafts with; None if a policy chooses the shape.
    """

    params: SamplingParams
    prompt_len: Annotated[int, msgspec.Meta(ge=1)]
    seed: Natural
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31))]
    shape: ShapeSizes | None


def sizes_of(shape: Shape) -> ShapeSizes:
    """Return the sizes that name a shape."""
    return shape.num_steps, shape.topk, shape.num_draft_tokens


def checked(values: Any, kind: Any) -> Any:
    """Return plain values as an object of a type, or of one of a union of tagged structs.

    Raises:
        ValueError: a value is missing, unknown, of another type or out of range. The message has
            its path.
    """
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from None
