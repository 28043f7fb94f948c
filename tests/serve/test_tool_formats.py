"""Calls in the forms of many families of models, and in every split of a stream."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paths import ROOT
from specpool.serve.api.errors import ApiError
from specpool.serve.api.requests import MAX_TOOLS, ChatRequest
from specpool.serve.api.structured import tools_of
from specpool.serve.api.tool_calls import ToolCalls
from specpool.serve.api.tool_formats import FORMATS, formats_of
from specpool.serve.api.tool_values import json_of_keywords, json_of_tag, types_of
from tool_families import ALL, BARE, FAMILIES

TYPES = {"city": "string", "days": "integer", "far": "boolean", "at": "object", "tags": "array"}
SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}}
ASK = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [
        {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "stop-it", "parameters": SCHEMA}},
    ],
}
PARIS = {"city": "Paris", "days": 3}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def units(pieces):
    """Characters and special tokens: a stream may be cut between any two."""
    return [
        (unit, is_special)
        for text, is_special in pieces
        for unit in ([text] if is_special else text)
    ]


def read(pieces, cuts, formats, thinks=False, **more):
    """Push the pieces, cut at these units; returns content, names and arguments."""
    tools = ToolCalls(ChatRequest.model_validate(ASK | more), formats, thinks=thinks)
    every = units(pieces)
    bounds = [0, *cuts, len(every)]
    content, all_deltas = "", []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        text, specials = "", []
        for unit, is_special in every[start:end]:
            if is_special:
                specials.append((len(text), unit))
            else:
                text += unit
        new, deltas = tools.push(text, number == len(bounds) - 2, specials)
        content += new
        for delta in deltas:
            if delta["index"] == len(all_deltas):
                assert set(delta) == {"index", "id", "type", "function"}
                all_deltas.append([delta["function"]["name"], ""])
            assert delta["index"] == len(all_deltas) - 1, "only the latest call goes on"
            all_deltas[-1][1] += delta["function"]["arguments"]
    made = [[c["function"]["name"], c["function"]["arguments"]] for c in tools.calls]
    assert all_deltas == made, "the deltas make up the calls"
    if all(is_json(arguments) for _, arguments in made):
        assert tools.finish_reason == ("tool_calls" if made else "stop")
    return content, made


def check(family, pieces, content, calls, *, every=True):
    """The pieces give this, in one part, in each two, by single units, and in random parts."""
    formats, num = formats_of(family.template), len(units(pieces))
    whole = read(pieces, [], formats)
    assert (whole[0], [[n, json.loads(a)] for n, a in whole[1]]) == (content, calls)
    rng = random.Random(num)
    splits = [range(1, num), *(sorted(rng.choices(range(num + 1), k=num // 3)) for _ in range(3))]
    for cuts in [*splits, *([cut] for cut in range(num + 1) if every)]:
        assert read(pieces, cuts, formats) == whole, cuts


def visible(pieces):
    return "".join(text for text, is_special in pieces if not is_special)


VALUES = {
    "one": [("get_weather", PARIS)],
    "parallel": [("get_weather", PARIS), ("stop-it", {}), ("get_weather", {"city": "Rom"})],
    "empty": [("stop-it", {})],
    "unicode": [("get_weather", {"city": "Zürich 東京 🙂 \"'\\ \t a\nb"})],
    "nested": [("get_weather", {"at": {"x": [1, -2.5, None, True, {"y": "}])"}]}, "tags": [[]]})],
    "types": [("get_weather", {"city": "3", "days": -7, "far": False, "tags": ["a", 1]})],
}


@pytest.mark.sample(32)
@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("name", ALL)
def test_calls_are_read_in_every_split(name, case):
    family, calls = ALL[name], [list(pair) for pair in VALUES[case]]
    pieces = family.answer("", [call(*pair) for pair in calls])
    check(family, pieces, "", calls)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ALL)
def test_text_before_and_behind_a_call_is_content(name):
    family, calls = ALL[name], [["get_weather", PARIS]]
    for content in ("Let me look.\n\n", "<think>\nIs it 1 < 2 [yes] {so}?\n</think>\n\n"):
        if name in BARE and "think" not in content:
            continue
        pieces = family.answer(content, [call("get_weather", PARIS)])
        check(family, pieces, content.rstrip(), calls)
        behind = [*pieces, (" and so on", False)]
        check(family, behind, content.rstrip() + " and so on", calls, every=False)
    blank = family.answer("\n", [call("get_weather", PARIS)])
    check(family, blank, "", calls, every=False)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_within_thoughts_is_content_unless_they_never_end(name):
    """A model may weigh a call and not make it; one that forgets to end its thoughts makes it."""
    family = ALL[name]
    formats = formats_of(family.template)
    called = family.answer("", [call("get_weather", PARIS)])
    after = family.answer("", [call("stop-it", {})])
    for begin, thinks in (("\n<think>\nIs ", False), ("Is ", True)):
        thought = [(begin, False), *called, (" right? No.\n</think>\n\n", False)]
        for rest, calls in (([("No.", False)], []), (after, [["stop-it", {}]])):
            pieces = [*thought, *rest]
            num = len(units(pieces))
            whole = read(pieces, [], formats, thinks)
            expected = visible(thought) + "No." if not calls else visible(thought).rstrip()
            assert (whole[0], [[n, json.loads(a)] for n, a in whole[1]]) == (expected, calls)
            for cuts in (range(1, num), *([cut] for cut in range(0, num, 5))):
                assert read(pieces, cuts, formats, thinks) == whole
        pieces = [(begin, False), *called]
        whole = read(pieces, [], formats, thinks)
        assert (whole[0], json.loads(whole[1][0][1])) == (begin.rstrip(), PARIS)
        num = len(units(pieces))
        for cuts in (range(1, num), *([cut] for cut in range(0, num, 5))):
            assert read(pieces, cuts, formats, thinks) == whole


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ALL)
def test_text_without_a_call_is_content(name):
    family = ALL[name]
    for text in ("", "Hello.\n\n", " [1] {2} <3> `4` (5) ", "<tool", '{"answer": 42}', "[get_weat"):
        check(family, [(text, False)], text, [])
    marks = [(mark, True) for mark in family.specials]
    mixed = [pair for mark in marks for pair in (mark, ("a ", False))]
    check(family, mixed, visible(mixed), [], every=False)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ALL)
def test_what_is_not_a_call_stays_whole(name):
    """Calls of functions that the request does not have, and broken ones."""
    family = ALL[name]
    pieces = family.answer("So: ", [call("other", PARIS), call("others", {})])
    check(family, pieces, visible(pieces), [], every=False)
    broken = "".join(text for text, _ in family.answer("", [call("get_weather", PARIS)]))
    for old, new in (("get_weather", "get weather"), ("get_weather", "")):
        pieces = family.pieces("So: " + broken.replace(old, new))
        check(family, pieces, visible(pieces), [], every=False)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ALL)
def test_a_call_that_is_cut_off_is_a_beginning_of_the_whole_one(name):
    """Law: no character is invented or lost: it is content, or arguments that would go on."""
    family = ALL[name]
    formats = formats_of(family.template)
    pieces = family.answer("", [call("get_weather", {"city": 'a\n"<b>', "days": 31, "far": True})])
    every = units(pieces)
    ((_, whole),) = read(every, [], formats)[1]
    for num in range(len(every)):
        content, calls = read(every[:num], range(1, num), formats)
        assert read(every[:num], [], formats) == (content, calls)
        if not calls:
            assert content == visible(every[:num])
            continue
        assert content == ""
        ((called, arguments),) = calls
        assert called == "get_weather" and whole.startswith(arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mark_within_an_argument_is_text(name):
    family = ALL[name]
    marks = [mark for form in formats_of(family.template) for mark in form.marks]
    text = "".join({*marks, "</tool_call>"} - {*family.specials}) + "}])"
    calls = [["get_weather", {"city": text, "days": 1}], ["stop-it", {}]]
    check(family, family.answer("", [call(*pair) for pair in calls]), "", calls, every=False)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].kind in ("object", "json")])
def test_a_call_without_its_last_brace_does_not_swallow_what_follows(name):
    family = ALL[name]
    calls = [["get_weather", PARIS], ["stop-it", {"city": "Rom"}]]
    text = "".join(text for text, _ in family.answer("", [call(*pair) for pair in calls]))
    end = '"days": 3}'
    assert text.count(end) == 1
    if family.kind == "object":
        missing = text.replace(end + "}", end)
        assert len(missing) == len(text) - 1
        check(family, family.pieces(missing), "", calls, every=False)
        more = missing.replace(end, end + ', "id": "x", "more": {"a": [1, "}"]}')
        check(family, family.pieces(more), "", calls, every=False)
        begin = missing[: missing.index(end) + len(end)]
        check(family, family.pieces(begin + "\n\nSo."), "\n\nSo.", calls[:1], every=False)
    if name != "apertus":
        extra = text.replace(end, end + "}")
        check(family, family.pieces(extra), "", calls, every=False)


@pytest.mark.parametrize("value", ["12", "-1.5e3", "true", '"x"', '{"a": [1, "}"]}'])
def test_a_member_behind_the_arguments_is_left_out(value):
    calls = [["get_weather", PARIS], ["stop-it", {}]]
    text = "".join(text for text, _ in ALL["qwen"].answer("", [call(*pair) for pair in calls]))
    more = text.replace("}}", f'}}, "index": {value}, "n": {value}}}')
    assert more.count(value) == 4
    check(ALL["qwen"], ALL["qwen"].pieces(more), "", calls)


@pytest.mark.parametrize("name", [n for n in ALL if ALL[n].kind == "json" and n != "apertus"])
def test_arguments_that_lack_a_brace_end_where_the_next_call_begins(name):
    """They are not whole, so the answer's finish reason says that it stopped within them."""
    family = ALL[name]
    calls = [["get_weather", PARIS], ["stop-it", {"city": "Rom"}]]
    text = "".join(text for text, _ in family.answer("", [call(*pair) for pair in calls]))
    pieces = family.pieces(text.replace('"days": 3}', '"days": 3'))
    formats, num = formats_of(family.template), len(units(pieces))
    content, told = read(pieces, [], formats)
    assert [called for called, _ in told] == [called for called, _ in calls]
    assert told[0][1].startswith('{"city": "Paris", "days": 3') and not is_json(told[0][1])
    assert json.loads(told[1][1]) == {"city": "Rom"}
    for cuts in (range(1, num), *([cut] for cut in range(0, num, 5))):
        assert read(pieces, cuts, formats) == (content, told)


