"""The seeded draw and the law of sampling (docs/contract.md, The draft tree)."""

import numpy as np
import pytest
from scipy import stats

import kernel_reference as ref
from specpool.errors import ShapeError
from specpool.kernels import twins as kernels


def draw(logits, u, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, function=kernels.sample_tokens):
    logits = np.ascontiguousarray(logits, np.float32)
    n = len(logits)
    return function(
        logits,
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.broadcast_to(np.asarray(u, np.float64), n).copy(),
        min_p=np.full(n, min_p, np.float32) if min_p else None,
    )


def uniform(seed, positions):
    positions = np.asarray(positions, np.int64)
    return kernels.uniform(np.full(positions.shape, seed, np.uint64), positions)


# --- uniform ---


def test_uniform_is_philox():
    rng = np.random.default_rng(0)
    seeds = np.append(rng.integers(0, 2**64, 51, np.uint64), np.uint64(2**64 - 1))
    positions = np.concatenate([rng.integers(0, 2**63, 50), [0, 2**63 - 1]])
    expected = [ref.uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert kernels.uniform(seeds, positions).tolist() == expected


def test_uniform_is_uniform_along_positions_and_along_seeds():
    n = 200_000
    along_positions = uniform(1, np.arange(n))
    along_seeds = kernels.uniform(np.arange(n, dtype=np.uint64), np.full(n, 5))
    for u in (along_positions, along_seeds):
        assert u.min() >= 0 and u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-4
        pairs = np.histogram2d(u[:-1], u[1:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-4
        bits = (u * 2**53).astype(np.int64)[:, None] >> np.arange(53) & 1
        assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / n**0.5
    assert abs(np.corrcoef(along_positions, along_seeds)[0, 1]) < 5 / n**0.5
    # The same positions under neighbouring seeds have nothing in common.
    assert abs(np.corrcoef(along_positions, uniform(2, np.arange(n)))[0, 1]) < 5 / n**0.5


def test_uniform_refuses_negative_positions():
    with pytest.raises(ShapeError, match=r"positions\[1\] must be 0 or more, got -3"):
        uniform(0, [1, -3])
    with pytest.raises(ShapeError, match=r"seeds must be .* uint64, got int64"):
        kernels.uniform(np.zeros(1, np.int64), np.zeros(1, np.int64))


# --- one row ---


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 255, 256, 257, 1000, 5000])
def test_equals_slow_twin(vocab):
    """Any temperature, top-k, top-p and min-p; draws within 1e-5 of another outcome may differ."""
    rng = np.random.default_rng(vocab)
    checked = 0
    for _ in range(60):
        logits = (rng.standard_normal((4, vocab)) * rng.choice([0.1, 3, 10])).astype(np.float32)
        if rng.random() < 0.3:
            logits[rng.random(logits.shape) < 0.3] = -np.inf
            logits[:, -1] = 0
        parameters = {
            "temperature": float(rng.choice([0, 0.3, 1, 2.5])),
            "top_k": int(rng.choice([0, 1, 3, vocab, vocab + 5])),
            "top_p": float(np.float32(rng.choice([1, 0.99, 0.5, 0.01]))),
            "min_p": float(np.float32(rng.choice([0, 0, 1e-3, 0.2, 1]))),
        }
        u = rng.random(4)
        tokens = draw(logits, u, **parameters)
        margins = draw(logits, u, **parameters, function=kernels.sample_margins)
        for row in range(4):
            if margins[row] > 1e-5:
                checked += 1
                assert tokens[row] == ref.sample(logits[row], **parameters, u=u[row])
    assert checked > 150


def test_ties_go_to_the_lower_id():
    logits = np.zeros((1, 6), np.float32)
    assert draw(logits, 0.99, temperature=0).tolist() == [0]
    assert draw(logits, 0.99, top_k=2).tolist() == [1]
    assert draw(logits, 0.99, top_p=0.5).tolist() == [2]
    logits[0, 1] = -0.0
    assert draw(logits, 0.99, top_k=2).tolist() == [1]


def test_weightless_tokens_are_never_drawn():
    logits = np.full((1, 700), -np.inf, np.float32)
    logits[0, [300, 302]] = 0, -200  # e^-200 is no weight in float32
    largest = np.nextafter(1, 0)
    for u in (0.0, 0.5, largest):
        for top_p in (1.0, 0.9):
            assert draw(logits, u, top_p=top_p).tolist() == [300]


def test_tiny_temperature_is_argmax():
    logits = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    tokens = draw(logits, np.linspace(0, 0.999, 8), temperature=1e-40)
    assert (tokens == logits.argmax(1)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3, 9, 16])
