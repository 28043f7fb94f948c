"""Adaptive drafting: the rule on the mean, the routing, and which range a result counts for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool import ConfigError, Shape
from specpool.engine.shape_names import chain
from specpool.engine.shapes import (
    AdaptiveConfig,
    AdaptiveController,
    CostController,
    RangeConfig,
    StepRange,
    StepRouter,
    controller_of,
)
from specpool.engine.shapes.acceptance import Acceptance, _Family

TREE = Shape.eagle(5, 8, 32)


class PlainRange:
    """SGLang's rule as docs/adaptive.md describes it, on depths."""

    def __init__(self, cands, initial, alpha, interval, warmup, up, down, ceiling):
        self.cands = sorted(cands)
        self.current = initial if initial in self.cands else self.cands[len(self.cands) // 2]
        self.ema = self.current - 1
        self.alpha, self.interval, self.warmup = alpha, interval, warmup
        self.up, self.down, self.ceiling = up, down, ceiling
        self.n = 0

    def update(self, mean):
        if self.current > 0:
            self.ema = (1 - self.alpha) * self.ema + self.alpha * mean
        self.n += 1
        if self.n > self.warmup and (self.n - self.warmup) % self.interval == 0:
            old, self.current = self.current, self.decide()
            return self.current if self.current != old else None
        return None

    def decide(self):
        old = self.current
        below = [c for c in self.cands if c < old]
        above = [c for c in self.cands if c > old]
        if old == 0:
            target = above[0] if above else 0
            if target > 0 and self.ema < 0:
                self.ema = target - 1
        else:
            target = old
            while below:
                prev = below[-1]
                if self.ema > (0.5 if prev == 0 else prev - 0.5) + self.down:
                    break
                target = below.pop()
            if target == old:
                while above and self.ema > target - 0.5 + self.up:
                    target = above.pop(0)
        if self.ceiling > 0:
            cap = max(1, math.ceil(self.ema * self.ceiling))
            while target > cap and target <= old and any(c < target for c in self.cands):
                target = max(c for c in self.cands if c < target)
        return target


@settings(max_examples=300, deadline=None)
@given(
    cands=st.sets(st.integers(0, 9), min_size=1, max_size=5),
    initial=st.integers(0, 9),
    alpha=st.sampled_from([0.05, 0.2, 0.5, 1.0]),
    interval=st.integers(1, 4),
    warmup=st.integers(0, 6),
    up=st.sampled_from([-0.25, 0.0, 0.3]),
    down=st.sampled_from([-0.4, -0.25, 0.0]),
    ceiling=st.sampled_from([0, 0.5, 1, 2]),
    data=st.data(),
)
def test_a_range_follows_the_rule(cands, initial, alpha, interval, warmup, up, down, ceiling, data):
    """Law: each round's depth, switch and EMA are those of the rule, bit for bit."""
    config = RangeConfig(
        candidates=tuple(chain(c) for c in cands), up_hysteresis=up, down_hysteresis=down,
        ceiling_coeff=ceiling, ema_alpha=alpha, update_interval=interval, warmup_batches=warmup,
    )  # fmt: skip
    batch_range = StepRange(config, initial)
    plain = PlainRange(cands, initial, alpha, interval, warmup, up, down, ceiling)
    means = st.floats(0, max(*cands, 1), allow_nan=False)
    for mean in data.draw(st.lists(means, min_size=1, max_size=60)):
        assert batch_range.current == chain(plain.current)
        expected = plain.update(mean)
        assert batch_range.update(mean) == (None if expected is None else chain(expected))
        assert batch_range.ema == plain.ema


@settings(max_examples=300, deadline=None)
@given(
    keys=st.sets(st.integers(1, 70), min_size=1, max_size=4),
    sizes=st.none() | st.sets(st.integers(1, 70), max_size=5),
    batch_size=st.integers(1, 90),
)
def test_a_batch_belongs_to_the_graph_that_holds_it(keys, sizes, batch_size):
    """Law: smallest graph size that holds it, if any; then the greatest key not above, or the
    smallest."""
    router = StepRouter(keys, graph_sizes=None if sizes is None else [*sizes])
    held = min((size for size in sizes or () if size >= batch_size), default=batch_size)
    key = max((key for key in keys if key <= held), default=min(keys))
    assert router.key_of(batch_size) == key == router.activate(batch_size)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=80), st.integers(1, 6))
