"""`plain`, `exact`: a JSON Schema as llguidance must get it.

llguidance 1.9.1 refuses some keywords even where they forbid nothing, and takes some schemas too
widely, so that a text may not be valid. Each is written in another way here. The new schema allows
the same values, but for a few of no use.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeGuard

#: Keywords that map names of a user's choice to schemas.
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
#: Keywords that hold values, not schemas.
VALUES = {"const", "enum", "default", "examples", "required"}

#: Keywords that say something about a schema, and nothing about its values.
_NOTES = {"title", "description", "$comment", "default", "examples", "deprecated"}
#: Keywords that the library refuses, and schemas in them, without notes, that forbid nothing.
_IDLE_SCHEMAS: dict[str, list[Any]] = {
    "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedProperties": [True, {}],
    "unevaluatedItems": [True, {}],
}
#: Keywords that the library refuses, and contents that forbid nothing.
_IDLE_CONTENTS: dict[str, Any] = {
    "uniqueItems": False,
    "dependentSchemas": {},
    "dependentRequired": {},
    "dependencies": {},
}
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
#: Patterns with look-ahead, which the library refuses, and others for the same texts.
_SAME_PATTERNS = {
    # zod's e-mail address
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]" + _DOMAIN
    ),
    # pydantic's decimal number
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
}
#: The formats that JSON Schema defines.
_FORMATS = frozenset(
    "date date-time duration email hostname idn-email idn-hostname ipv4 ipv6 iri iri-reference "
    "json-pointer regex relative-json-pointer time uri uri-reference uri-template uuid".split()
)
#: The begin of a negated class in a regular expression, or an escaped character.
_NEGATED = re.compile(r"\\.|\[\^(?!\])", re.DOTALL)
#: Any name of a property but those with the character 0.
_ANY_NAME = r"^[^\x00]*$"
#: How far a number must be from an integer that it may not be, unless this is very large.
_STEP = 1e-12


def plain(text: str) -> str:
    """Return a JSON Schema without some of what the library refuses; if it has none, itself.

    These are keywords that forbid nothing, patterns of `_SAME_PATTERNS`, and, beside a pattern,
    formats that JSON Schema does not define: there the pattern says what zod's mean.
    """
    return _rewritten(text, _make_plain)


def exact(text: str, *, closes_names: bool = True) -> str:
    r"""Return a JSON Schema that allows valid texts alone; the same text if it does already.

    Args:
        text: the schema.
        closes_names: forbid a property's name that is spelled with escapes, such as `\u0061` for
            `a`. Else it is another property.
    """
    return _rewritten(text, lambda schema: _mend(schema, closes_names))


def _rewritten(text: str, change: Callable[[dict[str, Any]], bool]) -> str:
    """Change each schema in a JSON Schema; `change` returns whether it has changed anything."""
    schema = json.loads(text)
    parts, is_changed = [schema], False
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        is_changed |= change(part)
        for key, value in part.items():
            if key in MAPS and isinstance(value, dict):
                parts += value.values()
            elif key not in VALUES:
                parts.append(value)
    if not is_changed:
        return text
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):  # a number beyond all limits, or too deep for JSON
        return text


def _make_plain(schema: dict[str, Any]) -> bool:
    """Change one schema; return whether it was changed. See `plain`."""
    old = dict(schema)
    for key in [key for key, content in schema.items() if _is_idle(key, content)]:
        del schema[key]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        schema["pattern"] = _SAME_PATTERNS.get(pattern, pattern)
        if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
            del schema["format"]
    return schema != old


def _is_idle(keyword: str, content: Any) -> bool:
    if keyword in _IDLE_CONTENTS:
        idle = [_IDLE_CONTENTS[keyword]]
    else:
        idle = _IDLE_SCHEMAS.get(keyword, [])
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if key not in _NOTES}
    # 1 equals True, and is no schema.
    return any(type(content) is type(value) and content == value for value in idle)


def _mend(schema: dict[str, Any], closes_names: bool) -> bool:
    """Change one schema; return whether it was changed. See `exact`."""
    old = dict(schema)
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        schema["pattern"] = _without_zero(pattern)
    if isinstance(patterns, dict):
        schema["patternProperties"] = {_without_zero(key): patterns[key] for key in patterns}
    _close_bound(schema, "minimum", "maximum", 1)
    _close_bound(schema, "maximum", "minimum", -1)
    is_open = schema.get("additionalProperties", True) in (True, {})
    if closes_names and schema.get("properties") and is_open and not patterns:
        schema |= {"patternProperties": {_ANY_NAME: True}, "additionalProperties": False}
    return schema != old


def _without_zero(pattern: str) -> str:
    """Return a pattern whose negated classes do not have the character 0.

    A class with all control characters has the escapes of quotes and backslashes too, even if it
    excludes these.
    """
    return _NEGATED.sub(lambda found: found[0] + r"[\x00]" * (found[0][0] == "["), pattern)


def _close_bound(schema: dict[str, Any], near: str, far: str, sign: int) -> None:
    """Write an exclusive bound that is an integer as a number beside it.

    If the other bound is less than 1 away, the excluded integer itself is allowed.

    Args:
        schema: with the bound.
        near: `minimum` or `maximum`, the side of the bound.
        far: the other side.
        sign: 1 if the numbers are above the bound, -1 if they are below.
    """
    exclusive = f"exclusive{near.capitalize()}"
    bound = schema.get(exclusive)
    if not _is_number(bound) or bound != math.floor(bound):
        return
    others = [schema.get(far), schema.get(f"exclusive{far.capitalize()}")]
    if not any(_is_number(other) and 0 < sign * (other - bound) < 1 for other in others):
        return
    # The library may read a number as one of its neighbours.
    beside = bound + sign * max(_STEP, 1024 * math.ulp(bound))
    del schema[exclusive]
    inclusive = schema.get(near)
    is_tighter = _is_number(inclusive) and sign * (inclusive - beside) > 0
    schema[near] = inclusive if is_tighter else beside


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e300
