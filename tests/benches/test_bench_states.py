"""`python -m benches states`: its models are those published, and it reaches the goals."""

from __future__ import annotations

import json
import re

import pytest
import torch

from benches.states import CONFIGS, NAMES, Marginal, outline, requests_at_once, results
from figure_tables import Record
from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.models.recurrent import MixerSpec, StateSpec
from specpool.engine.models.state_outline import StateOutline

SLOW = [pytest.param(name, marks=pytest.mark.full) for name in NAMES if name != "lfm2-1.2b"]
# Qwen3-Next: 36 mixers, of which one stands for all, and 12 layers with attention.
MIXER = MixerSpec((StateSpec(0, "recurrent", 0, (36 * 540672,), torch.float32),), 73728, torch.half)
QWEN = StateOutline(
    (LayerKV(2, 256, 256),) * 12, (MIXER,), StateBytes(77_856_768, 147_456, flush=16), 0
)


@pytest.mark.parametrize("name", ["lfm2-1.2b", *SLOW])
def test_a_config_has_the_parameters_of_its_name(name):
    stated = float(re.search(r"([\d.]+)B", NAMES[name])[1])
    assert outline(name).num_parameters / 1e9 == pytest.approx(stated, rel=0.06)


def test_every_config_is_in_the_table():
    assert {path.name for path in CONFIGS.iterdir()} == set(NAMES)


def test_bytes_are_counted_on_what_is_allocated():
    """Law: one slot more and one record more are the bytes of all states and inputs."""
    marginal = Marginal.of(QWEN)
    assert (marginal.slot, marginal.record) == (36 * 540672 * 4, 147_456)


def test_both_ways_have_the_same_bytes_and_serve_the_same_requests():
    how = {"kv_bytes": 3 << 30, "requests": 40, "overlap_depth": 0, "seed": 1}
    snapshots, rings = requests_at_once(QWEN, **how)
    for run in (snapshots, rings):
        assert 0.9 * (3 << 30) < run.sizes.num_bytes <= 3 << 30
        assert run.unfinished == 0
        assert max(run.running) <= run.sizes.num_rows
    assert rings.tokens == snapshots.tokens
    assert rings.mean_running > 1.5 * snapshots.mean_running
    found = results({"x": Marginal(2000, 10, 1)}, snapshots, rings)
    assert next(r.ratio for r in found if r.reference == "target, at least") == 20


def test_the_newest_record_reaches_the_goals():
    lines = json.loads(Record("cpu-states").path.read_text())["results"]
    goals = [line for line in lines if line["reference"] == "target, at least"]
    assert len(goals) == 5  # the two small states are of fewer than 100 records
    assert all(line["ratio"] >= 1 for line in goals)
