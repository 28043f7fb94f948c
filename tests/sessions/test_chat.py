"""Laws of chats: a list of messages is a prompt like a text, and can be a session's turn."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterator

import pytest

from specpool import ConfigError, Engine, RequestOutput, SamplingParams
from specpool.engine.output import Chunk
from specpool.engine.scheduler.request import Conversation, Request
from specpool.engine.texts import Texts

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
    with Engine.from_pretrained(draft="ngram", max_context_len=256, prefix_cache=False) as engine:
        engine.tokenizer.chat_template = TEMPLATE
        yield engine


@pytest.fixture
def tokenizer(engine):
    return engine.tokenizer


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
        ([{"role": "user", "content": ["a"]}], "part 0 of the content of message 0 .* is 'a'"),
        ([{"role": 1, "content": "a"}], "needs a string as 'role'"),
        ([CHAT, [*CHAT, {}]], "message 2 of prompt 1 needs a string as 'role', got {}"),
        (
            [{"role": "user", "content": "ab\udcff"}],
            "'content' of message 0 of prompt 0 is no valid text: a lone surrogate at position 2",
        ),
        (
            [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "b\ud800"}}]}],
            "a string of message 0 of prompt 0 is no valid text: a lone surrogate at position 1",
        ),
        (
            [{"role": "user", "content": "a", "\ud800": 1}],
            "a string of message 0 of prompt 0 is no valid text: a lone surrogate at position 0",
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


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("error", [TypeError("planted"), PanicException("planted")])
def test_a_text_that_the_tokenizer_refuses_is_named(tokenizer, error):
    stumbling = copy.deepcopy(tokenizer)

    def encode(text, **options):
        if "~" in text:
            raise error
        return tokenizer.encode(text, **options)

    stumbling.encode = encode
    texts = Texts(stumbling)
    with pytest.raises(ConfigError, match=r"the tokenizer refuses prompt 3: .*planted"):
        texts.encode(3, "a ~")
    with pytest.raises(ConfigError, match=r"the tokenizer refuses the turn: .*planted"):
        texts.turn(Conversation(1, []), [{"role": "user", "content": "~"}])
    assert texts.encode(3, "a") == [97]


def test_a_template_that_makes_no_text_is_named(tokenizer):
    """Law: the error says that the template has made it, and nothing else fails."""
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{{ 'ab\\ud800' }}"
    told = (
        "what the chat template makes of prompt 0 is no valid text: a lone surrogate at position 2"
    )
    chat = [{"role": "user", "content": "a"}]
    for ask in (
        lambda: Texts(broken).encode(0, chat),
        lambda: Texts(broken).turn(Conversation(1, []), chat),
    ):
        with pytest.raises(ConfigError, match=told):
            ask()
    with pytest.raises(ConfigError, match="a string of the variables of prompt 0 is no valid text"):
        Texts(tokenizer).encode(0, chat, variables={"tools": [{"name": "\ud800"}]})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match=r"the chat template refuses prompt 0: .*Circular"):
        Texts(tokenizer).encode(0, [chat[0] | {"more": endless}])


def test_parts_of_text_are_one_text(engine):
    """Parts as OpenAI's interface has them; a part that is not text is refused with its place."""
    parts = [{"type": "text", "text": "one, "}, {"type": "refusal", "refusal": "two"}]
    params = SamplingParams(max_new_tokens=4)
    chats = [[{"role": "user", "content": each}] for each in (parts, "one, two")]
    together, whole = engine.generate(chats, params)
    assert together.prompt_ids == whole.prompt_ids
    for part, says in (
        ({"type": "image_url", "image_url": {}}, "is the type 'image_url': only text can be read"),
        ({"type": "text", "text": 5}, r"is \{'type': 'text', 'text': 5\}: only text"),
        ({"type": "refusal", "text": "no"}, r"is \{'type': 'refusal', 'text': 'no'\}: only text"),
        ("three", "is 'three': only text can be read"),
    ):
        chat = [{"role": "user", "content": [*parts, part]}]
        with pytest.raises(ConfigError, match=f"part 2 of the content of message 0 .* {says}"):
            engine.generate([chat], params)


def test_without_a_template_or_a_tokenizer_it_says_so():
    with Engine.from_pretrained(max_context_len=64) as engine:
        with pytest.raises(ConfigError, match="prompt 0 is a chat, but the tokenizer has no chat"):
            engine.generate(CHAT)
    with Engine.from_pretrained(max_context_len=64) as loaded:
        engine = Engine(loaded.target, config=loaded.config)
        with pytest.raises(ConfigError, match="prompt 1 is a chat, but the target has no tokeni"):
            engine.generate([[1, 2], CHAT])


