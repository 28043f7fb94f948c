"""Calls of tools over HTTP, beside an engine that says what it is told, token by token."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from test_bridge import READY, done
from test_scripted_engine import Scripted

from reciter import byte_tokenizer
from serve_kit import events
from specpool.serve.bridge.messages import Accepted, Submit, Tokens
from specpool.serve.server import tokenizer_of
from tool_families import FAMILIES

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
ASK = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 999}
PARIS = {"city": "Zürich", "days": 3}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": PARIS}}


def run(tokenizer, test):
    async def all_of_it():
        ready = dataclasses.replace(READY, max_context_len=4096, vocab_size=len(tokenizer))
        front = Scripted(tokenizer=tokenizer, ready=ready)
        await front.start()
        await asyncio.wait_for(test(front), 60)

    asyncio.run(all_of_it())


async def answer(front, body, parts, reason="stop"):
    """Ask, and let the engine say these tokens in parts; returns the JSON or the stream's."""
    num = sum(isinstance(message, Submit) for message in front.wire.said)
    task = front.begin(body, path="/v1/chat/completions")
    asked = (await front.said(Submit, num + 1))[-1]
    await front.wire.come(Accepted(asked.key))
    for ids in parts:
        await front.wire.come(Tokens(asked.key, 0, ids, [False] * len(ids), None))
    await front.wire.come(done(asked.key, reason=reason))
    status, answer = await task
    assert status == 200, answer
    return answer, asked


def joined(text):
    """The message that a stream's parts make up, its calls, and its finish reason."""
    content, calls, reason = "", [], None
    for part in events(text):
        if part == "[DONE]":
            break
        (choice,) = ChatCompletionChunk.model_validate(part).choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return content or None, calls, reason


def said(answer):
    choice = ChatCompletion.model_validate(answer | {"model": "m"}).choices[0]
    calls = [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or []]
    return choice.message.content, calls, choice.finish_reason


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["", "Let me look."])
def test_a_call_behind_special_tokens_is_a_call(name, content):
    """Streamed and as a whole; the tokens that mark it are special, as in published tokenizers."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.specials, family.template)
    text = "".join(text for text, _ in family.answer(content, [CALL]))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (
        set(ids) >= {*tokenizer.convert_tokens_to_ids([*family.specials])} - {None} or "|" in text
    )
    parts = [ids[start : start + 9] for start in range(0, len(ids), 9)]

    async def test(front):
        whole, asked = await answer(front, ASK, parts)
        expected = (content or None, "tool_calls")
        got = said(whole)
        assert (got[0], got[2]) == expected
        assert [(n, json.loads(a)) for n, a in got[1]] == [("get_weather", PARIS)]
        stream, _ = await answer(front, ASK | {"stream": True}, parts)
        assert joined(stream) == got
        prompt = tokenizer.apply_chat_template(
            ASK["messages"], tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert asked.prompt == prompt

    run(tokenizer, test)


def test_special_tokens_are_no_content_where_no_call_is_read():
    family = FAMILIES["mistral_v13"]
    tokenizer = byte_tokenizer(family.specials, family.template)

    async def test(front):
        for text, shown in (
            ("So [TOOL_CALLS]get[ARGS]{}", "So get{}"),
            ("a[ARGS]b é[TOOL_CALLS]", "a" + "b é"),
        ):
            ids = tokenizer.encode(text, add_special_tokens=False)
            for body in (ASK, {**ASK, "tool_choice": "none"}):
                whole, _ = await answer(front, body, [ids])
                assert said(whole) == (shown, [], "stop")
                stream, _ = await answer(front, body | {"stream": True}, [[i] for i in ids])
                assert joined(stream) == (shown, [], "stop")

    run(tokenizer, test)


def test_the_drafts_of_a_text_are_its_content_however_it_is_held():
    """Law: a text that could have begun a call is told late, and its drafts with it."""
    tokenizer = byte_tokenizer(FAMILIES["qwen"].specials, FAMILIES["qwen"].template)
    text = 'So <tool_ca is no call, {"name": 5} neither. <tool'
    ids = tokenizer.encode(text, add_special_tokens=False)

    async def test(front):
        body = ASK | {"stream": True, "include_drafts": True}
        for split in ([ids], [[i] for i in ids]):
            stream, _ = await answer(front, body, split)
            assert joined(stream)[0] == text
            pieces = [piece for part in [*events(stream)][:-1] for piece in part.get("drafts", [])]
            assert "".join(piece for piece, _ in pieces) == text

    run(tokenizer, test)


def test_a_call_that_the_length_cuts_off_says_so():
    family = FAMILIES["mistral_v13"]
    tokenizer = byte_tokenizer(family.specials, family.template)
    ids = tokenizer.encode('[TOOL_CALLS]get_weather[ARGS]{"city": "Pa', add_special_tokens=False)

    async def test(front):
        whole, _ = await answer(front, ASK, [ids], reason="length")
        assert said(whole) == (None, [["get_weather", '{"city": "Pa']], "length")
        stream, _ = await answer(front, ASK | {"stream": True}, [[i] for i in ids], reason="length")
        assert joined(stream) == said(whole)

    run(tokenizer, test)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_whose_arguments_a_stop_cuts_off_was_not_made(name):
    """Law: `tool_calls` says that the arguments of every call are whole; a stop within them says
    `stop`, be it a stop string or the model's own end."""
    family = FAMILIES[name]
    tokenizer = byte_tokenizer(family.specials, family.template)
    first, second = ("".join(text for text, _ in family.answer("", [CALL] * num)) for num in (1, 2))
    cut = second[: second.rindex("Z") + 1]
    ids = tokenizer.encode(second, add_special_tokens=False)
    cut_ids = tokenizer.encode(cut, add_special_tokens=False)
    assert len(cut) > len(first)

    async def test(front):
        for body, parts in (({}, [[i] for i in cut_ids]), ({"stop": ["ürich"]}, [ids])):
            whole, _ = await answer(front, ASK | body, parts)
            stream, _ = await answer(front, ASK | body | {"stream": True}, parts)
            content, calls, reason = said(whole)
            assert joined(stream) == (content, calls, reason)
            is_whole = True
            for _, arguments in calls:
                try:
                    json.loads(arguments)
                except ValueError:
                    is_whole = False
            assert reason == ("tool_calls" if calls and is_whole else "stop")

    run(tokenizer, test)


