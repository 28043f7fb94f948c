"""Laws of streamed text: it is final, has whole characters, and no part of a stop string."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specpool import ConfigError, OrderError, SamplingParams
from specpool.engine.assets import corpus, resolve
from specpool.engine.text.stop_search import StopHit, StopSearch
from specpool.engine.text.stream import CONTEXT, TextStream
from specpool.engine.text.tokenizer import load_tokenizer

TEXT = "Ünïcode is 中文, ☃ and 🎈🎈; l'été, don't!  two  spaces\n\ttabs naïve ☃☃ été"


def byte_level() -> PreTrainedTokenizerBase:
    """Byte-level BPE with merges that cut characters, special tokens and a token of the user's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<tool é>", "<0x41>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece() -> PreTrainedTokenizerBase:
    """A tokenizer as Llama's: metaspaces, byte tokens for the rest, no first space."""
    pieces = ["<unk>", "<s>", "▁", "▁▁", "a", "b", "c", "▁a", "▁ab", "☃", "é", "�", "▁.", ""]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    vocab |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    merges = [("▁", "▁"), ("▁", "a"), ("▁a", "b")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [AddedToken(name, special=True) for name in ("<unk>", "<s>")]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def metaspace() -> PreTrainedTokenizerBase:
    """A tokenizer as T5's: transformers would take the space before "." away."""
    pieces = ["<pad>", "▁", "a", "b", "▁a", "▁b", "c▁", "é", "▁."]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=True
    )


MANY = 120  # examples of a law and tokenizer

TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": metaspace(),
    "tiny": load_tokenizer(resolve("specpool/tiny")),
}


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode all tokens at once: the oracle."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the earliest stop string, and the shortest that begins there."""
    hits = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    start, _, stop = min(hits)
    return text[:start], stop


def ends_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, list[int]]:
    """The decoded text, and for each character the fewest tokens whose text has it."""
    texts = [decode(tokenizer, tokens[:n]) for n in range(len(tokens) + 1)]
    whole, ends, num_tokens = texts[-1], [], 0
    for length in range(1, len(whole) + 1):
        while not texts[num_tokens].startswith(whole[:length]):
            num_tokens += 1
        ends.append(num_tokens)
    return whole, ends


def expected_hit(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stops: Sequence[str]
) -> tuple[str, StopHit | None]:
    """The oracle: the text and the hit, from the text with special tokens and the one without."""
    text, ends = ends_of(tokenizer, tokens)
    names = [(n, name_of_special(tokenizer, token)) for n, token in enumerate(tokens, 1)]
    characters = [(n, 1, c) for n, c in zip(ends, text, strict=True)]
    characters += [(n, 0, c) for n, name in names for c in name]
    characters.sort(key=lambda entry: entry[:2])  # stable
    hits = []
    for view in (characters, [entry for entry in characters if entry[1]]):
        before, stop = cut("".join(c for *_, c in view), stops)
        if stop is not None:
            num_shown = sum(is_shown for _, is_shown, _ in view[: len(before)])
            num_tokens = view[len(before) + len(stop) - 1][0]
            hits.append((num_shown, num_tokens, len(stop), stop))
    if not hits:
        return text, None
    num_shown, num_tokens, _, stop = min(hits)
    return text[:num_shown], StopHit(stop, num_tokens)