def test_a_broken_object_before_a_call_is_content():
    broken = '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"\n</tool_call>\n'
    pieces = ALL["qwen"].answer(broken, [call("stop-it", {})])
    check(ALL["qwen"], pieces, broken.rstrip(), [["stop-it", {}]])
    broken = '<|tool_call_start|>[stop-it(city="Paris"'
    pieces = ALL["lfm2"].pieces(broken) + ALL["lfm2"].answer("", [call("stop-it", {})])
    check(ALL["lfm2"], pieces, '[stop-it(city="Paris"', [["stop-it", {}]])
    broken = "<|tool_call>call:stop-it{city:1"
    pieces = ALL["gemma4"].pieces(broken) + ALL["gemma4"].answer("", [call("stop-it", {})])
    check(ALL["gemma4"], pieces, "call:stop-it{city:1", [["stop-it", {}]])


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("qwen3_coder", "\n</parameter>"),
        ("seed_oss", "</parameter>"),
        ("glm", "</arg_value>"),
        ("minimax", "</parameter>"),
    ],
)
def test_a_tags_value_without_its_end_ends_before_the_next_tag(name, old):
    family, calls = ALL[name], [["get_weather", PARIS], ["stop-it", {"city": "Rom"}]]
    text = "".join(text for text, _ in family.answer("", [call(*pair) for pair in calls]))
    first = text.index(old)
    offsets = [first] if name == "glm" else [first, text.index(old, first + 1)]
    for offset in offsets:
        cut = text[:offset] + text[offset + len(old) :]
        check(family, family.pieces(cut), "", calls, every=False)