def test_logits_that_are_no_numbers_fail_their_row_alone(temperature, bad, at):
    logits = np.zeros((3, 17), np.float32)
    logits[1, at] = bad
    for parameters in ({}, {"top_k": 3}, {"top_p": 0.5}):
        tokens = draw(logits, 0.1, temperature=temperature, **parameters)
        assert tokens[1] == -1 and (tokens[[0, 2]] >= 0).all()
    nothing = np.full((1, 17), -np.inf)
    assert draw(nothing, 0.1, temperature=temperature).tolist() == [-1]
    assert np.isnan(draw(nothing, 0.1, function=kernels.sample_margins)).all()


def test_margins():
    logits = np.log(np.array([[0.2, 0.3, 0.5]], np.float32))

    def margin(u, **parameters):
        return float(draw(logits, u, **parameters, function=kernels.sample_margins)[0])

    assert margin(0.45) == pytest.approx(0.05, abs=1e-6)
    assert margin(0.21) == pytest.approx(0.01, abs=1e-6)
    assert margin(0.0) == pytest.approx(0.2, abs=1e-6)  # 0 itself is no edge
    assert margin(0.99) == pytest.approx(0.49, abs=1e-6)  # nor is 1
    assert margin(0.5, temperature=0) == pytest.approx(np.log(5 / 3), abs=1e-6)
    assert margin(0.99, top_p=0.79) == pytest.approx(0.01, abs=1e-6)  # mass 0.8 is just enough
    assert margin(0.5, top_k=1) == pytest.approx(np.log(5 / 3), abs=1e-6)
    assert draw(np.zeros((1, 1)), 0.5, function=kernels.sample_margins).tolist() == [np.inf]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (-1, np.nan, np.inf)),
        ("top_k", -1),
        *(("top_p", x) for x in (0, 1.5, np.nan)),
        *(("u", x) for x in (1, -0.1, np.nan)),
        *(("min_p", x) for x in (1.5, -0.1, np.nan)),
    ],
)
def test_bad_parameters_name_their_row(name, value):
    arguments = {"u": [0.5, 0.5], name: value}
    with pytest.raises(ShapeError, match=rf"{name}\[0\] must be"):
        draw(np.zeros((2, 3)), **arguments)


def test_bad_shapes():
    logits, one = np.zeros((2, 3), np.float32), np.ones(2, np.float32)
    k, u = np.zeros(2, np.int32), np.zeros(2)
    with pytest.raises(ShapeError, match=r"u must have shape \[2\], got \[1\]"):
        kernels.sample_tokens(logits, one, k, one, u[:1])
    with pytest.raises(ShapeError, match=r"logits must be .* float32, got float64"):
        kernels.sample_tokens(logits.astype(float), one, k, one, u)
    with pytest.raises(ShapeError, match="logits must have 1 to"):
        kernels.sample_tokens(np.zeros((2, 0), np.float32), one, k, one, u)
    assert draw(np.zeros((0, 3)), []).tolist() == []


# --- the law: sampled through a tree = sampled plainly ---

V = 8


def markov(seed):
    """logits[token, position % 3] of the next token."""
    return np.random.default_rng(seed).standard_normal((V, 3, V)).astype(np.float32) * 2


