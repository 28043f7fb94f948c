"""Laws of prompt lookup: a proposal followed the text's end before, and its cost is bounded."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import Choosy, EagleDrafter, NgramDrafter, named_drafter, ngram
from specpool.engine.draft.ngram import MAX_OCCURRENCES, _NgramIndex
from specpool.engine.draft.texts import KEPT_CALLS, TAIL_LEN
from specpool.engine.models import TargetModel
from specpool.engine.models.files.names import MAX_NGRAM

CHAIN = Shape.eagle(3, 1, 4)
SHAPES = [
    CHAIN,
    Shape.eagle(1, 1, 2),
    Shape.eagle(4, 4, 16),
    Shape.eagle(3, 8, 24),
    Shape(2, 3, 40),
]

Path = tuple[int, ...]


def paths(drafter: NgramDrafter, shape: Shape, *texts: Sequence[int]) -> list[list[Path]]:
    """Per lane and node, in order, the tokens from below the root to the node."""
    roots = np.array([text[-1] for text in texts], np.int64)
    tree = drafter.propose(None, shape, roots, list(texts))  # type: ignore[arg-type]
    tokens, mask = np.asarray(tree.tokens), np.asarray(tree.mask)
    assert (tokens[:, 0] == roots).all()
    assert (np.asarray(tree.depths) <= shape.num_steps).all()
    return [
        [tuple(lane[seen][1:].tolist()) for seen in row]
        for lane, row in zip(tokens, mask, strict=True)
    ]


def followed(text: Sequence[int], end: int, num_steps: int) -> Path:
    """What follows position `end`; past the end of the text, what has been proposed."""
    known = list(text)
    for at in range(num_steps):
        known.append(known[end + 1 + at])
    return tuple(known[len(text) :])


def continuations(text: Sequence[int], lens: Sequence[int], num_steps: int) -> Iterator[Path]:
    """The tokens that followed the text's end before: longest match first, then latest."""
    for n in lens:
        ends = [
            end
            for end in range(len(text) - 2, n - 2, -1)
            if text[end - n + 1 : end + 1] == text[-n:]
        ]
        for end in ends[:MAX_OCCURRENCES]:
            yield followed(text, end, num_steps)


def slow_paths(text: Sequence[int], shape: Shape, *, most: int, least: int) -> list[Path]:
    """The oracle: no index, every occurrence looked for anew."""
    text = list(text)
    nodes: list[Path] = [()]
    num_branches = 0
    for path in continuations(text, range(most, least - 1, -1), shape.num_steps):
        if num_branches < shape.topk:
            new = [path[:n] for n in range(1, len(path) + 1) if path[:n] not in nodes]
            nodes += new[: shape.num_draft_tokens - len(nodes)]
            num_branches += bool(new)
    fill = (text[-1],) * shape.num_steps
    new = [fill[:n] for n in range(1, len(fill) + 1) if fill[:n] not in nodes]
    nodes += new[: shape.num_draft_tokens - len(nodes)]
    return nodes + [fill[:1]] * (shape.num_draft_tokens - len(nodes))


