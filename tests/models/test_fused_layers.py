"""What of a model runs fused on a GPU: found by what its modules compute, and equal to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cuda_host
from device_kit import kernels_run
from families import make_config, make_model, random_model
from specpool.engine.models import TargetModel, fused_layers
from specpool.engine.models.fused_layers import FusedLayers

# family -> how many norms are fused in two layers, and whether queries and keys are rotated fused
GATED = {"llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "cohere"}
FUSED = {
    "llama": (5, True),
    "qwen2": (5, True),
    "qwen3": (9, True),
    "mistral": (5, True),
    "gemma2": (9, True),
    "gemma3": (13, True),
    "gpt_oss": (5, True),
    "phi3": (5, True),
    "olmo2": (9, True),
    "granite": (5, True),
    "cohere": (0, False),  # norms by mean and variance; pairs of neighbours are rotated
    "gpt2": (0, False),
    "opt": (0, False),
}
TOKENS = torch.arange(3, 20).view(1, -1)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            pytest.mark.full,
        ],
    ),
]


def norms_of(fused: FusedLayers) -> list[nn.Module]:
    return [module for module, forward in fused._forwards if hasattr(forward.__func__, "func")]


@pytest.fixture(params=DEVICES)
def device(request):
    with torch.device(request.param):
        yield request.param


@pytest.fixture
def rotations(monkeypatch):
    """The calls of the rotating kernel."""
    calls = []
    rotate = fused_layers.kernels.rotate_heads

    def counted(*args, **options):
        calls.append(options)
        return rotate(*args, **options)

    monkeypatch.setattr(fused_layers.kernels, "rotate_heads", counted)
    return calls


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_model_computes_what_it_computes_by_itself(family, device, rotations):
    model = random_model(make_config(family)).to(device)
    tokens = TOKENS.to(device)
    for parameter in model.parameters():  # weights of 1 and 0 would hide a missing one
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    fused = FusedLayers(model)
    num_norms, rotates = FUSED[family]
    assert len(norms_of(fused)) == num_norms
    gates = [forward for _, forward in fused._forwards if forward.__func__ is fused_layers._gated]
    assert len(gates) == (2 if family in GATED else 0)
    with torch.inference_mode():
        own = model(tokens, use_cache=False).logits
        fused.switch(on=True)
        logits = model(tokens, use_cache=False).logits
        probes = len(rotations)
        again = model(tokens, use_cache=False).logits
        fused.switch(on=False)
        assert torch.equal(model(tokens, use_cache=False).logits, own)
    assert torch.allclose(logits, own, rtol=1e-4, atol=1e-5)
    assert torch.equal(again, logits)
    assert len(rotations) - probes == (2 if rotates else 0)  # one a layer
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2"])
def test_norms_of_16_bits_are_as_near_to_the_exact_ones(family, dtype, device):
    """Law: rounding once is no further from float64 than transformers' roundings."""
    model = random_model(make_config(family)).to(device, dtype).requires_grad_(False)
    for norm in norms_of(FusedLayers(model)):
        norm.weight.data += 0.3 * torch.randn_like(norm.weight)
    fused = FusedLayers(model)
    assert len(norms_of(fused)) == FUSED[family][0]
    for norm in norms_of(fused):
        x = torch.randn(40, len(norm.weight)).to(dtype)
        offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
        exact = nn.functional.rms_norm(
            x.double(), norm.weight.shape, norm.weight.double() + offset, 1e-6
        )
        own = norm(x)
        fused.switch(on=True)
        result = norm(x)
        fused.switch(on=False)
        errors = [float((y.double() - exact).norm()) for y in (result, own)]
        assert result.dtype == dtype and errors[0] <= 1.001 * errors[1]