# --- random calls

NAMES = st.sampled_from(["get_weather", "stop-it"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 10**9) | st.floats(-9, 9) | st.text(max_size=6),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text("abé", min_size=1), some, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from("<>[]{}()\"'\\`|, \n"), max_size=20)


def fitting(kind, value):
    """Leave out of the strings what ends them in this form."""
    if isinstance(value, str) and kind == "tags":
        return value.replace("<", "").strip("\n")
    if isinstance(value, str) and kind == "gemma":
        return value.replace("<", "")
    if isinstance(value, list):
        return [fitting(kind, item) for item in value]
    if isinstance(value, dict):
        return {fitting(kind, key): fitting(kind, item) for key, item in value.items()}
    return value


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "days": st.integers(-(10**12), 10**12),
        "far": st.booleans(),
        "at": st.dictionaries(st.text("abcé", min_size=1), JSON, max_size=3),
        "tags": st.lists(JSON, max_size=3),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([*FAMILIES]),
    st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["", "So.", "<think>{}[]</think>\n\n", "\n", "1 < 2 [ {"]),
    st.randoms(use_true_random=False),
)
def test_random_calls_are_read_in_random_splits(name, calls, content, rng):
    family = ALL[name]
    calls = [[called, fitting(family.kind, arguments)] for called, arguments in calls]
    pieces = family.answer(content, [call(*pair) for pair in calls])
    formats, num = formats_of(family.template), len(units(pieces))
    cuts = sorted(rng.choices(range(num + 1), k=rng.randrange(num + 1)))
    outcome = read(pieces, cuts, formats)
    assert (outcome[0], [[n, json.loads(a)] for n, a in outcome[1]]) == (content.rstrip(), calls)
    assert read(pieces, [], formats) == outcome


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_split_of_any_text_changes_what_is_read(data):
    """Marks, pieces of calls and texts in any order: nothing is lost where no call is found."""
    family = ALL[data.draw(st.sampled_from([*ALL]))]
    answer = family.answer("", [call("get_weather", PARIS), call("stop-it", {})])
    text = "".join(text for text, _ in answer)
    some = st.integers(0, len(text)).flatmap(
        lambda start: st.integers(start, len(text)).map(lambda end: text[start:end])
    )
    marks = st.sampled_from(
        [mark for form in FORMATS for mark in form.marks] + ["</think>", "<think>", "\n"]
    )
    pieces = family.pieces("".join(data.draw(st.lists(some | marks | TEXT, max_size=5))))
    formats = data.draw(st.sampled_from([FORMATS, formats_of(family.template)]))
    num = len(units(pieces))
    whole = read(pieces, [], formats)
    if not whole[1]:
        assert whole[0] == visible(pieces)
    for _ in range(3):
        cuts = data.draw(st.lists(st.integers(0, num), max_size=12).map(sorted))
        assert read(pieces, cuts, formats) == whole
    assert read(pieces, range(1, num), formats) == whole


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ALL)
def test_a_forced_call_is_read_whatever_the_models_own_form(name):
    """Law: the form of `tool_choice` is one that is read beside each family's own."""
    family = ALL[name]
    formats = formats_of(family.template)
    forced = json.dumps({"name": "get_weather", "arguments": PARIS})
    for cuts in ([], range(1, len(forced))):
        outcome = read([(forced, False)], cuts, formats, tool_choice="required")
        assert outcome == ("", [["get_weather", json.dumps(PARIS)]])
    choice = {"type": "function", "function": {"name": "get_weather"}}
    tools = ToolCalls(ChatRequest.model_validate(ASK | {"tool_choice": choice}), formats)
    marks = [(0, mark) for mark in family.specials]
    assert tools.push(json.dumps(PARIS), True, marks)[0] == ""
    assert [c["function"]["arguments"] for c in tools.calls] == [json.dumps(PARIS)]
    assert tools.finish_reason == "stop"


