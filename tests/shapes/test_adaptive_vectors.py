"""The adaptive controller, compared with SGLang's recorded rounds."""

import dataclasses
import json

import pytest

from paths import VECTORS
from specpool.engine.shape_names import chain
from specpool.engine.shapes import AdaptiveConfig, AdaptiveController


def cases():
    return json.loads((VECTORS / "adaptive.json").read_text())["cases"]


def controller_of(case):
    config = AdaptiveConfig.from_dict(case["config"])
    return AdaptiveController(
        dataclasses.replace(config, threshold_rounds=0),
        initial=case["initial_steps"],
        graph_sizes=case["cuda_graph_bs"],
    )


@pytest.mark.parametrize("number", range(len(cases())))
def test_vectors(number):
    """Bit for bit as upstream: routing, rounds and switches."""
    case = cases()[number]
    controller = controller_of(case)
    assert [shape.num_steps for shape in controller.candidates] == case["candidate_steps"]
    sizes = controller.graph_sizes_of_candidates()
    assert {str(shape.num_steps): found for shape, found in sizes.items()} == case[
        "cuda_graph_bs_for_step"
    ]
    assert case["rounds"]
    for i, round_ in enumerate(case["rounds"]):
        batch_size = round_["batch_size"]
        shape = controller.activate_step_by_batch(batch_size)
        assert shape.num_steps == round_["steps_before"], i
        switched = controller.on_verify_complete(shape, batch_size, round_["num_correct_drafts"])
        expected = round_["switched_to"]
        assert switched == (None if expected is None else chain(expected)), i