def name_of_special(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The name of a special token; "" = it is none."""
    return "" if decode(tokenizer, [token]) else tokenizer.decode([token])


@st.composite
def runs_of_tokens(draw: st.DrawFn, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens in runs: random ones, encoded text, the same token again and again."""
    size = len(tokenizer) + 3  # a model may know more tokens than its tokenizer
    some = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    part = st.one_of(
        st.lists(st.sampled_from(some), max_size=12),
        st.lists(st.integers(0, size - 1), max_size=8),
        st.sampled_from(some).flatmap(lambda t: st.integers(1, 90).map(lambda n: [t] * n)),
        st.text(st.sampled_from("ab. é☃🎈中"), max_size=10).map(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        ),
    )
    tokens = [token for run in draw(st.lists(part, max_size=8)) for token in run]
    edges = draw(st.lists(st.integers(0, len(tokens)), max_size=12)) if tokens else []
    if draw(st.booleans()):
        edges = list(range(len(tokens)))
    cuts = [0, *sorted(edges), len(tokens)]
    return [tokens[a:b] for a, b in itertools.pairwise(cuts)]


#: Characters of the names of special tokens.
NAMES = set("<>/bosekunpad")


@st.composite
def stops_for(
    draw: st.DrawFn, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]
) -> list[str]:
    """Pieces of the text, some with another end, and strings over few letters."""
    few = st.text(st.sampled_from("ab .é☃"), min_size=1, max_size=4)
    text = tokenizer.decode(
        tokens, skip_special_tokens=draw(st.booleans()), clean_up_tokenization_spaces=False
    )
    if not text:
        return draw(st.lists(few, max_size=4))
    piece = st.builds(
        lambda at, n, end: text[at : at + n] + end,
        st.integers(0, len(text) - 1),
        st.integers(1, 12),
        st.sampled_from(["", "", "x"]),
    )
    return draw(st.lists(st.one_of(piece, few), max_size=5))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=MANY, deadline=None)
@given(data=st.data())
def test_the_text_is_the_oracles_at_every_moment(name, data):
    tokenizer = TOKENIZERS[name]
    runs = data.draw(runs_of_tokens(tokenizer))
    tokens = [token for run in runs for token in run]
    stops = data.draw(stops_for(tokenizer, tokens))
    expected, hit = expected_hit(tokenizer, tokens, stops)
    # The oracle cannot tell a broken character from one that is cut, so it does not know its end.
    knows_ends = "�" not in decode(tokenizer, tokens)
    if not knows_ends:
        stops = [stop for stop in stops if stop in decode(tokenizer, tokens)]
        stops = [stop for stop in stops if not NAMES.intersection(stop)]
        whole, ends = ends_of(tokenizer, tokens)
        expected, stop = cut(whole, stops)
        hit = stop and StopHit(stop, ends[len(expected) + len(stop) - 1])
    stream, given_out, pushed = TextStream(tokenizer, tuple(stops)), "", 0
    for run in runs:
        before = stream.hit
        given_out += stream.push(run)
        pushed += len(run)
        assert expected.startswith(given_out)
        assert before is None or stream.hit == before
        if stream.hit is not None:
            assert given_out == expected and stream.hit.num_tokens <= pushed
    given_out += stream.push([], last=True)
    assert given_out == expected
    if hit is None or knows_ends or "�" not in hit.stop:
        assert stream.hit == hit
    else:
        assert stream.hit.stop == hit.stop


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        ([0, 2], ("<pad>ax", "a")),
        ([0, 2], ("<pad>ax", "pad", "a")),
        ([0, 2, 3, 3], ("<pad>abx", "d", "ab")),
        ([2, 0, 2], ("a<pad>ax", "p", "aa")),
    ],
)
def test_a_stop_string_in_a_hidden_name_ends_the_text_before_one_behind_it(tokens, stops):
    """Law: also while a longer string, which began before both, may still come."""
    tokenizer = TOKENIZERS["metaspace"]
    expected = expected_hit(tokenizer, tokens, stops)
    for size in (1, len(tokens)):
        stream = TextStream(tokenizer, stops)
        text = "".join(stream.push(tokens[n : n + size]) for n in range(0, len(tokens), size))
        assert (text + stream.push([], last=True), stream.hit) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=MANY, deadline=None)
@given(data=st.data())
def test_a_split_changes_nothing(name, data):
    """Tokens one by one, in runs, or all at once give the same text and the same hit."""
    tokenizer = TOKENIZERS[name]
    runs = data.draw(runs_of_tokens(tokenizer))
    tokens = [token for run in runs for token in run]
    stops = tuple(data.draw(stops_for(tokenizer, tokens)))
    results = []
    for split in (runs, [[token] for token in tokens], [tokens]):
        stream = TextStream(tokenizer, stops)
        text = "".join([stream.push(run) for run in split])
        results.append((text, stream.push([], last=True), stream.hit))
    assert results[0] == results[1] == results[2]