# --- chats in sessions ---


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def talk(session, *texts: str) -> list[RequestOutput]:
    """Turns of one message each."""
    return [session.append(user(text), PARAMS).output() for text in texts]


def rendered(engine, outputs: list[RequestOutput], *texts: str) -> str:
    """The chat so far up to where the next answer begins, as the template says."""
    chat = []
    for text, output in itertools.zip_longest(texts, outputs):
        chat += user(text)
        if output is not None:
            chat.append({"role": "assistant", "content": output.text})
    return str(
        engine.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )


@pytest.fixture
def template(engine) -> Iterator[Callable[[str], None]]:
    """Gives the tokenizer another chat template, for one test."""

    def change(text: str) -> None:
        engine.tokenizer.chat_template = text

    yield change
    engine.tokenizer.chat_template = TEMPLATE


def test_a_sessions_messages_go_on_behind_its_answers(engine):
    """Law: a turn has the tokens of the whole chat, and computes those that are new."""
    texts = ["seq: 2, 4, ", "and then?", "é"]
    with engine.open_session() as session:
        system = session.append(CHAT, PARAMS).output()
        assert system.prompt_ids == list(TEXT.encode())
        session.rewind(0)
        outputs = talk(session, *texts)
        for i, output in enumerate(outputs):
            assert bytes(output.prompt_ids).decode() == rendered(
                engine, outputs[:i], *texts[: i + 1]
            )
            (fresh,) = engine.generate(output.prompt_ids, PARAMS)
            assert output.token_ids == fresh.token_ids
            if i:
                before = outputs[i - 1]  # its last token has KV if a round went beyond it
                history = len(before.prompt_ids + before.token_ids)
                assert history - 1 <= output.num_reused <= history
        assert session.turn_ends == [len(o.prompt_ids + o.token_ids) for o in outputs]


def test_the_answers_own_tokens_stay(engine, monkeypatch):
    """Law: a tokenizer that would cut an answer otherwise costs nothing."""
    with engine.open_session() as session:
        (first,) = talk(session, "seq: 2, 4, ")
        # From now on it knows the answer's text as one token.
        encode, text = engine.tokenizer.encode, first.text

        def cut(value, **options):
            head, found, tail = value.partition(text)
            ids = encode(head, **options)
            return [*ids, 7, *encode(tail, **options)] if found else ids

        monkeypatch.setattr(engine.tokenizer, "encode", cut)
        kept = session.tokens
        (second,) = talk(session, "and then?")
        assert second.prompt_ids[: len(kept)] == kept and 7 not in second.prompt_ids
        assert second.num_reused >= len(kept) - 1


def test_a_piece_that_is_not_cut_as_in_the_text_is_not_put_behind(engine, monkeypatch):
    """Law: the tokens are those of the template, also if sentencepiece adds a space."""
    with engine.open_session() as session:
        (first,) = talk(session, "seq: 2, 4, ")
        encode = engine.tokenizer.encode

        def spaced(text, **options):
            return encode(text if text.startswith("user") else f" {text}", **options)

        monkeypatch.setattr(engine.tokenizer, "encode", spaced)
        (second,) = talk(session, "and then?")
        assert bytes(second.prompt_ids).decode() == rendered(
            engine, [first], "seq: 2, 4, ", "and then?"
        )


def test_a_template_that_tells_the_history_otherwise_is_followed(engine, template):
    """Law: the turn has the template's tokens; the part in common is not computed again.

    As with models that think: the last answer is in full, and earlier ones are shortened.
    """
    template(
        "{% for m in messages %}{{ m['role'] }}: "
        "{{ m['content'][:3] if m['role'] == 'assistant' and not loop.last else m['content'] }}\n"
        "{% endfor %}assistant: "
    )
    texts = ["seq: 2, 4, ", "and then?", "more"]
    with engine.open_session() as session:
        outputs = talk(session, *texts)
        first, second, third = outputs
        for i, output in enumerate(outputs):
            assert bytes(output.prompt_ids).decode() == rendered(
                engine, outputs[:i], *texts[: i + 1]
            )
            assert output.token_ids == engine.generate(output.prompt_ids, PARAMS)[0].token_ids
        assert second.num_reused == len(first.prompt_ids) + 3
        assert third.num_reused == len(second.prompt_ids) + 3
        # A turn ends where its own part of what there is now does.
        ends = session.turn_ends
        assert ends == [
            len(first.prompt_ids + first.token_ids[:3]) + len("\nuser: "),
            len(second.prompt_ids + second.token_ids[:3]) + len("\nuser: "),
            session.num_tokens,
        ]
        session.rewind(ends[1])
        (again,) = talk(session, "more")
        assert again.prompt_ids == third.prompt_ids and again.num_reused == ends[1]
        session.rewind(ends[0])
        (again,) = talk(session, "and then?")
        assert again.prompt_ids == second.prompt_ids


