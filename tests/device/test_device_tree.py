"""Kernels of `cuda/tree.cu` beside their twins; the recorded trees; scenario 15."""

import json

import numpy as np
import pytest
import torch

import kernel_reference as ref
from benches.candidates import Candidates
from kernel_kit import array, i32, i64
from paths import VECTORS
from specpool import kernels as device
from specpool.kernels import twins as kernels

KINDS = (torch.int64, torch.int32, torch.float32)


class Device:
    """A round's candidates on the device, between guard words, beside the twin's."""

    def __init__(self, kit, batch, num_steps, topk):
        self.kit, self.batch, self.s, self.k = kit, batch, num_steps, topk
        self.twin = Candidates.empty(batch, num_steps=num_steps, topk=topk)
        total = self.twin.scores.shape[1]
        self.scores = kit.out((batch, total), torch.float32)
        self.tokens = kit.out((batch, total), torch.int64)
        self.parents = kit.out((batch, 1 + topk * num_steps), torch.int64)
        self.kept = None

    def select(self, step, topk_p, topk_index):
        p, index = np.ascontiguousarray(topk_p, np.float32), i64(topk_index)
        before = self.kept[2] if step else None
        n, k = self.batch, self.k
        out = [self.kit.out(s, d) for s, d in zip([(n * k,), (n, k), (n, k)], KINDS, strict=True)]
        self.kept = device.select_topk(
            step, self.kit.put(p), self.kit.put(index), before,
            self.scores, self.tokens, self.parents, out=out,
        )  # fmt: skip
        self.expected = self.twin.select(step, p, index, self.expected[2] if step else None)
        for got, want in zip(self.kept, self.expected, strict=True):
            assert np.array_equal(array(got), want)

    def build(self, num_draft_tokens, root_tokens):
        """Build a tree, and compare all six results with the twin's; return the twin's choice."""
        n, nodes = self.batch, num_draft_tokens
        shapes = [(n, nodes)] * 2 + [(n, nodes, nodes)] + [(n, nodes)] * 3
        kinds = [torch.int64, torch.int32, torch.bool, *[torch.int32] * 3]
        out = [self.kit.out(s, d) for s, d in zip(shapes, kinds, strict=True)]
        tree = device.build_tree(
            self.scores, self.tokens, self.parents, self.kit.put(i64(root_tokens)),
            topk=self.k, num_draft_tokens=nodes, out=out,
        )  # fmt: skip
        parent_list, top, draft_tokens = self.twin.organize(nodes)
        depths, mask, child, sibling, parents = kernels.build_tree(parent_list, top, topk=self.k)
        tokens = np.concatenate([i64(root_tokens)[:, None], draft_tokens], axis=1)
        for got, want in zip(tree, (tokens, depths, mask, child, sibling, parents), strict=True):
            assert np.array_equal(array(got), want)
        return tree, (parent_list, top, draft_tokens)


def outputs_of(rng, batch, s, k, ties):
    for step in range(s):
        shape = (batch if step == 0 else batch * k, k)
        p = np.sort(rng.random(shape, np.float32))[:, ::-1].copy()
        if ties:
            p = rng.choice(i32([0, 1, 2]), shape).astype(np.float32) / 2
        yield p, rng.integers(0, 9, shape)


@pytest.mark.sample(3)
@pytest.mark.parametrize("ties", [False, True])
def test_trees_equal_the_twins(kit, ties):
    shapes = [(1, 1), (3, 1), (1, 8), (3, 4)] if kit.is_checked else [(1, 1), (5, 4), (4, 8)]
    for s, k in shapes:
        for batch in kit.batches:
            rng = np.random.default_rng([s, k, batch])
            tree = Device(kit, batch, s, k)
            for step, (p, index) in enumerate(outputs_of(rng, batch, s, k, ties)):
                tree.select(step, p, index)
            most = 1 + k + (s - 1) * k * k
            for n in {1, 2, int(rng.integers(2, most + 1)), min(most, 64)}:
                tree.build(n, rng.integers(0, 99, batch))


def test_recorded_trees(kit):
    """vectors/tree.json: selection, choice, links, masks and the greedy walk."""
    cases = json.loads((VECTORS / "tree.json").read_text())["cases"]
    for case in cases[::8] if kit.is_checked else cases:
        b, k, s, n = (
            case[name] for name in ("batch_size", "topk", "num_steps", "num_draft_tokens")
        )
        tree = Device(kit, b, s, k)
        for step, output in enumerate(case["draft_outputs"]):
            tree.select(step, output["topk_p"], output["topk_index"])
            assert tree.kept[0].tolist() == case["draft_input_ids"][step]
        (tokens, depths, mask, child, sibling, _), choice = tree.build(n, case["root_token"])
        assert choice[0].tolist() == case["parent_list"] or s == 1
        assert choice[1].tolist() == case["top_scores_index"]
        assert tokens[:, 1:].tolist() == case["draft_tokens"]
        lens = np.asarray(case["seq_lens"])
        assert (array(depths) + lens[:, None]).ravel().tolist() == case["positions"]
        assert child.tolist() == case["retrieve_next_token"]
        assert sibling.tolist() == case["retrieve_next_sibling"]
        flat = iter(case["full_mask"])
        for lane in range(b):
            for node in range(n):
                line = [next(flat) == "1" for _ in range(lens[lane] + n)]
                assert all(line[: lens[lane]])
                assert line[lens[lane] :] == mask[lane, node].tolist()
        target = kit.put(i64(case["target_predict"]))
        index, accept_len, predict = device.verify_tree(tokens, child, sibling, target, num_steps=s)
        assert index.tolist() == case["accept_index"]
        assert (accept_len - 1).tolist() == case["num_correct_drafts"]
        assert predict.tolist() == case["predict"]