def push_all(stream: TextStream, text: str) -> list[str]:
    """The text's bytes one by one, for the embedded tokenizer."""
    return [stream.push([byte]) for byte in text.encode()]


def test_a_stop_string_across_tokens_is_never_given_out():
    stream = TextStream(TOKENIZERS["tiny"], ("\n\n", "END"))
    assert push_all(stream, "a\nEN\nEND!") == ["a", "", "\n", "", "EN", "\n", "", "", ""]
    assert stream.hit == StopHit("END", 8)
    assert stream.push(list(b"more")) == "" and stream.push([], last=True) == ""


def test_a_stop_string_inside_a_token_cuts_it():
    tokenizer = TOKENIZERS["sentencepiece"]
    stream = TextStream(tokenizer, ("a",))
    tokens = tokenizer.convert_tokens_to_ids(["c", "▁ab", "b"])
    assert stream.push(tokens) == "c "
    assert stream.hit == StopHit("a", 2)


@pytest.mark.parametrize(
    ("stop", "expected", "num_tokens"),
    [
        ("<bos>", "ab", 3),
        ("b<bos>", "a", 3),
        ("<bos>c", "ab", 4),
        ("b<bos>c", "a", 4),
        ("bos", "ab", 3),
        ("bc", "a", 4),  # as the text is shown
        ("ab", "", 2),
        ("cd", "ab", 5),
        ("<bos>d", "abcd", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_string_sees_the_name_of_a_special_token(stop, expected, num_tokens, size):
    """Its name is never shown, though text before and behind it is searched as one."""
    stream = TextStream(TOKENIZERS["tiny"], (stop,))
    tokens = [*b"ab", 256, *b"cd"]
    parts = [stream.push(tokens[i : i + size]) for i in range(0, 5, size)]
    assert "".join([*parts, stream.push([], last=True)]) == expected
    assert stream.hit == (None if num_tokens is None else StopHit(stop, num_tokens))


def test_a_special_token_amid_a_byte_run_stands_behind_the_characters_before_it():
    """A line break of a sentencepiece tokenizer is a byte token, which waits for the run's end."""
    tokenizer = TOKENIZERS["sentencepiece"]
    tokens = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "<s>", "<0x0A>", "b"])
    for stop, expected in (("\n<s>", "a"), ("<s>\n", "a\n"), ("<s>b", "a\n\nb")):
        stream = TextStream(tokenizer, (stop,))
        assert (
            "".join(stream.push([token]) for token in tokens) + stream.push([], last=True)
            == expected
        )
        assert (stream.hit is None) == (stop == "<s>b")


def test_a_hidden_token_has_no_text_and_may_be_part_of_a_stop_string():
    tokenizer = TOKENIZERS["tiny"]
    stream = TextStream(tokenizer, ("b.",), hidden={ord(".")})
    assert stream.push(list(b"a.ab.")) == "aa"
    assert stream.hit == StopHit("b.", 5)


def test_special_tokens_are_shown_if_asked_for():
    stream = TextStream(TOKENIZERS["tiny"], hidden={257}, shows_special=True)
    assert stream.push([97, 256, 98, 257, 99], last=True) == "a<bos>bc"


def test_many_special_tokens_cost_the_same_each(monkeypatch):
    """What is held back for a stop string never grows with the hidden text."""
    stream = TextStream(TOKENIZERS["tiny"], ("ab", "<bos>" * 3 + "x"))
    fed = []
    original = StopSearch.feed

    def counting(self, text, ends):
        fed.append(self.num_held)
        return original(self, text, ends)

    monkeypatch.setattr(StopSearch, "feed", counting)
    assert "".join(stream.push([token]) for token in [97, *[256] * 2000, 98]) == ""
    assert stream.hit == StopHit("ab", 2002) and max(fed) < 40


def test_text_that_began_no_stop_string_is_given_out():
    stream = TextStream(TOKENIZERS["tiny"], ("aab",))
    assert push_all(stream, "aaaa") == ["", "", "a", "a"]
    assert stream.push([], last=True) == "aa"
    assert stream.hit is None


def test_the_earliest_stop_string_wins_though_another_is_complete_before():
    stops = ("abcd", "c")
    stream = TextStream(TOKENIZERS["tiny"], stops)
    assert push_all(stream, "xabcd") == ["x", "", "", "", ""]
    assert stream.hit == StopHit("abcd", 5)
    stream = TextStream(TOKENIZERS["tiny"], stops)
    assert push_all(stream, "xabcx") == ["x", "", "", "", "ab"]
    assert stream.hit == StopHit("c", 4)
    stream = TextStream(TOKENIZERS["tiny"], stops)
    assert push_all(stream, "xabc") == ["x", "", "", ""]
    assert stream.push([], last=True) == "ab"
    assert stream.hit == StopHit("c", 4)


def test_a_character_that_was_held_before_a_run_has_a_token():
    """A literal replacement character looks like one that is cut until a run follows it."""
    tokenizer = TOKENIZERS["sentencepiece"]
    tokens = tokenizer.convert_tokens_to_ids(["�", "<0x20>", "<0x20>", "a"])
    stream = TextStream(tokenizer, (" a",))
    assert [stream.push([token]) for token in tokens] == ["", "", "", "� "]
    assert stream.hit == StopHit(" a", 4)


def test_a_run_of_byte_tokens_is_decided_when_it_ends():
    """`decode` shows one broken byte in a run by breaking all of it."""
    tokenizer = TOKENIZERS["sentencepiece"]

    def ids(text: bytes) -> list[int]:
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text])

    (letter,) = tokenizer.convert_tokens_to_ids(["a"])
    stream = TextStream(tokenizer)
    assert stream.push(ids("中文".encode())) == ""
    assert stream.push([letter]) == "中文a"
    assert stream.push(ids("中文".encode()[:-1])) == ""
    assert stream.push([letter]) == "�����a"
    stream = TextStream(tokenizer, ("文",))
    assert stream.push([letter, *ids("中文🎈".encode())]) == "a"
    assert stream.push([letter]) == "中"
    assert stream.hit == StopHit("文", 7)


