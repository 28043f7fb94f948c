"""Laws of the choice of a back end: what cannot read trees on pages is refused before any pool."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.assets import corpus
from specpool.engine.attention import BACK_ENDS, BackEnd, start_back_end

TREE = Shape.eagle(3, 2, 6)
CHAIN = Shape.eagle(3, 1, 4)


@pytest.fixture
def whole_pages(monkeypatch) -> None:
    """A back end that reads chains on pages, and trees only token by token."""
    cannot = BackEnd(
        "whole", reads_ragged_masks=True, reads_trees_on_pages=False, needs_host_lengths=False
    )
    monkeypatch.setitem(BACK_ENDS, "whole", cannot)


def build(**options) -> Engine:
    defaults = {"draft": "specpool/tiny-eagle", "max_context_len": 64, "attention": "whole"}
    return Engine.from_pretrained(**(defaults | options))


@pytest.mark.parametrize(
    "shapes",
    [{"shape": TREE}, {"shape": CHAIN, "shapes": (TREE,)}, {"shape": TREE, "draft": "ngram"}],
)
def test_trees_on_pages_need_a_back_end_that_reads_them(whole_pages, shapes):
    """The refusal also holds if only some requests may ask for the tree."""
    message = (
        r"attention 'whole' cannot read trees on pages, and page_size is 16, topk 2 "
        r"\(Shape.*\): torch, flashinfer can; or take page_size 1, or topk 1"
    )
    with pytest.raises(ConfigError, match=message):
        build(page_size=16, **shapes)


@pytest.mark.parametrize(
    ("page_size", "shape", "attention"),
    [(1, TREE, "whole"), (16, CHAIN, "whole"), (16, TREE, "torch")],
)
def test_a_chain_or_single_slots_are_no_trees_on_pages(whole_pages, page_size, shape, attention):
    with build(page_size=page_size, shape=shape, attention=attention) as engine:
        (output,) = engine.generate(corpus.prompts(1, 9), SamplingParams(max_new_tokens=5))
        assert output.finish_reason == "length"


CUDA, LAYERS = torch.device("cuda", 0), [LayerKV(2, 64, 64, None)]


def test_a_cpu_has_torch_and_says_so(caplog):
    caplog.set_level(logging.INFO, "specpool")
    found = start_back_end("auto", torch.device("cpu"), torch.float32, LAYERS, "llama")
    assert found == (BACK_ENDS["torch"], None)
    assert [record.getMessage() for record in caplog.records] == ["attention: torch"]


def test_a_gpu_has_flashinfer_where_it_can_serve(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "specpool")
    started = object()

    def start(device, dtype, layers, model_type):
        if dtype != torch.bfloat16:
            raise ConfigError("it computes in 16 bits")
        return started

    flashinfer = dataclasses.replace(BACK_ENDS["flashinfer"], start=start)
    monkeypatch.setitem(BACK_ENDS, "flashinfer", flashinfer)
    found = start_back_end("auto", CUDA, torch.bfloat16, LAYERS, "llama")
    assert found == (flashinfer, started)
    assert start_back_end("auto", CUDA, torch.float32, LAYERS, "llama") == (
        BACK_ENDS["torch"],
        None,
    )
    assert [record.getMessage() for record in caplog.records] == [
        "attention: flashinfer",
        "attention: torch (it computes in 16 bits)",
    ]
    with pytest.raises(ConfigError, match="16 bits"):  # asked for by name
        start_back_end("flashinfer", CUDA, torch.float32, LAYERS, "llama")
    with pytest.raises(ConfigError, match="must be one of auto, torch, flashinfer, got 'x'"):
        start_back_end("x", CUDA, torch.float32, LAYERS, "llama")
