"""Text in a given form over HTTP: JSON schemas, regular expressions, choices, tools."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["oslo", "rome"]}, "count": {"type": "boolean"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
CHAT = {
    "model": "specpool/tiny",
    "messages": [{"role": "user", "content": "seq: 2, "}],
    "max_tokens": 120,
    "temperature": 0,
}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def check(text):
    value = json.loads(text)
    assert set(value) == {"city", "count"} and value["city"] in ("oslo", "rome")


def test_a_schema_holds_in_a_stream_and_drawn(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for more in ({}, {"temperature": 1.5, "seed": 3}):
        answer = client.chat.completions.create(response_format=form, **CHAT | more)
        check(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
        parts = client.chat.completions.create(response_format=form, stream=True, **CHAT | more)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == answer.choices[0].message.content


def test_other_forms(client):
    ask = {"model": "specpool/tiny", "prompt": "a", "max_tokens": 40, "temperature": 1.0, "seed": 1}
    for form, fits in (
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda t: re.fullmatch("[0-9]{3}-[a-f]{2}", t)),
        ({"choice": ["yes", "no", "maybe"]}, lambda t: t in ("yes", "no", "maybe")),
        ({"json": SCHEMA}, lambda t: check(t) is None),
        ({"grammar": 'root ::= "a" "b"+ "c"'}, lambda t: re.match("ab+c?$", t)),
    ):
        answer = client.completions.create(extra_body={"structured_outputs": form}, **ask)
        assert fits(answer.choices[0].text), (form, answer.choices[0].text)


def test_a_named_tool_is_called_with_its_arguments(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    ask = CHAT | {"tools": TOOLS, "tool_choice": choice}
    message = client.chat.completions.create(**ask).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather" and call.id.startswith("call_")
    check(call.function.arguments)
    deltas = [
        call_delta
        for part in client.chat.completions.create(stream=True, **ask)
        for call_delta in part.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].function.name == "weather" and deltas[0].id
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments


def test_some_tool_must_be_called(client):
    ask = CHAT | {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0}
    names = set()
    for seed in range(4):
        choice = client.chat.completions.create(seed=seed, **ask).choices[0]
        assert choice.finish_reason in ("tool_calls", "length")
        for call in choice.message.tool_calls or []:
            names.add(call.function.name)
            if call.function.name == "weather":
                check(call.function.arguments)
    assert names and names <= {"weather", "stop"}


NODE = {
    "type": "object",
    "properties": {
        "is": {"$ref": "#/$defs/some%20kind"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["is", "next"],
    "additionalProperties": False,
    "$defs": {"some kind": {"enum": ["red"]}},
}


@pytest.mark.parametrize("more", [{}, {"$id": "http://example.org/node"}])
@pytest.mark.parametrize("num", [1, 2])
def test_references_within_a_tools_parameters_mean_the_parameters(client, more, num):
    """Law: they do so in the schema of all tools too, also where the parameters hold themselves."""
    nodes = [NODE | (more and {"$id": f"{more['$id']}/{i}"}) for i in range(num)]
    tools = [
        {"type": "function", "function": {"name": f"node{i}", "parameters": node}}
        for i, node in enumerate(nodes)
    ]
    ask = CHAT | {"tools": tools, "temperature": 1.0, "seed": 3, "logit_bias": {"123": -4}}
    choice = client.chat.completions.create(tool_choice="required", **ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(choice.message.tool_calls[0].function.arguments), NODE)


def test_some_of_the_allowed_tools_must_be_called(client):
    def choice(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    ask = CHAT | {"tools": TOOLS, "temperature": 1.0}
    for seed in range(3):
        answer = client.chat.completions.create(
            tool_choice=choice("required", "weather"), seed=seed, **ask
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        check(call.function.arguments)
    for wrong in (choice("required"), choice("auto", "other"), choice("none", "weather")):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(tool_choice=wrong, **ask)
        assert error.value.param == "tool_choice"


def test_tools_that_need_not_be_called_leave_the_text(client):
    plain = client.chat.completions.create(**CHAT | {"max_tokens": 20})
    for choice in ("auto", "none", None):
        more = {"tool_choice": choice} if choice else {}
        ask = CHAT | {"max_tokens": 20, "tools": TOOLS, **more}
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.message.content == plain.choices[0].message.content
        assert answer.message.tool_calls is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 70000]}}},
    ],
    ids=["type", "ref", "large"],
)
def test_a_bad_schema_is_a_400_that_says_where(client, form):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(response_format=form, **CHAT)
    assert error.value.param == "response_format" and "structured: " in error.value.message


def test_a_form_without_an_end_is_a_400(client):
    """A part of it must hold itself, which is found out on the way."""
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    schema = {"$defs": {"n": node}, "$ref": "#/$defs/n"}
    more = {"structured_outputs": {"json": schema}}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(extra_body=more, **CHAT)
    assert error.value.code == "structured_failed" and error.value.param == "structured_outputs"
    with pytest.raises(openai.APIError) as late:
        list(client.chat.completions.create(extra_body=more, stream=True, **CHAT))
    assert late.value.code == "structured_failed" and late.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs"),
    ],
)
def test_the_error_of_a_form_names_its_field(client, more, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(extra_body=more, **CHAT)
    assert error.value.param == param and error.value.message.count("structured: ") == 1


def test_penalties_and_bias_reach_the_engine(client):
    ask = {"model": "specpool/tiny", "prompt": "seq: 2, 4, ", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(logit_bias={"120": 100}, **ask)
    assert answer.choices[0].text == "xxxxxx"
    answer = client.completions.create(
        logit_bias={"120": 50}, presence_penalty=2.0, frequency_penalty=2.0, **ask
    )
    assert answer.choices[0].text.startswith("xx")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(logit_bias={"4000": 1}, **ask)
    assert "logit_bias" in error.value.message
