"""`read`: a request's body, from its bytes to its model, within limits that keep it short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from specpool.serve.api.errors import ApiError, bad

#: The most objects, lists and members of objects in a body. Each of them costs far more than a
#: number or a character.
MOST_NODES = 100_000
#: Mistakes that an error names.
_TOLD = 3
_MARKS = np.isin(np.arange(256), [*b"[{:"])

B = TypeVar("B", bound=BaseModel)


def read(model: type[B], content: bytes) -> B:
    """Parse and check a body; the slowest one of 8 MiB takes about a tenth of a second.

    Raises:
        ApiError: it is no JSON, has too many parts, or does not fit the model.
    """
    # Each one takes a byte at least.
    if len(content) > MOST_NODES and (num := num_nodes(content)) > MOST_NODES:
        raise ApiError(
            413,
            f"the body has {num} objects, lists and members; at most {MOST_NODES} are read",
            code="request_too_large",
        )
    try:
        value = from_json(content)
    except ValueError as error:
        raise bad(f"the body is no JSON: {error!s:.200}", code="invalid_request") from None
    if not isinstance(value, dict):
        raise bad("the body must be a JSON object", code="invalid_request")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=False, include_input=False)
        raise misfit(mistakes, value) from None


def num_nodes(content: bytes) -> int:
    """Return how many objects, lists and members of objects a JSON text has.

    NumPy counts without the interpreter's lock, so the event loop goes on meanwhile.
    """
    plain = content.replace(rb"\\", b"").replace(rb"\"", b"")  # no quote is escaped now
    text = np.frombuffer(plain, np.uint8)
    is_quoted = np.bitwise_xor.accumulate(text == ord('"'))
    return int(np.count_nonzero(_MARKS[text] & ~is_quoted))


def misfit(mistakes: Sequence[Any], value: Any) -> ApiError:
    """Return the error for a body that does not fit its model, without the values in it.

    Args:
        mistakes: what pydantic found.
        value: the body.
    """
    named = [(_field_of(mistake, value), mistake["msg"][:200]) for mistake in mistakes[:_TOLD]]
    messages = dict.fromkeys(f"{field}: {text}".removeprefix(": ") for field, text in named)
    param = next((field for field, _ in named if field), None)
    return bad("; ".join(messages), param, "invalid_request")


def _field_of(mistake: Any, value: Any) -> str:
    """Return a mistake's field as OpenAI writes it, such as `messages[0].content`.

    pydantic's locations also name its own alternatives; parts that are not in the body are left
    out.
    """
    field, parts = "", list(mistake["loc"])
    for number, part in enumerate(parts):
        is_missing = mistake["type"] == "missing" and number == len(parts) - 1
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            field, value = f"{field}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or is_missing):
            field, value = f"{field}.{part}", value.get(part)
    return field.removeprefix(".")[:200]
