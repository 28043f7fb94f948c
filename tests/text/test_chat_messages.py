"""A chat's history as its template expects it; the judge is transformers' own rendering."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from reciter import CHATML, byte_tokenizer
from specpool import ConfigError
from specpool.engine import texts as texts_module
from specpool.engine.scheduler.request import Conversation, Said, common_len
from specpool.engine.text import chat_messages
from specpool.engine.text.chat_messages import SEAM, with_seams
from specpool.engine.text.chat_template import TemplateLimitError
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.engine.texts import Texts
from specpool.serve.api.reading import read
from specpool.serve.api.requests import ChatRequest
from specpool.serve.routes.chat import messages_of
from tool_families import ALL

ARGUMENTS = {"city": "Zürich \"'", "days": 3, "at": {"x": [1, None, True]}}
USER = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "18 C"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
#: These join the arguments to other text.
JOINS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '\n' + c.function.arguments }}{% endfor %};{% endfor %}"
)
#: These read contents as lists of parts alone.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
#: These take ids of nine characters alone, as Mistral's do.
NINE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if not c.id is defined or c.id|length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "{{ c.function.name }}#{{ c.id }}#{% endfor %}{% if m.role == 'tool' %}"
    "{% if not m.tool_call_id is defined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('length 9!') }}{% endif %}#{{ m.tool_call_id }}#{% endif %};{% endfor %}"
)

#: Kimi's show a call's id in the place of its name.
KIMI = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }} {% endif %}{{ m.content }};"
    "{% endfor %}"
)

#: How templates read thoughts elsewhere than in a field: as parts, whose value is a text or a list,
#: as blocks, which each answer then has, or in a field of another name.
_CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %};{% endfor %}"
_REFUSES = (
    "{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty answer') }}{% endif %}"
)
_AS_PARTS = (
    "{% for m in messages %}{{ m.role }}:" + _REFUSES + "{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}{{ '(' + THOUGHT + ')' }}{% endif %}{% endfor %}{% endif %}" + _CALLS
)
_AS_BLOCKS = (
    "{% set ns = namespace(kind=none) %}{% for m in messages %}{{ m.role }}:"
    "{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set kind = 'text' if m.content is string else 'blocks' %}"
    "{% if ns.kind and ns.kind != kind %}{{ raise_exception('mixed') }}{% endif %}"
    "{% set ns.kind = kind %}{% if kind == 'text' %}{{ m.content }}{% else %}"
    "{% for block in m.content.blocks %}{% if block.type == 'thoughts' %}({{ block.text }})"
    "{% else %}{{ block.text }}{% endif %}{% endfor %}{% endif %}{% endif %}" + _CALLS
)
_AS_FIELD = (
    "{% for m in messages %}{{ m.role }}:{% if m.NAME is defined %}({{ m.NAME }}){% endif %}"
    "{{ m.content }}" + _CALLS
)
#: These show no thoughts; they refuse an empty answer, or print a content that is not a text.
_UNREAD = {
    "refused": "{% for m in messages %}{{ m.role }}:" + _REFUSES + "{{ m.content }}" + _CALLS,
    "printed": "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string "
    "else m.content | tojson }}" + _CALLS,
}
THINKING = {
    "texts": _AS_PARTS.replace("THOUGHT", "part.thinking"),
    "lists": _AS_PARTS.replace("THOUGHT", "part.thinking[0].text"),
    "blocks": _AS_BLOCKS,
    **{name: _AS_FIELD.replace("NAME", name) for name in
       ("reasoning_content", "thinking", "thought", "tool_plan")},
}  # fmt: skip


def call(arguments, **more):
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    } | more


def history(arguments):
    called = {"role": "assistant", "content": "So.", "tool_calls": [call(arguments)]}
    return [USER, called, RESULT, USER]


def texts_of(template):
    return Texts(byte_tokenizer(chat_template=template))


def rendered(template, messages, **variables):
    texts = texts_of(template)
    return texts.render(0, texts.messages(0, messages), variables)


def judged(template, messages, **more):
    tokenizer = byte_tokenizer(chat_template=template)
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **more
    )


@pytest.mark.parametrize("name", ALL)
def test_arguments_as_text_are_rendered_as_the_object_is(name):
    template = ALL[name].template
    expected = judged(template, history(ARGUMENTS))
    for given in (json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1), ARGUMENTS):
        assert rendered(template, history(given)) == expected


@pytest.mark.parametrize("given", [json.dumps(ARGUMENTS), ARGUMENTS])
def test_a_template_that_joins_arguments_gets_text(given):
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    assert rendered(JOINS, history(given)) == judged(JOINS, history(text))


@pytest.mark.parametrize("name", ALL)
def test_half_of_an_escaped_character_in_arguments_does_not_end_a_chat(name):
    """Law: a call is sent back as it was got; the model can escape half of an emoji in it."""
    given = r'{"city": "\ud83d \ud83d\ude00 \\ud83d", "tags": ["\uDFFF"], "\ud800": 1}'
    valid = {"city": "\ufffd \U0001f600 \\ud83d", "tags": ["\ufffd"], "\ufffd": 1}
    template = ALL[name].template
    assert rendered(template, history(given)) == judged(template, history(valid))


#: These print the arguments, or join them in another way.
PRINTS = {
    "print": "{{ c.function.arguments }}",
    "tilde": "{{ c.function.name ~ c.function.arguments }}",
    "string": "{{ c.function.arguments | string }}",
    "trim": "{{ c.function.arguments | trim }}",
    "format": "{{ '%s' | format(c.function.arguments) }}",
    "join": "{{ ' '.join([c.function.name, c.function.arguments]) }}",
    "for tools": "{% if tools %}{{ c.function.arguments }}{% endif %}",
}


@pytest.mark.parametrize("how", PRINTS)
def test_a_template_that_prints_arguments_gets_text(how):
    """Law: no template writes a call's arguments as Python does."""
    template = JOINS.replace("{{ c.function.name + '\n' + c.function.arguments }}", "CALL")
    template = template.replace("CALL", PRINTS[how])
    arguments = {"far": True, "n": None, "city": "Zürich"}
    for given in (json.dumps(arguments, indent=1), arguments):
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        expected = judged(template, history(text), tools=[TOOL])
        assert rendered(template, history(given), tools=[TOOL]) == expected
        assert text.strip() in expected


