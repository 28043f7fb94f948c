"""Kernels of `cuda/layers.cu` beside torch's own operators."""

import pytest
import torch

from kernel_kit import Kit
from specpool.errors import ShapeError
from specpool.kernels import layers
from specpool.kernels import with_twin as twins

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def numbers(seed, *shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(kit: Kit, q, k, cos, sin, **options):
    """Compare kernel and twin, bit by bit."""
    got = layers.rotate_heads(*(kit.put(part) for part in (q, k, cos, sin)), **options)
    want = twins.rotate_heads(q, k, cos, sin, **options)
    for mine, other in zip(got, want, strict=True):
        assert mine.is_contiguous() and mine.dtype == other.dtype
        assert torch.equal(mine.cpu(), other), (q.shape, options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_rotated_as_torch_does_it(kit, dtype):
    for dim, rotary_dim in ((64, 64), (128, 128), (6, 6), (80, 32), (20, 6)):
        for tokens, q_heads, k_heads in ((1, 4, 1), (5, 3, 2)):
            q = numbers(1, tokens, q_heads, dim, dtype=dtype)
            k = numbers(2, tokens, k_heads, dim, dtype=dtype)
            for width in (rotary_dim, rotary_dim // 2):
                cos, sin = (numbers(seed, tokens, width, dtype=dtype) for seed in (3, 4))
                for is_rounded in (True, False):
                    options = {"rotary_dim": rotary_dim, "is_rounded": is_rounded}
                    same(kit, q, k, cos, sin, **options)
                    same(kit, q, k, cos.float(), sin.float(), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits_is_read_and_rounded(kit, dtype):
    """With angles of 1 and 0 nothing changes; with other ones infinite and tiny results come."""
    if dtype == torch.float32:
        q = numbers(1, 4, 2, 64, dtype=dtype) * 1e30
    else:
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        q = bits[bits.isfinite()].view(-1, 4, 64)
    if kit.kind == "cuda":  # CuPy has the smallest numbers of float32 flushed to 0
        q = torch.where(q.abs() < 2.0**-100, 0, q)
    if kit.is_checked:
        q = q[::16]
    k = q[:, :1].contiguous()
    options = {"rotary_dim": 64, "is_rounded": True}
    ones = torch.ones(len(q), 64, dtype=dtype)
    got, _ = layers.rotate_heads(
        kit.put(q), kit.put(k), kit.put(ones), kit.put(torch.zeros_like(ones)), **options
    )
    # Beside 0 times the other half, so -0 may become 0.
    assert torch.equal(got.cpu(), q)
    for factor in (0.37, 3.1):
        same(kit, q, k, ones * factor, ones * -0.7, **options)


def test_heads_may_be_a_part_of_wider_rows(kit):
    whole = numbers(1, 5, 7, 32, dtype=torch.bfloat16)
    rows = kit.put(whole)
    cos, sin = (numbers(seed, 5, 32, dtype=torch.bfloat16) for seed in (2, 3))
    options = {"rotary_dim": 32, "is_rounded": True}
    angles = kit.put(cos), kit.put(sin)
    got = layers.rotate_heads(rows[:, :4], rows[:, 4:6], *angles, **options)
    want = twins.rotate_heads(whole[:, :4], whole[:, 4:6], cos, sin, **options)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_no_tokens_are_no_launch(kit):
    empty = torch.empty(0, 2, 8, device=kit.device)
    angles = torch.empty(0, 8, device=kit.device)
    q, k = layers.rotate_heads(empty, empty, angles, angles, rotary_dim=8, is_rounded=True)
    assert q.shape == k.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(3, 1, 6)}, r"k must be float32 \[3, heads, 8\]"),
        ({"q": torch.zeros(3, 1, 8, dtype=torch.float64)}, "q must be float32 or"),
        ({"q": torch.zeros(3, 8)}, r"q must be .* \[n, heads, D\]"),
        ({"cos": torch.zeros(3, 6)}, "got 8 and 6"),
        ({"sin": torch.zeros(2, 8)}, r"sin must be contiguous float32 \[3, 8\]"),
        ({"rotary_dim": 7}, "got 7 and 8"),
        ({"rotary_dim": 10}, r"rotary_dim must be in \[2, 8\], got 10"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, text):
    args = {
        "q": torch.zeros(3, 2, 8),
        "k": torch.zeros(3, 1, 8),
        "cos": torch.zeros(3, 8),
        "sin": torch.zeros(3, 8),
        "rotary_dim": 8,
        "is_rounded": True,
    }
    with pytest.raises(ShapeError, match=text):
        layers.rotate_heads(**{**args, **change})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_what_torch_makes_of_it(kit, dtype):
    """But for the last bits of an exponential function; -inf to inf, and rows of wider ones."""
    for rows, width in ((1, 64), (5, 320), (3, 7)):
        whole = numbers(1, rows, 2 * width, dtype=dtype) * 8
        whole[0, :4] = torch.tensor([0.0, -60.0, 60.0, float("inf")])
        given = kit.put(whole)
        got = layers.gated_silu(given[:, :width], given[:, width:]).cpu().float()
        gate, up = whole[:, :width], whole[:, width:]
        exact = torch.nn.functional.silu(gate.double()) * up.double()
        # Of float32, an exponential, a sum and a quotient round before the product does.
        apart = (4 if dtype == torch.float32 else 1.1) * torch.finfo(dtype).eps
        least = (
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * (1 + up.double().abs())
        )
        finite = exact.isfinite() & (exact.abs() < torch.finfo(dtype).max)
        assert torch.equal(got[~finite], exact[~finite].float())
        assert ((got - exact).abs() <= apart * exact.abs() + least)[finite].all()


def test_gates_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match=r"got torch.float32 \[2, 4\] on cpu and .* \[2, 3\]"):
        layers.gated_silu(torch.zeros(2, 4), torch.zeros(2, 3))
    assert layers.gated_silu(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0, 4)
