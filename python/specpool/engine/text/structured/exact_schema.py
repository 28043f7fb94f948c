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
_SECONDS = r"\d+([.,]\d+)?S"
_TIME = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
#: Patterns with look-ahead, which the library refuses, and others for the same texts.
_SAME_PATTERNS = {
    # zod's e-mail address
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]" + _DOMAIN
    ),
    # pydantic's decimal number
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    # zod's duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)({_TIME})?|{_TIME})$"
    ),
}
_DECIMAL = re.escape(r"^(?!^[-+.]*$)[+-]?0*")
#: pydantic's decimal numbers: of so many digits before and behind the point, of so many digits in
#: all, and of so many behind the point.
_PLACES, _DIGITS, _FRACTION = (
    re.compile(
        _DECIMAL
        + re.escape(rest)
        .replace("WHOLE", r"(?P<whole>\d{1,5})", 1)
        .replace("WHOLE", "(?P=whole)")
        .replace("LENGTH", r"(?P<length>\d{1,5})")
        .replace("PLACES", r"(?P<places>\d{1,5})")
    )
    for rest in (
        r"(?:\d{0,WHOLE}|(?=[\d.]{1,LENGTH}0*$)\d{0,WHOLE}\.\d{0,PLACES}0*$)",
        r"(?:\d{0,WHOLE}|(?=[\d.]{1,LENGTH}0*$)\d*\.\d*0*$)",
        r"\d*\.?\d{0,PLACES}0*$",
    )
)
#: A pattern that begins with a look-ahead over the whole text, such as that of zod's host name.
_WHOLE_AHEAD = re.compile(r"\^\(\?=((?:[^()\[\]|\\]|\\.)*\$)\)(.*)", re.DOTALL)
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


def plain(text: str, contradicts: Callable[[str, tuple[str, ...]], bool]) -> str:
    """Return a JSON Schema without some of what the library refuses; if it has none, itself.

    These are keywords that forbid nothing, look-ahead in patterns of zod and pydantic, and, beside
    a pattern, formats that JSON Schema does not define, or that no text of the pattern has: there
    the pattern says what zod's mean.

    Args:
        text: the schema.
        contradicts: returns whether no text has both a format and all of these patterns.
    """
    return _rewritten(text, lambda schema: _make_plain(schema, contradicts))


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


def _make_plain(
    schema: dict[str, Any], contradicts: Callable[[str, tuple[str, ...]], bool]
) -> bool:
    """Change one schema; return whether it was changed. See `plain`."""
    old = dict(schema)
    for key in [key for key, content in schema.items() if _is_idle(key, content)]:
        del schema[key]
    pattern, names = schema.get("pattern"), schema.get("patternProperties")
    parts = schema.get("allOf", [])
    if isinstance(pattern, str) and isinstance(parts, list):
        schema["pattern"], *others = _without_ahead(pattern)
        if others:
            parts = schema["allOf"] = [*parts, *({"pattern": other} for other in others)]
    if isinstance(names, dict):
        # Here a narrower pattern would allow more, as names of no pattern are free.
        same_names = {_same(name): names[name] for name in names}
        if len(same_names) == len(names):
            schema["patternProperties"] = same_names
    patterns = [
        part["pattern"]
        for part in [schema, *(parts if isinstance(parts, list) else [])]
        if isinstance(part, dict) and isinstance(part.get("pattern"), str)
    ]
    if patterns and isinstance(name := schema.get("format"), str):
        plain_patterns = (other for pattern in patterns for other in _without_ahead(pattern))
        if name not in _FORMATS or contradicts(name, tuple(plain_patterns)):
            del schema["format"]
    return schema != old


def _same(pattern: str) -> str:
    """Return a pattern without look-ahead for the same texts; if none is known, the pattern."""
    if number := _FRACTION.fullmatch(pattern):
        places = int(number["places"])
        return rf"^[+-]?(\d+(\.\d{{0,{places}}}0*)?|\.{_some(places)}0*)$"
    return _SAME_PATTERNS.get(pattern, pattern)


def _without_ahead(pattern: str) -> list[str]:
    r"""Return patterns without look-ahead that together allow what a pattern does, or less.

    pydantic's patterns with a number of digits have no `$` behind their first alternative. So they
    match whatever has a character but `-+.`. The new patterns allow only the numbers they mean.
    """
    if number := _PLACES.fullmatch(pattern):
        whole = int(number["whole"])
        places = min(int(number["places"]), int(number["length"]) - 1)
        fraction = rf"\.\d{{0,{places}}}0*"
        return [rf"^[+-]?(0*{_some(whole)}({fraction})?|\.{_some(places)}0*)$"]
    if number := _DIGITS.fullmatch(pattern):
        # The second pattern counts the digits of a number with a point, and the point.
        return [
            rf"^[+-]?(0*{_some(int(number['whole']))}|\d+\.\d*|\.\d+)$",
            rf"^[+-]?0*[\d.]{{1,{number['length']}}}0*$",
        ]
    if ahead := _WHOLE_AHEAD.fullmatch(pattern):
        # A second alternative must match it too.
        return [f"^{ahead[2]}", f"^{ahead[1]}"]
    return [_same(pattern)]


def _some(num_digits: int) -> str:
    """Return a pattern of 1 to `num_digits` digits; of a 0 alone if there may be none."""
    return rf"\d{{1,{num_digits}}}" if num_digits else "0"


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
