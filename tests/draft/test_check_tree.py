"""Law: a proposal that is not a tree ends its requests, and never changes a text."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import kernel_reference as ref
from conftest import assert_no_page_leaked
from kernel_kit import array, backend, i32, i64
from specpool import Engine, EngineConfig, SamplingParams, Shape, ShapeError
from specpool import kernels as device
from specpool.engine.draft import DraftTree
from specpool.engine.worker.draft_round import DraftRound
from specpool.kernels import launch, with_twin

PARENTS = i32([[-1, 0, 0, 1]])
SHAPE = Shape(2, 2, 4)
FIELDS = ("tokens", "depths", "mask", "first_child", "next_sibling")
PROMPTS = [[72, 101, 108, 108, 111], [84, 104, 101, 32], [65, 110, 100]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


def with_cell(name, *place_and_value):
    *place, value = place_and_value

    def spoil(tree):
        field = getattr(tree, name).clone()
        field[0][tuple(place)] = value
        return replace(tree, **{name: field})

    return spoil


#: The links say 0-1-3. What node 3 sees says otherwise, or what the root sees, and so on.
BROKEN = {
    "node 3 sees node 2, not its parent": with_cell(
        "mask", 3, torch.tensor([True, False, True, True])
    ),
    "the root sees node 3": lambda tree: with_cell("depths", 0, 1)(
        with_cell("mask", 0, 3, True)(tree)
    ),
    "the root sees node 3 at depth 0": with_cell("mask", 0, 3, True),
    "the root sees node 3 instead of itself": with_cell(
        "mask", 0, torch.tensor([False, False, False, True])
    ),
    "a sibling sees its sibling": lambda tree: with_cell("depths", 2, 2)(
        with_cell("mask", 2, 1, True)(tree)
    ),
    "the next sibling is a grandchild": with_cell("next_sibling", 1, 3),
    "the child is a grandchild": with_cell("first_child", 0, 3),
    "the root is another token": with_cell("tokens", 0, 7),
    "a token beyond the vocabulary": with_cell("tokens", 2, 259),
    "a negative token": with_cell("tokens", 2, -1),
    "a depth": with_cell("depths", 3, 1),
    "a negative depth": with_cell("depths", 0, -1),
    "a link back": with_cell("first_child", 2, 1),
    "a link beyond": with_cell("next_sibling", 3, 4),
}


class Knowing:
    """Proposes what the text goes on with, in a tree of four nodes, and spoils some lanes' trees.

    With `reads_tokens` the tree is made on the host; without, it comes as a head's does.
    """

    layers = ()
    feature_layers = ()

    def __init__(self, texts, spoil, *, reads_tokens, parents=PARENTS):
        self.texts, self.spoil, self.reads_tokens = texts, spoil, reads_tokens
        self.parents = parents
        self.number_of = {}  # row -> the number of its text

    def attach(self, *args):
        pass

    def extend(self, lanes, tokens, features):
        pass

    def propose(self, lanes, shape, root_tokens, tokens):
        trees = []
        rows, starts, roots = lanes.rows.tolist(), lanes.starts.tolist(), root_tokens.tolist()
        for row, start, root in zip(rows, starts, roots, strict=True):
            if row not in self.number_of:
                self.number_of[row] = next(
                    i for i, text in enumerate(self.texts) if text[start : start + 1] == [root]
                )
            number = self.number_of[row]
            text = self.texts[number]
            first, second, third = [*text[start + 1 :], 0, 0, 0][:3]
            wrong = (first + 1) % 259
            after = (first, wrong, second) if self.parents is PARENTS else (first, second, third)
            tree = DraftTree.from_parents(i64([[root, *after]]), self.parents)
            trees.append(self.spoil(tree) if number == 0 else tree)
        return functools.reduce(DraftTree.joined, trees)


def engine_of(target, texts, spoil, *, reads_tokens):
    drafter = Knowing(texts, spoil, reads_tokens=reads_tokens)
    config = EngineConfig(shape=SHAPE, max_context_len=64, max_batch=3, page_size=4)
    return Engine(target, drafter, config=config)


@pytest.fixture(scope="module")
def texts(target):
    with_plain = Engine(target, config=EngineConfig(max_context_len=64))
    outputs = with_plain.generate(PROMPTS, PARAMS)
    return [output.prompt_ids + output.token_ids for output in outputs]


def kept(tree):
    return tree


@pytest.mark.parametrize("reads_tokens", [True, False])
def test_a_whole_tree_is_accepted(target, texts, reads_tokens):
    engine = engine_of(target, texts, kept, reads_tokens=reads_tokens)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.prompt_ids + output.token_ids for output in outputs] == texts
    assert all(output.accept_len == 3 for output in outputs)


@pytest.mark.parametrize("reads_tokens", [True, False])
@pytest.mark.parametrize("case", BROKEN)
def test_a_tree_that_contradicts_itself_ends_its_own_request_alone(
    target, texts, case, reads_tokens
):
    """The text would be another one than the target's, without a word."""
    engine = engine_of(target, texts, BROKEN[case], reads_tokens=reads_tokens)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error.startswith("the drafter's tree is no tree: ")
    assert outputs[0].error.endswith(", at position 5")
    assert [output.prompt_ids + output.token_ids for output in outputs][1:] == texts[1:]
    assert all(output.accept_len == 3 for output in outputs[1:])
    assert_no_page_leaked(engine)


