"""What a user's files hold, and what a head learns of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specpool import Engine, SamplingParams
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.errors import ConfigError
from specpool.train.config import TrainConfig
from specpool.train.state import load_texts
from specpool.train.texts import TextTokenizer, pack, read_rows, unpack
from train_kit import run, save_target

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def rows_of(path: Path, *values: object):
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n\n")
    return read_rows([path]).rows


@pytest.fixture(scope="module")
def tokenizer():
    from specpool.engine.assets import resolve

    loaded = load_tokenizer(resolve("specpool/tiny"))
    loaded.chat_template = TEMPLATE
    return loaded


def learned(text) -> tuple[bytes, bytes]:
    """Return what is read, and what is learned of it; tokens beyond a byte become `$`."""
    letters = np.where(text.tokens < 256, text.tokens, ord("$")).astype(np.uint8)
    return bytes(letters[~text.learned]), bytes(letters[text.learned])


def test_a_head_learns_answers_and_plain_text(tokenizer, tmp_path: Path) -> None:
    tokens = TextTokenizer(tokenizer, vocab_size=259, length=64)
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    completed, *turns, asked, plain = rows_of(
        tmp_path / "rows.jsonl",
        {"prompt": "1 + 1 = ", "completion": "2; 2"},
        {"messages": chat},
        {"messages": chat[:3]},
        {"text": "a" * 100 + "b" * 10},
    )
    assert learned(tokens.answered(completed)) == (b"1 + 1 = ", b"2; 2$")
    assert [learned(tokens.answered(turn)) for turn in turns] == [
        (b"<user>one\n<assistant>", b"two$"),
        (b"<user>one\n<assistant>two\n<user>three\n<assistant>", b"four$"),
    ]
    assert asked.is_question and not completed.is_question and not plain.is_question
    first, second = tokens.plain(plain)
    assert learned(first) == (b"", b"a" * 64) and learned(second) == (b"", b"a" * 36 + b"b" * 10)
    assert first.prompt == [ord("a")] * 32


def test_an_answer_is_cut_and_a_prompt_without_room_for_one_is_left_out(tokenizer) -> None:
    tokens = TextTokenizer(tokenizer, vocab_size=259, length=16)
    assert learned(tokens.joined([65] * 10, [66] * 10)) == (b"A" * 10, b"B" * 6)
    assert tokens.joined([65] * 15, [66] * 10) is None
    assert tokens.joined([65] * 10, [66]) is None
    assert tokens.joined([65] * 2, [66] * 3) is None


def test_texts_survive_a_file(tokenizer) -> None:
    tokens = TextTokenizer(tokenizer, vocab_size=259, length=16)
    texts = [tokens.joined([65] * n, [66] * 8) for n in (2, 5)]
    for before, after in zip(texts, unpack(pack(texts)), strict=True):
        assert before.tokens.tolist() == after.tokens.tolist()
        assert learned(before) == learned(after) and before.prompt == after.prompt


def test_the_target_answers_prompts(tmp_path: Path) -> None:
    """Law: what is learned of a prompt is what the target itself says, word for word."""
    target = save_target(tmp_path / "target", "qwen3")
    prompts = [f"{i} + {i} = " for i in range(12)]
    path = tmp_path / "prompts.jsonl"
    rows_of(path, *({"prompt": prompt} for prompt in prompts), {"prompt": "x" * 40})
    config = TrainConfig(
        target=str(target), data=(path,), out=tmp_path / "head", length=32, epochs=1, new_tokens=9
    )
    report = run(config)
    assert (report.num_left_out, report.num_texts, report.num_held_out) == (1, 8, 4)
    texts, num_held_out = load_texts(tmp_path / "head")
    with Engine.from_pretrained(target, max_context_len=64) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=9))
    answers = {tuple(output.prompt_ids): output.token_ids for output in outputs}
    assert {
        tuple(text.prompt): text.tokens[text.prompt_len :].tolist() for text in texts
    } == answers
    assert num_held_out == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"promt": "a"}', "no other keys, got the keys 'promt'"),
        ('{"prompt": "a", "id": 1}', "no other keys, got the keys 'prompt', 'id'"),
        ('["a"]', "must be an object with 'text' or 'prompt' or"),
        ("{", "line 2 is not JSON"),
        ('{"text": 5}', "line 2: 'text' must be a string, got 5"),
        ('{"prompt": ""}', "'prompt' must be a text or a list of token ids, got ''"),
        ('{"prompt": [1, true]}', "'prompt' must be a text or a list of token ids"),
        ('{"prompt": "a", "completion": null}', "'completion' must be a string, got None"),
        ('{"messages": []}', "'messages' must be a list of messages, got []"),
        ('{"messages": [{"role": "user"}]}', "needs strings as 'role' and 'content'"),
    ],
)
def test_a_wrong_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError) as error:
        read_rows([path])
    assert says in str(error.value) and "rows.jsonl, line 2" in str(error.value)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n")
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="there is no text in"):
        read_rows([empty])
    with pytest.raises(ConfigError, match="is not UTF-8 text: byte 3 is 0xe9"):
        read_rows([empty, latin])
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read: No such file"):
        read_rows([tmp_path / "missing.txt"])


def test_a_token_beyond_the_vocabulary_names_its_line(tokenizer, tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "rows.jsonl", {"prompt": [1, 300]})
    with pytest.raises(ConfigError, match="line 1: token id 300 is outside the vocabulary"):
        TextTokenizer(tokenizer, vocab_size=259, length=16).prompt(row)