@pytest.mark.parametrize("end", ["", " no. </think> Hm."])
def test_thoughts_that_the_prompt_begins_are_thoughts(end):
    family = FAMILIES["qwen"]
    begin = "{%- if add_generation_prompt %}<think>\n{% endif %}"
    tokenizer = byte_tokenizer(family.specials, family.template + begin)
    text = "".join(text for text, _ in family.answer("So: ", [CALL]))
    ids = tokenizer.encode(text + end, add_special_tokens=False)

    async def test(front):
        for parts in ([ids], [[i] for i in ids]):
            whole, asked = await answer(front, ASK, parts)
            assert tokenizer.decode(asked.prompt).endswith("[A]<think>\n")
            content, calls, reason = said(whole)
            if end:
                assert (content, calls, reason) == (text + end, [], "stop")
            else:
                assert content == "So:" and len(calls) == 1 and reason == "tool_calls"
            stream, _ = await answer(front, ASK | {"stream": True}, parts)
            assert joined(stream) == (content, calls, reason)

    run(tokenizer, test)


def test_of_one_call_that_is_told_the_reason_says_if_it_is_whole():
    """Whether a later one is cut off, or the first one itself lacks its braces."""
    family = FAMILIES["qwen"]
    tokenizer = byte_tokenizer(family.specials, family.template)
    text = "".join(text for text, _ in family.answer("", [CALL, CALL]))
    ids = tokenizer.encode(text[: text.rindex("Z")], add_special_tokens=False)

    async def test(front):
        body = ASK | {"parallel_tool_calls": False}
        whole, _ = await answer(front, body, [ids])
        stream, _ = await answer(front, body | {"stream": True}, [[i] for i in ids])
        assert joined(stream) == said(whole) and said(whole)[2] == "tool_calls"
        assert json.loads(said(whole)[1][0][1]) == PARIS
        cut_ids = tokenizer.encode(text.replace("3}}", "3", 1), add_special_tokens=False)
        whole, _ = await answer(front, body, [cut_ids])
        stream, _ = await answer(front, body | {"stream": True}, [[i] for i in cut_ids])
        assert joined(stream) == said(whole) and said(whole)[2] == "stop"

    run(tokenizer, test)


def test_a_stop_string_before_a_call_ends_the_text():
    """The call behind it is not read, though its tokens have come."""
    family = FAMILIES["mistral_v3"]
    tokenizer = byte_tokenizer(family.specials, family.template)
    text = "".join(text for text, _ in family.answer("One. Two.", [CALL]))
    ids = tokenizer.encode(text, add_special_tokens=False)

    async def test(front):
        for parts in ([ids], [[i] for i in ids]):
            whole, _ = await answer(front, ASK | {"stop": ["Two"]}, parts)
            assert said(whole) == ("One. ", [], "stop")
            whole, _ = await answer(front, ASK | {"stop": ["Twos"]}, parts)
            assert said(whole)[0] == "One. Two." and said(whole)[2] == "tool_calls"

    run(tokenizer, test)