def test_a_template_that_prints_whole_functions_gets_objects():
    template = JOINS.replace("c.function.name + '\n' + c.function.arguments", "c.function")
    expected = judged(template, history(ARGUMENTS))
    assert rendered(template, history(json.dumps(ARGUMENTS))) == expected


#: As those of DeepSeek R1 and V3: calls are shown where the content is None.
NONE = (
    "{% for m in messages %}{% if m.role != 'assistant' %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name + '\n' + c.function.arguments }}</call>{% endfor %}[E]{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}[A]{{ m.content }}[E]{% endif %}"
    "{% endfor %}"
)


def judged_as_given(template, messages):
    """What transformers makes of messages that it does not change: a content may be None."""
    (text,), _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=True
    )
    return text


@pytest.mark.parametrize("arguments", ["{}", '{"city":  "x"}'])
def test_no_call_of_a_history_is_lost(arguments):
    """Law: whoever sends an answer back finds its calls in the prompt, and its content."""
    calls = [call(arguments), call("{}", id="c2")]
    none = {"role": "assistant", "content": None, "tool_calls": calls}
    expected = judged_as_given(NONE, [USER, none, RESULT, USER])
    assert expected.count("<call>f") == 2
    for content in (None, "", []):
        said = none | {"content": content}
        assert rendered(NONE, [USER, said, RESULT, USER]) == expected
        body = json.dumps({"messages": [USER, said, RESULT, USER]}).encode()
        assert rendered(NONE, messages_of(read(ChatRequest, body).messages)) == expected
    expected = judged_as_given(NONE, [USER, {"role": "assistant", "content": "So."}, none, RESULT])
    assert rendered(NONE, [USER, none | {"content": "So."}, RESULT]) == expected
    plain = {"role": "assistant", "content": ""}
    assert rendered(NONE, [USER, plain, USER]) == judged_as_given(NONE, [USER, plain, USER])


def test_a_template_that_shows_calls_in_the_place_of_content_gets_both():
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}{% else %}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
    )
    said, called = {"role": "assistant", "content": "So."}, history(ARGUMENTS)[1]
    expected = judged(template, [USER, said, called | {"content": ""}, RESULT])
    assert rendered(template, [USER, called, RESULT]) == expected


def test_a_template_that_takes_no_call_beside_content_refuses_it():
    template = NONE.replace("{% endfor %}", "{% endfor %}", 1).replace(
        "[A]", "{% if m.tool_calls %}{{ raise_exception('calls alone') }}{% endif %}[A]"
    )
    with pytest.raises(ConfigError, match="calls alone"):
        rendered(template, history(ARGUMENTS))


