"""Answers in gpt-oss' form, in every split: thoughts, content, and what is not a header."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from test_bridge import done
from test_tool_calls_http import ASK, answer, joined, run, said

from reciter import byte_tokenizer
from serve_kit import events
from specpool.serve.api.channels import Channels, has_channels
from specpool.serve.bridge.messages import Accepted, Submit, Tokens
from tool_families import FAMILIES, Family

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
GPT_OSS = Family(FAMILIES["gpt_oss"].calls, MARKS, "json")
THOUGHT = "<|channel|>analysis<|message|>Hm, f?<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 18."
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
HEADER = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
)
CALL = HEADER + '{"city": "Paris"}<|call|>'


def units(text):
    return [
        (unit, is_special)
        for piece, is_special in GPT_OSS.pieces(text)
        for unit in ([piece] if is_special else piece)
    ]


def read(text, cuts):
    """Push a text, cut at these units; returns the thoughts, and the rest with its marks."""
    channels, every = Channels(), units(text)
    thoughts, rest = "", ""
    bounds = [0, *cuts, len(every)]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        new, specials = "", []
        for unit, is_special in every[start:end]:
            if is_special:
                specials.append((len(new), unit))
            else:
                new += unit
        part = channels.push(new, number == len(bounds) - 2, specials)
        thoughts += part.thoughts
        at = 0
        for offset, special in part.specials:
            rest += part.text[at:offset] + special
            at = offset
        rest += part.text[at:]
    return thoughts, rest


@pytest.mark.parametrize(
    ("text", "thoughts", "rest"),
    [
        (THOUGHT + FINAL, "Hm, f?", "It is 18."),
        (THOUGHT + PREAMBLE + CALL, "Hm, f?", "Let me look." + CALL),
        (THOUGHT + PREAMBLE + FINAL, "Hm, f?", "Let me look.\nIt is 18."),
        (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, "Hm, f?\nHm, f?", "It is 18."),
        ("<|channel|>final<|message|> a\n", "", " a\n"),
        ("<|channel|>analysis<|message|>Hm", "Hm", ""),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", None),
        ("to=functions.f<|channel|>analysis code<|message|>{}<|call|>", "", None),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "", None),
        # A text without a header: in a form of the request's, or of another model.
        ('{"a": 1}', "", None),
        ("Hello.", "", None),
        ("to", "", None),
        ("", "", ""),
        ("tomatoes to=x", "", None),
        ("\n" * 99, "", None),
        # A header that is cut off is no text, and what is not a header is.
        ("<|channel|>", "", ""),
        (THOUGHT + "<|start|>assi", "Hm, f?", ""),
        (THOUGHT + "<|start|>assistant<|channel|>fin", "Hm, f?", ""),
        (THOUGHT + "<|start|>user<|message|>b", "Hm, f?", "<|start|>user<|message|>b"),
        ("<|channel|>final It is 18.", "", None),
        ("<|channel|>final<|end|>a", "", None),
        (THOUGHT + "So.", "Hm, f?", "So."),
        # A call whose arguments lack their end says so by the mark behind them.
        (HEADER + '{"city": 1' + FINAL, "", HEADER + '{"city": 1<|start|>It is 18.'),
    ],
)
def test_thoughts_and_the_rest_are_parted_in_every_split(text, thoughts, rest):
    whole = read(text, [])
    assert whole == (thoughts, text if rest is None else rest)
    num = len(units(text))
    for cuts in (range(1, num), *([cut] for cut in range(num + 1))):
        assert read(text, cuts) == whole, cuts


@settings(max_examples=100, deadline=None)
@example(["<|start|>", "assistant", " to=functions.f"], random.Random(0))
@given(
    st.lists(
        st.sampled_from([*MARKS, "assistant", "analysis", "final", " to=functions.f", "a", "\n"]),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_no_split_of_any_text_changes_what_is_read(pieces, rng):
    text, num = "".join(pieces), len(units("".join(pieces)))
    whole = read(text, [])
    for cuts in (range(1, num), sorted(rng.choices(range(num + 1), k=3))):
        assert read(text, cuts) == whole


def test_marks_that_are_not_special_tokens_are_text():
    """As with `skip_special_tokens: false`."""
    text = THOUGHT + FINAL
    channels = Channels()
    parts = [channels.push(char, False) for char in text] + [channels.push("", True)]
    assert "".join(part.text for part in parts) == text
    assert not any(part.thoughts for part in parts)


def test_only_templates_with_both_marks_have_channels():
    assert has_channels({"default": GPT_OSS.template})
    assert not any(has_channels(FAMILIES[name].template) for name in ("qwen", "apertus"))


def thoughts_of(stream):
    parts = [ChatCompletionChunk.model_validate(part) for part in [*events(stream)][:-1]]
    deltas = [choice.delta for part in parts for choice in part.choices]
    return "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "arguments"),
    [
        (THOUGHT + FINAL, "Hm, f?", "It is 18.", []),
        (THOUGHT + PREAMBLE + CALL, "Hm, f?", "Let me look.", [{"city": "Paris"}]),
        (THOUGHT + CALL, "Hm, f?", None, [{"city": "Paris"}]),
        (CALL.replace("<|constrain|>json", "code"), None, None, [{"city": "Paris"}]),
        (THOUGHT.replace("f?", CALL[30:].replace("<|", "<")) + FINAL, ..., "It is 18.", []),
    ],
)
def test_a_chats_answer_is_its_final_channel(text, thoughts, content, arguments):
    tokenizer = byte_tokenizer(MARKS, GPT_OSS.template)
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(len(ids))
    cuts = sorted(rng.sample(range(1, len(ids)), 9))
    parts = [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]

    async def test(front):
        bodies = [ASK] if arguments else [ASK, {k: v for k, v in ASK.items() if k != "tools"}]
        for body in bodies:
            whole, _ = await answer(front, body, [ids])
            got = said(whole)
            assert (got[0], [json.loads(a) for _, a in got[1]]) == (content, arguments)
            assert got[2] == ("tool_calls" if arguments else "stop")
            told = whole["choices"][0]["message"].get("reasoning_content")
            assert told == thoughts or (thoughts is ... and told.startswith("Hm, "))
            for split in (parts, [[i] for i in ids]):
                stream, _ = await answer(front, body | {"stream": True}, split)
                assert joined(stream) == got and thoughts_of(stream) == (told or "")

    run(tokenizer, test)


def test_drafts_are_told_of_the_content():
    tokenizer = byte_tokenizer(MARKS, GPT_OSS.template)
    ids = tokenizer.encode(THOUGHT + FINAL, add_special_tokens=False)

    async def test(front):
        body = {"messages": ASK["messages"], "stream": True, "include_drafts": True}
        for split in ([ids], [[i] for i in ids]):
            stream, _ = await answer(front, body, split)
            pieces = [piece for part in [*events(stream)][:-1] for piece in part.get("drafts", [])]
            assert "".join(text for text, _ in pieces) == "It is 18."

    run(tokenizer, test)


def test_the_next_prompt_shows_the_thoughts_of_a_call_and_not_those_of_an_answer():
    """As the model's own template has them: thoughts beside a content are refused there."""
    thinking = (
        "{% if m.thinking and m.tool_calls %}"
        "{% if m.content %}{{ raise_exception('both') }}{% endif %}"
        "[T]{{ m.thinking }}{% endif %}[A]"
    )
    template = GPT_OSS.template.replace("[A]{{ m.content", thinking + "{{ m.content")
    tokenizer = byte_tokenizer(MARKS, template)

    async def test(front):
        for text, shown in (
            (THOUGHT + CALL, "[T]Hm, f?[A]"),
            (THOUGHT + PREAMBLE + CALL, "[A]Let me look."),
            (THOUGHT + FINAL, "[A]It is 18.[E]"),
        ):
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole, _ = await answer(front, ASK, [ids])
            message = whole["choices"][0]["message"]
            body = ASK | {"messages": [*ASK["messages"], message, *ASK["messages"]]}
            _, asked = await answer(front, body, [[97]])
            prompt = tokenizer.decode(asked.prompt)
            assert shown in prompt and ("[T]" in prompt) is ("[T]" in shown)

    run(tokenizer, test)