@st.composite
def texts(draw: st.DrawFn, *, min_size: int = 0) -> list[int]:
    """Over few tokens, with repeats."""
    token = st.integers(0, draw(st.sampled_from([1, 3, 60])))
    part = st.lists(token, max_size=8).flatmap(
        lambda one: st.integers(1, 12).map(lambda n: one * n)
    )
    text = [token for one in draw(st.lists(part, max_size=4)) for token in one]
    return text + draw(st.lists(token, min_size=max(0, min_size - len(text)), max_size=4))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_proposals_are_the_slow_oracles_whatever_happens_to_the_texts(data):
    """Rows that grow, are cut and grow again, come back in other lists, and end."""
    least = data.draw(st.integers(1, 3))
    most = data.draw(st.integers(least, 6))
    wanted = data.draw(st.integers(0, most))
    drafter = NgramDrafter(max_ngram=most, min_ngram=least, min_match=wanted)
    rows = [data.draw(texts(min_size=1)) for _ in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 6))):
        shape = data.draw(st.sampled_from(SHAPES))
        for text, found in zip(rows, paths(drafter, shape, *rows), strict=True):
            assert found == slow_paths(text, shape, most=most, least=least)
            lens = range(most, least - 1, -1)
            matches = [n for n in lens if next(continuations(text, [n], 1), None) is not None]
            if max(matches, default=0) < wanted or not wanted:
                assert drafter.is_promising(text) == (not wanted)
        for at, text in enumerate(rows):
            what = data.draw(st.sampled_from(["grow", "cut", "copy", "end"]))
            if what == "cut":
                del text[max(1, len(text) - data.draw(st.integers(0, TAIL_LEN))) :]
            elif what == "copy":
                rows[at] = text = list(text)
            elif what == "end":
                rows[at] = text = data.draw(texts(min_size=1))
            text += data.draw(texts())