def test_a_call_has_the_id_that_the_model_gives_it_once():
    """Kimi's next prompt shows it in the place of the function's name."""
    text = "".join(
        f"<|tool_call_begin|>{ident}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for ident in ("functions.stop-it:3", "functions.stop-it:3", "stop-it", "stop-it:4")
    )
    tools = ToolCalls(ChatRequest.model_validate(ASK), formats_of(ALL["kimi"].template))
    parts = [tools.push(char, False) for char in text] + [tools.push("", True)]
    first, *others = [call["id"] for call in tools.calls]
    assert first == "functions.stop-it:3" and "".join(part[0] for part in parts) == ""
    assert len(others) == len({*others}) == 3 and all(i.startswith("call_") for i in others)


def test_half_a_forced_call_is_no_content():
    """Where some function must be called, the form is the server's own, not the model's words."""
    forced = json.dumps({"name": "get_weather", "arguments": PARIS})
    for end in range(len(forced)):
        for cuts in ([], range(1, end)):
            content, calls = read([(forced[:end], False)], cuts, FORMATS, tool_choice="required")
            assert content == "" and len(calls) == (end > forced.index("{", 1))


def test_a_required_call_is_no_thought_where_the_prompt_begins_thoughts():
    arguments = {"city": "</think>"}
    text = json.dumps({"name": "get_weather", "arguments": arguments})
    for cuts in ([], range(1, len(text))):
        content, calls = read([(text, False)], cuts, FORMATS, True, tool_choice="required")
        assert (content, json.loads(calls[0][1])) == ("", arguments)