def test_a_template_that_passes_a_limit_is_rendered_no_second_time(monkeypatch):
    chats = []

    def render(template, messages, variables):
        chats.append(messages)
        raise TemplateLimitError("it has not ended after 20 s, and was stopped")

    monkeypatch.setattr(texts_module, "render_template", render)
    with pytest.raises(ConfigError, match="refuses prompt 0: it has not ended after 20 s"):
        rendered(NONE, history(ARGUMENTS))
    assert len(chats) == 1


@pytest.mark.parametrize("given", ["", None])
def test_no_arguments_are_an_empty_object(given):
    template = ALL["qwen"].template
    assert rendered(template, history(given)) == judged(template, history({}))


@pytest.mark.parametrize(
    "ids", [["call_0123456789abcdef01234567", "call_1"], ["a" * 9, "b12345678"]]
)
def test_a_template_that_wants_ids_of_nine_characters_gets_them(ids):
    """Law: a result has the id of its call; ids that fit, and those for other templates, stay."""
    calls = [call({}, id=ident) for ident in ids]
    results = [RESULT | {"tool_call_id": ident} for ident in reversed(ids)]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    first, second, *results = rendered(NINE, messages).split("#")[1::2]
    assert results == [second, first] and first != second
    assert all(len(ident) == 9 and ident.isalnum() for ident in (first, second))
    assert [first, second] == ids or len(ids[0]) != 9
    assert rendered(NINE.replace("9", "0").replace("!= 0", "== 0"), messages).split("#")[1::2] == [
        *ids,
        *reversed(ids),
    ]


def test_a_template_that_shows_ids_in_the_place_of_names_gets_both():
    """Law: the model sees which function it has called. An id that repeats means the latest."""

    def said(*pairs):
        calls = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in pairs]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def result(ident):
        return {"role": "tool", "tool_call_id": ident, "content": "r"}

    messages = [
        said(("a", "f"), ("b", "g-1")),
        result("b"),
        result("a"),
        said(("a", "g-1"), ("functions.f:7", "f"), ("functions.f:8", "g-1")),
        result("a"),
        result("functions.f:7"),
        result("other"),
    ]

    def shown(*idents):
        return "assistant:" + "".join(
            f"<|tool_call_begin|>{ident}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            for ident in idents
        )

    assert rendered(KIMI, messages).split(";") == [
        shown("functions.f:0", "functions.g-1:1"),
        "tool:## Return of functions.g-1:1 r",
        "tool:## Return of functions.f:0 r",
        shown("functions.g-1:2", "functions.f:7", "functions.g-1:4"),
        "tool:## Return of functions.g-1:2 r",
        "tool:## Return of functions.f:7 r",
        "tool:## Return of other r",
        "",
    ]
    odd = [{"role": "assistant", "tool_calls": [{}, 3, {"id": 5, "function": {"name": "f"}}]}]
    with pytest.raises(ConfigError, match="the chat template refuses prompt 0"):
        rendered(KIMI, odd)


def test_a_name_in_the_place_of_ids_is_no_pattern(monkeypatch):
    """Law: none is compiled of it. Of a name of a million characters that takes seconds."""
    monkeypatch.setattr(chat_messages, "re", None)
    idents = ["functions.f(x):12", "functions.f(x):", "functions.f(x):\u0663", "12"]
    calls = [{"id": ident, "function": {"name": "f(x)"}} for ident in idents]
    (said,) = chat_messages.prepared([{"role": "assistant", "tool_calls": calls}], KIMI)
    shown = [call["id"] for call in said["tool_calls"]]
    assert shown == [idents[0], *(f"functions.f(x):{number}" for number in (1, 2, 3))]


@pytest.mark.parametrize("given", ['{"city": "Par', "[1]", '"x"', "3", "[" * 100_000])
def test_text_that_is_not_an_object_stays_as_it_is(given):
    template = ALL["qwen"].template
    assert rendered(template, history(given)) == judged(template, history(given))


def test_an_error_of_a_template_is_told_as_it_is():
    template = "{{ raise_exception('no tools') }}"
    with pytest.raises(ConfigError, match=r"the chat template refuses prompt 0.*no tools"):
        rendered(template, history(ARGUMENTS))
    items = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | items | list }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="TypeError: Can only get item pairs from a mapping"):
        rendered(items, history("no object"))


