"""Grammars: what is refused, at once and with a reason, and the masks along a tree."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
import time

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paths import ROOT
from schemas import closed
from specpool import ConfigError, Engine, Grammar, SamplingParams
from specpool.engine.assets import resolve
from specpool.engine.draft.base import DraftTree
from specpool.engine.text.structured import compiler as compiler_module
from specpool.engine.text.structured.compiler import Compiler, check_grammar
from specpool.engine.text.structured.exact_schema import exact
from specpool.engine.text.structured.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS
from specpool.engine.text.structured.matcher import Matcher

EOS = 257


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    return Compiler(tokenizer, 259, frozenset([EOS]))


def ids_of(bits: np.ndarray) -> set[int]:
    return {token for token in range(259) if bits[token // 32] >> (token % 32) & 1}


def root_ids(matcher: Matcher) -> set[int]:
    none = np.full(1, -1, np.int32)
    _, bits = matcher.masks(np.zeros(1, np.int64), none, none)
    return ids_of(bits[0])


def decimal_pattern(max_digits, places):
    """The pattern of pydantic 2.12 for a decimal number."""
    whole = max_digits if places is None else max(0, max_digits - places)
    number = r"\d*\.\d*" if places is None else rf"\d{{0,{whole}}}\.\d{{0,{places}}}"
    ahead = rf"(?=[\d.]{{1,{max_digits + 1}}}0*$)"
    return rf"^(?!^[-+.]*$)[+-]?0*(?:\d{{0,{whole}}}|{ahead}{number}0*$)"


#: Schemas that llguidance itself takes too widely, texts that they allow, and texts that not.
EXACT = [
    ({"type": "string", "pattern": '^[^"]*$'}, ['"a"', r'"\\"', r'"\n"'], [r'"a\"b"', r'"\u0022"']),
    ({"pattern": r"^[^\\/]+$"}, [r'"\""', "[1]"], [r'"a\\b"', '"a/b"']),
    ({"pattern": r"^[^-\]\"]$"}, ['"a"'], ['"-"', '"]"', r'"\""']),
    ({"pattern": r"^\[[^\s\"]\]$"}, ['"[a]"'], [r'"[\"]"', '"[ ]"', r'"[\n]"']),
    (
        {"patternProperties": {'^[^"]$': {"type": "null"}}, "additionalProperties": False},
        ['{"a":null}'],
        [r'{"\"":null}'],
    ),
    (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.1", "0.5"],
        ["0", "0.0", "-0", "0.6"],
    ),
    (
        {"type": "number", "exclusiveMinimum": 17.0, "exclusiveMaximum": 18},
        ["17.01"],
        ["17", "17.0", "18"],
    ),
    ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}, ["-2.1"], ["-2", "-2.0", "-2.6"]),
    ({"minimum": -0.5, "exclusiveMaximum": 0, "type": "number"}, ["-0.1"], ["0", "-0", "-0.6"]),
    (
        {"type": "number", "minimum": 3.25, "exclusiveMinimum": 3, "maximum": 3.5},
        ["3.25"],
        ["3", "3.1"],
    ),
    ({"type": "number", "exclusiveMinimum": 1e5, "maximum": 100000.5}, ["100000.1"], ["100000"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, ["1"], ["0", "2"]),
    (
        {"properties": {"a": {"type": "integer"}, "\u00e9": {"type": "null"}}, "type": "object"},
        ['{"a":1}', '{"b":"x"}', '{"a":1,"A":{}}', r'{"\n":1}', '{"\u00e9":null}'],
        ['{"a":"x"}', r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', r'{"\u00e9":1}'],
    ),
    (
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}},
                {"properties": {"b": {"type": "null"}}},
            ]
        },
        ['{"a":null,"b":null,"c":1}', "3"],
        ['{"a":1}', '{"b":1}', r'{"\u0062":1}'],
    ),
    (
        {"const": {"pattern": '[^"]', "properties": {"a": 1}}},
        ['{"pattern":"[^\\"]","properties":{"a":1}}'],
        ["{}"],
    ),
    (  # as zod 4 writes an e-mail address
        {
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
            r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            "type": "string",
        },
        ['"a@b.cd"', '"a.b+c\'d.e-@b.c-d.de"'],
        ['".a@b.cd"', '"a..b@b.cd"', '"a.@b.cd"', '"a\'@b.cd"', '"@b.cd"', '"a@b..cd"', '"a@b.c"'],
    ),
    (  # as pydantic writes a decimal number
        {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "type": "string"},
        ['"0"', '"-007"', '"+1."', '".5"', '"0.50"'],
        ['""', '"-"', '"."', '"+."', '"1.2.3"', '"1e5"', '"--1"'],
    ),
    (  # as pydantic writes a decimal number of 2 places
        {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$", "type": "string"},
        ['"0"', '"-12345.67"', '"+1."', '".5"', '"0.50000"'],
        ['""', '"-"', '"."', '"0.001"', '"1.2.3"', '"1e5"', '".a"'],
    ),
    (  # as pydantic writes names that are such numbers
        {
            "patternProperties": {
                r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$": {"type": "null"},
            },
            "additionalProperties": False,
        },
        ['{"1.25":null}', "{}"],
        ['{"1.25":1}', '{"1.255":null}', '{"":null}'],
    ),
    (  # as zod 4 writes a time
        {
            "format": "time",
            "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?$",
            "type": "string",
        },
        ['"10:00"', '"23:59:59.123"'],
        ['"10:00:00Z"', '"24:00"'],
    ),
    (
        {
            "format": "time",
            "pattern": r"^([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?$",
            "type": "string",
        },
        ['"10:00:00"'],
        ['"10:00"', '"10:00:00Z"'],
    ),
    (  # as zod 4 writes a date and a time without seconds
        {"format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\dZ$", "type": "string"},
        ['"2026-01-02T10:00Z"'],
        ['"2026-01-02T10:00:00Z"'],
    ),
    (
        {
            "format": "time",
            "allOf": [{"pattern": r"^\d\d:"}, {"pattern": r"\d$"}],
            "type": "string",
        },
        ['"10:00:00+01:00"'],
        ['"10:00:00Z"'],
    ),
    (  # as zod 4 writes a host name
        {
            "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
            r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
            "type": "string",
        },
        ['"a"', '"a-b.c"', '"a.b."', f'"{"a." * 126}a"', f'"{"a." * 126}a."'],
        ['""', '"-a"', '"a..b"', f'"{"a." * 126}ab"', f'"{"a." * 127}a"'],
    ),
    (  # a look-ahead before two alternatives
        {"pattern": "^(?=.{2}$)a*|^ab?$", "type": "string", "maxLength": 3},
        ['"aa"', '"ab"', '"xy"'],
        ['"aaa"', '"c"', '""'],
    ),
    (  # as zod 4 writes a duration, but for its format
        {
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            "type": "string",
        },
        ['"P1W"', '"P1Y2D"', '"P10MT3S"', '"PT1H"', '"PT1,5S"', '"P1DT2M0.25S"'],
        ['"P"', '"PT"', '"P1DT"', '"P1W1D"', '"P1H"', '"PT1.S"', '"P1D1M"', '"1D"'],
    ),
    (
        {"properties": {"pattern": {"pattern": '^[^"]$'}}, "additionalProperties": False},
        ['{"pattern":"a"}'],
        [r'{"pattern":"\""}', '{"b":1}'],
    ),
]


@pytest.mark.parametrize(("schema", "allowed", "others"), EXACT)
def test_a_form_allows_no_text_that_its_schema_does_not(compiler, schema, allowed, others):
    """Law: whoever gives a schema gets values that it allows, whatever the library takes it for."""
    start = compiler.matcher(Grammar.json_schema(schema))
    for text in [*allowed, *others]:
        matcher = start.fresh()
        matcher.follow([*text.encode()], 0)
        is_allowed = matcher.error is None and EOS in root_ids(matcher)
        assert is_allowed is (text in allowed), text
        assert Draft202012Validator(schema).is_valid(json.loads(text)) is is_allowed, text


@pytest.mark.parametrize(
    "schema",
    [
        {
            "allOf": [
                {"properties": {"a": {"type": "null"}}},
                {"patternProperties": {"^x": {"pattern": '^[^"]*$'}}},
            ]
        },
        {
            "$ref": "#/$defs/extended",
            "properties": {"a": {"type": "null"}},
            "$defs": {
                "extended": {"type": "object", "patternProperties": {"^x": {"pattern": '^[^"]*$'}}}
            },
        },
    ],
)
def test_a_schema_that_the_library_takes_is_taken(compiler, schema):
    """Law: how a schema is written for the library is no reason to refuse it; the rest is exact."""
    check_grammar(Grammar.json_schema(schema))
    matcher = compiler.matcher(Grammar.json_schema(schema))
    matcher.follow([*b'{"a":null,"x":1}'], 0)
    assert matcher.error is None and EOS in root_ids(matcher)
    quoted = matcher.fresh()
    quoted.follow([*rb'{"x":"\""}'], 0)
    assert quoted.error is not None


@pytest.mark.parametrize(
    "keywords",
    [
        {"propertyNames": {"type": "string", "description": "an id"}},  # as zod writes a record
        {"propertyNames": {"title": "Id"}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"unevaluatedProperties": {}},
        {"unevaluatedProperties": True, "unevaluatedItems": {"description": "any"}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    ],
    ids=repr,
)
def test_a_keyword_that_forbids_nothing_is_not_refused(compiler, keywords):
    """Law: what some tools write beside any schema is no reason to refuse it."""
    schema = {"type": ["object", "array"], "additionalProperties": {"type": "null"}} | keywords
    nested = {"properties": {"uniqueItems": schema}, "required": ["uniqueItems"]}
    for given, text in ((schema, '{"a":null}'), (schema, "[1,1]"), (nested, '{"uniqueItems":[]}')):
        check_grammar(Grammar.json_schema(given))
        matcher = compiler.matcher(Grammar.json_schema(given))
        matcher.follow([*text.encode()], 0)
        assert matcher.error is None and EOS in root_ids(matcher)
        assert Draft202012Validator(given).is_valid(json.loads(text))


@pytest.mark.parametrize(
    "keywords",
    [
        {"dependentRequired": {"title": ["a"]}},
        {"dependentSchemas": {"description": {"required": ["a"]}}},
        {"dependencies": {"default": ["a"]}},
        {"propertyNames": {"type": "string", "maxLength": 1}},
        {"propertyNames": {"type": "null"}},
        {"propertyNames": 1},
        {"uniqueItems": 0},
        {"propertyNames": False},
        {"uniqueItems": True},
        {"unevaluatedProperties": {"type": "null"}},
        {"unevaluatedItems": False},
    ],
    ids=repr,
)
def test_a_keyword_that_forbids_something_is_refused(compiler, keywords):
    with pytest.raises(ConfigError, match=f"{next(iter(keywords))}.*at #/"):
        compiler.matcher(Grammar.json_schema({"type": ["object", "array"]} | keywords))


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"format": "e164", "pattern": "^a$"}, False),  # as zod writes a telephone number
        ({"format": "e164"}, True),
        ({"format": "e164", "allOf": [{"pattern": "^a"}, {"pattern": "a$"}]}, False),
        ({"format": "e164", "allOf": [{"minLength": 1}]}, True),
        ({"format": "uri-reference", "pattern": "^a$"}, True),
        ({"format": 1, "pattern": "^a$"}, True),
    ],
)
def test_a_format_of_ones_own_is_an_annotation_beside_a_pattern(compiler, schema, is_refused):
    grammar = Grammar.json_schema({"type": "string"} | schema)
    if is_refused:
        with pytest.raises(ConfigError, match="format"):
            compiler.matcher(grammar)
        return
    for text, is_allowed in (('"a"', True), ('"b"', False)):
        matcher = compiler.matcher(grammar)
        matcher.follow([*text.encode()], 0)
        assert (matcher.error is None) is is_allowed


@pytest.mark.parametrize(
    ("schema", "allowed", "others"),
    [
        ({"format": "time", "pattern": "Z$"}, ["10:00:00Z"], ["10:00:00+01:00", "Z"]),
        (  # as zod 4 writes a duration: the format has no comma, and no gap
            {
                "format": "duration",
                "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
                r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            },
            ["P1W", "P1Y2M3DT1H2M3S", "PT5M"],
            ["PT1,5S", "P", "PT"],
        ),
        (  # a host name of zod: the format has no point at its end
            {"format": "hostname", "pattern": r"^(?=.{1,9}\.?$)[a-z]+(?:\.[a-z]+)*\.?$"},
            ["a.b", "abcdefg.h"],
            ["abcdefgh.i", "a..b", "-"],
        ),
    ],
)
def test_a_format_holds_beside_a_pattern_that_it_fits(compiler, schema, allowed, others):
    start = compiler.matcher(Grammar.json_schema({"type": "string"} | schema))
    for text in [*allowed, *others]:
        matcher = start.fresh()
        matcher.follow([*f'"{text}"'.encode()], 0)
        assert (matcher.error is None) is (text in allowed), text


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("max_digits", "places"),
    [(10, 2), (5, None), (3, 3), (2, 4), (4, 0), (1, None), (0, None), (0, 0), (38, 10)],
)
def test_a_decimal_number_has_no_more_digits_than_pydantic_allows(compiler, max_digits, places):
    """Law: a form may be narrower than its pattern, and never wider; each number is allowed.

    The pattern itself matches any text with a digit, as its first alternative has no end.
    """
    pattern = decimal_pattern(max_digits, places)
    start = compiler.matcher(Grammar.json_schema({"type": "string", "pattern": pattern}))
    rng, seen = random.Random(17), set()
    for _ in range(400):
        alphabet = rng.choice(["0123456789", "01", "0123456789" * 3 + "+-.a", "00.1"])
        texts = ["".join(rng.choices(alphabet, k=rng.randint(0, max_digits // 2 + 2)))]
        texts.append(f"{rng.choice(['', '-', '+', '00'])}{texts[0]}{rng.choice(['', '.'])}")
        texts.append(f"{texts[1]}.{''.join(rng.choices('0123', k=rng.randint(0, 3)))}00")
        for text in texts:
            matcher = start.fresh()
            matcher.follow([*f'"{text}"'.encode()], 0)
            is_allowed = matcher.error is None and EOS in root_ids(matcher)
            number = re.fullmatch(r"[+-]?0*(\d*)(?:\.(\d*?)0*)?", text)
            is_number = number is not None and any(digit.isdigit() for digit in text)
            if is_number:
                whole, fraction = len(number[1]), len(number[2] or "")
                is_number = whole + fraction <= max_digits
                if places is not None:
                    is_number &= whole <= max(0, max_digits - places) and fraction <= places
            assert is_allowed is is_number, text
            assert not is_allowed or re.search(pattern, text), text
            seen.add(is_allowed)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "integer",  "minimum": 0}',
        '{"properties": {"a": {}}, "additionalProperties": false}',
        '{"properties": {"a": {}}, "minimum": 1e999}',
        '{"enum": [{"pattern": "[^a]"}]}',
        '{"pattern": "^[^]a]$"}',
        '{"exclusiveMinimum": 0}',
        '{"exclusiveMinimum": 1' + "0" * 400 + ', "maximum": 1e999}',
        '{"exclusiveMinimum": true, "minimum": 0, "maximum": 0.5}',
        '{"items": ' * 900 + '{"pattern": "a"}' + "}" * 900,
    ],
)
def test_a_schema_that_is_exact_stays_as_it_is(text):
    assert exact(text) == text


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice([f"c{number}" for number in range(MAX_CHOICES)]),
        Grammar.json_schema({"enum": [f"c{number}" for number in range(MAX_CHOICES)]}),
        Grammar.ebnf("root ::= " + " | ".join(f'"c{number}"' for number in range(MAX_CHOICES))),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_form_may_have_as_many_strings_as_a_choice(compiler, grammar):
    """Law: a form within the limits of a `Grammar` is not refused behind its first token."""
    quote = '"' if grammar.kind == "json_schema" else ""
    for word in ("c0", "c17", f"c{MAX_CHOICES - 1}"):
        matcher, text = compiler.matcher(grammar), [*f"{quote}{word}{quote}".encode()]
        for num, token in enumerate(text):
            assert token in root_ids(matcher)
            matcher.follow(text[: num + 1], 0)
        assert matcher.error is None and EOS in root_ids(matcher)


def test_a_form_that_is_too_large_for_a_step_says_so(compiler, monkeypatch):
    """Law: a limit of the library is not told as a text that has left its form."""
    monkeypatch.setattr(compiler_module, "MAX_ITEMS", 100)
    rules = "root ::= " + " | ".join(f'"c{number}"' for number in range(150))
    matcher = compiler.matcher(Grammar.ebnf(rules))
    matcher.follow([*b"c"], 0)
    assert matcher.error is not None and "151 items; max is 100" in matcher.error


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Grammar("xml", "a"), "kind must be one of json_schema, .* got 'xml'"),
        (lambda: Grammar("regex", 5), "text must be a string, got 5"),
        (lambda: Grammar("regex", " "), "the text of a regex is empty"),
        (lambda: Grammar("regex", "a\ud800"), "a lone surrogate at position 1"),
        (lambda: Grammar.choice(["a\ud800"]), r"the choice is not valid: a lone surrogate in "),
        (lambda: Grammar("choice", r'["\ud800"]'), r"a lone surrogate in '\[\"\\ud800'"),
        (lambda: Grammar.json_schema({"a\ud800": {}}), "the schema is not valid: a lone surrogate"),
        (lambda: Grammar.json_schema(r'{"const": "\udfff"}'), "the schema is not valid: a lone"),
        (lambda: Grammar("json_object", "{}"), "json_object has no text, got '{}'"),
        (lambda: Grammar.json_schema("{"), "the schema is no JSON: .* at line 1, column 2"),
        (lambda: Grammar.json_schema({"a": {1}}), "the schema is no JSON: .* set"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "the schema is no JSON"),
        (lambda: Grammar.json_schema("[" * 50_000), "the schema is no JSON"),
        (lambda: Grammar.json_schema("[1]"), r"a schema is an object or true, got '\[1\]'"),
        (lambda: Grammar.json_schema(False), "false allows no text"),
        (lambda: Grammar.json_schema({"enum": ["x" * 1_000_000]}), f"{MAX_GRAMMAR_CHARS} char"),
        (lambda: Grammar.choice("abc"), "a choice is a list of strings, got 'abc'"),
        (lambda: Grammar.choice([]), f"a choice has 1 to {MAX_CHOICES} strings, got 0"),
        (lambda: Grammar.choice(["a", ""]), "strings that are not empty"),
        (lambda: Grammar.choice(["a", 1]), "a choice is a list of strings, got 1"),
        (lambda: Grammar.choice(["a"] * 4097), "got 4097"),
        (lambda: Grammar("choice", "{"), "a choice is a JSON list of strings"),
        (lambda: SamplingParams(structured=Grammar.json_object(), ignore_eos=True), "ignore_eos"),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


DEEP: dict[str, object] = {"type": "integer"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "objct"}), r"Invalid type: objct \(at #/type\)"),
        (
            Grammar.json_schema({"properties": {"a": {"items": {"type": "nmber"}}}}),
            r"Invalid type: nmber \(at #/properties/a/items/type\)",
        ),
        (
            Grammar.json_schema({"properties": {"a/b": {"not": {}}}}),
            r'Unimplemented keys: \["not"\] \(at #/properties/a~1b/not\)',
        ),
        (
            Grammar.json_schema({"type": "array", "uniqueItems": True}),
            r'Unimplemented keys: \["uniqueItems"\] \(at #/uniqueItems\)',
        ),
        (
            Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
            r"Unsatisfiable schema: minimum \(5\) is greater than maximum \(3\)",
        ),
        (Grammar.json_schema({"allOf": [{"type": "null"}, {"type": "string"}]}), "Unsatisfiable"),
        (
            Grammar.json_schema({"type": "string", "pattern": "^aaa$", "maxLength": 2}),
            "Unsatisfiable schema",
        ),
        (Grammar.json_schema({"$ref": "#"}), "allows no text at all"),
        (
            Grammar.json_schema(
                {"properties": {"not": {}, "b": {"const": {"not": 1}}, "c": {"not": {}}}}
            ),
            r"\(at #/properties/c/not\)",
        ),
        (Grammar.json_schema({"$ref": "#/$defs/x"}), "Pointer '/.defs/x' does not exist"),
        (Grammar.json_schema({"$ref": "http://127.0.0.1/x"}), "retrieving it failed"),
        (Grammar.json_schema(DEEP), "recursion limit exceeded"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (  # a narrower pattern of names would free the others
            Grammar.json_schema({"patternProperties": {decimal_pattern(4, 2): {"type": "null"}}}),
            "look-around",
        ),
        (
            Grammar.json_schema(
                {
                    "patternProperties": {
                        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": {"type": "null"},
                        r"^[+-]?(\d+\.?\d*|\.\d+)$": {"type": "integer"},
                    }
                }
            ),
            "look-around",
        ),
        (Grammar.regex("[a-z"), "unclosed character class"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.ebnf('root ::= "a" missing'), "missing"),
        (Grammar.ebnf('start: "a" missing'), 'unknown name: "missing"'),
        (Grammar.ebnf('start: start "a"'), "allows no text at all"),
        (Grammar.ebnf('root ::= "a" [0-9+'), "structured: "),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, Grammar) else "",
)
def test_a_wrong_grammar_is_refused_with_its_place(compiler, grammar, message):
    with pytest.raises(ConfigError, match=message) as caught:
        compiler.matcher(grammar)
    text = str(caught.value)
    assert text.startswith("structured: ") and len(text) < 400 and "\n" not in text


def refused_keywords():
    """The table of docs/structured.md: a keyword, and a schema that has it."""
    page = (ROOT / "docs/structured.md").read_text(encoding="utf-8")
    table = page.partition("| refused keyword |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\S+)` \| `(.+?)` \|", table, re.MULTILINE)
    assert len(rows) > 15
    return rows


@pytest.mark.parametrize(("keyword", "schema"), refused_keywords())
def test_each_keyword_of_the_table_is_refused_with_its_place(compiler, keyword, schema):
    """In a schema alone, in a property, and in a definition; before a model is there, too."""
    bare = json.loads(schema)
    for whole, pointer in (
        (bare, "#"),
        ({"type": "object", "properties": {"a b": bare}, "required": ["a b"]}, "#/properties/a b"),
        ({"$defs": {"x/y": bare}, "$ref": "#/$defs/x~1y"}, "#/$defs/x~1y"),
    ):
        for check in (compiler.matcher, check_grammar):
            with pytest.raises(ConfigError) as caught:
                check(Grammar.json_schema(whole))
            assert str(caught.value).startswith("structured: ")
            assert str(caught.value).endswith(f"(at {pointer}/{keyword})"), caught.value


@pytest.mark.timeout(100)  # alone it is well below a second
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(a{1,1000}){1,1000}"),
        Grammar.regex("(.{0,1000}a.{0,1000}){5}"),
        Grammar.regex(".*a.{300}"),
        Grammar.regex("((a{0,100}){0,100}){0,100}"),
        Grammar.json_schema({"type": "array", "items": {"$ref": "#"}, "maxItems": 100_000}),
        Grammar.json_schema({"enum": [f"x{i:05d}" for i in range(5000)]}),
        Grammar.json_schema({"type": "string", "maxLength": 1_000_000}),
        Grammar.ebnf('root ::= a\na ::= "x" a'),  # no text ever ends
    ],
    ids=lambda grammar: grammar.text[:30],
)
def test_a_grammar_that_explodes_is_bounded(compiler, grammar):
    """It is compiled, or refused, within the limit; each later step is bounded too."""
    try:
        matcher = compiler.matcher(grammar)
        rng = random.Random(1)
        tokens = [1]
        for _ in range(60):
            matcher.follow(tokens, 1)
            matcher.forced(20)
            allowed = root_ids(matcher) - {EOS}
            if matcher.error or not allowed:
                break
            tokens.append(rng.choice(sorted(allowed)))
    except ConfigError:
        pass


def test_a_grammar_that_takes_too_long_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(compiler_module, "compiled", lambda *_: time.sleep(0.5))
    with pytest.raises(ConfigError, match=r"a regex of 7 characters took more than 0.05 s"):
        compiler.matcher(Grammar.regex("[x-z]+1"))


def test_without_the_package_the_error_names_the_extra(compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'specpool\[grammar\]'"):
        compiler.matcher(Grammar.regex("[q]+"))


def test_a_target_without_tokenizer_or_end_is_refused():
    with pytest.raises(ConfigError, match="fast tokenizer; the target's is NoneType"):
        Compiler(None, 259, frozenset([EOS])).matcher(Grammar.json_object())
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    with pytest.raises(ConfigError, match="a token that ends the text, and the target has none"):
        Compiler(tokenizer, 259, frozenset()).matcher(Grammar.json_object())


def test_a_wrong_grammar_changes_nothing_in_an_engine():
    with Engine.from_pretrained("specpool/tiny", draft="specpool/tiny-eagle") as engine:
        wrong = SamplingParams(structured=Grammar.regex("(?=a)"))
        with engine.open_session() as session:
            for call in (
                lambda: engine.generate(["a", "b"], [SamplingParams(), wrong]),
                lambda: engine.submit("a", wrong),
                lambda: session.append("a", wrong),
                lambda: list(engine.stream("a", wrong)),
            ):
                with pytest.raises(ConfigError, match=r"structured: .*look-around"):
                    call()
            stats = engine.stats()
            assert stats.num_waiting == stats.num_running == 0 and not session.is_busy


def test_a_grammar_is_compiled_once(compiler, monkeypatch):
    calls = []
    real = compiler_module.compiled
    monkeypatch.setattr(compiler_module, "compiled", lambda *a: calls.append(a) or real(*a))
    for _ in range(3):
        compiler.matcher(Grammar.regex("once[0-9]"))
    assert len(calls) == 1
    for _ in range(2):
        with pytest.raises(ConfigError):
            compiler.matcher(Grammar.regex("never["))
    assert len(calls) == 3  # a refusal is not kept


def test_grammars_are_values():
    first, second = (Grammar.json_schema({"type": "null"}) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    params = SamplingParams(structured=first, logit_bias={1: 2})
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(params)


# --- masks --------------------------------------------------------------------------------------


def allowed_after(choices: list[bytes], prefix: bytes) -> set[int]:
    """The oracle: the bytes that continue a prefix to one of the choices, and the end."""
    matches = [choice for choice in choices if choice.startswith(prefix)]
    ends = {EOS} if prefix in matches else set()
    return {choice[len(prefix)] for choice in matches if len(choice) > len(prefix)} | ends


@pytest.mark.parametrize("seed", range(30))
def test_masks_along_a_tree_are_those_of_each_path(compiler, seed):
    """Random choices, outputs and trees: each node's mask is that of its own path alone."""
    rng = random.Random(seed)
    choices = [bytes(rng.choices(b"abc", k=rng.randint(1, 8))) for _ in range(rng.randint(1, 12))]
    matcher = compiler.matcher(Grammar.choice(sorted({text.decode() for text in choices})))
    output = rng.choice(choices)
    output = output[: rng.randrange(len(output))]
    for step in range(3):
        matcher.follow([7, 7, *output], 2)
        parents = [-1, *(rng.randrange(i) for i in range(1, 14))]
        tokens = [output[-1] if output else 7, *rng.choices([*b"abcx", EOS, 256], k=13)]
        tree = DraftTree.from_parents(np.array([tokens]), np.array([parents], np.int32))
        links = tree.first_child[0].numpy(), tree.next_sibling[0].numpy()
        nodes, bits = matcher.masks(np.array(tokens), *links)
        masks = dict(zip(nodes.tolist(), map(ids_of, bits), strict=True))
        for node in range(14):
            path, at = [], node
            while at:
                path.append(tokens[at])
                at = parents[at]
            prefix, is_allowed = bytes(output), True
            for token in reversed(path):
                is_allowed &= token != EOS and token in allowed_after(choices, prefix)
                prefix += bytes([token]) if is_allowed else b""
            if is_allowed:
                assert masks.pop(node) == allowed_after(choices, prefix), (step, node)
        assert not masks
        more = sorted(allowed_after(choices, bytes(output)) - {EOS})
        if not more:
            break
        output = bytes([*output, rng.choice(more)])
    assert matcher.error is None