def test_tools_choose_the_template_of_several_and_tokenize_sees_it():
    family = FAMILIES["qwen"]
    named = {"default": family.template, "tool_use": "{{ tools | tojson }}" + family.template}
    tokenizer = byte_tokenizer(chat_template=named)
    schema = {"type": "object", "properties": {"a": {"type": "null", "default": None}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    async def test(front):
        for more in ({}, {"tools": tools}):
            body = {"messages": ASK["messages"], **more}
            expected = tokenizer.apply_chat_template(
                add_generation_prompt=True, return_dict=False, conversation=body["messages"], **more
            )
            status, found = await front.ask(body, path="/tokenize")
            assert status == 200 and found["tokens"] == expected
        wanted = {"messages": ASK["messages"], "tools": tools, "max_tokens": 1}
        _, asked = await answer(front, wanted, [[97]])
        assert asked.prompt == expected

    run(tokenizer, test)


def test_an_answer_of_calls_may_be_sent_back_as_it_came():
    """Law: the next request's prompt shows the call as the model said it."""
    family = FAMILIES["mistral_v13"]
    tokenizer = byte_tokenizer(family.specials, family.template)
    text = "".join(text for text, _ in family.answer("", [CALL]))
    ids = tokenizer.encode(text, add_special_tokens=False)

    async def test(front):
        whole, first = await answer(front, ASK, [ids])
        message = ChatCompletion.model_validate(whole | {"model": "m"}).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 C"}
        body = ASK | {"messages": [*ASK["messages"], message.model_dump(), result]}
        _, second = await answer(front, body, [[97]])
        assert second.prompt[: len(first.prompt) + len(ids)] == [*first.prompt, *ids]

    run(tokenizer, test)


def test_a_template_of_the_command_line_replaces_all(tmp_path):
    byte_tokenizer(chat_template={"default": "a", "tool_use": "b"}).save_pretrained(tmp_path)
    assert tokenizer_of(str(tmp_path), "c", False).chat_template == "c"
    assert tokenizer_of(str(tmp_path), None, False).chat_template == {
        "default": "a",
        "tool_use": "b",
    }


#: As gpt-oss', it refuses a result without a call before; as Mistral's, it counts the messages
#: without calls, which must be the user's and the assistant's by turns.
STERN = """{%- set ns = namespace(num=0, has_call=false) %}{%- for m in messages %}
{%- if m.role == 'tool' %}{% if not ns.has_call %}{{ raise_exception('no call') }}{% endif %}[R]
{{- m.tool_call_id }}={{ m.content }}
{%- elif m.tool_calls is defined %}{% set ns.has_call = true %}[A]{{ m.content }}
{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]
{{- c.function.arguments | tojson }}{% endfor %}
{%- else %}{% if (m.role == 'user') != (ns.num % 2 == 0) %}{{ raise_exception('by turns') }}
{%- endif %}{% set ns.num = ns.num + 1 %}[{{ m.role }}]{{ m.content }}{% endif %}[E]{% endfor %}
{%- if add_generation_prompt %}[A]{% endif %}"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_sessions_history_has_its_calls_as_a_chats_has_them(stream):
    """Law: a session goes on where a template refuses a call in the text, and ids fit results."""
    tokenizer = byte_tokenizer(("[TOOL_CALLS]", "[ARGS]"), STERN)
    said_call = 'So.[TOOL_CALLS]get_weather[ARGS]{"city":"x"}'

    async def test(front):
        ident, offset, chat = await front.opened(), 0, []

        async def turn(new, text):
            nonlocal offset
            num = sum(isinstance(message, Submit) for message in front.wire.said)
            more = {"messages": [new], "session_offset": offset, "stream": stream}
            path = "/v1/chat/completions"
            task = front.begin(ASK | more, path=path, x_session_id=ident)
            asked = (await front.said(Submit, num + 1))[-1]
            ids = tokenizer.encode(text, add_special_tokens=False)
            end = dataclasses.replace(done(asked.key), token_ids=ids)
            tokens = Tokens(asked.key, 0, ids, [False] * len(ids), None)
            await front.wire.come(Accepted(asked.key), tokens, end)
            status, answer = await task
            assert status == 200, answer
            chat.append(new)
            expected = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.decode(asked.prompt.tokens) == expected
            offset = len(asked.prompt.tokens) + len(ids)
            return answer

        for number in range(2):
            answer = await turn({"role": "user", "content": "q"}, said_call)
            call_id = re.search("call_[0-9a-f]+", answer if stream else json.dumps(answer))[0]
            call = CALL["function"] | {"arguments": {"city": "x"}}
            calls = [{"id": call_id, "type": "function", "function": call}]
            chat.append({"role": "assistant", "content": "So.", "tool_calls": calls})
            result = {"role": "tool", "tool_call_id": call_id, "content": "18 C"}
            await turn(result, f"It is {number}.")
            chat.append({"role": "assistant", "content": f"It is {number}."})

    run(tokenizer, test)