def test_fields_without_a_value_mean_nothing():
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls is defined %}{{ m.tool_calls[0].function.name }}{% endif %}"
        "{% for key in ('name', 'refusal', 'audio', 'function_call', 'annotations') %}"
        "{% if m[key] is defined %}{{ key }}{% endif %}{% endfor %};{% endfor %}"
    )
    empty = dict.fromkeys(("name", "refusal", "audio", "function_call", "reasoning_content"))
    for calls in ([], None):
        said = {"role": "assistant", "content": "Hi.", "tool_calls": calls, "annotations": []}
        assert rendered(template, [USER, said | empty, USER]) == (
            "user:Weather?;assistant:Hi.;user:Weather?;"
        )
    called = {"role": "assistant", "content": None, "tool_calls": [call("{}")]} | empty
    assert rendered(template, [USER, called, USER]).startswith("user:Weather?;assistant:f;")


def test_what_a_client_got_may_be_sent_back():
    """Law: `message.model_dump()` of an answer is a message of the next request."""
    messages = [
        ChatCompletionMessage(role="assistant", content="Hi."),
        ChatCompletionMessage.model_validate(
            {"role": "assistant", "content": None, "tool_calls": [call('{"city": "x"}')]}
        ),
        ChatCompletion.model_validate(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "logprobs": None,
                        "message": {
                            "role": "assistant",
                            "content": "Yes.",
                            "refusal": None,
                            "annotations": [],
                            "reasoning": None,
                        },
                    }
                ],
            }
        )
        .choices[0]
        .message,
    ]
    template = ALL["qwen"].template
    for message in messages:
        plain = {"role": "assistant", "content": message.content or ""}
        if message.tool_calls:
            plain["tool_calls"] = [call({"city": "x"})]
        for said in (message.model_dump(), message.model_dump(exclude_unset=True)):
            body = json.dumps({"messages": [USER, said, RESULT]}).encode()
            found = messages_of(read(ChatRequest, body).messages)
            expected = judged(template, [USER, plain, RESULT])
            assert rendered(template, found) == rendered(template, [USER, said, RESULT]) == expected


def test_a_developer_is_the_system_where_the_template_knows_none():
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    system = [{"role": "system", "content": "Be brief."}, USER]
    for template in (CHATML, CHATML + "{% set token = '<|developer_start|>' %}"):
        assert rendered(template, messages) == judged(template, system)
    for name in ("'developer'", '"developer"'):
        knows = CHATML + f"{{% set roles = ['system', {name}] %}}"
        assert rendered(knows, messages) == judged(knows, messages)


@pytest.mark.parametrize("given", ["Hello", [{"type": "text", "text": "Hello"}]])
def test_contents_have_the_form_that_the_template_reads(given):
    messages = [{"role": "user", "content": given}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert rendered(PARTS, messages) == judged(PARTS, parts) == "<user>Hello"
    text = [{"role": "user", "content": "Hello"}]
    for template in (CHATML, CHATML + "{# type #}", PARTS.replace("m.content", "[m.content]")):
        assert rendered(template, messages) == judged(template, text)


#: As templates write functions: each part is joined to the text, so that none may be missing.
FUNCTIONS = (
    "{% for t in tools %}{% set f = t.function %}{{ f.name + ': ' + f.description }}("
    "{% for key, value in f.parameters.properties.items() %}{{ key + '=' + value.description }},"
    "{% endfor %}){% endfor %}{% for m in messages %};{{ m.content }}{% endfor %}"
)
#: As Apertus': functions alone.
ALONE = FUNCTIONS.replace("t.function", "t")
WHOLE = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": "A."}},
}


@pytest.mark.parametrize("template", [FUNCTIONS, ALONE], ids=["functions", "alone"])
@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({"description": "D.", "parameters": WHOLE}, "f: D.(a=A.,)"),
        ({"parameters": WHOLE}, "f: (a=A.,)"),
        ({"description": "D."}, "f: D.()"),
        ({}, "f: ()"),
        ({"parameters": {}}, "f: ()"),
        ({"parameters": {"type": "object"}}, "f: ()"),
        ({"parameters": {"properties": {"a": {"type": "string"}, "b": {}}}}, "f: (a=,b=,)"),
    ],
)
def test_a_template_that_wants_whole_functions_gets_them(template, function, shown):
    """Law: a function may leave out its description and its parameters, whatever the template."""
    tools = [{"type": "function", "function": {"name": "f"} | function}]
    assert rendered(template, [USER], tools=tools) == shown + ";Weather?"
    called = {"role": "assistant", "content": None, "tool_calls": [call("{}")]}
    assert rendered(template, [USER, called], tools=tools) == shown + ";Weather?;"