@pytest.mark.parametrize("seed", range(20))
def test_a_forced_span_is_what_every_text_goes_on_with(compiler, seed):
    rng = random.Random(seed)
    stem = "".join(rng.choices("ab", k=rng.randint(1, 9)))
    choices = {stem + "".join(rng.choices("ab", k=rng.randint(0, 3))) for _ in range(3)}
    matcher = compiler.matcher(Grammar.choice(sorted(choices)))
    tokens, texts = [1], [text.encode() for text in choices]
    for _ in range(12):
        matcher.follow(tokens, 1)
        prefix, expected = bytes(tokens[1:]), []
        while len(after := allowed_after(texts, prefix)) == 1:
            expected += after
            if after == {EOS}:
                break
            prefix += bytes(after)
        max_tokens = rng.randint(1, 12)
        assert matcher.forced(max_tokens) == expected[:max_tokens]
        choice = rng.choice(sorted(allowed_after(texts, bytes(tokens[1:]))))
        tokens.append(choice)
        if choice == EOS:
            matcher.follow(tokens, 1)
            assert matcher.forced(5) == []
            return
    raise AssertionError("the text has no end")


def test_samples_do_not_share_their_place(compiler):
    first = compiler.matcher(Grammar.regex("a[0-9]b"))
    second = first.fresh()
    first.follow([1, 97], 1)
    assert root_ids(first) == {*range(48, 58)}
    assert root_ids(second) == {97}


