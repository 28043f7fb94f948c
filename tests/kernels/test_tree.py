"""The draft tree, compared with SGLang's recorded figures and a slow twin."""

import json

import numpy as np
import pytest

import kernel_reference as ref
from benches.candidates import Candidates
from paths import VECTORS
from specpool.errors import ShapeError
from specpool.kernels import twins as kernels


def cases():
    return json.loads((VECTORS / "tree.json").read_text())["cases"]


def grow(case_or_outputs, batch, num_steps, topk):
    candidates = Candidates.empty(batch, num_steps=num_steps, topk=topk)
    scores, kept = None, []
    for step, (p, index) in enumerate(case_or_outputs):
        kept.append(
            candidates.select(step, np.asarray(p, np.float32), np.asarray(index, np.int64), scores)
        )
        scores = kept[-1][2]
    return candidates, kept


@pytest.mark.parametrize("number", range(len(cases())))
def test_vectors(number):
    """Bit for bit as upstream, from the draft model's outputs to the accepted tokens."""
    case = cases()[number]
    batch, k, s, n = (
        case[name] for name in ("batch_size", "topk", "num_steps", "num_draft_tokens")
    )
    outputs = [(o["topk_p"], o["topk_index"]) for o in case["draft_outputs"]]
    candidates, kept = grow(outputs, batch, s, k)
    assert [ids.tolist() for ids, _, _ in kept] == case["draft_input_ids"]
    parent_list, top, draft_tokens = candidates.organize(n)
    assert parent_list.tolist() == case["parent_list"]
    assert top.tolist() == case["top_scores_index"]
    assert draft_tokens.tolist() == case["draft_tokens"]

    depths, mask, first_child, next_sibling, parents = kernels.build_tree(parent_list, top, topk=k)
    seq_lens = np.array(case["seq_lens"])
    assert (seq_lens[:, None] + depths).ravel().tolist() == case["positions"]
    full_mask = "".join(
        "1" * seq_len + "".join("01"[seen] for seen in row)
        for seq_len, lane in zip(case["seq_lens"], mask.astype(int), strict=True)
        for row in lane
    )
    assert full_mask == case["full_mask"]
    assert np.arange(batch * n).reshape(batch, n).tolist() == case["retrieve_index"]
    assert first_child.tolist() == case["retrieve_next_token"]
    assert next_sibling.tolist() == case["retrieve_next_sibling"]
    again = kernels.tree_from_parents(parents)
    for ours, theirs in zip((depths, mask, first_child, next_sibling, parents), again, strict=True):
        assert ours.dtype == theirs.dtype and (ours == theirs).all()

    root = np.array(case["root_token"])[:, None]
    accept_index, accept_len, predict = kernels.verify_tree(
        np.concatenate([root, draft_tokens], 1),
        first_child,
        next_sibling,
        np.array(case["target_predict"]),
        num_steps=s,
    )
    assert accept_index.tolist() == case["accept_index"]
    assert (accept_len - 1).tolist() == case["num_correct_drafts"]
    assert predict.tolist() == case["predict"]


def random_outputs(rng, batch, s, k, ties):
    outputs = []
    for step in range(s):
        p = rng.random((batch if step == 0 else batch * k, k), np.float32)
        if ties:  # certainty and impossibility: a child's score equals its parent's
            p = rng.choice(np.array([0, 0.5, 1], np.float32), p.shape)
        outputs.append((np.sort(p)[:, ::-1].copy(), rng.integers(0, 7, p.shape)))
    return outputs


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_equals_slow_twin(k, ties):
    """Selection, choice and parents follow the paths; ties go to the lower index, parents first."""
    rng = np.random.default_rng(k)
    for batch in (1, 2, 3, 8):
        s = int(rng.integers(1, 6))
        most = 1 + k + (s - 1) * k * k
        for n in {1, 2, most, int(rng.integers(1, most + 1))}:
            outputs = random_outputs(rng, batch, s, k, ties)
            candidates, kept = grow(outputs, batch, s, k)
            parent_list, top, draft_tokens = candidates.organize(n)
            built = kernels.build_tree(parent_list, top, topk=k)
            for lane in range(batch):
                own = [
                    (p[lane], index[lane])
                    if step == 0
                    else (p.reshape(batch, k, k)[lane], index.reshape(batch, k, k)[lane])
                    for step, (p, index) in enumerate(outputs)
                ]
                expected = ref.draft_tree(own, k, n)
                ids = [step[0].reshape(batch, k)[lane].tolist() for step in kept]
                assert ids == expected["input_ids"]
                assert [step[1][lane].tolist() for step in kept] == expected["branch_parents"]
                assert top[lane].tolist() == expected["chosen"]
                assert draft_tokens[lane].tolist() == expected["draft_tokens"]
                assert built[4][lane].tolist() == expected["parents"]