def test_a_template_that_takes_functions_as_they_are_gets_them_so():
    template = CHATML + "{{ tools | tojson }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(template, [USER], tools=tools) == judged(template, [USER], tools=tools)
    refuses = "{{ raise_exception('no tools') if tools else '' }}"
    with pytest.raises(ConfigError, match="refuses prompt 0: TemplateError: no tools"):
        rendered(refuses, [USER], tools=tools)
    refuses = FUNCTIONS + "{{ raise_exception('no user') }}"
    with pytest.raises(ConfigError, match="refuses prompt 0: TemplateError: no user"):
        rendered(refuses, [USER], tools=tools)


#: As those of Llama 3.1, which refuse a second call, and of gpt-oss, which do not show it.
ONE_CALL = {
    "refuse": "{% if m.tool_calls|length != 1 %}{{ raise_exception('one at once') }}{% endif %}",
    "lose": "",
}


@pytest.mark.parametrize("how", ONE_CALL)
def test_a_template_that_takes_one_call_a_message_gets_one(how):
    """Law: an answer with several calls may be sent back; each result stands behind its call."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}"
        + ONE_CALL[how]
        + "{% set c = m.tool_calls[0].function %}<{{ c.name }}{{ c.arguments | tojson }}>"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    names = ["f", "g", "h"]
    calls = [call("{}", id=n, function={"name": n, "arguments": '{"a": 1}'}) for n in names]
    results = [RESULT | {"tool_call_id": name, "content": name * 3} for name in ("g", "f", "x")]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    assert rendered(template, [USER, said, *results, USER, said]) == (
        '[user]Weather?<f{"a": 1}>[tool]fff<g{"a": 1}>[tool]ggg<h{"a": 1}>[tool]xxx[user]Weather?'
        '<f{"a": 1}><g{"a": 1}><h{"a": 1}>'
    )
    twice = [said | {"tool_calls": calls[:1] * 2}, *[results[1]] * 2]
    assert rendered(template, twice) == '<f{"a": 1}>[tool]fff' * 2


@pytest.mark.parametrize("description", [3, "probe_function {'probe_argument': True}"])
def test_a_requests_tools_say_nothing_about_the_calls_of_later_requests(description):
    """Law: one client's tools, even those that the template refuses, change no other's prompt."""
    template = (
        "{% for t in tools %}{{ '#' + t.function.description }}{% endfor %}"
        "{% for m in messages %}{% if m.tool_calls and not m.content %}"
        + ONE_CALL["refuse"]
        + "{% set c = m.tool_calls[0].function %}<{{ c.name + c.arguments }}>"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    said = {"role": "assistant", "content": "So.", "tool_calls": [call("{}")] * 2}
    texts = texts_of(template)
    messages = texts.messages(0, [USER, said])
    strange = {"type": "function", "function": {"name": "g", "description": description}}
    with contextlib.suppress(ConfigError):
        texts.render(0, messages, {"tools": [strange]})
    expected = "#d[user]Weather?[assistant]So.<f{}><f{}>"
    assert texts.render(0, messages, {"tools": [TOOL]}) == expected


def test_a_template_that_reads_results_as_lists_of_parts_gets_such():
    """As Command A's: a text would be read character by character, and an empty one is refused."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}"
        "{% if m.content[0].thinking %}T{% endif %}{{ m.tool_calls[0].function.name }}"
        "{% elif m.role == 'tool' %}{% for part in m.content %}{{ part | tojson }};{% endfor %}"
        "{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text if part.type == 'text' }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    assert rendered(template, [USER, history("{}")[1] | {"content": None}, RESULT, USER]) == (
        '[user]Weather?[assistant]f[tool]{"type": "text", "text": "18 C"};[user]Weather?'
    )


@pytest.mark.parametrize("kind", THINKING)
@pytest.mark.parametrize("has_tools", [False, True])
def test_thoughts_come_back_in_the_form_that_the_template_reads(kind, has_tools):
    """Law: beside a text and beside a call, and where the answer was cut off within them."""
    texts = texts_of(THINKING[kind])
    variables = {"tools": [TOOL]} if has_tools else {}
    cut = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    called = {**cut, "tool_calls": [call("{}")]}
    said = {**cut, "content": "So."}
    plain = {"role": "assistant", "content": "Yes."}
    chat = [USER, cut, USER, called, RESULT, said, USER, plain, USER]
    assert texts.render(0, texts.messages(0, chat), variables) == (
        "user:Weather?;assistant:(Hm);user:Weather?;assistant:(Hm)<f>;tool:18 C;"
        "assistant:(Hm)So.;user:Weather?;assistant:Yes.;user:Weather?;"
    )
    assert texts.reads_thoughts(variables)