@pytest.mark.parametrize("case", BROKEN)
def test_on_a_device_it_ends_its_own_request_alone(target, texts, case):
    """Nothing waits for the check: its result travels with the round's results."""
    with launch.host_backend(backend("fast", "forward")):
        engine = engine_of(target, texts, BROKEN[case], reads_tokens=False)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert outputs[0].finish_reason == "error"
        assert outputs[0].error.startswith("the drafter's tree is no tree: a wrong root, ")
        assert [output.prompt_ids + output.token_ids for output in outputs][1:] == texts[1:]
        assert all(output.accept_len == 3 for output in outputs[1:])
        assert_no_page_leaked(engine)


CHAIN_PARENTS = i32([[-1, 0, 1, 2]])
CHAIN = Shape(3, 1, 4)


def in_place(name, *place_and_value):
    """Spoil a chain that still calls itself one."""
    *place, value = place_and_value

    def spoil(tree):
        getattr(tree, name)[0][tuple(place)] = value
        return tree

    return spoil


BROKEN_CHAINS = {
    "a token beyond the vocabulary": in_place("tokens", 2, 259),
    "the root is another token": in_place("tokens", 0, 7),
    "node 3 does not see node 1": in_place("mask", 3, 1, False),
    "a link beyond": in_place("first_child", 3, 4),
    "a negative depth": in_place("depths", 2, -1),
}


@pytest.fixture
def no_mask(monkeypatch):
    def refuse(*args):
        raise AssertionError("a round of chains was verified with a mask")

    monkeypatch.setattr(DraftRound, "_tree_reads", refuse)
    monkeypatch.setattr(DraftRound, "_compact", refuse)


@pytest.mark.parametrize("case", ["none", *BROKEN_CHAINS])
def test_a_broken_chain_on_a_device_ends_at_its_root_and_changes_no_other(
    target, texts, case, no_mask
):
    """Law: chains need no mask on a device either, because a broken one is never walked."""
    spoil = BROKEN_CHAINS.get(case, kept)
    with launch.host_backend(backend("fast", "forward")):
        drafter = Knowing(texts, spoil, reads_tokens=False, parents=CHAIN_PARENTS)
        config = EngineConfig(shape=CHAIN, max_context_len=64, max_batch=3, page_size=4)
        engine = Engine(target, drafter, config=config)
        outputs = engine.generate(PROMPTS, PARAMS)
        assert_no_page_leaked(engine)
    found = [output.prompt_ids + output.token_ids for output in outputs]
    assert found[1:] == texts[1:]
    assert all(output.accept_len == 4 for output in outputs[1:])
    if case == "none":
        assert found == texts and outputs[0].accept_len == 4
    else:
        assert outputs[0].error.startswith("the drafter's tree is no tree: a wrong root, ")
        assert found[0] == texts[0][: len(found[0])]
        assert len(found[0]) == len(PROMPTS[0]) + 1  # the prompt's own token


