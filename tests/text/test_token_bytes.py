"""Laws of tokens' bytes: joined, they are the bytes of the text, whatever the tokenizer is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokens import TOKENIZERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specpool.engine.scheduler.request import TokenLogprob
from specpool.engine.text.stream import TextStream
from specpool.engine.text.token_bytes import TokenBytes
from specpool.serve.api.logprobs import TokenLog


def wordpiece() -> PreTrainedTokenizerBase:
    """A tokenizer as BERT's: pieces of words, spaces between words."""
    pieces = ["[UNK]", "ab", "##c", "##é", "don", "'", "t", ".", "☃", "##☃"]
    tokenizer = Tokenizer(
        models.WordPiece(dict(zip(pieces, range(10), strict=True)), unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


ALL = TOKENIZERS | {"wordpiece": wordpiece()}


def log_of(tokenizer, hidden=()) -> TokenLog:
    return TokenLog(tokenizer, TextStream(tokenizer, hidden=hidden).shows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_bytes_of_a_texts_tokens_are_the_text(name, data):
    """Also in parts, and with special tokens between them, which the text does not show."""
    tokenizer = ALL[name]
    special = sorted(set(tokenizer.all_special_ids))
    tokens = []
    letters = "abc .☃é🎈中\n'" if name in ("byte_level", "tiny") else "abc.☃é中"
    for text in data.draw(st.lists(st.text(st.sampled_from(letters), max_size=9), max_size=4)):
        tokens += tokenizer.encode(text, add_special_tokens=False)
        tokens += data.draw(st.lists(st.sampled_from(special), max_size=2))
    tokens = [token for token in tokens if token != tokenizer.unk_token_id]
    size = data.draw(st.integers(1, 5))
    entries = [TokenLogprob(token, -1.0, {token: -1.0, 3: -2.0}) for token in tokens]
    stream = TextStream(tokenizer)
    text, log = stream.push(tokens, last=True), log_of(tokenizer)
    chat = [
        entry
        for start in range(0, len(entries), size)
        for entry in log.chat(entries[start : start + size], 2)["content"]
    ]
    shown = [e for e, token in zip(chat, tokens, strict=True) if stream.shows(token)]
    assert b"".join(bytes(entry["bytes"]) for entry in shown).decode() == text
    for entry in shown:  # the same token among its alternatives has the same bytes
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
    whole, log = log_of(tokenizer).completion(entries, 1, 7), log_of(tokenizer)
    parts = [log.completion(entries[i : i + size], 1, 7) for i in range(0, len(entries), size)]
    for field in ("tokens", "text_offset", "token_logprobs"):
        assert whole[field] == [value for part in parts for value in part[field]]
    for token, offset, part in zip(tokens, whole["text_offset"], whole["tokens"], strict=True):
        if stream.shows(token) and not part.startswith("bytes:"):
            assert text[offset - 7 :].startswith(part)


@settings(max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(2, 330), max_size=40))
def test_random_byte_level_tokens_are_the_bytes_that_the_decoder_reads(tokens):
    tokenizer = TOKENIZERS["byte_level"]
    tokens = [token for token in tokens if token < len(tokenizer)]
    reader = TokenBytes(tokenizer)
    text = b"".join(reader.bytes_of(token) for token in tokens).decode(errors="replace")
    assert text == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def bytes_of(tokenizer, names):
    reader, ids = TokenBytes(tokenizer), tokenizer.convert_tokens_to_ids(list(names))
    return [reader.bytes_of(*pair) for pair in zip(ids, [None, *ids], strict=False)]


def test_a_part_of_a_character_has_its_own_bytes():
    assert bytes_of(ALL["byte_level"], ["â", "ĺ", "Ġ", "<bos>", "<tool é>"]) == [
        b"\xe2",
        b"\x98",
        b" ",
        b"<bos>",
        "<tool é>".encode(),
    ]
    assert bytes_of(ALL["sentencepiece"], ["<0xE2>", "▁a", "<s>", "▁", "�"]) == [
        b"\xe2",
        b" a",
        b"<s>",
        b" ",
        "�".encode(),
    ]
    assert bytes_of(ALL["sentencepiece"], ["▁a", "▁a"]) == [b"a", b" a"]
    assert bytes_of(ALL["wordpiece"], ["ab", "##c", "ab", "."]) == [b"ab", b"c", b" ab", b"."]


def test_a_part_of_a_character_is_written_as_openai_writes_it():
    """Also alternatives: two parts of characters are two keys."""
    tokenizer = ALL["tiny"]
    entries = [TokenLogprob(0xE2, -0.5, {0xE2: -0.5, 0xE3: -1.0, 65: -2.0})]
    entries += [TokenLogprob(byte, -0.5, {}) for byte in (0x98, 0x83, 65, 257)]
    (first, *_, last) = log_of(tokenizer).chat(entries, 2)["content"]
    assert (first["token"], first["bytes"]) == (r"\xe2", [0xE2])
    assert [top["bytes"] for top in first["top_logprobs"]] == [[0xE2], [0xE3]]
    assert (last["token"], last["bytes"]) == ("<eos>", [*b"<eos>"])
    logprobs = log_of(tokenizer).completion(entries, 3, 4)
    assert logprobs["tokens"] == [r"bytes:\xe2", r"bytes:\x98", r"bytes:\x83", "A", "<eos>"]
    assert logprobs["top_logprobs"][0] == {r"bytes:\xe2": -0.5, r"bytes:\xe3": -1.0, "A": -2.0}
    assert logprobs["text_offset"] == [4, 4, 4, 5, 6]


def test_tokens_that_are_bytes_already_are_taken_as_they_are():
    """Tokenizers on tiktoken, with code of their own."""
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [b"\xe2" for _ in ids])
    assert TokenBytes(tokenizer).bytes_of(5) == b"\xe2"