@pytest.mark.parametrize("factor", [0, 1, 1 << 40])
def test_ngrams_of_one_hash_change_no_proposal(monkeypatch, factor):
    """Law: hashes only sort; with a factor of 0 all n-grams have the same."""
    monkeypatch.setattr(ngram, "_FACTORS", [factor] * MAX_NGRAM)
    rng = random.Random(factor)
    for _ in range(20):
        drafter, text = NgramDrafter(), [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        for _ in range(4):
            shape = rng.choice(SHAPES)
            assert paths(drafter, shape, text) == [slow_paths(text, shape, most=4, least=1)]
            text += [rng.randrange(4) for _ in range(rng.randrange(5))]


def test_a_prompt_is_not_indexed_token_by_token(monkeypatch):
    """Law: the first round of a prompt sorts it with NumPy, a later one adds the new tokens."""
    grown, grow = [], _NgramIndex._grow

    def growing(self, n, text, begin):
        grown.append(len(text) - begin)
        grow(self, n, text, begin)

    monkeypatch.setattr(_NgramIndex, "_grow", growing)
    drafter, text = NgramDrafter(), [i * i % 977 for i in range(5000)]
    paths(drafter, CHAIN, text)
    assert not grown
    text += [1, 2, 3]
    assert paths(drafter, CHAIN, text) == [slow_paths(text, CHAIN, most=4, least=1)]
    assert grown == [3] * 4


def test_a_text_that_was_cut_and_grew_to_nearly_the_same_is_indexed_anew():
    """Only the first of the cut tokens differs."""
    drafter, text = NgramDrafter(), [i % 90 for i in range(100 + TAIL_LEN)]
    paths(drafter, CHAIN, text)
    again = [text[7], *text[101:], *text[5:8]]
    del text[100:]
    text += again
    assert paths(drafter, CHAIN, text) == [slow_paths(text, CHAIN, most=4, least=1)]
    text += [text[99], text[100]]
    assert paths(drafter, CHAIN, text)[0][-1] == tuple(text[101:104])


@settings(max_examples=200, deadline=None)
@given(before=texts(min_size=1), after=texts(min_size=1))
@example(before=[1, 7, 1], after=[2, 7, 1])
def test_a_text_that_was_rewritten_unnoticed_gets_no_wrong_proposal(before, after):
    """Deeper than the tail that is compared: proposals may be missing, never made up."""
    after = [*after, *before[len(after) :]]
    after[len(before) - 1] = before[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specpool.engine.draft.texts.TAIL_LEN", 1)
        drafter, text, shape = NgramDrafter(), list(before), Shape.eagle(3, 2, 7)
        paths(drafter, shape, text)
        text[:] = after
        (found,) = paths(drafter, shape, text)
    true = [followed(after, end, 3) for end in range(len(after) - 1) if after[end] == after[-1]]
    every = {path[:n] for path in [*true, (after[-1],) * 3] for n in range(4)}
    assert set(found) <= every


def test_the_longest_end_wins_over_a_recent_one():
    text = [1, 2, 3, 4, 5, 9, 3, 7, 7, 2, 3]
    assert paths(NgramDrafter(), CHAIN, text)[0][-1] == (4, 5, 9)
    assert paths(NgramDrafter(max_ngram=1), CHAIN, text)[0][-1] == (7, 7, 2)


def test_a_tree_has_a_branch_for_each_continuation():
    text = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 3, 9, 1, 2]
    (found,) = paths(NgramDrafter(), Shape.eagle(3, 4, 10), text)
    assert found[1:4] == [(3,), (3, 9), (3, 9, 1)]
    assert found[4:7] == [(4,), (4, 8), (4, 8, 1)]
    assert found[7:9] == [(3, 8), (3, 8, 1)]
    assert found[9] == (2,)  # the root again: nothing else is known
    (found,) = paths(NgramDrafter(), Shape.eagle(3, 2, 10), text)
    assert found[4:7] == [(4,), (4, 8), (4, 8, 1)] and found[7:] == [(2,), (2, 2), (2, 2, 2)]


def test_text_that_repeats_goes_on_with_itself():
    assert paths(NgramDrafter(), Shape.eagle(5, 1, 6), [3, 1, 2, 1, 2])[0][-1] == (1, 2, 1, 2, 1)
    assert paths(NgramDrafter(), Shape.eagle(5, 1, 6), [3, 7, 7])[0][-1] == (7,) * 5


def test_nothing_known_is_the_root_again():
    assert paths(NgramDrafter(), CHAIN, [1, 2, 3], [5]) == [
        [(), (3,), (3, 3), (3, 3, 3)],
        [(), (5,), (5, 5), (5, 5, 5)],
    ]
    assert paths(NgramDrafter(min_ngram=2), CHAIN, [1, 2, 1])[0][-1] == (1, 1, 1)


class Counted(list):  # type: ignore[type-arg]
    """Counts the items that are read from it."""

    num_read = 0

    def __getitem__(self, at):
        result = super().__getitem__(at)
        self.num_read += len(result) if isinstance(at, slice) else 1
        return result


@pytest.mark.parametrize("kind", ["random", "one token"])
def test_a_round_costs_the_same_however_long_the_text(kind):
    """100,000 tokens: only what is new is read, beside a bounded number of occurrences."""
    rng = random.Random(3)
    text = Counted(rng.randrange(200 if kind == "random" else 1) for _ in range(100_000))
    drafter, shape = NgramDrafter(), Shape.eagle(4, 4, 16)
    start = time.thread_time()
    paths(drafter, shape, text)
    first = time.thread_time() - start
    text.num_read, start = 0, time.thread_time()
    for _ in range(200):
        text += [rng.randrange(200) for _ in range(4)]
        paths(drafter, shape, text)
    each = (time.thread_time() - start) / 200
    assert text.num_read / 200 < 1500
    assert each < first / 10
    print(f"{kind}: the first round {first * 1e3:.0f} ms, each other {each * 1e6:.0f} us")


def test_texts_that_are_used_no_more_are_let_go():
    drafter = NgramDrafter()
    text, other = Counted([1, 2, 1]), [3, 4, 3]
    gone = weakref.ref(text)
    paths(drafter, CHAIN, text, other)
    del text
    for _ in range(KEPT_CALLS - 1):
        paths(drafter, CHAIN, other)
        assert gone() is not None
    paths(drafter, CHAIN, other)
    assert gone() is None
    assert paths(drafter, CHAIN, other)[0][-1] == (4, 3, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ngram": 0}, r"max_ngram must be an integer in \[1, 32\], got 0"),
        ({"max_ngram": 33}, r"max_ngram must be an integer in \[1, 32\], got 33"),
        ({"max_ngram": "4"}, "max_ngram must be an integer.*got '4'"),
        ({"max_ngram": 3, "min_ngram": 4}, r"min_ngram must be an integer in \[1, 3\], got 4"),
        ({"min_ngram": 0}, "min_ngram must be an integer.*got 0"),
    ],
)
def test_lengths_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(**options)


