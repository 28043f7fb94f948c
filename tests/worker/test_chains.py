"""Law: chains are verified as plain text is, without a mask or moves; other trees keep both."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kernel_kit import backend, i32, i64
from specpool import Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.draft import DraftTree, NgramDrafter
from specpool.engine.worker import draft_round
from specpool.kernels import launch

CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 7)
PROMPTS = [[7, 8, 9, 10] * 5, [30, 31, 32] * 6, [5, 4, 3, 2, 1] * 4]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


class Forked:
    """Knows the text, and puts its next token behind another one, in the shape of a chain."""

    layers = ()
    feature_layers = ()

    def __init__(self, texts, *, reads_tokens=True):
        self.texts, self.reads_tokens = texts, reads_tokens
        self.text_of = {}  # by row

    def attach(self, *args):
        pass

    def extend(self, lanes, tokens, features):
        pass

    def propose(self, lanes, shape, root_tokens, tokens):
        nodes = []
        for lane, (start, root) in enumerate(
            zip(lanes.starts.tolist(), root_tokens.tolist(), strict=True)
        ):
            row = int(lanes.rows[lane])
            if row not in self.text_of:
                self.text_of[row] = next(
                    text for text in self.texts if text[start : start + 1] == [root]
                )
            first, second = [*self.text_of[row][start + 1 :], 0, 0][:2]
            nodes.append([root, (first + 1) % 259, first, second])
        return DraftTree.from_parents(i64(nodes), i32([[-1, 0, 0, 2]] * len(nodes)))


@pytest.fixture(scope="module")
def texts(target):
    plain = Engine(target, config=EngineConfig(max_context_len=64))
    outputs = plain.generate(PROMPTS, PARAMS)
    return [output.prompt_ids + output.token_ids for output in outputs]


def played(target, drafter, shape, texts, monkeypatch):
    """Generate the texts; return the accept lengths, and how often nodes had a mask and moved."""
    counts = {"mask": 0, "move": 0}

    def counted(name, function):
        def count(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return count

    monkeypatch.setattr(draft_round, "_own_cells", counted("mask", draft_round._own_cells))
    moves = counted("move", draft_round.kernels.compact_accepted)
    monkeypatch.setattr(draft_round.kernels, "compact_accepted", moves)
    config = EngineConfig(shape=shape, max_context_len=64, max_batch=3, page_size=4)
    outputs = Engine(target, drafter, config=config).generate(PROMPTS, PARAMS)
    assert [output.prompt_ids + output.token_ids for output in outputs] == texts
    return np.concatenate([output.accept_lens for output in outputs]), counts


def test_chains_have_no_mask_and_do_not_move(target, texts, monkeypatch):
    drafter = NgramDrafter(min_match=0)
    lens, counts = played(target, drafter, CHAIN, texts, monkeypatch)
    assert counts == {"mask": 0, "move": 0} and lens.max() > 1


def test_trees_have_both(target, texts, monkeypatch):
    drafter = NgramDrafter(min_match=0)
    lens, counts = played(target, drafter, TREE, texts, monkeypatch)
    assert counts["mask"] and counts["move"] and lens.max() > 1


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_a_tree_in_the_shape_of_a_chain_is_taken_for_a_tree(
    reads_tokens, is_on_device, target, texts, monkeypatch
):
    kernels = launch.host_backend(backend("fast", "forward"))
    with kernels if is_on_device else contextlib.nullcontext():
        drafter = Forked(texts, reads_tokens=reads_tokens)
        lens, counts = played(target, drafter, CHAIN, texts, monkeypatch)
    assert counts["mask"] and counts["move"]
    assert lens.mean() > 2.5  # the second child of the root is right, and its child