def test_an_output_outside_the_form_is_an_error(compiler):
    matcher = compiler.matcher(Grammar.regex("ab"))
    matcher.follow([1, 98], 1)
    assert matcher.error == "structured: the form does not allow the output"


def test_special_tokens_are_never_allowed(compiler):
    for grammar in (Grammar.regex("(?s).*"), Grammar.json_object(), Grammar.json_schema(True)):
        assert root_ids(compiler.matcher(grammar)).isdisjoint({256, 258})


@pytest.mark.parametrize("ends", [{ord("e")}, {ord("e"), EOS}, {ord("e"), 256, EOS}])
def test_a_token_that_ends_the_text_is_allowed_exactly_where_the_form_is_complete(ends):
    """An end may be ordinary text, as where a base model ends at a line break."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    ends = frozenset(ends)
    for compiler, more in (
        (Compiler(tokenizer, 259, ends), frozenset()),
        (Compiler(tokenizer, 259, frozenset([EOS])), ends),
    ):
        matcher = compiler.matcher(Grammar.regex("[a-f]{2,}"), more)
        matcher.follow([1], 1)
        assert root_ids(matcher) == {*b"abcdf"}
        matcher.follow([1, 97], 1)
        assert root_ids(matcher) == {*b"abcdf"} and matcher.forced(9) == []
        matcher.follow([1, 97, 98], 1)
        assert root_ids(matcher) == {*b"abcdf"} | ends | ({EOS} if more else set())
        matcher.follow([1, 97, 98, ord("e")], 1)
        assert matcher.error is None and not len(matcher.masks(*[np.zeros(1, np.int64)] * 3)[0])
        matcher = compiler.matcher(Grammar.choice(["yes"]), more)
        assert matcher.forced(9) == [ord("y")]  # not the end within it


@pytest.mark.parametrize("strange", [-1, 259, 1 << 20])
def test_an_end_outside_the_vocabulary_changes_no_mask(strange):
    """A config may name an end-of-sequence token that the target cannot say."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    matcher = Compiler(tokenizer, 259, frozenset([EOS])).matcher(
        Grammar.regex("ab?"), frozenset([strange])
    )
    matcher.follow([1, 97], 1)
    assert root_ids(matcher) == {98, EOS} and matcher.error is None