def test_scenario_15_walks_of_several_lanes_equal_the_twins(kit):
    """N != S + 1, lanes 1 to 8 and 257: each reads its own line (sgl#27545, sgl#26866)."""
    for batch in kit.batches:
        for n, s in ((1, 0), (8, 3), (16, 2), (7, 9), (64, 5)):
            rng = np.random.default_rng([batch, n])
            parents = i32([ref.random_parents(rng, n) for _ in range(batch)])
            _, _, child, sibling, _ = kernels.tree_from_parents(parents)
            tokens = rng.integers(0, 3, (batch, n))
            target = rng.integers(0, 3, (batch, n))
            target[rng.random((batch, n)) < 0.05] = -1
            expected = kernels.verify_tree(tokens, child, sibling, target, num_steps=s)
            shapes = [(batch, s + 1), (batch,), (batch * n,)]
            kinds = [torch.int32, torch.int32, torch.int64]
            got = device.verify_tree(
                *(kit.put(value) for value in (tokens, child, sibling, target)), num_steps=s,
                out=[kit.out(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)],
            )  # fmt: skip
            for one, other in zip(got, expected, strict=True):
                assert np.array_equal(array(one), other)


def test_probabilities_that_are_none(kit):
    """NaN counts as 0, tiny scores too (the GPU flushes them), none lifts a child."""
    nan, tiny = float("nan"), 1e-39
    tree = Device(kit, 2, 3, 2)
    tree.select(0, [[0.5, nan], [1e-20, tiny]], [[1, 2], [3, 4]])
    tree.select(1, [[1.5, nan], [np.inf, -1], [1e-20, 0.5], [1, 1]], np.arange(8).reshape(4, 2))
    tree.select(2, [[1, nan]] * 4, np.arange(8).reshape(4, 2))
    for n in (1, 4, 11):
        tree.build(n, [7, 8])
    assert tree.scores[1, 1] == 0 and tree.scores[1, 2] == 0


def test_no_lane_is_no_launch(kit):
    if kit.kind != "cuda":
        kit.backend.launches.clear()
    tree = Device(kit, 0, 2, 2)
    tree.select(0, np.zeros((0, 2)), np.zeros((0, 2)))
    tree.build(3, [])
    none = kit.put(np.zeros((0, 3), np.int32))
    tokens = kit.put(np.zeros((0, 3), np.int64))
    assert device.verify_tree(tokens, none, none, tokens, num_steps=2)[0].shape == (0, 3)
    if kit.kind != "cuda":
        assert kit.backend.launches == []


def test_whatever_the_device_arrays_hold_the_trees_are_trees(kit):
    """Scores, parents and links that make no sense: walks end, nodes hang on the root."""
    wild = i64([-(2**62), -1, 0, 1, 2, 5, 9, 2**62])
    rng = np.random.default_rng(2)
    batch, s, k, n = 20, 3, 3, 9
    scores = rng.choice(np.array([np.nan, np.inf, -np.inf, -1, 0, 0.5], np.float32), (batch, 21))
    tokens, parents = rng.choice(wild, (batch, 21)), rng.choice(wild, (batch, 1 + k * s))
    roots = rng.choice(wild, batch)
    built = device.build_tree(
        *(kit.put(value) for value in (scores, tokens, parents, roots)),
        topk=k, num_draft_tokens=n,
    )  # fmt: skip
    node_parents = array(built[5])
    assert (node_parents[:, 0] == -1).all()
    assert (node_parents[:, 1:] >= 0).all() and (node_parents < np.arange(n)).all()
    expected = kernels.tree_from_parents(node_parents)
    for got, want in zip(built[1:5], expected, strict=False):
        assert np.array_equal(array(got), want)
    links = i32([-(2**31), -1, 0, 1, 2, 5, 8, 9, 2**31 - 1])
    child, sibling = rng.choice(links, (batch, n)), rng.choice(links, (batch, n))
    token, target = rng.integers(0, 2, (2, batch, n))
    index, accept_len, _ = device.verify_tree(
        *(kit.put(value) for value in (token, child, sibling, target)), num_steps=4
    )
    assert accept_len.min() >= 1 and accept_len.max() <= 5
    lanes = array(index)[array(index) >= 0]
    assert lanes.min() >= 0 and lanes.max() < batch * n
