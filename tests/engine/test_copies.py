"""Law: configurations, outputs and statistics can be pickled, copied and compared."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from specpool import Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.output import Chunk
from specpool.engine.shapes import config_of

WAYS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
}
CONFIGS = {
    "default": EngineConfig(),
    "shapes": EngineConfig(shape=Shape.eagle(3, 4, 16), shapes=(Shape.none(), Shape(2, 1, 3))),
    "adaptive": EngineConfig(adaptive=config_of("ema"), graph_sizes=(1, 2)),
    "params": SamplingParams(temperature=0.5, stop=("a",), stop_token_ids=(3,), seed=1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_copied_whole(name, way):
    """`Shape` is a Rust class, which pickle and copy refused."""
    config = CONFIGS[name]
    assert WAYS[way](config) == config


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_a_shape_is_copied_whole(way):
    shape = WAYS[way](Shape.eagle(3, 4, 16))
    assert shape == Shape.eagle(3, 4, 16) and hash(shape) == hash(Shape.eagle(3, 4, 16))


@pytest.mark.parametrize("way", WAYS)
def test_outputs_chunks_and_stats_are_copied_whole(way):
    options = {"draft": "ngram", "max_context_len": 64, "adaptive": "ema"}
    with Engine.from_pretrained(**options) as engine:
        *chunks, output = engine.stream("abc", SamplingParams(max_new_tokens=4, logprobs=2))
        assert chunks and isinstance(chunks[0], Chunk)
        for value in (output, chunks[0], engine.stats(), *engine.pool_stats()):
            assert WAYS[way](value) == value
