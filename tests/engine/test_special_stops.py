"""Laws of stop strings with the names of special tokens, through every way into an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reciter import byte_tokenizer, reciter
from specpool import Engine, RequestOutput, SamplingParams
from specpool.engine.output import Chunk

PROMPT = "seq: 1, 2"
ANSWER = "Hello<|im_end|>\n<|im_start|>user\nmore text. And more"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer = byte_tokenizer()
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    model = reciter({len(PROMPT): answer}, len(tokenizer))
    with Engine.from_pretrained(
        model, draft="ngram", tokenizer=tokenizer, max_context_len=128
    ) as engine:
        yield engine


STOPS = [
    ("<|im_end|>", "Hello", 6),
    ("lo<|im_end|>", "Hel", 6),
    ("Hello<|im_end|>\n<", "", 8),
    ("<|im_start|>user", "Hello\n", 12),
    ("o\nuser", "Hell", 12),
    ("more text", "Hello\nuser\n", 22),
]


@pytest.mark.parametrize(("stop", "text", "num_tokens"), STOPS)
def test_every_way_in_stops_at_the_name_of_a_special_token(engine, stop, text, num_tokens):
    params = SamplingParams(max_new_tokens=40, stop=stop)
    (whole,) = engine.generate(PROMPT, params)
    assert (whole.text, whole.stop_hit, whole.finish_reason) == (text, stop, "stop")
    assert len(whole.token_ids) == num_tokens

    def check(items):
        *chunks, output = items
        assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == text
        assert isinstance(output, RequestOutput)
        assert (output.text, output.token_ids) == (text, whole.token_ids)

    check(list(engine.stream(PROMPT, params)))
    heard = []
    engine.submit(PROMPT, params, on_item=lambda _, item: heard.append(item))
    while engine.turn():
        pass
    check(heard)
    with engine.open_session() as session:
        check(list(session.append(PROMPT, params)))


def test_a_shown_special_token_is_searched_as_it_is_shown(engine):
    params = SamplingParams(max_new_tokens=40, stop="user\nmore", skip_special_tokens=False)
    *chunks, output = engine.stream(PROMPT, params)
    assert output.text == "".join(chunk.text for chunk in chunks) == "Hello<|im_end|>\n<|im_start|>"


def test_a_stop_token_may_end_a_stop_string(engine):
    """The text ends before the string, also in the history of a chat."""
    (stop_id,) = engine.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    params = SamplingParams(max_new_tokens=40, stop="lo<|im_end|>", stop_token_ids=(stop_id,))
    *chunks, output = engine.stream(PROMPT, params)
    assert output.text == "".join(chunk.text for chunk in chunks) == "Hel"
    assert output.token_ids[-1] == stop_id and output.stop_hit == "lo<|im_end|>"
    chat = [{"role": "user", "content": "x"}]
    length = len(engine.core.prompts._texts.encode(0, chat))
    tokenizer = engine.tokenizer
    answer = tokenizer.encode(ANSWER, add_special_tokens=False)
    model = reciter({length: answer}, len(tokenizer))
    with (
        Engine.from_pretrained(model, tokenizer=tokenizer, max_context_len=128) as other,
        other.open_session() as session,
    ):
        assert session.append(chat, params).output().text == "Hel"
        follow = session.append(chat, params).output()
        assert "assistant\nHel<|im_end|>" in tokenizer.decode(follow.prompt_ids)