def test_a_token_without_a_text_ends_a_run():
    tokenizer = TOKENIZERS["sentencepiece"]
    tokens = tokenizer.convert_tokens_to_ids(["<0x80>", "", "", "<0x41>", "", "a"])
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in tokens] == ["", "�", "", "", "A", "a"]


def test_a_token_that_is_only_called_like_a_byte_waits_for_nothing():
    tokenizer = TOKENIZERS["byte_level"]
    token = tokenizer.convert_tokens_to_ids("<0x41>")
    assert TextStream(tokenizer).push([token]) == "<0x41>"


def test_the_context_may_begin_inside_a_broken_run():
    """A long run that is broken at its beginning alone: the tail by itself would be whole."""
    tokenizer = TOKENIZERS["sentencepiece"]
    run = b"\xff" + "é".encode() * 3 * CONTEXT
    tokens = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in run] + ["a", "b"])
    stream = TextStream(tokenizer)
    assert "".join(stream.push([token]) for token in tokens) == "�" * len(run) + "ab"


def test_broken_bytes_before_an_empty_token_come_out_once():
    """Law: also where the window of old tokens is shortened at that token."""
    tokenizer = TOKENIZERS["sentencepiece"]
    byte, empty, letter = tokenizer.convert_tokens_to_ids(["<0x80>", "", "a"])
    for num_letters in range(3 * CONTEXT):
        tokens = [letter] * num_letters + [byte] * 3 + [empty, letter]
        stream = TextStream(tokenizer)
        text = "".join(stream.push([token]) for token in tokens) + stream.push([], last=True)
        assert text == decode(tokenizer, tokens) == "a" * num_letters + "���a"


def test_bytes_that_never_become_a_character_come_out():
    stream = TextStream(TOKENIZERS["tiny"])
    assert [stream.push([byte]) for byte in b"\xff\xff\xf0\x9f\x98a"] == [
        "",
        "�",
        "�",
        "",
        "",
        "�a",
    ]


