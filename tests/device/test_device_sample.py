"""Kernels of `cuda/sample.cu`: bit for bit the twins' draws."""

import os

import numpy as np
import pytest
import torch

import kernel_reference as ref
from kernel_kit import array, i64
from specpool import kernels as device
from specpool.kernels import launch, sample
from specpool.kernels import twins as kernels


def both(kit, logits, temperature, top_k, top_p, u, min_p=None):
    """The kernel's tokens, held against the twin's."""
    n = len(logits)
    params = [
        np.broadcast_to(np.asarray(value, dtype), (n,)).copy()
        for value, dtype in ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32))
    ]
    params.append(np.broadcast_to(np.asarray(u, np.float64), (n,)).copy())
    tensor = torch.as_tensor(logits)
    least = None if min_p is None else np.broadcast_to(np.float32(min_p), (n,)).copy()
    expected = kernels.sample_tokens(tensor.float().numpy(), *params, min_p=least)
    out = kit.out((n,), torch.int64)
    put = None if least is None else kit.put(least)
    on_device = (kit.put(value) for value in params)
    device.sample_tokens(kit.put(tensor), *on_device, min_p=put, out=out)
    assert np.array_equal(array(out), expected)
    return expected


def test_uniform_is_the_twins(kit):
    rng = np.random.default_rng(0)
    seeds = np.append(rng.integers(0, 2**64, 299, np.uint64), np.uint64(2**64 - 1))
    positions = np.concatenate([rng.integers(0, 2**63, 298), [0, 2**63 - 1]])
    u = device.uniform(kit.put(seeds.view(np.int64)), kit.put(positions))
    assert np.array_equal(array(u), kernels.uniform(seeds, positions))
    assert u[0] == ref.uniform(int(seeds[0]), int(positions[0]))
    again = device.uniform(kit.put(torch.from_numpy(seeds)), kit.put(positions))
    assert torch.equal(again, u)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_equal_the_twins(kit, dtype):
    """Any temperature, top-k, top-p and min-p; the 16-bit types have many ties."""
    for vocab in [1, 2, 31, 257, 1000] if kit.is_checked else [1, 2, 7, 33, 256, 1000, 5001]:
        rng = np.random.default_rng(vocab)
        n = 12 if kit.is_checked else 60
        scale = rng.choice([0.1, 3, 10], (n, 1))
        logits = torch.from_numpy(rng.standard_normal((n, vocab)) * scale).to(dtype)
        ruled_out = torch.from_numpy(rng.random((n, vocab)) < 0.3 * (rng.random((n, 1)) < 0.3))
        ruled_out[:, -1] = False
        logits[ruled_out] = -torch.inf
        both(
            kit,
            logits,
            rng.choice([0, 1e-40, 0.3, 1, 2.5, 1e30], n),
            rng.choice([0, 1, 3, vocab, vocab + 5, max(vocab // 2, 1)], n),
            rng.choice([1, 0.99, 0.5, 0.01], n),
            np.where(rng.random(n) < 0.2, rng.choice([0, np.nextafter(1, 0)], n), rng.random(n)),
            rng.choice([0, 1e-9, 0.1, 0.7, 1], n) if vocab % 2 else None,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bad_logit_fails_its_row_wherever_it_is(kit, dtype):
    rng = np.random.default_rng(5)
    for n, vocab in [(1, 301), (3, 128), (2, 41)]:
        logits = torch.from_numpy(rng.standard_normal((n, vocab))).to(dtype)
        both(kit, logits, [0, 0.8, 1][:n], 0, 1, rng.random(n))
        for at in {0, 39, 40, vocab // 2, vocab - 1}:
            for value in (torch.nan, -torch.nan, torch.inf):
                bad = logits.clone()
                bad[0, at] = value
                assert both(kit, bad, 0, 0, 1, 0.5)[0] == -1


def rows_of_many_kinds(rng, vocab, dtype):
    """Rows whose last kept token is hard to find: ties nearby and far apart, no spread,
    ruled-out tokens, both zeros, tiny numbers, one token that has all the weight."""
    tiny = {torch.float32: 1e-40, torch.float16: 6e-8, torch.bfloat16: 1e-40}[dtype]
    rows = np.stack(
        [
            np.zeros(vocab),
            np.full(vocab, -7.5),
            rng.choice([-1.0, 2.0, 2.5], vocab),
            np.where(np.arange(vocab) % 40 < 3, 1.0, -1.0),
            np.sort(rng.standard_normal(vocab)),
            np.where(rng.random(vocab) < 0.9, -np.inf, rng.standard_normal(vocab)),
            rng.choice([0.0, -0.0, tiny, -tiny], vocab),
            np.where(np.arange(vocab) == vocab // 2, 90.0, rng.standard_normal(vocab)),
            rng.standard_normal(vocab) * 1e4
            if dtype != torch.float16
            else rng.normal(0, 1e3, vocab),
        ]
    )
    return torch.from_numpy(rows).to(dtype)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_top_k_and_top_p_keep(kit, dtype):
    """Law: the last kept token is the twin's, and so is the draw, among candidates and by bins."""
    rng = np.random.default_rng(11)
    for vocab in (281,) if kit.is_checked else (281, 1025):
        logits = rows_of_many_kinds(rng, vocab, dtype)
        n = len(logits)
        for top_k, top_p in [(0, 0.5), (7, 1), (vocab - 1, 0.3), (130, 0.999), (1, 1e-30), (41, 1)]:
            u = np.where(rng.random(n) < 0.3, np.nextafter(1, 0), rng.random(n))
            both(kit, logits, rng.choice([0.3, 1, 3], n), top_k, top_p, u)
        # Rows with different wishes go through the same launches.
        both(
            kit,
            logits,
            rng.choice([0, 1], n),
            rng.choice([0, 1, 50, vocab], n),
            rng.choice([1, 0.9, 0.1], n),
            rng.random(n),
        )


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_more_ties_than_there_is_room_for(kit, dtype):
    """Law: rows of thousands of equal logits draw as the twin does, top-k above the threads too."""
    if kit.is_checked:
        return
    vocab, rng = 5001, np.random.default_rng(2)
    rows = [
        np.zeros(vocab),
        np.where(np.arange(vocab) % 3 == 0, 1.0, -1.0),
        np.where(np.arange(vocab) < 20, 2.0, -0.0),
        rng.standard_normal(vocab),
        rng.standard_normal(vocab) * 1e-3,
    ]
    logits = torch.from_numpy(np.stack(rows)).to(dtype)
    for top_k, top_p in [(30, 1), (30, 0.5), (513, 1), (2000, 0.9), (0, 0.05), (0, 0.95), (512, 1)]:
        both(kit, logits, [0.5, 1, 2, 1, 1], top_k, top_p, rng.random(5))


def test_a_draw_is_one_launch(kit):
    """Law: rows few or many, of any wish, are one launch, which a graph captures as it is."""
    if kit.kind == "cuda" or kit.is_checked:
        return
    for n, vocab, dtype in [(2, 8192, torch.float32), (133, 700, torch.bfloat16)]:
        for temperature, top_k, top_p in [(0, 0, 1), (1, 0, 1), (1, 5, 1), (1, 0, 0.5)]:
            kit.backend.launches.clear()
            both(kit, torch.zeros(n, vocab, dtype=dtype), temperature, top_k, top_p, 0.5)
            assert kit.backend.launches == ["sample_tokens_kernel"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("top_p", [1, 0.5, 0.95])
def test_large_bfloat16_rows_read_weights_from_a_table(kit, top_p):
    """Law: the table covers all that weighs anything; smaller logits are computed."""
    if kit.is_checked or kit.order == 7:
        return
    vocab, rng = 16_500, np.random.default_rng(int(top_p * 100))
    normal = rng.standard_normal((7, vocab))
    rows = np.stack(
        [
            np.where(np.arange(vocab) % 7000 == 9, 13, normal[0]),
            normal[1] * 3 - 100,
            normal[2] * 1e-3,
            np.where(rng.random(vocab) < 0.5, -np.inf, normal[3] * 4),
            np.exp2(normal[4] * 20) * rng.choice([-1, 1], vocab),
            np.where(rng.random(vocab) < 0.1, 0.0, normal[5] * 1e30),
            normal[6] * 1e-38,
        ]
    )
    logits = torch.from_numpy(rows).to(torch.bfloat16)
    for temperature in ([0.8, 1, 0.7, 30, 1e5, 1e29, 1], [3, 0.1, 1e-4, 1e30, 1, 3e38, 1e-38]):
        for _ in range(8):
            both(kit, logits, temperature, 0, top_p, rng.random(7), [0, 0, 0, 0, 0, 0.1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_the_twins_at_any_temperature(kit, dtype):
    """Law: a weight is the twin's to the last unit: the draw changes at the same u.

    So a quotient is the nearest float, from the least temperature to the greatest.
    """
    n, rng = 64 if kit.is_checked else 400, np.random.default_rng(9)
    temperature = np.exp2(rng.uniform(-2, 2, n))
    temperature[: n // 4] = np.exp2(rng.uniform(-99, 127.9, n // 4))
    temperature = temperature.astype(np.float32)
    temperature[:3] = [2.0**-100, np.finfo(np.float32).max, np.nextafter(np.float32(2), 0)]
    distance = rng.uniform(0, 20, n) * temperature
    top = rng.standard_normal(n) * 10
    logits = torch.from_numpy(np.stack([top - distance, top], 1)).to(dtype)
    logits = torch.where(logits.isinf(), torch.finfo(dtype).min, logits)
    wishes = temperature, np.zeros(n, np.int32), np.ones(n, np.float32)
    below, above = np.zeros(n), np.full(n, np.nextafter(1, 0))
    for _ in range(70):
        u = below + (above - below) / 2
        is_below = kernels.sample_tokens(logits.float().numpy(), *wishes, u) == 0
        below, above = np.where(is_below, u, below), np.where(is_below, above, u)
    for u in (below, above):
        both(kit, logits, temperature, 0, 1, u)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1",
    reason="torch captures no graph without its caching allocator",
)
@pytest.mark.parametrize("n", [1, 16, 100])
def test_few_rows_in_a_graph_cuda(n):
    """Law: a replay draws by what the tensors hold then."""
    cuda, vocab = torch.device("cuda"), 128_256
    launch.prepare(cuda)
    rng = np.random.default_rng(n)
    logits = torch.empty(n, vocab, dtype=torch.bfloat16, device=cuda)
    params = [
        torch.zeros(n, dtype=dtype, device=cuda)
        for dtype in (torch.float32, torch.int32, torch.float32, torch.float64)
    ]
    out = torch.empty(n, dtype=torch.int64, device=cuda)
    device.sample_tokens(logits.zero_(), *params, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.sample_tokens(logits, *params, out=out)
    for _ in range(50):
        values = torch.from_numpy(rng.standard_normal((n, vocab)).astype(np.float32)).bfloat16()
        wishes = (
            rng.choice([0, 0.7, 1.5], n).astype(np.float32),
            rng.choice([0, 1, 40, 5000], n).astype(np.int32),
            rng.choice([1, 0.9, 0.2], n).astype(np.float32),
            rng.random(n),
        )
        logits.copy_(values)
        for tensor, wish in zip(params, wishes, strict=True):
            tensor.copy_(torch.from_numpy(wish))
        graph.replay()
        expected = kernels.sample_tokens(values.float().numpy(), *wishes)
        assert np.array_equal(array(out), expected)


def test_a_large_vocabulary(kit):
    vocab = 2000 if kit.is_checked else 152_064
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((4, vocab)) * 3).astype(np.float32)
    tokens = both(kit, logits, [1, 1, 0.7, 0], [0, 50, 0, 0], [1, 0.9, 0.95, 1], rng.random(4))
    assert len(set(tokens.tolist())) > 1
    flat = np.zeros((2, vocab), np.float32)
    drawn = both(kit, flat, 1, [0, 1000], 1, [0.75, 0.75])
    assert drawn.tolist() == [vocab * 3 // 4, 750]


@pytest.mark.parametrize("blocks", [0, 264])
def test_the_largest_vocabulary_is_still_exact(kit, blocks, monkeypatch):
    """2^19 tokens of equal weight: the total is 2^53, and every one of them can be drawn."""
    if kit.is_checked or kit.order == 7:
        return
    monkeypatch.setattr(sample, "_BLOCKS", blocks)  # of 512 threads, or of 1,024
    logits = np.zeros((3, 1 << 19), np.float16)
    u = [np.nextafter(1, 0), 1 - 2**-19, 0.5]
    drawn = both(kit, logits, 1, 0, 1, u)
    assert drawn.tolist() == [2**19 - 1, 2**19 - 1, 2**18]
    drawn = both(kit, logits, 1, [0, 2**19 - 1, 3], [0.5, 1, 0.5], [np.nextafter(1, 0)] * 3)
    assert drawn.tolist() == [2**18 - 1, 2**19 - 2, 1]


def test_ties_go_to_the_lower_id(kit):
    logits = np.zeros((5, 300), np.float32)
    logits[:, 1] = -0.0
    drawn = both(kit, logits, [0, 1, 1, 1, 1], [0, 2, 0, 7, 299], [1, 1, 0.5, 0.5, 1], 0.999)
    assert drawn.tolist() == [0, 1, 149, 3, 298]


def test_tiny_numbers_are_told_apart(kit):
    """A GPU that flushes them must not: 1e-40 is more than 0."""
    logits = np.array([[0, 1e-40, -1e-40], [-1e-40, -0.0, 0]], np.float32)
    assert both(kit, logits, 0, 0, 1, 0.5).tolist() == [1, 1]
    assert both(kit, logits, 1, 1, 1, 0.5).tolist() == [1, 1]
    subnormal = torch.tensor([[0.0, 6e-8, 1.2e-7, -6e-8]], dtype=torch.float16)
    assert both(kit, subnormal, 0, 0, 1, 0.5).tolist() == [2]
    assert both(kit, subnormal, 1, 2, 1, 0.1).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_that_are_no_numbers_fail_their_row_alone(kit, dtype):
    for bad in (np.nan, -np.nan, np.inf):
        logits = torch.zeros(4, 65, dtype=dtype)
        logits[1, 64] = bad
        logits[3] = -torch.inf
        for parameters in ((0, 0, 1), (1, 0, 1), (1, 3, 1), (1, 0, 0.5)):
            assert both(kit, logits, *parameters, 0.0).tolist() == [0, -1, 0, -1]


def test_parameters_out_of_range_fail_their_row_alone(kit):
    """The twin refuses them; on the device they are not read before the launch."""
    n = 9
    values = np.ones((4, n))
    values[0, :3], values[1], values[3] = [-1, np.nan, np.inf], 0, 0.5
    values[1, 3], values[2, 4:7], values[3, 7:] = -1, [0, 1.5, np.nan], [1, np.nan]
    params = [
        kit.put(value.astype(dtype))
        for value, dtype in zip(values, (np.float32, np.int32, np.float32, np.float64), strict=True)
    ]
    logits = kit.put(np.zeros((n, 40), np.float32))
    assert device.sample_tokens(logits, *params).tolist() == [-1] * n
    good = [np.ones(3, dtype) for dtype in (np.float32, np.int32, np.float32, np.float64)]
    params = [kit.put(value / 2 if value.dtype == np.float64 else value) for value in good]
    least = kit.put(np.array([-0.1, 1.5, np.nan], np.float32))
    assert device.sample_tokens(logits[:3], *params, min_p=least).tolist() == [-1] * 3


@pytest.mark.sample(5)
@pytest.mark.parametrize("vocab", [1, 7, 300, 5001])
def test_the_likeliest_tokens_are_the_twins(kit, vocab):
    """Law: of equally probable tokens the lower id comes first; a row of NaN counts as zeros."""
    if kit.is_checked and vocab > 300:
        return
    rng = np.random.default_rng(vocab)
    spread = rng.standard_normal((6, vocab)).astype(np.float32) * [[1], [30], [0], [1], [1], [200]]
    spread[3] = np.round(spread[3])  # many ties
    spread[4] = np.nan
    p = torch.softmax(torch.from_numpy(spread).float(), -1)
    for k in sorted({1, min(4, vocab), min(33, vocab), min(70, vocab)}):
        expected = sample._likeliest_by_keys(p, k)
        found = device.likeliest(kit.put(p), k)
        for ours, twins in zip(found, expected, strict=True):
            assert np.array_equal(array(ours), twins.numpy())


def test_no_row_is_no_launch(kit):
    if kit.kind != "cuda":
        kit.backend.launches.clear()
    none = kit.put(np.zeros(0, np.float32))
    tokens = device.sample_tokens(
        kit.put(np.zeros((0, 9), np.float32)), none, kit.put(np.zeros(0, np.int32)), none,
        kit.put(np.zeros(0)),
    )  # fmt: skip
    assert tokens.shape == (0,)
    assert device.uniform(kit.put(i64([])), kit.put(i64([]))).shape == (0,)
    if kit.kind != "cuda":
        assert kit.backend.launches == []