def test_trees_know_that_they_are_chains_if_they_were_made_as_such():
    tokens = i64([[1, 2, 3], [4, 5, 6]])
    chains = DraftTree.from_parents(tokens, i32([[-1, 0, 1]] * 2))
    trees = DraftTree.from_parents(tokens, i32([[-1, 0, 1], [-1, 0, 0]]))
    assert chains.is_chain and DraftTree.chain(torch.from_numpy(tokens)).is_chain
    assert not trees.is_chain
    assert DraftTree.joined(chains, chains).is_chain
    assert not DraftTree.joined(chains, trees).is_chain
    assert chains.select(torch.tensor([1])).is_chain
    assert not replace(chains, mask=trees.mask).is_chain


def random_trees(rng, batch, n):
    parents = i32([ref.random_parents(rng, n) for _ in range(batch)])
    return DraftTree.from_parents(rng.integers(0, 9, (batch, n)), parents)


def test_whole_trees_pass_and_one_changed_cell_never_does(kit):
    """The kernel, its twin, the host's check and a plain reading agree on every changed cell."""
    for batch in kit.batches:
        for n in (1, 2, 4, 8) if kit.is_checked else (1, 2, 4, 8, 40):
            rng = np.random.default_rng([batch, n])
            trees = random_trees(rng, batch, n)
            fields = [getattr(trees, name).clone() for name in FIELDS]
            roots = torch.from_numpy(trees.tokens[:, 0].numpy().copy())
            changed = np.flatnonzero(rng.random(batch) < 0.5).tolist()
            for lane in changed:
                which = int(rng.integers(0, 5))
                line = fields[which][lane].view(-1)
                at = int(rng.integers(0, len(line)))
                if which == 2:
                    line[at] = ~line[at]
                elif which == 0:
                    line[at] = int(rng.choice([-1, 9, 2**62])) if at else int(line[at]) + 1
                elif which == 1:
                    line[at] += int(rng.choice([-(2**31), 1, -1, 2**30]))
                else:
                    line[at] = int(rng.choice([at, n, -2, 0, 2**31 - 1]))
            tokens, depths, mask, child, sibling = fields
            shapes, kinds = (
                ((batch, n), (batch, n), (batch,)),
                (torch.int64, torch.int32, torch.bool),
            )
            got = device.check_tree(
                *(kit.put(field) for field in (tokens, depths, mask, child, sibling, roots)),
                vocab_size=9,
                out=[kit.out(s, k) for s, k in zip(shapes, kinds, strict=True)],
            )
            twin = with_twin.check_tree(
                *(field.numpy() for field in (tokens, depths, mask, child, sibling, roots)),
                vocab_size=9,
            )
            for one, other in zip(got, twin, strict=True):
                assert np.array_equal(array(one), other)
            for lane in range(batch):
                lines = [field[lane].numpy() for field in (tokens, depths, mask, child, sibling)]
                assert ref.is_tree(*lines, int(roots[lane]), 9) != bool(twin[2][lane])
                own = DraftTree(*(field[lane : lane + 1] for field in fields))
                is_broken = refused(own, roots[lane : lane + 1].numpy())
                assert is_broken == bool(twin[2][lane]), (lane, own)
                assert is_broken or lane not in changed, own
            safe_tokens, safe_depths = array(got[0]), array(got[1])
            assert safe_tokens.min() >= 0 and safe_tokens.max() <= 9 and safe_depths.min() >= 0


def refused(tree, roots):
    try:
        tree.check_values(roots, 9)
    except ShapeError:
        return True
    return False


def test_no_lane_and_wrong_arguments():
    none = torch.zeros(0, 3, dtype=torch.int32)
    tokens, mask = torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, 3, dtype=torch.bool)
    arguments = (tokens, none, mask, none, none)
    with launch.host_backend(backend("fast", "forward")):
        result = device.check_tree(*arguments, tokens[:, 0].contiguous(), vocab_size=9)
        assert [list(one.shape) for one in result] == [[0, 3], [0, 3], [0]]
        with pytest.raises(ShapeError, match=r"root_tokens must be contiguous int64 \[0\]"):
            device.check_tree(*arguments, tokens, vocab_size=9)
        with pytest.raises(ShapeError, match=r"vocab_size must be in \[1, .*got 0"):
            device.check_tree(*arguments, tokens[:, 0].contiguous(), vocab_size=0)
