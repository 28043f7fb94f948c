"""Arguments of calls that are no JSON: tags with raw values, Python's keywords, Gemma's objects."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

#: What parsers raise for texts that they cannot read, also for those that are nested too deep.
_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)
#: References of a schema that are followed: each may lead to the next.
_MOST_REFS = 64
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
#: What Gemma writes on both sides of a string.
_GEMMA_QUOTE = re.compile(r'<\|"\|>|<escape>')
_GEMMA_KEY = re.compile(r"([{,]\s*)([\w.-]+)(\s*:)")
_PYTHON_WORD = re.compile(r"\b(?:True|False|None)\b")
#: A string of Python, or the name of an argument, which need not be a name of Python's.
_PYTHON_STRING_OR_KEY = re.compile(
    r"""(?P<triple>\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3})"""
    r"""|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<key>(?<![\w$.@-])(?:[^\W\d]|[$@])[\w$.@-]*)(?=\s*=(?!=))""",
    re.DOTALL,
)
_ESCAPED_OR_NEWLINE = re.compile(r"\\.|\r\n|\r|\n", re.DOTALL)


def types_of(schema: object, root: object = None) -> frozenset[str]:
    """Return the JSON types that a schema names; none = any type may come.

    Args:
        schema: of a value.
        root: the schema within which a `$ref` such as `#/$defs/x` is looked up.
    """
    return frozenset(_types(schema, root, set()))


def _types(schema: object, root: object, refs: set[str]) -> set[str]:
    """Return the types of `types_of`; each reference is followed once, and is noted in `refs`."""
    if not isinstance(schema, Mapping):
        return set()
    type_names = schema.get("type")
    names = type_names if isinstance(type_names, list) else [type_names]
    types = {name for name in names if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice, root, refs)
    ref = schema.get("$ref")
    if not types and isinstance(ref, str) and ref not in refs and len(refs) < _MOST_REFS:
        refs.add(ref)
        types |= _types(_referred(ref, root), root, refs)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types = {_type_of(value) for value in values}
    if schema.get("nullable") is True:
        types.add("null")
    return types


def _referred(ref: str, root: object) -> object:
    """Return the part of a schema that a JSON pointer such as `#/$defs/x` names, or None."""
    if not ref.startswith("#"):
        return None
    for part in unquote(ref[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        root = root.get(key) if isinstance(root, Mapping) else None
    return root


def json_of_tag(text: str, types: frozenset[str]) -> str:
    """Return a tag's raw value as JSON: of one of the types, or the text as a string.

    Args:
        text: JSON, or what Python prints for a value.
        types: what the function's schema allows; see `types_of`. If a string is allowed, a text in
            quotes keeps them.
    """
    for read in (json.loads, _literal):
        try:
            value = read(text.strip())
            if isinstance(value, str) and ("string" in types or read is _literal):
                break
            if "integer" in types and isinstance(value, float) and value.is_integer():
                value = int(value)
            kind = _type_of(value)
            if not types or kind in types or (kind == "integer" and "number" in types):
                return _json(value)
        except _UNREADABLE:
            continue
    return json.dumps(text)


def json_of_keywords(text: str) -> str | None:
    """Return the arguments of a Python call as a JSON object; None if they are not keywords.

    Args:
        text: what stands between the call's brackets.
    """
    names: list[str] = []

    def python(match: re.Match[str]) -> str:
        if match["key"]:
            names.append(match["key"])
            return f"_{len(names) - 1}"
        return match[0] if match["triple"] else _ESCAPED_OR_NEWLINE.sub(_escaped, match[0])

    try:
        call = _parsed(f"f({_PYTHON_STRING_OR_KEY.sub(python, text)}\n)")
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        if len(set(names)) < len(names):
            return None
        values = (_value(keyword.value) for keyword in call.keywords)
        return _json(dict(zip(names, values, strict=True)))
    except _UNREADABLE:
        return None


def _escaped(match: re.Match[str]) -> str:
    """Return a line's end in a string as Python writes it; an escape stays as it is."""
    return match[0] if match[0].startswith("\\") else repr(match[0])[1:-1]


def json_of_gemma(text: str) -> str | None:
    """Return an object with bare keys as a JSON object; None if it is not one."""
    parts = _GEMMA_QUOTE.split(text)
    parts[1::2] = map(json.dumps, parts[1::2])
    for index, part in enumerate(parts[::2]):
        words = _PYTHON_WORD.sub(lambda word: json.dumps(ast.literal_eval(word[0])), part)
        parts[2 * index] = _GEMMA_KEY.sub(r'\1"\2"\3', words)
    try:
        value = json.loads("".join(parts))
        return _json(value) if isinstance(value, dict) else None
    except _UNREADABLE:
        return None


def _literal(text: str) -> Any:
    return _value(_parsed(text))


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an unknown escape stays as it is
        return ast.parse(text, mode="eval").body


def _value(node: ast.expr) -> Any:
    """Evaluate literals, with JSON's words beside Python's."""
    return ast.literal_eval(_Words().visit(node))


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _json(value: object) -> str:
    """Return JSON in ASCII, because a string may hold a lone surrogate."""
    return json.dumps(value, allow_nan=False)


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "none")
