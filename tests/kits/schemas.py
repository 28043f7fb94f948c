"""JSON Schemas for tests: fifty by hand, a keyword or a habit each, and a seeded generator."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def closed(required: list[str] | None = None, **properties: Any) -> Schema:
    """An object with these properties and no others."""
    names = [*properties] if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


INT, TEXT = {"type": "integer", "minimum": 0, "maximum": 999}, {"type": "string", "maxLength": 6}
TREE = {"$ref": "#/$defs/tree"}

#: Fifty schemas; each keyword that llguidance knows is in one of them.
OWN: list[Schema] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 99, "exclusiveMaximum": 103},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 70},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": -0.5},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "pattern": "^(red|green|blue)( light)?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email", "maxLength": 20},
    {"const": "a fixed text"},
    {"const": {"nested": [1, True, None, "\u00e9"]}},
    {"enum": ["alpha", "alphabet", "beta"]},
    {"enum": [1, "one", None, [1], {"one": 1}]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["string", "boolean"], "maxLength": 3},
    closed(),
    closed(a=INT),
    closed(name=TEXT, age=INT),
    closed(["age"], name=TEXT, age=INT),
    closed([], name=TEXT, age=INT, ok={"type": "boolean"}),
    closed(**{"a key with blanks": INT, 'a "quoted" key': INT, "\u65e5\u672c": INT}),
    closed(customer_identification_number=INT, shipping_address_first_line=TEXT),
    closed(outer=closed(middle=closed(inner=INT))),
    {"type": "object", "patternProperties": {"^x_[a-c]$": INT}, "additionalProperties": False},
    {"type": "object", "properties": {"a": INT}, "required": ["a"], "additionalProperties": INT},
    {"type": "object", "required": ["must"], "properties": {"must": {"const": 1}}},
    {"type": "object", "additionalProperties": {"enum": ["x", "y"]}},
    {"type": "array", "items": INT, "maxItems": 3},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": closed(id=INT), "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [INT, {"const": "second"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}, "maxItems": 2},
    {"anyOf": [INT, {"type": "null"}]},
    {"anyOf": [closed(kind={"const": "cat"}, lives=INT), closed(kind={"const": "dog"})]},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"$defs": {"id": INT}, **closed(one={"$ref": "#/$defs/id"}, two={"$ref": "#/$defs/id"})},
    {"$defs": {"tree": closed(["v"], v=INT, next=TREE)}, "$ref": "#/$defs/tree"},
    {
        "$defs": {"list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]},
                  "cell": closed(head=INT, tail={"$ref": "#/$defs/list"})},
        "$ref": "#/$defs/list",
    },
    {"title": "A price", "description": "in cents", "default": 1, "examples": [3], **INT},
    closed(status={"enum": ["pending_confirmation", "delivered_to_customer"]}, code=INT),
    closed(when={"type": "string", "format": "date"}, where={"anyOf": [TEXT, {"type": "null"}]}),
    closed(
        items={"type": "array", "items": closed(sku=TEXT, count=INT), "maxItems": 2},
        total={"type": "number", "minimum": 0, "maximum": 99},
    ),
]  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of bounded texts, with keywords chosen at random."""
    kinds = ["integer", "number", "string", "pattern", "format", "enum", "const", "types"]
    if depth:
        kinds += ["object", "array", "tuple", "anyOf", "allOf", "open", "ref"] * 2
    return MAKERS[rng.choice(kinds)](rng, depth - 1)


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-200, 200)
    low, high = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum"])
    schema = {"type": "integer", low: least, high: least + rng.randint(30, 3000)}
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.randint(2, 9)
    return schema


def _number(rng: random.Random, depth: int) -> Schema:
    least = round(rng.uniform(-5, 5), 1)
    return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 9)}


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}


def _pattern(rng: random.Random, depth: int) -> Schema:
    patterns = ["^[a-f0-9]{4}$", "^(ab|cd)+e?$", "^v[0-9]\\.[0-9]$", "^.{2,4}$", '^[^aeiou"]{3}$']
    return {"type": "string", "pattern": rng.choice(patterns), "maxLength": 9}


def _format(rng: random.Random, depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "date-time"])}


def _enum(rng: random.Random, depth: int) -> Schema:
    values = ["red", "green", "dark green", 1, 2.5, None, True, [1, 2], {"a": "b"}, "\u00fc\n"]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": _enum(rng, depth)["enum"][0]}


def _types(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["integer", "null", "boolean", "string"], 2)
    return {"type": names, "maxLength": 4, "minimum": 0, "maximum": 50}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "display_name", "created_at", "x", "a b", "tags", "\u00e4"], 3)
    properties = {name: random_schema(rng, depth) for name in names[: rng.randint(1, 3)]}
    required = [name for name in properties if rng.random() < 0.7]
    return closed(required, **properties)


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth),
        "minItems": least,
        "maxItems": least + rng.randint(0, 1),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    count = rng.randint(1, 3)
    parts = [random_schema(rng, depth) for _ in range(count)]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": count}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": least}, {"maximum": least + 9}]}


def _open(rng: random.Random, depth: int) -> Schema:
    key = rng.choice(["^[a-c]$", "^k[0-9]$"])
    return {
        "type": "object",
        "patternProperties": {key: random_schema(rng, depth)},
        "additionalProperties": False,
    }


def _ref(rng: random.Random, depth: int) -> Schema:
    """A schema within a schema that refers to itself: names are unique by number."""
    name = f"n{rng.randrange(1 << 40)}"
    return {"$ref": f"#/$defs/{name}", "_defs": {name: random_schema(rng, depth)}}


MAKERS = {
    "integer": _integer, "number": _number, "string": _string, "pattern": _pattern,
    "format": _format, "enum": _enum, "const": _const, "types": _types, "object": _object,
    "array": _array, "tuple": _tuple, "anyOf": _any_of, "allOf": _all_of, "open": _open,
    "ref": _ref,
}  # fmt: skip


def generated(seed: int) -> Schema:
    """The schema number `seed`, with the definitions of its references at the top."""
    schema = random_schema(random.Random(seed))
    definitions: dict[str, Schema] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            definitions.update(value.pop("_defs", {}))
        for item in [*value.values()] if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                collect(item)

    collect(schema)
    waiting = [*definitions.values()]
    while waiting:
        before = {*definitions}
        collect(waiting.pop())
        waiting += [definitions[name] for name in definitions.keys() - before]
    return {**schema, "$defs": definitions} if definitions else schema