def test_a_form_that_only_an_end_could_go_on_with_says_so(compiler):
    matcher = compiler.matcher(Grammar.choice(["yes"]), frozenset([ord("e")]))
    assert matcher.dead_end([1], 1) is None
    assert "only one that ends the text" in matcher.dead_end([1, ord("y")], 1)


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens, with added tokens of each kind."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    words = "hello think <think> table tool call [TOOL_CALLS] answer"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        [words] * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")


NAMES = ["<think>", "</think>", "<tool_call>", "<spec>", "[TOOL_CALLS]", "foo bar", "<pad>"]


@pytest.mark.parametrize("is_bytes", [True, False])
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        *((Grammar.regex(f"{re.escape(name)}[x]"), name + "x") for name in NAMES),
        *((Grammar.choice([f"hello {name} call"]), f"hello {name} call") for name in NAMES),
        (Grammar.regex("<think>x</think>0"), "<think>x</think>0"),
        (Grammar.regex(r"é<\|end\|>x"), "é<|end|>x"),
        (Grammar.ebnf('root ::= "<tool_call>\\n" "x" "</think>"'), "<tool_call>\nx</think>"),
        (Grammar.json_schema({"const": "<think>"}), '"<think>"'),
        (Grammar.json_schema({"enum": ["[TOOL_CALLS] tool"]}), '"[TOOL_CALLS] tool"'),
        (Grammar.json_schema(closed(**{"<spec>": {"const": 1}})), '{"<spec>":1}'),
    ],
)
def test_a_form_may_spell_the_name_of_a_token(is_bytes, grammar, text):
    """Law: forced text is text, also where it spells the name of a token."""
    tokenizer = (
        AutoTokenizer.from_pretrained(resolve("specpool/tiny")) if is_bytes else bpe_tokenizer()
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spec>", "[TOOL_CALLS]"]})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "foo bar", "QQ"])
    end = tokenizer.eos_token_id
    compiler = Compiler(tokenizer, len(tokenizer) + 5, frozenset([end]))
    matcher, output = compiler.matcher(grammar), []
    none = np.full(1, -1, np.int32)
    while len(output) < 99:
        span = matcher.forced(99)
        assert text.startswith(tokenizer.decode([*output, *span[:-1]]))
        _, bits = matcher.masks(np.zeros(1, np.int64), none, none)
        allowed = [i for i in range(len(tokenizer) + 5) if bits[0][i // 32] >> (i % 32) & 1]
        assert span[:1] in ([], allowed) and matcher.error is None
        if end in allowed:
            break
        output.append(allowed[0])
        matcher.follow([1, *output], 1)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert tokenizer.decode(output) == text and special.isdisjoint(output)


def test_a_grammar_may_name_a_special_token():
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<spec>"]})
    (token,) = tokenizer.convert_tokens_to_ids(["<spec>"])
    end = tokenizer.eos_token_id
    matcher = Compiler(tokenizer, len(tokenizer), frozenset([end])).matcher(
        Grammar.ebnf('start: <spec> "hello"')
    )
    assert matcher.forced(9) == [token, *tokenizer.encode("hello"), end]


def test_forced_text_without_such_names_is_the_tokenizers_own():
    tokenizer = bpe_tokenizer()
    tokenizer.add_tokens(["foo bar", "<think>"])
    end = tokenizer.eos_token_id
    for text in ("hello think table foo bar", "the <tool> calls: é \U0001f600", "a\n\nb"):
        matcher = Compiler(tokenizer, len(tokenizer), frozenset([end])).matcher(
            Grammar.choice([text])
        )
        assert matcher.forced(99) == [*tokenizer.encode(text), end]


def test_whitespace_is_not_a_choice(compiler):
    """Between the parts of JSON there are no blanks, so that keys are forced."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    matcher = compiler.matcher(Grammar.json_schema(schema))
    assert bytes(matcher.forced(20)[:-1]) == json.dumps({"a": 1}, separators=(",", ":")).encode()


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_texts_of_others_leave_a_request_its_form(monkeypatch, is_quick):
    """Law: a lexer that they have filled is compiled again, and ends no request.

    One that is slow to compile is not, between two rounds: only later requests have a new one.
    """
    monkeypatch.setattr(compiler_module, "MAX_STATES", 600)
    monkeypatch.setattr(compiler_module, "RENEWAL_SECONDS", 60.0 if is_quick else 0.0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    compiler = Compiler(tokenizer, 259, frozenset([EOS]))
    grammar, letters, rng = Grammar.regex("(a|b)*a(a|b){30}c"), {*b"ab"}, random.Random(0)
    early = compiler.matcher(grammar)
    early.follow([*b"prompt", *b"ab"], 6)
    errors = []
    for _ in range(20):
        others, output = compiler.matcher(grammar), list[int]()
        while others.error is None and len(output) < 100:
            assert root_ids(others) >= letters or others.error
            output.append(rng.choice(sorted(letters)))
            others.follow(output, 0)
        errors += [others.error] if others.error else []
    if is_quick:
        assert not errors
        for num in range(1, 60):
            assert root_ids(early) >= letters and early.error is None
            early.follow([*b"prompt", *b"ab", *b"a" * num], 6)
        assert root_ids(early.fresh()) == letters
    else:  # each lexer ends one of them at most
        assert 0 < len(errors) < 10
    later = compiler.matcher(grammar)
    later.follow([*b"ab"], 0)
    assert root_ids(later) == letters and later.error is None