def test_an_answer_in_the_requests_form_is_content_even_if_it_looks_like_a_call():
    text = json.dumps({"name": "get_weather", "arguments": PARIS})
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}):
        assert read([(text, False)], [], FORMATS, response_format=form) == (text, [])
    for field in ("guided_json", "json_schema", "structured_outputs"):
        value = {"json": {}} if field == "structured_outputs" else {"type": "object"}
        assert read([(text, False)], [], FORMATS, **{field: value}) == (text, [])
    assert read([(text, False)], [], FORMATS, response_format={"type": "text"})[1]
    assert read([(text, False)], [], FORMATS, structured_outputs={})[1]


def test_tools_that_are_not_allowed_are_not_called():
    text = json.dumps({"name": "get_weather", "arguments": PARIS})
    for mode in ("auto", "required"):
        for name, is_called in (("get_weather", True), ("stop-it", False)):
            tools = [{"type": "function", "function": {"name": name}}]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
            assert bool(read([(text, False)], [], FORMATS, tool_choice=choice)[1]) is is_called


def test_no_more_tools_are_allowed_than_there_may_be():
    for num in (MAX_TOOLS, MAX_TOOLS + 1):
        tools = [{"type": "function", "function": {"name": "get_weather"}}] * num
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
        request = ChatRequest.model_validate(ASK | {"tool_choice": choice})
        if num == MAX_TOOLS:
            assert [tool.function.name for tool in tools_of(request)] == ["get_weather"]
            continue
        with pytest.raises(ApiError, match=f"at most {MAX_TOOLS} tools, got {num}"):
            tools_of(request)