def test_a_drafter_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="needs the lanes' tokens"):
        NgramDrafter().propose(None, CHAIN, np.array([1]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["ngram:", "ngram:0", "ngram:33", "ngram:x", "ngram:-1", "ngram:²"]
)
def test_names_that_are_nearly_a_drafters_are_refused(name):
    with pytest.raises(ConfigError, match=r"in \[1, 32\]"):
        named_drafter(name)
    with pytest.raises(ConfigError, match=r"in \[1, 32\]"):
        Engine.from_pretrained("specpool/tiny", draft=name)


def test_names():
    text = [1, 2, 3, 4, 5, 9, 3, 7, 7, 2, 3]
    assert paths(named_drafter("ngram"), CHAIN, text)[0][-1] == (4, 5, 9)
    assert paths(named_drafter("ngram:1"), CHAIN, text)[0][-1] == (7, 7, 2)
    assert named_drafter("specpool/tiny-eagle") is None


@pytest.mark.parametrize("name", ["ngrm", "ngrams:3", "n-gram", "sufix", "suffixx:shared", "mpt"])
def test_a_word_that_is_nearly_a_drafters_is_refused_before_the_hub_is_asked(name, tmp_path):
    with pytest.raises(ConfigError, match=f"none named '{name}': did you mean '"):
        named_drafter(name)
    with pytest.raises(ConfigError, match=f"none named '{name}': did you mean '"):
        Engine.from_pretrained("specpool/tiny", draft=name)


def test_a_folder_may_have_a_name_that_is_nearly_a_drafters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ngrm").mkdir()
    assert named_drafter("ngrm") is None and named_drafter("somebody/ngrm") is None


# --- the same text as plain decoding -------------------------------------------------------------

REPETITIVE = "[size]\nmin = 3\nmax = 7\nowner = erin\nplace = rome\n\n" * 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(3, 1, 4), (7, 1, 8), (4, 4, 16)])
def test_repetitive_text_is_accepted(shape):
    shape = Shape.eagle(*shape)
    with Engine.from_pretrained(
        "specpool/tiny", draft="ngram", shape=shape, max_context_len=512
    ) as engine:
        params = SamplingParams(max_new_tokens=150, ignore_eos=True)
        (output,) = engine.generate(REPETITIVE, params)
    assert output.accept_len > 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "page_size", "options"),
    [
        ((3, 1, 4), 1, {}),
        ((7, 1, 8), 3, {"placement": "shared"}),
        ((4, 4, 16), 16, {"layout": "holey"}),
        ((3, 8, 24), 64, {"policy": "double_buffer"}),
        ((3, 1, 4), 64, {"placement": "shared"}),
        ((2, 3, 7), 2, {}),
        ((4, 4, 16), 3, {"placement": "shared"}),
    ],
)
def test_the_text_is_plain_decodings(shape, page_size, options):
    """Greedy and sampled, rows that come and go."""
    with Engine.from_pretrained(
        "specpool/tiny",
        draft=NgramDrafter(max_ngram=2 + page_size % 5),
        shape=Shape.eagle(*shape),
        page_size=page_size,
        max_batch=4,
        max_context_len=512,
        **options,
    ) as engine:
        prompts = [*corpus.prompts(4, 90), list(REPETITIVE.encode())] * 2
        params = [
            SamplingParams(max_new_tokens=30 + i, temperature=t, seed=i, ignore_eos=True)
            for t in (0.0, 0.8)
            for i in range(5)
        ]
        drafted = engine.generate(prompts, params)
        plain = engine.generate(prompts, params, shape=Shape.none())
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.accept_len for o in drafted) / 10 > 1.3


def test_text_to_the_context_end_is_plain_decodings():
    shape = Shape.eagle(4, 4, 16)
    with Engine.from_pretrained(
        "specpool/tiny", draft="ngram:6", shape=shape, max_context_len=150
    ) as engine:
        params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
        drafted = engine.generate(corpus.prompts(3, 40), params)
        plain = engine.generate(corpus.prompts(3, 40), params, shape=Shape.none())
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert [len(o.token_ids) for o in drafted] == [110] * 3


