"""Answers whose thoughts stand between special tokens, in every split and over HTTP."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from test_tool_calls_http import ASK, answer, joined, run, said

from reciter import byte_tokenizer
from serve_kit import events
from specpool.serve.api.thoughts import Thoughts, begins_thoughts
from tool_families import FAMILIES, Family

GEMMA_MARKS = ("<|channel>", "<channel|>", *FAMILIES["gemma4"].specials)
MISTRAL_MARKS = ("[THINK]", "[/THINK]", *FAMILIES["mistral_v13"].specials)
GEMMA = Family(FAMILIES["gemma4"].calls, GEMMA_MARKS, "gemma")
MISTRAL = Family(FAMILIES["mistral_v13"].calls, MISTRAL_MARKS, "json")
PLAIN = Family(FAMILIES["qwen"].calls, ("<think>", "</think>"))
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
MISTRAL_CALL = '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 3}'


def read(family, text, cuts, thinks=False):
    """Push a text, cut at these units; returns the thoughts, and the rest with its marks."""
    thoughts = Thoughts(thinks=thinks)
    units = [
        (unit, is_special)
        for piece, is_special in family.pieces(text)
        for unit in ([piece] if is_special else piece)
    ]
    bounds = [0, *(cut for cut in cuts if cut <= len(units)), len(units)]
    thought, rest = "", ""
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        new, specials = "", []
        for unit, is_special in units[start:end]:
            if is_special:
                specials.append((len(new), unit))
            else:
                new += unit
        part = thoughts.push(new, number == len(bounds) - 2, specials)
        thought += part.thoughts
        begin = 0
        for offset, special in part.specials:
            rest += part.text[begin:offset] + special
            begin = offset
        rest += part.text[begin:]
    return thought, rest


@pytest.mark.parametrize(
    ("text", "thought", "rest"),
    [
        ("<|channel>thought\nHm.\n<channel|>Hello.", "Hm.\n", "<channel|>Hello."),
        ("<|channel>thought\n<channel|>Hello.", "", "<channel|>Hello."),
        ("<|channel>thought\nHm." + GEMMA_CALL, "Hm.", GEMMA_CALL),  # no end of the thoughts
        ("So.<|channel>thought\nHm.<channel|>a", "Hm.", "So.<channel|>a"),
        ("<|channel>thought\nHm", "Hm", ""),
        ("<|channel>thou", "", ""),  # a label that is cut off is not a text
        ("<|channel>thou<channel|>a", "", "thou<channel|>a"),
        ("<|channel>final\nHello.", "", "final\nHello."),
        ("<|channel><|channel>thought\na", "a", ""),
        ("thought\nHello.<channel|>", "", "thought\nHello.<channel|>"),
        ("", "", ""),
    ],
)
def test_thoughts_and_the_rest_are_parted_in_every_split(text, thought, rest):
    num = len(text)
    for cuts in ([], range(1, num), *([cut] for cut in range(num + 1))):
        assert read(GEMMA, text, cuts) == (thought, rest), cuts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*GEMMA_MARKS, "thought", "\n", "thou", "a"]), max_size=12),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_split_of_any_text_changes_what_is_read(pieces, thinks, rng):
    text = "".join(pieces)
    whole = read(GEMMA, text, [], thinks)
    for cuts in (range(1, len(text)), sorted(rng.choices(range(len(text) + 1), k=3))):
        assert read(GEMMA, text, cuts, thinks) == whole


def test_a_prompt_may_begin_the_thoughts():
    assert all(map(begins_thoughts, ("a<|channel>thought\n", "a[THINK]", "<think>\n\n")))
    assert not any(map(begins_thoughts, ("<|channel>", "<|channel>final\n", "[THINK]a", "", "a")))


def thoughts_of(stream):
    parts = [ChatCompletionChunk.model_validate(part) for part in [*events(stream)][:-1]]
    deltas = [choice.delta for part in parts for choice in part.choices]
    return "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)


@pytest.mark.parametrize(
    ("family", "head", "text", "thought", "content", "calls"),
    [
        (GEMMA, "", "<|channel>thought\nHm.<channel|>Hello.", "Hm.", "Hello.", 0),
        (GEMMA, "", "<|channel>thought\nHm.<channel|>" + GEMMA_CALL, "Hm.", None, 1),
        (GEMMA, "<|channel>thought\n", "Hm.<channel|>Hello.", "Hm.", "Hello.", 0),
        (MISTRAL, "", "[THINK]Hm.[/THINK]Hello.", "Hm.", "Hello.", 0),
        (MISTRAL, "", "[THINK]Hm.[/THINK]" + MISTRAL_CALL, "Hm.", None, 1),
        (PLAIN, "<think>\n", "Hm.</think>Hello.", "Hm.", "Hello.", 0),
    ],
)
def test_thoughts_between_special_tokens_are_not_the_content(
    family, head, text, thought, content, calls
):
    """Streamed and as a whole, with tools and without."""
    head = "{%- if add_generation_prompt %}" + head.replace("\n", "{{ '\\n' }}") + "{% endif %}"
    tokenizer = byte_tokenizer(family.specials, family.template + head)
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(len(ids))
    cuts = sorted(rng.sample(range(1, len(ids)), 9))
    parts = [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]

    async def test(front):
        bodies = [ASK] if calls else [ASK, {k: v for k, v in ASK.items() if k != "tools"}]
        for body in bodies:
            whole, _ = await answer(front, body, [ids])
            got = said(whole)
            assert whole["choices"][0]["message"]["reasoning_content"] == thought
            assert got[0] == content and [name for name, _ in got[1]] == ["get_weather"] * calls
            for split in (parts, [[i] for i in ids]):
                stream, _ = await answer(front, body | {"stream": True}, split)
                assert joined(stream) == got and thoughts_of(stream) == thought

    run(tokenizer, test)


def test_a_text_without_marks_behind_its_thoughts_is_content():
    """A text in a form, and a text that shows its special tokens."""
    head = "{%- if add_generation_prompt %}<|channel>thought{{ '\\n' }}{% endif %}"
    tokenizer = byte_tokenizer(GEMMA_MARKS, GEMMA.template + head)

    async def test(front):
        for more, text in (
            ({"response_format": {"type": "json_object"}}, "{}"),
            ({"skip_special_tokens": False}, "Hm.<channel|>Hello."),
        ):
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole, _ = await answer(front, ASK | more, [ids])
            assert said(whole) == (text, [], "stop")
            assert "reasoning_content" not in whole["choices"][0]["message"]

    run(tokenizer, test)


def test_a_call_within_shown_thoughts_is_content():
    head = "{%- if add_generation_prompt %}<think>{% endif %}"
    tokenizer = byte_tokenizer(PLAIN.specials, PLAIN.template + head)
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    text = f"{call}? No.</think>Hello."
    ids = tokenizer.encode(text, add_special_tokens=False)

    async def test(front):
        whole, _ = await answer(front, ASK | {"skip_special_tokens": False}, [ids])
        assert said(whole) == (text, [], "stop")

    run(tokenizer, test)


def test_an_answer_may_be_sent_back_with_its_thoughts():
    shown = "{% if m.reasoning_content and m.tool_calls %}[T]{{ m.reasoning_content }}{% endif %}"
    template = GEMMA.template.replace("[A]{{ m.content", f"[A]{shown}{{{{ m.content")
    tokenizer = byte_tokenizer(GEMMA_MARKS, template)
    text = "<|channel>thought\nHm.<channel|>" + GEMMA_CALL
    ids = tokenizer.encode(text, add_special_tokens=False)

    async def test(front):
        whole, _ = await answer(front, ASK, [ids])
        message = whole["choices"][0]["message"]
        _, asked = await answer(front, ASK | {"messages": [*ASK["messages"], message]}, [[97]])
        assert f"[A][T]Hm.{GEMMA_CALL}" in tokenizer.decode(asked.prompt)

    run(tokenizer, test)


def test_thoughts_that_the_template_does_not_read_are_named():
    """Law: in a chat and in its tokens; where the template reads them, nothing is named."""
    shown = "{% if m.reasoning_content %}[T]{{ m.reasoning_content }}{% endif %}"
    reading = GEMMA.template.replace("[A]{{ m.content", f"[A]{shown}{{{{ m.content")
    part = {"type": "thinking", "thinking": "Hm."}
    answers = (
        ({"content": "", "reasoning_content": "Hm."}, "messages.reasoning_content"),
        ({"content": "a", "reasoning": "Hm."}, "messages.reasoning"),
        ({"content": [part]}, "messages.content.thinking"),
        ({"content": "a", "reasoning_content": ""}, None),
        ({"content": "a"}, None),
    )

    for template in (GEMMA.template, reading):
        tokenizer = byte_tokenizer(GEMMA_MARKS, template)

        async def test(front, template=template):
            for message, name in answers:
                history = [*ASK["messages"], {"role": "assistant", **message}, *ASK["messages"]]
                expected = name if template == GEMMA.template else None
                await answer(front, {"messages": history}, [[97]])
                assert front.headers.get("x-specpool-ignored") == expected, message
                status, _ = await front.ask({"messages": history}, path="/tokenize")
                assert (status, front.headers.get("x-specpool-ignored")) == (200, expected)

        run(tokenizer, test)