@pytest.mark.parametrize("kind", _UNREAD)
def test_thoughts_that_a_template_does_not_read_make_it_refuse_nothing(kind):
    """Law: the chat goes on, and says that they were not read; other refusals stay as they are."""
    texts = texts_of(_UNREAD[kind])
    cut = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    called = {**cut, "tool_calls": [call("{}")]}
    space = " " if kind == "refused" else ""
    for answer, shown in ((cut, space), (called, "<f>"), ({**cut, "content": "So."}, "So.")):
        text = texts.render(0, texts.messages(0, [USER, answer, USER]), {})
        assert text == f"user:Weather?;assistant:{shown};user:Weather?;"
        assert not texts.reads_thoughts({})
    refusal = "{{ raise_exception('not <' ~ messages[1].content ~ '>') }}"
    with pytest.raises(ConfigError, match="not <>"):
        rendered(refusal + _UNREAD[kind], [USER, cut, USER])


def test_a_chat_that_was_not_rendered_costs_no_probe(monkeypatch):
    """Law: whether thoughts are read is known from the chat that has them."""
    texts = texts_of(THINKING["texts"])
    monkeypatch.setattr(texts_module, "render_template", None)
    assert texts.reads_thoughts({})


def test_an_empty_answer_that_is_to_go_on_stays_empty():
    """Law: a space that the client did not send would begin the answer."""
    cut = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    for kind, shown in (("texts", "(Hm)"), ("lists", "(Hm)"), ("blocks", ""), ("thinking", "(Hm)")):
        texts = texts_of(THINKING[kind])
        for content in ("", "So"):
            chat = texts.messages(0, [USER, {**cut, "content": content}])
            text = texts.render(0, chat, going_on)
            assert text == f"user:Weather?;assistant:{shown}{content}"
        # transformers goes on with a text or with parts, and not with blocks
        assert texts.reads_thoughts(going_on) is (kind != "blocks")
    refuses_all = "{% if messages[1].content[:1] != ' ' %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(ConfigError, match="no"):
        rendered(refuses_all + _UNREAD["printed"], [USER, cut], **going_on)


def test_parts_with_thoughts_are_the_thoughts_of_an_answer():
    """Parts as Mistral's interface has them: a text, or a list of parts with texts."""
    texts = texts_of(THINKING["reasoning_content"])
    text_part = {"type": "text", "text": "So."}
    for thinking in ("Hm", [{"type": "text", "text": "H"}, {"type": "text", "text": "m"}]):
        part = {"type": "thinking", "thinking": thinking}
        for more in ({}, {"reasoning_content": "Hm"}):
            said = {"role": "assistant", "content": [part, text_part]} | more
            text = texts.render(0, texts.messages(0, [USER, said]), {})
            assert text == "user:Weather?;assistant:(Hm)So.;"
    both = {"role": "assistant", "content": [part], "reasoning": "A. "}
    text = texts.render(0, texts.messages(0, [USER, both]), {})
    assert text == "user:Weather?;assistant:(A. Hm);"
    for role, strange, says in (
        ("user", part, "is the type 'thinking': only text can be read"),
        ("assistant", {"type": "thinking"}, "is {'type': 'thinking'}: thoughts are read as"),
        ("assistant", {"type": "thinking", "thinking": [5]}, "part 0 .* is 5: only text"),
    ):
        with pytest.raises(ConfigError, match=says):
            texts.messages(0, [USER, {"role": role, "content": [strange]}])


NAMED = {name: CHATML + name for name in ("default", "tool_use", "rag")}


@pytest.mark.parametrize(
    ("names", "variables", "name"),
    [
        (["default", "tool_use"], {}, "default"),
        (["default", "tool_use"], {"tools": [TOOL]}, "tool_use"),
        (["default"], {"tools": [TOOL]}, "default"),
        (["tool_use"], {"tools": [TOOL]}, "tool_use"),
        (["default", "rag", "tool_use"], {"documents": [{"title": "a"}]}, "rag"),
        (["default", "rag", "tool_use"], {"documents": [{}], "tools": [TOOL]}, "tool_use"),
        (["default", "tool_use"], {"documents": [{"title": "a"}]}, "default"),
    ],
)
def test_the_template_of_several_is_chosen_by_what_is_given(names, variables, name):
    templates = {key: NAMED[key] for key in names}
    text = rendered(templates, [USER], **variables)
    assert text == judged(NAMED[name], [USER])
    if name != "rag":  # which transformers takes only by its name
        assert text == judged(templates, [USER], **variables)


