"""Laws of chats: a list of messages is a prompt wherever a text is one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from specpool import ConfigError, Engine, SamplingParams
from specpool.output import Chunk

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    "{% endif %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = [
    {"role": "system", "content": "You are a parrot. You say it again."},
    {"role": "user", "content": "é 1, 2, "},
]
TEXT = "system: You are a parrot. You say it again.\nuser: é 1, 2, \nassistant: "
PARAMS = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(draft="ngram", max_context_len=256) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


def test_a_chat_is_what_its_template_makes_of_it(engine):
    (text,) = engine.generate(TEXT, PARAMS)
    (chat,) = engine.generate(CHAT, PARAMS)
    assert bytes(chat.prompt_ids).decode() == TEXT
    assert (chat.prompt_ids, chat.token_ids) == (text.prompt_ids, text.token_ids)


def test_chats_stand_beside_texts_and_token_ids(engine):
    outputs = engine.generate([CHAT, TEXT, list(TEXT.encode()), tuple(CHAT)], PARAMS)
    assert len(outputs) == 4 and len({tuple(o.prompt_ids) for o in outputs}) == 1


def test_every_way_in_takes_a_chat(engine):
    (expected,) = engine.generate(CHAT, PARAMS)
    pin = engine.pin(CHAT)
    assert bytes(pin.tokens).decode() == TEXT[: len(pin.tokens) - 1]  # é is two bytes
    *_, last = engine.stream(CHAT, PARAMS)
    assert last.token_ids == expected.token_ids
    heard = []
    engine.submit(CHAT, PARAMS, on_item=lambda number, item: heard.append(item))
    while engine.turn():
        pass
    assert heard[-1].token_ids == expected.token_ids

    async def answer():
        return [x async for x in engine.stream_async(CHAT, PARAMS) if not isinstance(x, Chunk)]

    assert asyncio.run(answer())[0].token_ids == expected.token_ids
    engine.unpin(pin)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([CHAT[0], "hello"], "message 1 of prompt 0 must be a dict, got 'hello'"),
        ([{"role": "user"}], r"message 0 of prompt 0 needs a string as 'content', got {'role'"),
        ([{"content": "a"}], "message 0 of prompt 0 needs a string as 'role'"),
        ([{"role": "user", "content": ["a"]}], "needs a string as 'content'"),
        ([{"role": 1, "content": "a"}], "needs a string as 'role'"),
        ([CHAT, [*CHAT, {}]], "message 2 of prompt 1 needs a string as 'role', got {}"),
        (
            [{"role": "user", "content": "ab\udcff"}],
            "'content' of message 0 of prompt 0 is no valid text: a lone surrogate at position 2",
        ),
        (
            [{"role": "tool", "content": "a"}],
            "the chat template refuses prompt 0: TemplateError: no tools",
        ),
        ([{"role": "user", "content": "a" * 300}], "prompt 0 has 318 tokens"),
    ],
)
def test_a_chat_that_is_none_is_refused(engine, chat, message):
    with pytest.raises(ConfigError, match=message):
        engine.generate(chat, PARAMS)
    with pytest.raises(ConfigError, match=message):
        engine.stream(chat, PARAMS)


def test_without_a_template_or_a_tokenizer_it_says_so():
    with Engine.from_pretrained(max_context_len=64) as engine:
        with pytest.raises(ConfigError, match="prompt 0 is a chat, but the tokenizer has no chat"):
            engine.generate(CHAT)
    with Engine.from_pretrained(max_context_len=64) as loaded:
        engine = Engine(loaded.target, config=loaded.config)
        with pytest.raises(ConfigError, match="prompt 1 is a chat, but the target has no tokeni"):
            engine.generate([[1, 2], CHAT])
