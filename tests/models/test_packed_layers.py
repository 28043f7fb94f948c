"""`PackedLayers`: linear layers by oneDNN's packed weights, where they are quicker."""

from __future__ import annotations

import random
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

pytest.importorskip("transformers")

import transformers

from specpool.engine.config import EngineConfig
from specpool.engine.engine import Engine
from specpool.engine.models import packed_layers
from specpool.engine.models.packed_layers import PackedLayers
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError

pytestmark = pytest.mark.skipif(
    packed_layers._pack(torch.ones(16, 16)) is None, reason="torch has no oneDNN here"
)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.0)


@pytest.fixture
def always(monkeypatch) -> None:
    """Small weights are packed too, and prompts but no single row, whatever the clock says."""
    monkeypatch.setattr(packed_layers, "packed_rows", lambda: (4, sys.maxsize))
    monkeypatch.setattr(packed_layers, "MIN_BYTES", 0)


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """The number of rows of each product by a packed weight."""
    rows: list[int] = []
    product = packed_layers._product

    def count(x, packed, bias):
        rows.append(x.numel() // x.shape[-1])
        return product(x, packed, bias)

    monkeypatch.setattr(packed_layers, "_product", count)
    return rows


def packed_of(model: nn.Module, max_bytes: int = 1 << 30) -> PackedLayers:
    packed = PackedLayers(model, max_bytes)
    packed.switch(on=True)
    return packed


def test_any_layer_and_number_of_rows_gives_the_product(always, products) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(60):
        width, height = rng.randint(1, 70), rng.randint(1, 70)
        layer = nn.Linear(width, height, bias=rng.random() < 0.5)
        packed_of(layer)
        rows, before = rng.randint(0, 40), len(products)
        x = torch.randn(rng.choice([(rows, width), (1, rows, width), (2, rows, width)]))
        with torch.inference_mode():
            y = layer(x)
            expected = F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(y, expected)
        assert (len(products) > before) == (x.numel() // width >= 4)


@pytest.mark.parametrize("limits", [(4, 64), (1, 64), (4, sys.maxsize)])
def test_other_numbers_of_rows_are_packed_where_that_is_quicker(
    monkeypatch, products, limits
) -> None:
    """A batch is on any processor, so that two starts give the same text."""
    monkeypatch.setattr(packed_layers, "packed_rows", lambda: limits)
    layer = nn.Linear(512, 512)
    packed_of(layer)
    least, most = limits
    numbers = (1, 3, 4, 64, 65, 4096)
    with torch.inference_mode():
        for rows in numbers:
            layer(torch.ones(rows, 512))
    assert products == [rows for rows in numbers if least <= rows <= most]


@pytest.mark.parametrize("is_quick", [{2}, {128}, set(), {2, 128}])
def test_the_clock_says_which_other_rows_are_packed(monkeypatch, is_quick) -> None:
    """A clock by which the packed product of some numbers of rows takes no time."""
    now = 0.0
    product, linear = packed_layers._product, F.linear

    def timed_product(x, *arguments):
        nonlocal now
        now += 0.0 if len(x) in is_quick else 1e-6
        return product(x, *arguments)

    def timed_linear(*arguments):
        nonlocal now
        now += 5e-7
        return linear(*arguments)

    monkeypatch.setattr(packed_layers, "_product", timed_product)
    monkeypatch.setattr(packed_layers.F, "linear", timed_linear)
    monkeypatch.setattr(packed_layers.time, "perf_counter", lambda: now)
    assert packed_layers.packed_rows.__wrapped__() == (
        1 if 2 in is_quick else packed_layers.LEAST_ROWS,
        sys.maxsize if 128 in is_quick else packed_layers.MOST_ROWS,
    )


@pytest.mark.parametrize("max_bytes", [0, 255, 256, 511, 512, 700, 768, 1 << 20])
def test_copies_stay_within_their_bytes_and_a_shared_weight_has_one(always, max_bytes) -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    layers[3].weight = layers[0].weight
    packed = packed_of(layers, max_bytes)
    num_copies = min(max_bytes // 256, 3)
    assert packed.num_bytes == 256 * num_copies
    assert len(packed) == num_copies + (num_copies > 0)


def _load(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.load_state_dict({"weight": weight})


def _copy(layer: nn.Linear, weight: torch.Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)


def _replace(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.weight = nn.Parameter(weight)


def _merge(layer: nn.Linear, weight: torch.Tensor) -> None:
    layer.weight.data = weight


@pytest.mark.parametrize("change", [_load, _copy, _replace, _merge])
def test_a_changed_weight_is_never_served_from_its_copy(always, products, change) -> None:
    layer = nn.Linear(8, 8, bias=False)
    packed_of(layer)
    x = torch.randn(16, 8)
    with torch.inference_mode():
        layer(x)
    assert products == [16]
    weight = torch.randn(8, 8)
    change(layer, weight)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), F.linear(x, weight))
    assert products == [16]


def test_what_is_not_a_plain_layer_runs_as_it_is(always) -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    patched = nn.Linear(8, 8)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    with torch.inference_mode():
        inferred = nn.Linear(8, 8)
    half, part = nn.Linear(8, 8).half(), nn.Linear(8, 8)
    part.weight = nn.Parameter(torch.ones(8, 16)[:, ::2])
    others = [Odd(8, 8), patched, inferred, half, part, nn.Embedding(8, 8)]
    assert len(packed_of(nn.Sequential(*others))) == 0
    assert len(packed_of(nn.Sequential(*others, nn.Linear(8, 8)))) == 1


def test_small_weights_are_never_packed() -> None:
    assert len(packed_of(nn.Linear(256, 511, bias=False))) == 0
    assert len(packed_of(nn.Linear(256, 512, bias=False))) == 1


class Gated(nn.Module):
    """A layer gated by an activation, as transformers has them."""

    def __init__(self, act_fn: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(12, 20, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(20, 12, bias=bias), act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_layer_is_two_products_and_a_changed_one_runs_as_it_is(
    always, products, bias
) -> None:
    torch.manual_seed(0)
    layer = Gated(nn.SiLU(), bias=bias)
    packed = packed_of(layer)
    for x in (torch.randn(1, 9, 12), torch.randn(2, 3, 12), torch.randn(5, 12)):
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), Gated.forward(layer, x))
            products.clear()
            layer(x)
        assert len(products) == 1  # of the layer's end: the others have silu and a factor in them
    with torch.no_grad():
        layer.up_proj.weight.mul_(2)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), Gated.forward(layer, x))
        torch.testing.assert_close(layer(x[:3]), Gated.forward(layer, x[:3]))  # too few rows
    packed.switch(on=False)
    assert not any("forward" in module.__dict__ for module in layer.modules())


def test_a_layer_with_another_gate_is_none(always, products) -> None:
    layer = Gated(nn.GELU(), bias=False)
    packed_of(layer)
    with torch.inference_mode():
        layer(torch.randn(9, 12))
    assert len(products) == 3


def test_gradients_need_the_layer_itself(always, products) -> None:
    layer = nn.Linear(8, 8)
    packed_of(layer)
    layer(torch.ones(8, 8)).sum().backward()
    assert layer.weight.grad is not None and products == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    config = transformers.Qwen2Config(  # with biases
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("packed")
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def test_texts_are_those_of_the_model_as_it_is(always, products, folder) -> None:
    rng = random.Random(1)
    prompts = [[rng.randint(3, 299) for _ in range(rng.randint(2, 40))] for _ in range(6)]
    options = {"max_batch": 6, "max_context_len": 128, "draft": "ngram"}
    with Engine.from_pretrained(folder, **options, packed_weight_bytes=0) as engine:
        expected = [output.token_ids for output in engine.generate(prompts, PARAMS)]
    assert products == []
    with Engine.from_pretrained(folder, **options) as engine:
        outputs = engine.generate(prompts, PARAMS)
        num_products, model = len(products), engine.target.model
        assert num_products > 0
        engine.target.plain_logits(prompts[0] + [5] * 8)
        assert len(products) == num_products  # transformers' own way
    assert [output.token_ids for output in outputs] == expected
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_in_memory_stays_as_it_is(always, products, folder) -> None:
    """Whoever holds it may write to its weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with Engine.from_pretrained(model, max_batch=2, max_context_len=128) as engine:
        engine.generate([[5, 6, 7, 8, 9, 10]], PARAMS)
    assert products == []


@pytest.mark.parametrize("num_bytes", [-1, 1.5, "1GiB"])
def test_bytes_that_are_no_number_are_refused(num_bytes) -> None:
    with pytest.raises(ConfigError, match="packed_weight_bytes must be an integer"):
        EngineConfig(packed_weight_bytes=num_bytes)