def test_without_a_default_template_the_error_names_those_that_are_there():
    with pytest.raises(ConfigError, match="templates 'rag', 'tool_use', but no 'default'"):
        rendered({name: NAMED[name] for name in ("tool_use", "rag")}, [USER])


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("files", [{}, {"additional_chat_templates/tool_use.jinja": "T"}])
@pytest.mark.parametrize("jinja", [None, "J"])
def test_template_files_count_as_in_transformers(tmp_path, has_config, files, jinja):
    """A processor's `chat_template.json` counts where a tokenizer has no template."""
    byte_tokenizer(chat_template=None).save_pretrained(tmp_path)
    if has_config:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "default", "template": "C"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (
        files.items() if jinja is None else [("chat_template.jinja", jinja), *files.items()]
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert load_tokenizer(tmp_path).chat_template == expected
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "P"}))
    assert load_tokenizer(tmp_path).chat_template == (expected or "P")


def test_a_turn_of_a_session_renders_its_messages_as_a_chat_does():
    template = ALL["qwen"].template
    texts, tokenizer = texts_of(template), byte_tokenizer(chat_template=template)
    turn = texts.turn(Conversation(1), history(json.dumps(ARGUMENTS)))
    expected = judged(template, history(ARGUMENTS))
    assert turn.tokens == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("name", ["mistral_v13", "gpt_oss", "qwen"])
def test_a_sessions_call_keeps_its_special_tokens(name):
    """Law: the next turn goes on behind the session's own tokens, with the marks of its call."""
    family = ALL[name]
    tokenizer = byte_tokenizer(family.specials, family.template)
    texts = Texts(tokenizer)
    first = texts.turn(Conversation(1), [USER])
    answer = "".join(text for text, _ in family.answer("So.", [call({"a": 1})]))
    answer_ids = tokenizer.encode(answer, add_special_tokens=False)
    tokens = [*first.tokens, *answer_ids]
    said = [Said(len(tokens), first.messages, answer_ids, ())]
    turn = texts.turn(Conversation(1, tokens=tokens, said=said), [RESULT])
    assert turn.tokens[: len(tokens)] == tokens and turn.said == said
    assert tokenizer.decode(turn.tokens[len(tokens) :]) == "[E][tool]18 C[E][A]"


def test_a_template_that_refuses_special_tokens_in_a_history_gets_none():
    family = ALL["mistral_v13"]
    loop = "{%- for m in messages %}"
    refusal = "{% if 'ARGS' in m.content %}{{ raise_exception('no') }}{% endif %}"
    refuses = family.template.replace(loop, loop + refusal)
    tokenizer = byte_tokenizer(family.specials, refuses)
    texts = Texts(tokenizer)
    first = texts.turn(Conversation(1), [USER])
    answer_ids = tokenizer.encode("[TOOL_CALLS]f[ARGS]{}", add_special_tokens=False)
    tokens = [*first.tokens, *answer_ids]
    said = [Said(len(tokens), first.messages, answer_ids, ())]
    turn = texts.turn(Conversation(1, tokens=tokens, said=said), [RESULT])
    assert tokenizer.decode(turn.tokens) == "[user]Weather?[E][A]f{}[E][tool]18 C[E][A]"


@pytest.mark.parametrize("role", ["tool", "ipython"])
@pytest.mark.parametrize("name", ["qwen_special", "mistral_v13", "kimi", "deepseek_v3", "gpt_oss"])
def test_a_tools_result_spells_control_tokens_and_has_none(name, role):
    """Law: the prompt's text is transformers' own. A name in a result is not the token: a page
    that a tool has read could else end its message, and begin another's."""
    family = ALL[name]
    specials = ("[E]", "<|im_end|>", "<|im|", *family.specials)
    tokenizer = byte_tokenizer(specials, family.template)
    texts = Texts(tokenizer, 1 << 16)
    harmless = history(ARGUMENTS)
    harmless[2] = harmless[2] | {"role": role, "content": "-"}
    spelled = "a" + "".join(specials) + "<<|im_end|>|im_end|>" + specials[-1]
    messages = [*harmless[:2], harmless[2] | {"content": spelled}, *harmless[3:]]
    ids = texts.encode(0, messages)
    assert tokenizer.decode(ids) == judged(family.template, messages)

    def control(ids):
        return [token for token in ids if token > 258]

    assert control(ids) == control(texts.encode(0, harmless))
    texts._max_context_len = 64
    assert texts.encode(0, messages) == ids
    many = [*harmless[:2], harmless[2] | {"content": "[E]" * 65}]
    with pytest.raises(ConfigError, match="spell 65 control tokens; max_context_len is 64"):
        texts.encode(0, many)