def test_a_change_of_range_waits_for_rounds_in_a_row(batch_sizes, threshold_rounds):
    """Law: the range changes when the last so many rounds all belong elsewhere, and only then."""
    router = StepRouter([1, 5, 9], threshold_rounds=threshold_rounds)
    routed = [router.key_of(size) for size in batch_sizes]
    in_use, since = routed[0], 0
    for i, size in enumerate(batch_sizes):
        window = routed[max(since, i + 1 - threshold_rounds) : i + 1]
        if len(window) == threshold_rounds and in_use not in window:
            in_use, since = routed[i], i + 1
        assert router.activate(size) == in_use


def two_ranges(threshold_rounds: int) -> AdaptiveController:
    ranges = {1: RangeConfig(candidates=(chain(7),)), 5: RangeConfig(candidates=(chain(1),))}
    return AdaptiveController(AdaptiveConfig(ranges=ranges, threshold_rounds=threshold_rounds))


def switches(controller: AdaptiveController, batch_sizes: list[int]) -> list[int]:
    shapes = [controller.activate_step_by_batch(size) for size in batch_sizes]
    return [i for i in range(1, len(shapes)) if shapes[i] != shapes[i - 1]]


@pytest.mark.parametrize("run", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("rounds", [8, 0])
def test_scenario_12_a_batch_size_that_swings_round_a_threshold(rounds, run):
    """vllm#49548, decodes of 4 and 5 rows by turns, `run` rounds of each.

    Law: At most one switch per window of `threshold_rounds` rounds; shorter swings cause none.
    Without the window (0, upstream's rule) every swing is a switch.
    """
    batch_sizes = ([4] * run + [5] * run) * 20
    found = switches(two_ranges(rounds), batch_sizes)
    every_swing = len(batch_sizes) // run - 1
    if rounds == 0:
        assert len(found) == every_swing
        return
    assert all(b - a >= rounds for a, b in itertools.pairwise(found))
    assert len(found) == (every_swing if run >= rounds else 0)


def one_range(policy: str = "ema", **settings_: float) -> AdaptiveConfig:
    batch_range = RangeConfig(
        candidates=(Shape.none(), chain(1), chain(3)), update_interval=1, warmup_batches=0,
        **settings_,
    )  # fmt: skip
    return AdaptiveConfig(ranges={1: batch_range}, policy=policy, threshold_rounds=0)


def test_a_round_that_drafted_nothing_never_moves_the_ema():
    """Law: a shape-0 result counts as a round and leaves the EMA, also where it comes late."""
    batch_range = StepRange(one_range().ranges[1], 3)
    batch_range.update(None)
    assert batch_range.ema == 2.0
    controller = AdaptiveController(one_range(), initial=3)
    for _ in range(50):
        controller.on_verify_complete(Shape.none(), 4, [0, 0, 0, 0])
        controller.on_verify_complete(chain(3), 4, [])  # its lanes had all opted out
    assert controller.activate_step_by_batch(4) == chain(3)
    for _ in range(15):
        controller.on_verify_complete(chain(3), 4, [0, 0, 0, 0])
    assert controller.activate_step_by_batch(4).num_steps < 3


def test_a_result_counts_for_the_range_of_its_own_batch_size():
    """Law: a late result of a small batch moves the small batches' range, not the one in use."""
    ranges = {
        1: RangeConfig(candidates=(chain(1), chain(3)), update_interval=1, warmup_batches=0),
        8: RangeConfig(candidates=(chain(1), chain(3)), update_interval=1, warmup_batches=0),
    }
    controller = AdaptiveController(AdaptiveConfig(ranges=ranges, threshold_rounds=0), initial=3)
    assert controller.activate_step_by_batch(8) == chain(3)
    for _ in range(20):
        controller.on_verify_complete(chain(3), 2, np.zeros(2, np.int32))
    assert controller.activate_step_by_batch(8) == chain(3)
    assert controller.activate_step_by_batch(2) == chain(1)


def test_whole_shapes_go_by_their_depth():
    batch_range = RangeConfig(candidates=(TREE, chain(1)), update_interval=1, warmup_batches=0)
    controller = AdaptiveController(AdaptiveConfig(ranges={1: batch_range}), initial=TREE)
    assert controller.candidates == (chain(1), TREE)
    assert controller.activate_step_by_batch(1) == TREE
    switched = [controller.on_verify_complete(TREE, 1, [0]) for _ in range(40)]
    assert [shape for shape in switched if shape] == [chain(1)]


def test_graph_sizes_that_reach_a_candidate():
    config = AdaptiveConfig.default()
    controller = AdaptiveController(config, graph_sizes=[1, 8, 64])
    assert controller.graph_sizes_of_candidates() == {
        chain(1): [1, 8, 64], chain(3): [1, 8], chain(7): [1]
    }  # fmt: skip
    assert AdaptiveController(config).graph_sizes_of_candidates() == {
        chain(1): None, chain(3): None, chain(7): None
    }  # fmt: skip


@pytest.mark.parametrize("initial", [5, TREE, chain(5)])
@pytest.mark.parametrize("policy", ["ema", "cost"])
def test_an_initial_shape_in_no_range_is_refused(policy, initial):
    with pytest.raises(ConfigError, match=r"in no range; the ranges have none, chain:1, chain:3"):
        controller_of(one_range(policy), initial=initial)


def test_the_policy_names_the_controller():
    assert type(controller_of(one_range("ema"), initial=3)) is AdaptiveController
    cost = controller_of(one_range("cost"), initial=3, graph_sizes=[1, 2])
    assert type(cost) is CostController
    assert cost.candidates == (Shape.none(), chain(1), chain(3))


def test_a_late_result_counts_for_the_range_that_chose_its_shape():
    """Law of overlap: the range has changed before the round's result comes."""
    config = AdaptiveConfig.from_dict(
        {
            "threshold_rounds": 2,
            "warmup_batches": 0,
            "1": {"candidate_steps": [1, 3, 7]},
            "8": {"candidate_steps": [1, 3]},
        }
    )
    controller = AdaptiveController(config, initial=7)
    shapes = [controller.activate_step_by_batch(size) for size in (1, 8, 8)]
    assert [shape.num_steps for shape in shapes] == [7, 7, 3]  # one round more from the old range
    before = {key: batch_range.ema for key, batch_range in controller._ranges.items()}
    controller.on_verify_complete(shapes[1], 8, [0])
    assert controller._ranges[1].ema < before[1] and controller._ranges[8].ema == before[8]
    controller.on_verify_complete(shapes[2], 8, [0])
    assert controller._ranges[8].ema < before[8]


def test_ctrl_c_while_rates_are_reckoned_leaves_them_to_be_reckoned(monkeypatch):
    shapes = [Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6), Shape.eagle(7, 1, 8)]
    one, other = Acceptance(shapes), Acceptance(shapes)
    for acceptance in (one, other):
        acceptance.observe(shapes[0], [3, 2, 3])
        acceptance.observe(shapes[1], [1, 0, 3])
    with monkeypatch.context() as patch:
        patch.setattr(_Family, "estimate", lambda self, prior: interrupt())
        with pytest.raises(KeyboardInterrupt):
            one.expected(shapes[2])
    for shape in shapes:
        assert one.expected(shape) == other.expected(shape)


def interrupt() -> None:
    raise KeyboardInterrupt