def plain(model, seed, first, length, **parameters):
    text = [first]
    for position in range(1, length):
        logits = model[text[-1], (position - 1) % 3][None]
        text.append(int(draw(logits, uniform(seed, [position]), **parameters)[0]))
    return text


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}])
@pytest.mark.parametrize("form", ["chain", "tree"])
def test_tree_sampling_is_plain_sampling(form, parameters):
    """The text depends only on seed and position, whatever the shape of each round."""
    rng = np.random.default_rng(11)
    won = rounds = 0
    for seed in range(12):
        model = markov(seed)
        text = [int(rng.integers(V))]
        while len(text) < 60:
            n = int(rng.integers(1, 9))
            num_steps = int(rng.integers(0, n))
            parents = list(range(-1, n - 1)) if form == "chain" else ref.random_parents(rng, n)
            depths, _, first_child, next_sibling, _ = kernels.tree_from_parents(
                np.array([parents], np.int32)
            )
            tokens = rng.integers(0, V, n)
            tokens[0] = text[-1]
            positions = len(text) - 1 + depths[0]
            target = draw(model[tokens, positions % 3], uniform(seed, positions + 1), **parameters)
            accept_index, accept_len, predict = kernels.verify_tree(
                tokens[None], first_child, next_sibling, target[None], num_steps=num_steps
            )
            text += predict[accept_index[0, : accept_len[0]]].tolist()
            won, rounds = won + int(accept_len[0]), rounds + 1
        assert text == plain(model, seed, text[0], len(text), **parameters)
    assert won > 1.05 * rounds  # drafts really were accepted


def first_two(u1, u2, rng):
    """First and second token of many requests, through one round of random trees."""
    model, n = markov(3), 6
    lanes = len(u1)
    parents = np.array([ref.random_parents(rng, n) for _ in range(64)], np.int32)
    parents = parents[rng.integers(0, 64, lanes)]
    depths, _, first_child, next_sibling, _ = kernels.tree_from_parents(parents)
    tokens = rng.integers(0, V, (lanes, n))
    tokens[:, 0] = 2
    u = np.where(depths == 0, u1[:, None], np.where(depths == 1, u2[:, None], 0.5))
    target = draw(model[tokens, depths % 3].reshape(-1, V), u.ravel()).reshape(lanes, n)
    accept_index, accept_len, predict = kernels.verify_tree(
        tokens, first_child, next_sibling, target, num_steps=3
    )
    first = predict[accept_index[:, 0]]
    later = draw(model[first, 1], u2)  # where the round ended after one token: the next round
    second = np.where(accept_len > 1, predict[accept_index[:, 1]], later)
    p1 = ref.distribution(model[2, 0], 1, 0, 1)
    p2 = np.array([ref.distribution(model[t, 1], 1, 0, 1) for t in range(V)])
    joint = np.histogram2d(first, second, bins=V, range=[[0, V], [0, V]])[0]
    return joint, p1[:, None] * p2


def fits(counts, p):
    """Chi-square, with the cells too rare for it taken together."""
    counts, expected = counts.ravel(), p.ravel() * counts.sum()
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue)


def test_sampled_text_follows_the_distribution():
    """Chi-square of first and second token; the same test sees planted biases."""
    lanes, rng = 40_000, np.random.default_rng(0)
    seeds = np.arange(lanes, dtype=np.uint64)
    u1, u2 = (kernels.uniform(seeds, np.full(lanes, position)) for position in (1, 2))
    joint, p = first_two(u1, u2, rng)
    assert fits(joint.sum(1), p.sum(1)) > 1e-3
    assert fits(joint, p) > 1e-3
    skewed, _ = first_two(u1**1.05, u2, rng)
    assert fits(skewed.sum(1), p.sum(1)) < 1e-6
    tied, _ = first_two(u1, u1, rng)  # one draw for both positions: each alone fits, both do not
    assert fits(tied.sum(1), p.sum(1)) > 1e-3
    assert fits(tied, p) < 1e-6
