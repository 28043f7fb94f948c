"""Verify: the walk along the target's tokens (docs/contract.md, The draft tree)."""

import numpy as np
import pytest

import kernel_reference as ref
from specpool.errors import ShapeError
from specpool.kernels import twins as kernels


def walk(tokens, parents, target, num_steps):
    _, _, first_child, next_sibling, _ = kernels.tree_from_parents(np.array(parents, np.int32))
    arrays = np.array(tokens), first_child, next_sibling, np.array(target)
    return kernels.verify_tree(*arrays, num_steps=num_steps)


@pytest.mark.parametrize("batch", range(1, 9))
def test_equals_slow_twin(batch):
    """Batches of trees with few tokens, so that siblings often bear the same one (sgl#27545)."""
    rng = np.random.default_rng(batch)
    for n in (1, 2, 5, 16):
        for num_steps in (0, 1, 3, n):
            parents = [ref.random_parents(rng, n) for _ in range(batch)]
            tokens, target = rng.integers(0, 3, (2, batch, n))
            target[rng.random((batch, n)) < 0.05] = -1
            accept_index, accept_len, predict = walk(tokens, parents, target, num_steps)
            assert accept_index.shape == (batch, num_steps + 1) and predict.shape == (batch * n,)
            expected_predict = np.zeros((batch, n), int)
            for lane in range(batch):
                nodes, won = ref.verify(
                    tokens[lane].tolist(), parents[lane], target[lane].tolist(), num_steps
                )
                padding = [-1] * (num_steps + 1 - len(nodes))
                assert accept_index[lane].tolist() == [lane * n + i for i in nodes] + padding
                assert accept_len[lane] == len(nodes)
                expected_predict[lane, nodes] = won
            assert (predict == expected_predict.ravel()).all()


def test_the_first_of_equal_siblings_is_taken():
    accept_index, _, _ = walk([[9, 5, 5, 6]], [[-1, 0, 0, 2]], [[5, 1, 6, 2]], 2)
    assert accept_index.tolist() == [[0, 1, -1]]


def test_depth_ends_the_walk():
    """The walk never gives more than S + 1 tokens, whatever the tree (A = min(S+1, N))."""
    accept_index, accept_len, predict = walk([[1, 1, 1]], [[-1, 0, 1]], [[1, 1, 1]], 1)
    assert accept_len.tolist() == [2] and accept_index.tolist() == [[0, 1]]
    assert predict.tolist() == [1, 1, 0]


def test_a_row_without_a_token_stops_and_says_where():
    """A target of -1 (NaN logits) fails its lane alone, at its position; no draft equals it."""
    parents = [[-1, 0, 1]] * 2
    accept_index, accept_len, predict = walk(
        [[7, 1, -1], [7, 1, 2]], parents, [[1, -1, 5], [1, 2, 3]], 2
    )
    assert accept_len.tolist() == [2, 3]
    last = accept_index[np.arange(2), accept_len - 1]
    assert predict[last].tolist() == [-1, 3]


def test_bad_links_and_shapes():
    tokens = np.zeros((1, 3), np.int64)
    none = np.full((1, 3), -1, np.int32)
    for link in (0, 3, -2):
        bad = np.array([[link, -1, -1]], np.int32)
        with pytest.raises(ShapeError, match=r"first_child\[0, 0\] must be -1 or in \(0, 3\)"):
            kernels.verify_tree(tokens, bad, none, tokens, num_steps=2)
    loop = np.array([[-1, 1, -1]], np.int32)
    child = np.array([[1, -1, -1]], np.int32)
    with pytest.raises(ShapeError, match=r"next_sibling\[0, 1\]"):
        kernels.verify_tree(tokens, child, loop, tokens + 1, num_steps=2)
    with pytest.raises(ShapeError, match="num_steps must be in"):
        kernels.verify_tree(tokens, none, none, tokens, num_steps=-1)
    with pytest.raises(ShapeError, match=r"target_tokens must have shape \[1, 3\], got \[1, 2\]"):
        kernels.verify_tree(tokens, none, none, tokens[:, :2].copy(), num_steps=1)
    with pytest.raises(ShapeError, match="N >= 1"):
        empty = np.zeros((1, 0), np.int64)
        kernels.verify_tree(empty, none[:, :0], none[:, :0], empty, num_steps=1)