def test_trees_of_any_form_equal_slow_twin():
    rng = np.random.default_rng(5)
    for n in (1, 2, 3, 7, 16, 64):
        parents = np.array([ref.random_parents(rng, n) for _ in range(5)], np.int32)
        depths, mask, first_child, next_sibling, echoed = kernels.tree_from_parents(parents)
        assert (echoed == parents).all()
        for lane, line in enumerate(parents.tolist()):
            expected = ref.tree(line)
            assert depths[lane].tolist() == expected["depths"]
            assert mask[lane].tolist() == expected["mask"]
            assert first_child[lane].tolist() == expected["first_child"]
            assert next_sibling[lane].tolist() == expected["next_sibling"]


def test_a_chain_is_the_plain_order():
    parents = np.arange(-1, 4, dtype=np.int32)[None]
    depths, mask, first_child, next_sibling, _ = kernels.tree_from_parents(parents)
    assert depths.tolist() == [[0, 1, 2, 3, 4]]
    assert (mask[0] == np.tril(np.ones((5, 5), bool))).all()
    assert first_child.tolist() == [[1, 2, 3, 4, -1]] and (next_sibling == -1).all()


def test_probabilities_that_are_none_never_orphan_a_node():
    """A child above its parent would be chosen without it; upstream prints "invalid eagle tree"."""
    nan = float("nan")
    outputs = [([[0.5, nan]], [[1, 2]]), ([[1.5, nan], [np.inf, -1.0]], [[3, 4], [5, 6]])]
    candidates, _ = grow(outputs, 1, 2, 2)
    parent_list, top, _ = candidates.organize(4)
    kernels.build_tree(parent_list, top, topk=2)
    assert candidates.scores[0].tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_an_empty_batch_is_no_error():
    candidates, _ = grow([(np.zeros((0, 2)), np.zeros((0, 2)))], 0, 1, 2)
    parent_list, top, _ = candidates.organize(3)
    assert kernels.build_tree(parent_list, top, topk=2)[1].shape == (0, 3, 3)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[0, 0]], r"parents\[0, 0\] is the root's and must be -1, got 0"),
        ([[-1, 0, 2]], r"parents\[0, 2\] must be in \[0, 2\), got 2"),
        ([[-1, 0], [-1, -1]], r"parents\[1, 1\] must be in \[0, 1\), got -1"),
        ([[]], "parents must have 1 column or more"),
    ],
)
def test_parents_that_are_no_tree(parents, message):
    with pytest.raises(ShapeError, match=message):
        kernels.tree_from_parents(np.array(parents, np.int32))


def test_bad_selections_record_nothing():
    candidates = Candidates.empty(2, num_steps=2, topk=2)
    p, index = np.ones((2, 2), np.float32), np.ones((2, 2), np.int64)
    wide = np.ones((4, 2), np.float32), np.ones((4, 2), np.int64)
    scores = np.ones((2, 2), np.float32)
    for arguments, message in [
        ((2, *wide, scores), r"step must be in \[0, 2\), got 2"),
        ((-1, p, index), "step must be in"),
        ((1, *wide), "scores must not be None at step 1"),
        ((1, p, index, scores), r"topk_p must have shape \[4, 2\], got \[2, 2\]"),
        ((0, *wide), r"topk_p must have shape \[2, 2\], got \[4, 2\]"),
        ((0, p, index[:1]), r"topk_index must have shape \[2, 2\], got \[1, 2\]"),
        ((0, p.astype(np.float64), index), "topk_p must be a C-contiguous 2-dim.* float32, got f"),
        ((0, p, index.astype(np.int32)), "topk_index must be .* of int64, got int32"),
        ((0, p[:, ::-1], index), "got float32 of shape .2, 2., not contiguous"),
        ((0, np.asfortranarray(p), index), "got float32 of shape .2, 2., not contiguous"),
        ((0, p, index[0]), "topk_index must be a C-contiguous 2-dim"),
        ((1, *wide, scores[0]), "scores must be"),
        ((0, [[1.0]], index), "topk_p must be .* got .*list"),
    ]:
        with pytest.raises(ShapeError, match=message):
            candidates.select(*arguments)
    assert not candidates.scores.any() and not candidates.tokens.any()


def test_bad_choices():
    candidates = Candidates.empty(1, num_steps=2, topk=2)
    for n in (0, 8, -1, 1 << 21):
        with pytest.raises(ShapeError, match=r"num_draft_tokens must be in \[1, "):
            candidates.organize(n)
    with pytest.raises(ShapeError, match="candidate_parents must have shape"):
        kernels.organize(*(getattr(candidates, f) for f in ("scores", "tokens", "parents")),
                         topk=3, num_draft_tokens=2)  # fmt: skip
    parent_list = np.array([[-1, 0, 1]])
    for top, message in [
        ([[2, 3]], "chooses candidate 2, but not its parent"),
        ([[1, 0]], "must ascend"),
        ([[-1, 0]], "must ascend"),
        ([[0, 99]], "chooses candidate 99"),
    ]:
        with pytest.raises(ShapeError, match=message):
            kernels.build_tree(parent_list, np.array(top), topk=2)
    with pytest.raises(ShapeError, match="topk must be in"):
        kernels.build_tree(parent_list, parent_list, topk=0)