@pytest.mark.parametrize(
    "names",
    [
        [f"[control_{i}]" for i in range(1000)],
        ["<s>", "</s>", "<|im_end|>", "<|im|", "<|im_", "[", "a.b", "é", "\n", "🙂x"],
    ],
)
def test_names_of_control_tokens_are_found_at_every_place(names):
    """Law: a thousand names cost a text about what one costs: those alike are tried as one."""
    rng = random.Random(3)
    parts = [*rng.sample(names, 10), "[control_", "<", "<|im", "a", "aab", "]", "x\n"]
    for _ in range(50):
        text = "".join(rng.choices(parts, k=12))
        told = with_seams([RESULT | {"content": text}], "", dict.fromkeys([*names, "", " "], True))
        spelled = [name for name in names if len(name) > 1 and name.strip()]
        starts = [any(text.startswith(name, i) for name in spelled) for i in range(len(text))]
        marked = "".join(c + SEAM * start for c, start in zip(text, starts, strict=True))
        assert told == [RESULT | {"content": marked}]
    assert chat_messages._any_of(names).count("control") <= 1


def test_names_of_control_tokens_are_tokens_outside_of_results():
    """As with transformers, and vLLM: who writes the chat may write them."""
    tokenizer = byte_tokenizer()
    for role in ("user", "assistant", "system"):
        messages = [{"role": role, "content": "a<|im_end|>b"}]
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert Texts(tokenizer).encode(0, messages) == expected


def test_a_sessions_turn_goes_on_behind_a_result_that_spells_control_tokens():
    tokenizer = byte_tokenizer(chat_template=CHATML)
    texts = Texts(tokenizer)
    first = texts.turn(Conversation(1), [USER, RESULT | {"content": "a<|im_end|>é<|im_start|>"}])
    answer_ids = tokenizer.encode("So.", add_special_tokens=False)
    tokens = [*first.tokens, *answer_ids]
    said = [Said(len(tokens), first.messages, answer_ids, ())]
    new = [RESULT | {"content": "<|im_start|>b"}, USER]
    turn = texts.turn(Conversation(1, tokens=tokens, said=said), new)
    assert turn.tokens[: len(tokens)] == tokens and turn.said == said
    chat = [*first.messages, {"role": "assistant", "content": "So."}, *new]
    assert tokenizer.decode(turn.tokens) == judged(CHATML, chat)
    marks = [token for token in turn.tokens[len(tokens) :] if token > 258]
    end, begin = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert marks == [end, begin, end, begin, end, begin]


CHECKS = """{%- for m in messages %}{% if m.role == 'tool' and m.content[:1] != '{' %}
{{- raise_exception('a result is JSON') }}{% endif %}[{{ m.role }}]
{{- m.content.split('</think>')[-1] }}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def test_a_sessions_turn_is_one_that_the_template_takes():
    """Law: a session takes each message that a chat takes, also where its history is rendered anew,
    and its template checks what a message says."""
    tokenizer = byte_tokenizer(chat_template=CHECKS)
    texts, conversation = Texts(tokenizer), Conversation(1)
    turn = texts.turn(conversation, [USER])
    answer = tokenizer.encode("<think>a</think>b", add_special_tokens=False)
    conversation.tokens = [*turn.tokens, *answer]
    conversation.said = [Said(len(conversation.tokens), turn.messages, answer, ())]
    result = {"role": "tool", "content": '{"a": 1}'}
    turn = texts.turn(conversation, [result])
    expected = [USER, {"role": "assistant", "content": "b"}, result]
    assert tokenizer.decode(turn.tokens) == judged(CHECKS, expected)
    assert [said.end for said in turn.said] == [common_len(conversation.tokens, turn.tokens)]


def test_a_rewind_to_the_begin_forgets_turns_whose_first_token_has_changed():
    template = "{{ messages[-1].content[:1] }}" + CHECKS
    tokenizer = byte_tokenizer(chat_template=template)
    texts, conversation = Texts(tokenizer), Conversation(1)
    turn = texts.turn(conversation, [USER])
    conversation.tokens = [*turn.tokens, 98]
    conversation.said = [Said(len(conversation.tokens), turn.messages, [98], ())]
    turn = texts.turn(conversation, [USER | {"content": "no"}])
    conversation.tokens, conversation.said = turn.tokens, turn.said
    conversation.cut(0)
    assert conversation.said == []
