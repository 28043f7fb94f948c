"""Laws of suffix decoding: proposals are what followed, weighed by counts; the text is unharmed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool._core import SuffixIndex
from specpool.engine.assets import corpus
from specpool.engine.draft import Choosy, SuffixDrafter, named_drafter
from specpool.engine.draft.texts import KEPT_CALLS

CHAIN, TREE = Shape.eagle(4, 1, 5), Shape.eagle(4, 4, 12)
SHAPES = [CHAIN, TREE, Shape.eagle(1, 1, 2), Shape.eagle(2, 8, 17)]
Texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3)


def propose(drafter: SuffixDrafter, shape: Shape, *texts: list[int]):
    return drafter.propose(None, shape, None, list(texts))  # type: ignore[arg-type]


@settings(deadline=None)
@given(texts=Texts, shape=st.sampled_from(SHAPES), shares=st.booleans(), cut=st.integers(0, 30))
def test_trees_are_valid_and_every_known_path_occurred(texts, shape, shares, cut):
    drafter = SuffixDrafter(shares=shares, max_context=6)
    for text in texts:  # some tokens first, then all of them
        drafter.is_promising(text[: max(1, min(cut, len(text)))])
    tree = propose(drafter, shape, *texts)
    tree.check(shape, len(texts))
    tree.check_values(np.array([text[-1] for text in texts]), 4)
    everything = texts if shares else None
    for lane, text in enumerate(texts):
        pairs = {pair for one in everything or [text] for pair in itertools.pairwise(one)}
        tokens, mask = tree.tokens[lane].tolist(), tree.mask[lane].numpy()
        first = tree.first_child[lane, 0].item()
        if first != -1 and (text[-1], tokens[first]) not in pairs:
            # Nothing was known, so the root is repeated.
            assert set(tokens) == {text[-1]} and mask[first, 0]


def test_the_commonest_continuation_comes_first_and_rarer_ones_beside_it():
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    tree = propose(SuffixDrafter(), Shape.eagle(2, 2, 5), text)
    assert tree.tokens[0].tolist()[:3] == [2, 3, 4]  # after 1 2: twice 3, once 4
    drafter = SuffixDrafter()
    assert isinstance(drafter, Choosy) and drafter.is_promising(text)
    assert not drafter.is_promising([5, 6, 7])
    assert not drafter.is_promising([1, 2, 1, 3, 1, 4, 1, 5, 1])  # a known end of one token
    assert SuffixDrafter(min_match=0).is_promising([5])


def test_texts_are_shared_only_if_asked():
    known, new = [1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3]
    for shares in (True, False):
        drafter = SuffixDrafter(shares=shares)
        drafter.is_promising(known)
        assert drafter.is_promising(new) is shares
        tokens = propose(drafter, CHAIN, new).tokens[0].tolist()
        assert tokens == ([3, 4, 5, 6, 7] if shares else [3] * 5)


def test_a_changed_text_is_indexed_anew_and_an_unused_one_is_dropped():
    drafter, text = SuffixDrafter(), [1, 2, 3, 1, 2]
    assert propose(drafter, CHAIN, text).tokens[0, 1] == 3
    text[2] = 7
    assert propose(drafter, CHAIN, text).tokens[0, 1] == 7
    other = [5, 5, 5]
    for _ in range(KEPT_CALLS + 1):
        propose(drafter, CHAIN, other)
    assert list(drafter._texts._entries) == [id(other)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", ["suffix", "suffix:shared"])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_plain_decoding(draft, shape, depth, temperature):
    prompts = [p[:n] for p, n in zip(corpus.prompts(3), (60, 30, 9), strict=True)]
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    with Engine.from_pretrained(max_context_len=160) as engine:
        expected = [o.token_ids for o in engine.generate(prompts, params)]
    options = {"max_context_len": 160, "overlap_depth": depth, "page_size": 4}
    with Engine.from_pretrained(draft=draft, shape=shape, **options) as engine:
        outputs = engine.generate(prompts, params)
        again = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in again] == expected
    if draft == "suffix:shared" and not temperature:  # the second time every text is known
        rounds = [sum(len(o.accept_lens) for o in each) for each in (outputs, again)]
        assert rounds[1] < rounds[0]


def test_bad_input_is_refused():
    for options, says in (
        ({"max_tokens": 1}, "max_tokens"),
        ({"max_context": 1}, "max_context"),
        ({"min_match": 40}, "min_match"),
        ({"shares": 1}, "shares must be True or False, got 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            SuffixDrafter(**options)
    with pytest.raises(ConfigError, match=r"'suffix' or 'suffix:shared', got 'suffix:9'"):
        named_drafter("suffix:9")
    index = SuffixIndex(100)
    text = index.begin()
    with pytest.raises(ConfigError, match="tokens must be 0 or more, got -3"):
        index.extend(text, [1, -3])
    with pytest.raises(ConfigError, match="there is no text 9"):
        index.extend(9, [1])
    with pytest.raises(ConfigError, match="there is no text -1"):
        index.end(-1)
    index.extend(text, [1, 2, 1])
    assert (index.num_tokens, index.best(text)) == (3, (1, 1.0))
    assert index.num_states <= 8
