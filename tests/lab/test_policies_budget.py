"""The simulated devices of `python -m lab budget`: wrong starts, and rows of many lengths."""

import pytest

from lab.policies import devices as model
from lab.policies.budget import LENGTHS, MIXES, START_ERROR
from lab.policies.budget import _controller as controller
from lab.policies.budget import _urgent as urgent
from lab.policies.random_devices import random_case, ratios

HARD = MIXES[-1]
A100 = model.DEVICES[2:]  # those whose forwards others measured


@pytest.mark.parametrize("device", A100, ids=[device.name for device in A100])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_lose_because_the_start_was_wrong(device: model.Device, seed: int) -> None:
    """Law: where no draft is worth its time, the policy finds that out, whatever it was told.

    It has 300 rounds. What the start told too fast is tried first, and what it told too slow later.
    """
    how = device, HARD, 64, 300
    plain = model.run(*how).rate
    found = model.run(*how, controller=controller("budget"), seed=seed, error=START_ERROR).rate
    assert found > 0.9 * plain


@pytest.mark.parametrize(("device", "size"), [(0, 64), (1, 32)])
def test_rows_of_many_lengths_are_served_well(device: int, size: int) -> None:
    """Law: rows that hold far more than those of the start get nearly the best single shape.

    With long rows the device is busy reading them, so more nodes ride along, and they must be
    found. Only some rows draft each family of shapes, so estimates must not drift.
    """
    how = model.DEVICES[device], LENGTHS, size, 400
    best = max(model.run(*how, shape=shape).rate for shape in model.CANDIDATES)
    found = model.run(*how, controller=controller("budget")).rate
    assert found > 0.85 * best


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(20))
def test_random_devices_and_mixes(seed: int) -> None:
    """Law: the policy is near the best shape with hindsight, and hardly below plain decoding.

    It has 400 rounds to learn. A row alone has few requests in that time.
    """
    (*_, num_rows), num_rounds = random_case(seed), 400
    of_best, of_plain = ratios(seed, controller("budget"), num_rounds)
    assert of_best > (0.9 if num_rows > 1 else 0.75) and of_plain > 0.95


def test_rows_that_could_be_in_time_are_not_given_up() -> None:
    """Law: where the mean of new rows is too slow for a target, rows that are faster are found."""
    device = model.DEVICES[2]
    how = device, urgent(device), 128, 600
    best = max(model.run(*how, shape=shape).goodput for shape in model.CANDIDATES)
    found = model.run(*how, controller=controller("budget")).goodput
    assert found > 1.1 * best