# --- rounds that are not worth drafting ----------------------------------------------------------


class Sometimes:
    """Another drafter that finds two rounds of three worth it."""

    def __init__(self, drafter) -> None:
        self._drafter, self._asked = drafter, 0

    def __getattr__(self, name: str):
        return getattr(self._drafter, name)

    def is_promising(self, tokens) -> bool:
        self._asked += 1
        return self._asked % 3 > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", ["ngram", "specpool/tiny-eagle", "specpool/tiny-eagle3"])
def test_rows_pass_rounds_beside_rows_that_draft(kind, depth):
    """Rounds of both shapes side by side; draft KV stays current where it is kept."""
    target = TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32")
    if kind == "ngram":
        inner = NgramDrafter()
    else:
        inner = EagleDrafter.from_pretrained(resolve(kind), target)
        assert not isinstance(inner, Choosy)
    drafter = Sometimes(inner)
    config = EngineConfig(shape=CHAIN, overlap_depth=depth, max_batch=3, max_context_len=300)
    with target, Engine(target, drafter, config=config) as engine:
        shapes = []
        prepare = engine.core.worker.run

        def seen(steps):
            shapes.extend(set(s.plan.shapes.tolist()) for s in steps if s.is_decode)
            return prepare(steps)

        engine.core.worker.run = seen
        params = SamplingParams(max_new_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
        prompts = corpus.prompts(4, 50)
        drafted = engine.generate(prompts, params)
        assert {0, 1} in shapes and drafter._asked > 60
        plain = engine.generate(prompts, params, shape=Shape.none())
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert max(max(o.accept_lens) for o in drafted) > 1


def test_finds_that_do_not_come_true_end_the_drafting():
    """Finds that come true bring drafting back, even without a proposal in between."""
    drafter = NgramDrafter(min_match=2)
    text = [1, 2, 3]
    assert not drafter.is_promising(text)
    answers = []
    for i in range(8):  # 1, 2 again and again, never followed by the same
        text += [1, 2]
        answers.append(drafter.is_promising(text))
        text.append(10 + i)
        drafter.is_promising(text)
    assert answers[0] and not any(answers[3:])
    for _ in range(8):
        text += [1, 2]
        answers.append(drafter.is_promising(text))
        text.append(99)
        drafter.is_promising(text)
    assert answers[-1]


def test_finds_are_judged_by_their_length():
    """One token that leads nowhere says nothing of three that do."""
    drafter, text = NgramDrafter(), [1, 2, 3, 4]
    for i in range(8):
        text.append(9)  # it occurred before, and another token follows each time
        drafter.is_promising(text)
        text.append(20 + i)
        drafter.is_promising(text)
    text.append(9)
    assert not drafter.is_promising(text)
    text += [1, 2, 3]
    assert drafter.is_promising(text)


def test_text_without_repeats_is_decoded_plainly():
    """It costs what plain decoding costs, plus the look-up."""
    with Engine.from_pretrained(draft="ngram", shape=CHAIN) as engine:
        params = SamplingParams(max_new_tokens=100, temperature=4.0, seed=1, ignore_eos=True)
        outputs = engine.generate(corpus.prompts(4), params)
        drafting = []
        propose = engine.drafter.propose
        engine.drafter.propose = lambda *a: (drafting.append(1), propose(*a))[1]
        again = engine.generate(corpus.prompts(4), params)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]
    assert len(drafting) < 30  # of 100 rounds


def test_an_index_is_dropped_also_while_nobody_drafts():
    drafter = NgramDrafter()
    others = [list(range(i, i + 50)) for i in range(5)]
    assert not any(drafter.is_promising(text) for text in others)
    text = list(range(100))
    for _ in range(KEPT_CALLS + 2):
        assert not drafter.is_promising(text)
    assert list(drafter._indexes._entries) == [id(text)]