def test_an_object_that_is_no_call_streams():
    """It may be long, such as an answer in a form beside tools: it is content from its begin on."""
    tools = ToolCalls(ChatRequest.model_validate(ASK))
    assert tools.push('{"city": "Par', False) == ('{"city": "Par', [])


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("3", {"type": "string"}, '"3"'),
        ("3", {"type": "integer"}, "3"),
        ("3.0", {"type": "integer"}, "3"),
        ("3", {"type": "number"}, "3"),
        (" 3 ", {}, "3"),
        ("three", {"type": "integer"}, '"three"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("3", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"3"'),
        ("None", {"type": "object", "nullable": True}, "null"),
        ("True", {"type": "boolean"}, "true"),
        ("['a', None]", {"type": "array"}, '["a", null]'),
        ('{"a": [1]}', {"$ref": "#/x"}, '{"a": [1]}'),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("1e999", {"type": "number"}, '"1e999"'),
        ("[" * 9999, {"type": "array"}, json.dumps("[" * 9999)),
        ("b'x'", {}, "\"b'x'\""),
        ("x", "no schema", '"x"'),
        ("0123", {"$ref": "#/$defs/a%20~1b"}, '"0123"'),
        ("123", {"$ref": "#/$defs/a%20~1b"}, '"123"'),
        ("123", {"allOf": [{"$ref": "#/$defs/a%20~1b"}], "default": "1"}, '"123"'),
        ("123", {"anyOf": [{"$ref": "#/$defs/a%20~1b"}, {"type": "null"}]}, '"123"'),
        ("null", {"anyOf": [{"$ref": "#/$defs/a%20~1b"}, {"type": "null"}]}, "null"),
        ("123", {"$ref": "#/$defs/round"}, "123"),
        ("123", {"anyOf": [{"$ref": "#/$defs/round"}] * 9}, "123"),
        ("123", {"$ref": "#/$defs/none"}, "123"),
        ("123", {"$ref": "http://x#/$defs/a"}, "123"),
        ("1", {"const": "1"}, '"1"'),
        ('"exact phrase"', {"type": "string"}, r'"\"exact phrase\""'),
        (
            '"exact phrase"',
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            r'"\"exact phrase\""',
        ),
        ("'a' 'b'", {"type": ["string", "null"]}, "\"'a' 'b'\""),
        ("None", {"type": ["string", "null"]}, "null"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ('"5"', {"type": "integer"}, r'"\"5\""'),
        ('"x"', {}, '"x"'),
        ("'a' 'b'", {}, "\"'a' 'b'\""),
    ],
)
def test_a_tags_value_is_what_the_schema_says(text, schema, expected):
    defs = {"a /b": {"enum": ["0123", "123"]}, "round": {"anyOf": [{"$ref": "#/$defs/round"}] * 9}}
    assert json_of_tag(text, types_of(schema, {"$defs": defs})) == expected


@pytest.mark.parametrize(
    "text", ["1", "*a", "**a", "a=b", "a=f()", "a=1)#", "a=1, a={1}", "a=1e999", "a=" + "[" * 9999]
)
def test_python_that_is_more_than_literals_is_no_call(text):
    assert json_of_keywords(text) is None


PYTHON = {name: FAMILIES[name] for name in FAMILIES if FAMILIES[name].kind == "python"} | {
    "llama4": BARE["llama4"]
}


@pytest.mark.parametrize("name", PYTHON)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("from='Paris', to = 'Rome'", {"from": "Paris", "to": "Rome"}),
        (
            "class='economy', None=1, max-results=3",
            {"class": "economy", "None": 1, "max-results": 3},
        ),
        ("$ref='x', a.b=[1, -2]", {"$ref": "x", "a.b": [1, -2]}),
        ("city='from=1, to=2', async=True", {"city": "from=1, to=2", "async": True}),
        ('code="""print("(")\nx = 1"""', {"code": 'print("(")\nx = 1'}),
        ("code='''it's [\\'''', n='', m=\"\"", {"code": "it's ['", "n": "", "m": ""}),
        ('code="print(1)\nx = \\"\\n)\\"", n=2', {"code": 'print(1)\nx = "\n)"', "n": 2}),
        ("code='a\r\nb\rc'", {"code": "a\r\nb\rc"}),
    ],
)
def test_a_python_calls_arguments_have_any_name_and_any_string(name, written, arguments):
    family = PYTHON[name]
    text = "".join(text for text, _ in family.answer("", [call("stop-it", {})]))
    assert "stop-it()" in text
    pieces = family.pieces(text.replace("stop-it()", f"stop-it({written})"))
    check(family, pieces, "", [["stop-it", arguments]], every=False)


def test_each_format_is_in_the_documentation():
    rows = [line for line in (ROOT / "docs/serve.md").read_text().splitlines() if line[:1] == "|"]
    for form in FORMATS:
        families = [row for row in rows if all(name in row for name in form.families.split(", "))]
        assert families, form.families
        for mark in form.marks[:1]:
            assert any(mark.replace("|", "\\|") in row for row in families), mark