def test_a_rewind_takes_the_messages_along(engine):
    """Law: a turn that is cut anywhere leaves no message behind."""
    with engine.open_session() as session:
        first, second = talk(session, "seq: 2, 4, ", "and then?")
        ends, tokens = session.turn_ends, session.tokens
        for offset in (ends[0], ends[0] + 1, len(second.prompt_ids), ends[1] - 1):
            copy = session.fork()
            kept_len = copy.rewind(offset)
            assert copy.tokens == tokens[:offset] and copy.turn_ends == ends[:1]
            (other,) = talk(copy, "or else?")
            assert bytes(other.prompt_ids).decode() == rendered(
                engine, [first], "seq: 2, 4, ", "or else?"
            )
            assert other.num_reused >= min(kept_len, ends[0] // 16 * 16)  # the page is shared
            copy.close()
        assert session.tokens == tokens and session.turn_ends == ends
        session.rewind(ends[0] - 1)
        (anew,) = talk(session, "and then?")
        assert bytes(anew.prompt_ids).decode() == rendered(engine, [], "and then?")


def test_a_fork_has_the_messages_and_goes_its_own_way(engine):
    with engine.open_session() as session:
        talk(session, "seq: 2, 4, ")
        with session.fork() as copy:
            (theirs,) = talk(copy, "one")
            (ours,) = talk(session, "two")
            for output, text in ((theirs, "one"), (ours, "two")):
                shown = bytes(output.prompt_ids).decode()
                assert shown.startswith("user: seq: 2, 4, \nassistant: ")
                assert shown.endswith(f"\nuser: {text}\nassistant: ")
                assert shown.count("user: ") == 2


def test_a_turn_that_does_not_end_says_nothing(engine):
    """Law: after an abort, or an error, a session has the messages that it had."""
    with engine.open_session() as session:
        (first,) = talk(session, "seq: 2, 4, ")
        turn = session.append(user("never mind"), SamplingParams(max_new_tokens=40))
        next(turn)
        turn.close()
        with pytest.raises(ConfigError, match=r"the chat template refuses prompt 0.*no tools"):
            session.append([{"role": "tool", "content": "a"}])
        with pytest.raises(ConfigError, match="message 1 of prompt 0 needs a string as 'role'"):
            session.append([*user("a"), {"content": "b"}])
        with pytest.raises(ConfigError, match=r"the session has .* leaves room for"):
            session.append(user("a" * 250))
        (second,) = talk(session, "and then?")
        assert bytes(second.prompt_ids).decode() == rendered(
            engine, [first], "seq: 2, 4, ", "and then?"
        )


def test_a_stop_string_is_no_part_of_the_answer(engine):
    with engine.open_session() as session:
        (whole,) = talk(session, "seq: 2, 4, ")
        session.rewind(0)
        stop = whole.text[3:5]
        first = session.append(user("seq: 2, 4, "), SamplingParams(max_new_tokens=8, stop=(stop,)))
        answer = first.output().text
        assert answer == whole.text[: whole.text.index(stop)]
        (second,) = talk(session, "and then?")
        assert f"assistant: {answer}\nuser: and" in bytes(second.prompt_ids).decode()


def test_the_answer_is_what_the_output_says(engine):
    """Law: the answer lacks the token that stopped it, and keeps a character that was cut."""
    with engine.open_session() as session:
        (whole,) = talk(session, "seq: 2, 4, ")
        session.rewind(0)
        stopping = SamplingParams(max_new_tokens=8, stop_token_ids=(whole.token_ids[5],))
        first = session.append(user("seq: 2, 4, "), stopping).output()
        assert first.text == whole.text[:5] and first.token_ids == whole.token_ids[:6]
        (second,) = talk(session, "and then?")
        assert bytes(second.prompt_ids).decode() == rendered(
            engine, [first], "seq: 2, 4, ", "and then?"
        )


def test_an_answer_that_ends_amid_a_character_stays(engine, monkeypatch):
    """Law: the replacement for its bytes is part of the message, so its tokens can stay."""
    append = Request.append
    monkeypatch.setattr(
        Request,
        "append",
        lambda self, tokens, **options: append(self, [0xC3] * len(tokens), **options),
    )
    with engine.open_session() as session:
        first = session.append(user("seq: "), SamplingParams(max_new_tokens=1)).output()
        assert first.token_ids == [0xC3] and first.text == "\N{REPLACEMENT CHARACTER}"
        kept = session.tokens
        (second,) = talk(session, "and then?")
        assert second.prompt_ids[: len(kept)] == kept


def test_messages_do_not_follow_a_text(engine):
    """Law: tokens that are not part of a chat are not silently left out of one."""
    message = "tokens from {} on are text or token ids, not a chat: .*rewind to {}$"
    with engine.open_session() as session:
        session.append("seq: 2, 4, ", PARAMS).output()
        with pytest.raises(ConfigError, match=message.format(0, 0)):
            session.append(CHAT)
        session.rewind(5)
        with pytest.raises(ConfigError, match=message.format(0, 0)):
            session.append(CHAT)
        session.rewind(0)
        talk(session, "seq: 2, 4, ")
        end = session.num_tokens
        session.append("\nuser: 3\n", PARAMS).output()
        with pytest.raises(ConfigError, match=message.format(end, end)):
            session.append(CHAT)
        session.rewind(end)
        (last,) = talk(session, "and then?")
        assert last.num_reused == end


def test_messages_may_be_changed_after_the_turn(engine):
    with engine.open_session() as session:
        messages = user("seq: 2, 4, ")
        session.append(messages, PARAMS).output()
        messages[0]["content"] = "something else"
        (second,) = talk(session, "and then?")
        assert bytes(second.prompt_ids).decode().startswith("user: seq: 2, 4, \n")


# --- Limits ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for a in range(9999) %}" * 5 + "{% endfor %}" * 5, "not ended after 0.5 s"),
        ("{{ 'x' * 10**11 }}", "MemoryError"),
        (
            "{% set n = namespace(s='x') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}",
            "Memory",
        ),
        ("{{ '%0999999999d' % 1 }}", "MemoryError"),
        ("{{ 'x' * 40000000 }}", "40000000 characters, at most 33554432"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for", "TemplateSyntaxError"),
    ],
)
def test_a_template_that_takes_too_much_is_stopped(engine, template, monkeypatch, text, message):
    if "not ended" in message:
        monkeypatch.setattr("specpool.engine.text.chat_template.MOST_SECONDS", 0.5)
    template(text + "{% endfor %}" if text.count("{% for") > text.count("{% end") > -1 else text)
    with pytest.raises(ConfigError, match=f"the chat template refuses prompt 0: .*{message}"):
        engine.generate(CHAT, PARAMS)
    template(TEMPLATE)
    monkeypatch.undo()
    (chat,) = engine.generate(CHAT, PARAMS)
    assert bytes(chat.prompt_ids).decode() == TEXT


@pytest.mark.parametrize(
    "text",
    [
        TEMPLATE,
        "{{ bos_token }}{{ messages[0].content | tojson }}{{ messages | length }}",
        "{% generation %}{{ messages[-1]['content'] | trim }}{% endgeneration %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if ns.n == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ eos_token }}",
        "{{ dict(a=1) }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].role) }}",
        "{% if tools %}tools{% endif %}{% if messages[0].name is defined %}name{% endif %}\n \n",
    ],
)
def test_a_template_renders_as_the_tokenizer_renders_it(engine, template, text):
    template(text)
    chat = [{**CHAT[0], "name": None}, {**CHAT[1], "more": {"a": [1, 2.5, True]}}]
    expected = engine.tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    (output,) = engine.generate(chat, PARAMS)
    assert bytes(i for i in output.prompt_ids if i < 256).decode() == expected.replace(
        "<bos>", ""
    ).replace("<eos>", "")


def test_a_message_that_is_no_plain_data_is_refused(engine):
    with pytest.raises(ConfigError, match=r"messages must be of plain data: .*object"):
        engine.generate([{**CHAT[1], "more": object()}], PARAMS)