def test_special_tokens_are_skipped_and_bind_no_spaces():
    tokenizer = TOKENIZERS["sentencepiece"]
    special = tokenizer.convert_tokens_to_ids("<s>")
    tokens = tokenizer.convert_tokens_to_ids(["▁a", "▁", "▁ab"])
    stream = TextStream(tokenizer)
    pushed = [special] * 40 + tokens[:1] + [special] * 40 + tokens[1:]
    assert "".join(stream.push([token]) for token in pushed) == "a  ab"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("tiny", list(b"abc ")),
        ("tiny", [0xFF]),
        ("tiny", [0xF0, 0x9F, 0x98]),
        ("tiny", [0x80, 0xE2]),
        ("tiny", [256]),
        ("tiny", [5000]),
        ("sentencepiece", [2]),
        ("sentencepiece", [13]),  # a token without a text
        ("sentencepiece", [13, 13, 7]),
        ("sentencepiece", [13, 100]),
        ("sentencepiece", [100]),
        ("sentencepiece", [100, 200, 7]),
        ("metaspace", [1]),
    ],
)
@pytest.mark.parametrize("stops", [(), ("abab", "�" * 50 + "x")])
def test_a_token_costs_the_same_however_long_the_text(monkeypatch, name, pattern, stops):
    """Tokens that are decoded per token pushed; the text is never decoded again from its start."""
    tokenizer = TOKENIZERS[name]
    letter = {"tiny": 97, "sentencepiece": 7, "metaspace": 5}[name]
    tokens = [letter, *(pattern * 2000)[:2000], letter]
    expected = decode(tokenizer, tokens)
    decoded = []
    original = type(tokenizer).decode

    def counting(self, tokens, **options):
        decoded.append(len(tokens))
        return original(self, tokens, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    stream = TextStream(tokenizer, stops)
    text = "".join(stream.push([token]) for token in tokens) + stream.push([], last=True)
    assert text == expected
    assert sum(decoded) <= 4 * CONTEXT * len(tokens)
    assert max(decoded, default=0) <= 2 * CONTEXT + 2 or pattern == [100]


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_a_growing_text_is_searched_as_a_whole_one(stops, pieces):
    """Law: what was given out, and the stop string, are those of the text so far."""
    search, given_out, seen = StopSearch(stops), "", ""
    for number, piece in enumerate(pieces, 1):
        given_out += search.feed(piece, [number] * len(piece))
        seen += piece
        text, stop = cut(seen, stops)
        begun = (p for p in range(len(text)) if any(s.startswith(seen[p:]) for s in stops))
        assert given_out == text[: next(begun, len(text))]
        if search.hit is not None:
            break
    given_out += search.close()
    text, stop = cut(seen, stops)
    assert given_out == text
    ends = [number for number, piece in enumerate(pieces, 1) for _ in piece]
    hit = None if stop is None else StopHit(stop, ends[len(text) + len(stop) - 1])
    assert search.hit == hit


def test_long_stop_strings_cost_a_moment_each():
    """Text that is nearly a stop string everywhere: a plain comparison would take as many times as
    long as the stop strings have characters.
    """
    stops = tuple("a" * n + "b" for n in range(1000, 1064))
    stream = TextStream(TOKENIZERS["tiny"], stops)
    unlike = TextStream(TOKENIZERS["tiny"], stops)
    seconds = []
    for text, other in ((stream, b"a"), (unlike, b"c")):
        start = time.thread_time()
        given_out = "".join(text.push(list(other * 500)) for _ in range(40))
        seconds.append(time.thread_time() - start)
        if text is stream:
            nearly = given_out
    print("nearly a stop string, and unlike any: CPU s", seconds)
    assert seconds[0] < 20 * seconds[1]
    assert nearly == "a" * (20_000 - 1063)
    assert stream.push(list(b"b")) == ""
    assert stream.hit == StopHit("a" * 1063 + "b", 20_001)


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None)
    assert stream.push([1, 2, 3]) == "" and stream.push([], last=True) == ""
    with pytest.raises(ConfigError, match=r"need a tokenizer.*'x'"):
        TextStream(None, ("x",))


