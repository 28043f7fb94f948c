"""The simulated devices of `python -m benches budget`: a start that told wrong seconds."""

import pytest

from benches import budget_model as model
from benches.budget import MIXES, START_ERROR
from benches.budget import _controller as controller

HARD = MIXES[-1]
A100 = model.DEVICES[2:]  # those whose forwards others measured


@pytest.mark.parametrize("device", A100, ids=[device.name for device in A100])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_lose_because_the_start_was_wrong(device: model.Device, seed: int) -> None:
    """Law: where no draft is worth its time, the policy finds that out, whatever it was told."""
    how = device, HARD, 64, 300
    plain = model.run(*how).rate
    found = model.run(*how, controller=controller("budget"), seed=seed, error=START_ERROR).rate
    assert found > 0.95 * plain
