"""How many kernels a round launches may not grow: a small kernel takes 2 us of a graph and more.

A count that is lower than its line of `BUDGET` fails too, so that the line is lowered.
"""

from __future__ import annotations

import pytest
import torch

import cuda_host
from fake_cuda import Card
from graph_kit import CHAIN, NONE, TREE
from launch_counts import count_layer

pytestmark = [
    pytest.mark.skipif(bool(cuda_host.unavailable()), reason=cuda_host.unavailable() or ""),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card"),
]

SHAPES = {"plain": NONE, "chain": CHAIN, "tree": TREE}

# Launches of a layer of a Llama, and of the rest of the round, EAGLE head included; in bfloat16.
BUDGET = {
    ("plain", "eager"): (16, 26),
    ("plain", "captured"): (16, 48),
    ("chain", "eager"): (16, 147),
    ("chain", "captured"): (16, 196),
    ("tree", "eager"): (34, 361),
    ("tree", "captured"): (34, 370),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "how"),
    [pytest.param(*at, marks=() if at[1] == "captured" else pytest.mark.full) for at in BUDGET],
)
def test_a_round_launches_no_more_than_its_budget(shape, how):
    card = Card()
    with card.running():
        layer, rest = count_layer(card, SHAPES[shape], is_captured=how == "captured")
    counts = layer.total(), rest.total()
    assert counts == BUDGET[shape, how], f"a layer: {dict(layer)}; the rest: {dict(rest)}"