class Odd(nn.Module):
    """Like a norm, with one thing else."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.eps, self.what = nn.Parameter(torch.rand(8) + 0.5), 1e-5, what
        if what == "a bias":
            self.bias = nn.Parameter(torch.zeros(8))
        if what == "a part":
            self.part = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "a mean":
            x = x - x.mean(-1, keepdim=True)
        eps = 1e-3 if self.what == "another epsilon" else self.eps
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight
        if self.what == "another form":
            x = x.unflatten(0, (2, 5))
        return x * 1.001 if self.what == "a factor" else x


class Gated(Odd):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    "what", ["a mean", "another epsilon", "a factor", "a bias", "a part", "another form"]
)
def test_a_module_that_is_another_norm_runs_as_it_is(what):
    assert not FusedLayers(Odd(what))._forwards
    assert not FusedLayers(Gated("nothing"))._forwards
    assert len(FusedLayers(Odd("nothing"))._forwards) == 1


def test_a_forward_that_is_replaced_already_stays():
    norm = Odd("nothing")
    norm.forward = forward = lambda x: x
    fused = FusedLayers(norm)
    fused.switch(on=True)
    fused.switch(on=False)
    assert norm.forward is forward


# --- rotations ----------------------------------------------------------------------------------


def rotate_half(x):
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def plain(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + rotate_half(x) * sin for x in (q, k))


def in_float32(q, k, cos, sin):
    return tuple(x.to(q.dtype) for x in plain(q.float(), k.float(), cos, sin))


def of_halves(q, k, cos, sin):
    return plain(q, k, *(torch.cat((part, part), -1) for part in (cos, sin)))


def of_a_part(q, k, cos, sin):
    width = cos.shape[-1]
    rotated = plain(q[..., :width], k[..., :width], cos, sin)
    return tuple(torch.cat((x, y[..., width:]), -1) for x, y in zip(rotated, (q, k), strict=True))


def of_neighbours(q, k, cos, sin):
    def rotated(x):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    return rotated(q), rotated(k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("original", "width", "num_launches"),
    [
        (plain, 16, 1),
        (in_float32, 16, 1),
        (of_halves, 8, 1),
        (of_a_part, 8, 1),
        (of_a_part, 6, 1),
        (of_neighbours, 16, 0),
    ],
)
def test_a_rotation_is_the_kernel_where_that_is_the_same(
    original, width, num_launches, dtype, device, rotations
):
    """Law: equal to the bit, whichever kind it is; of no other kind."""
    rotate = fused_layers._Rotation(original)
    q, k = torch.randn(2, 3, 5, 16).to(dtype), torch.randn(2, 1, 5, 16).to(dtype)
    angles = [torch.randn(2, 5, width).to(dtype) for _ in range(2)]
    for _ in range(2):
        before = len(rotations)
        for result, expected in zip(rotate(q, k, *angles), original(q, k, *angles), strict=True):
            assert torch.equal(result, expected)
    assert len(rotations) - before == num_launches


def test_calls_of_another_form_go_to_the_function_itself(rotations):
    rotate = fused_layers._Rotation(plain)
    q, k = torch.randn(1, 5, 3, 16), torch.randn(1, 5, 2, 16)
    angles = [torch.randn(1, 5, 16) for _ in range(2)]
    results = rotate(q, k, *angles, unsqueeze_dim=2)
    for result, expected in zip(results, plain(q, k, *angles, unsqueeze_dim=2), strict=True):
        assert torch.equal(result, expected)
    shared = [part[:, :5] for part in angles]  # one row of angles for two texts
    two = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    assert torch.equal(rotate(*two, *shared)[0], plain(*two, *shared)[0])
    assert not rotations


# --- a model over pages -------------------------------------------------------------------------


@pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or "")
def test_a_model_is_fused_while_it_runs_over_pages_alone(rotations):
    model = make_model(make_config("llama"))
    with kernels_run() as seen, TargetModel(model) as target:
        probes = len(rotations)
        target.plain_logits([3, 4, 5])
        target.plain_hidden([3, 4, 5])
        assert len(rotations) == probes  # its own way
        assert any("forward" in module.__dict__ for module in model.modules())
    assert seen["rotate_heads"] >= 2 * 2
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_on_a_cpu_is_not_fused():
    with TargetModel(make_model(make_config("llama"))) as target:
        assert target._fused_layers is None