def test_a_sessions_history_has_the_final_channel():
    """As gpt-oss' template does, this one refuses a content with the marks of a thought."""
    refusal = "{% if '<|channel|>' in m.content %}{{ raise_exception('marks') }}{% endif %}[A]"
    template = GPT_OSS.template.replace("[A]{{ m.content", refusal + "{{ m.content")
    tokenizer = byte_tokenizer(MARKS, template)
    ids = tokenizer.encode(THOUGHT + FINAL, add_special_tokens=False)

    async def test(front):
        ident, offset, chat = await front.opened(), 0, []
        for number in range(2):
            new = {"role": "user", "content": f"q{number}"}
            body = {"messages": [new], "session_offset": offset, "max_tokens": 99}
            task = front.begin(body, path="/v1/chat/completions", x_session_id=ident)
            asked = (await front.said(Submit, number + 1))[-1]
            end = dataclasses.replace(done(asked.key), token_ids=ids)
            tokens = Tokens(asked.key, 0, ids, [False] * len(ids), None)
            await front.wire.come(Accepted(asked.key), tokens, end)
            status, found = await task
            assert status == 200, found
            chat.append(new)
            expected = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
            assert tokenizer.decode(asked.prompt.tokens) == expected
            chat.append({"role": "assistant", "content": "It is 18."})
            offset = len(asked.prompt.tokens) + len(ids)

    run(tokenizer, test)