def test_tokens_after_the_last_are_refused():
    stream = TextStream(TOKENIZERS["tiny"])
    assert stream.push(list(b"ab"), last=True) == "ab"
    assert stream.push([], last=True) == ""
    with pytest.raises(OrderError, match="3 tokens after the last of 2"):
        stream.push([1, 2, 3])


def test_the_streams_of_a_corpus_are_the_corpus():
    """The plainest law: 20,000 bytes, with tokens in random runs."""
    tokenizer = TOKENIZERS["byte_level"]
    text = corpus.corpus(5, 20_000).decode() + TEXT * 20
    tokens, rng = tokenizer.encode(text, add_special_tokens=False), random.Random(1)
    stream, parts = TextStream(tokenizer), []
    while tokens:
        n = rng.randint(1, 6)
        parts.append(stream.push(tokens[:n]))
        tokens = tokens[n:]
    assert "".join([*parts, stream.push([], last=True)]) == text


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (None, "tuple of strings, got None"),
        ({"a"}, r"tuple of strings, got \{'a'\}"),
        (("a", ""), "not empty, got ''"),
        (("a", 5), "not empty, got 5"),
        ((b"a",), "not empty, got b'a'"),
        ((None,), "not empty, got None"),
        (("ab\ud800",), r"lone surrogate at position 2 of 'ab\\ud800'"),
        (tuple("x" * n for n in range(1, 66)), r"at most 64 strings, got 65: \('x', 'xx'"),
    ],
)
def test_stop_strings_that_cannot_work_are_refused(stop, message):
    with pytest.raises(ConfigError, match=message) as refused:
        SamplingParams(stop=stop)
    assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match=message):
        TextStream(TOKENIZERS["tiny"], stop)


def test_stop_strings_that_work_are_taken():
    assert SamplingParams().stop == ()
    assert SamplingParams(stop=("\n\n", "é", "END")).stop == ("\n\n", "é", "END")
    assert SamplingParams(stop=["END"]).stop == ("END",)
    assert len(SamplingParams(stop=tuple("x" * n for n in range(1, 65))).stop) == 64


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=MANY, deadline=None)
@given(data=st.data())
def test_special_tokens_are_noted_in_their_places(name, data):
    """Law: a special token stands behind the text of the tokens before it, in every split."""
    tokenizer = TOKENIZERS[name]
    specials = [i for i, added in tokenizer.added_tokens_decoder.items() if added.special]
    pieces = st.text(st.sampled_from("ab. é☃🎈中"), max_size=8).map(
        lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    piece = pieces | st.sampled_from(specials).map(lambda token: [token])
    tokens = [token for ids in data.draw(st.lists(piece, max_size=12)) for token in ids]
    stops = data.draw(st.sampled_from([(), ("xyz", "a  b!")]))  # begun at times, never whole
    places = [
        (len(decode(tokenizer, tokens[:n])), tokenizer.decode([token], skip_special_tokens=False))
        for n, token in enumerate(tokens)
        if token in specials[1:]
    ]
    stream = TextStream(tokenizer, stops, hidden=specials[:1], notes_special=True)
    size, text = data.draw(st.integers(1, 9)), ""
    for start in range(0, len(tokens), size):
        text += stream.push(tokens[start : start + size])
    text += stream.push([], last=True)
    assert text == decode(tokenizer, tokens) and stream.specials == places
    assert TextStream(tokenizer).push(tokens, last=True) == text


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked():
    """Only transformers' own call around the tokenizer is left out."""

    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper()

    tokenizer = byte_level()
    loud = Loud(tokenizer_object=tokenizer.backend_tokenizer)
    ids = tokenizer.encode("text")
    assert TextStream(loud).push(ids, last=True) == "TEXT"
    assert TextStream(tokenizer).push(ids, last=True) == "text"
    tokenizer.decode = lambda *args, **options: "patched"
    assert TextStream(tokenizer).push(ids, last=True) == "patched"
