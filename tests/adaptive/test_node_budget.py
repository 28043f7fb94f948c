"""Laws of the budget of nodes: as many are read as pay, and a drafter's guess is corrected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.adaptive import AdaptiveConfig, BudgetController
from specpool.adaptive.node_budget import (
    SHARES,
    NodeBudget,
    NodeChoice,
    NodeResults,
    NodeSeconds,
    Outlook,
)
from specpool.assets import corpus
from specpool.loop.loop import Loop
from specpool.scheduler.round_shapes import RoundShapes
from specpool.scheduler.scheduler import Scheduler

TREE = Shape.eagle(3, 4, 9)  # eight drafts
CONFIG = AdaptiveConfig.from_dict(
    {"policy": "budget", "1": {"candidates": ["none", "chain:3", "tree:4x4x16"]}}
)


def told(choice: float, node: float, sizes: tuple[int, ...] = (1, 8)) -> NodeSeconds:
    """Rounds in which a choice and a node take so many seconds."""
    seconds = NodeSeconds()
    for size in sizes:
        total = size * TREE.num_draft_tokens
        for share, read in ((None, total), (1.0, total), (0.25, size + (total - size) // 4)):
            took = 1.0 + node * read + choice * (share is not None)
            seconds.tell(TREE, size, share, took)
            seconds.tell(TREE, size, share, 2 * took)  # load only adds seconds
    return seconds


def results(curve: np.ndarray, num_lanes: int, depth: int = 4) -> NodeResults:
    """What a round of these tokens by share of the drafts tells."""
    nothing = np.zeros((num_lanes, depth), np.float32)
    flags = np.zeros(num_lanes, np.bool_)
    undrafted = np.zeros(num_lanes, np.int32)
    return NodeResults(nothing, flags, curve.astype(np.float32), num_lanes, undrafted)


def sources(num_lanes: int) -> Any:
    return lambda: (np.arange(num_lanes, dtype=np.int32), np.zeros(num_lanes, np.int32))


def learn(budget: NodeBudget, curve: np.ndarray, num_lanes: int, rounds: int = 100) -> None:
    for _ in range(rounds):
        lens = np.ones(num_lanes, np.int32)
        budget.learn(*sources(num_lanes)(), lens, results(curve, num_lanes))


def nodes(num_lanes: int) -> np.ndarray:
    return np.full(num_lanes, TREE.num_draft_tokens, np.int32)


def test_the_seconds_of_a_choice_and_of_a_node_are_found() -> None:
    seconds = told(0.25, 0.01)
    for size in (1, 3, 8, 64):
        assert seconds.of(size) == pytest.approx((0.25, 0.01))
    assert NodeSeconds().of(4) == (0.0, 0.0)
    only_all = NodeSeconds()
    only_all.tell(TREE, 4, None, 1.0)
    only_all.tell(TREE, 4, 1.0, 1.5)
    assert only_all.of(4) == (0.0, 0.0)


def choices(budget: NodeBudget, num_lanes: int, rounds: int) -> list[NodeChoice | None]:
    """The choices of so many rounds."""
    return [budget.choose(nodes(num_lanes), sources(num_lanes)) for _ in range(rounds)]


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_gains_most_of_all_shares(seed: int) -> None:
    """Law: tokens left out, at the batch's rate, cost less than the seconds of their nodes."""
    rng = np.random.default_rng(seed)
    num_lanes, choice, node = int(rng.integers(1, 9)), rng.uniform(0, 0.02), rng.uniform(0, 0.01)
    gains = np.sort(rng.exponential(1.0, SHARES) ** 2)[::-1].cumsum()
    budget = NodeBudget(3, 16, seconds=told(choice, node))
    learn(budget, num_lanes + gains, num_lanes)
    outlook = budget.outlook = Outlook(float(rng.uniform(0, 3)), float(rng.uniform(1, 500)))
    share = gains / gains[-1]
    drafts = 8 * num_lanes
    value = {}
    for part in range(1, SHARES + 1):
        left_out = drafts - drafts * part // SHARES
        spared = left_out * node - choice
        lost = (1 - share[part - 1]) * outlook.num_drafts * num_lanes
        value[num_lanes + drafts - left_out] = spared * outlook.rate - lost
    best = max(value, key=value.__getitem__)
    found = choices(budget, num_lanes, 32)[4:]  # four rounds read all nodes
    if value[best] > 0.02 * num_lanes * (1 + outlook.num_drafts):
        assert {each and each.num_nodes for each in found} == {best}
        spared = (num_lanes + drafts - best) * node - choice
        assert found[0] is not None
        assert found[0].spared == pytest.approx(spared, rel=1e-3)
    else:
        assert {*found} == {None}


def test_nothing_is_chosen_where_it_cannot_pay() -> None:
    """Law: a choice that costs more than all nodes is not made, and nothing is measured for it."""
    for seconds in (told(1.0, 0.001), told(0.1, 0.0), NodeSeconds()):
        budget = NodeBudget(3, 16, seconds=seconds)
        budget.outlook = Outlook(1.0, 100.0)
        assert choices(budget, 4, 100) == [None] * 100
    budget = NodeBudget(3, 16, seconds=told(0.0, 0.1))
    assert choices(budget, 4, 1) == [None]  # the policy has chosen nothing yet


@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_what_could_not_gain_enough_with_every_token_kept_is_not_tried(gain: float) -> None:
    """Law: no round is spent on looks or trials, which cost, unless a choice may gain 2 percent."""
    num_lanes, rate, num_drafts = 4, 100.0, 1.0
    node = gain * 0.02 * (1 + num_drafts) * num_lanes / rate / 28  # of 32 drafts 28 are left out
    budget = NodeBudget(3, 16, seconds=told(0.0, node))
    budget.outlook = Outlook(num_drafts, rate)
    assert any(choices(budget, num_lanes, 100)) == (gain > 1)


def test_looks_are_rare_where_all_nodes_are_worth_reading() -> None:
    budget = NodeBudget(3, 16, seconds=told(0.001, 0.001))
    budget.outlook = Outlook(3.0, 20.0)
    found = []
    for _ in range(512):
        choice = budget.choose(nodes(4), sources(4))
        found.append(choice)
        if choice is not None:
            assert choice.num_nodes == 36
            budget.learn(*sources(4)(), np.ones(4, np.int32), results(4 + np.arange(1, 9), 4))
    assert [i for i, choice in enumerate(found) if choice is not None] == [3, 131, 387]


@pytest.mark.parametrize("so_much", [-1.0, 0.0, 0.25, 1.0])
def test_a_choice_that_spares_less_than_it_should_is_given_up(so_much: float) -> None:
    """Law: where rounds with a choice take as long as others, only trials go on, under any load."""
    rng = np.random.default_rng(0)
    budget = NodeBudget(3, 16, seconds=told(0.0, 0.01))
    gains = np.array([4.0, 0, 0, 0, 0, 0, 0, 0]).cumsum() + np.arange(8) * 0.1
    learn(budget, 4 + gains, 4)
    budget.outlook = Outlook(1.0, 6.0)
    known, found = 1.0, []
    for number in range(1024):
        choice = budget.choose(nodes(4), sources(4))
        found.append(choice)
        spared = 0.0 if choice is None else so_much * choice.spared
        load = 3.0 if number > 512 else 1.0
        noise = 1 + 0.02 * rng.normal()
        budget.observe(choice, load * noise * (known - spared), known)
    chosen = [sum(each is not None and each.spared > 0 for each in found[at : at + 128])
              for at in range(128, 1024, 128)]  # fmt: skip
    assert budget.trust == pytest.approx(max(so_much, 0.0), abs=0.3)
    if so_much < 0.5:
        assert sorted(chosen)[len(chosen) // 2] <= 8
    else:
        assert sorted(chosen)[1] > 90  # but for the turn in which the load changes


def test_a_fixed_number_is_kept_to() -> None:
    budget = NodeBudget(3, 16, fixed=10)
    for num_lanes, expected in ((1, None), (2, 10), (9, 10), (10, 10), (12, 12)):
        found = budget.choose(nodes(num_lanes), sources(num_lanes))
        assert (found and found.num_nodes) == expected


def test_what_a_drafter_says_is_corrected_by_what_came() -> None:
    """One drafter says twice what is right, the other is right; one row is better than others."""
    rng = np.random.default_rng(0)
    budget = NodeBudget(2, 8, fixed=1)
    rows = np.arange(1, 7, dtype=np.int32)
    drafters = np.array([0, 0, 0, 1, 1, 1], np.int32)
    rates = np.array([0.4, 0.4, 0.4, 0.6, 0.6, 0.6])
    said = np.where(drafters == 0, 0.8, 0.6)
    for _ in range(300):
        right = rng.random((6, 2)) < rates[:, None]
        lens = 1 + np.cumprod(right, axis=1).sum(axis=1)
        guess = np.stack([np.ones(6), said, said**2], axis=1)
        flags, undrafted = np.zeros(6, np.bool_), np.zeros(6, np.int32)
        curve = np.ones(SHARES, np.float32)
        told_now = NodeResults(guess.astype(np.float32), flags, curve, 6, undrafted)
        budget.learn(rows, drafters, lens.astype(np.int32), told_now)
    factors = budget.factors(rows, drafters)
    assert factors[:, 0] == pytest.approx(1.0, abs=0.5)
    assert factors[:3, 1].mean() == pytest.approx(0.5, rel=0.25)
    assert factors[:3, 2].mean() == pytest.approx(0.25, rel=0.4)
    assert factors[3:, 1].mean() == pytest.approx(1.0, rel=0.25)
    for _ in range(40):  # row 1 is always right
        lens = np.array([3, 1, 1, 2, 2, 2], np.int32)
        budget.learn(rows, drafters, lens, told_now)
    factors = budget.factors(rows, drafters)
    assert factors[0, 1] > 2 * factors[1, 1]
    budget.admit(1)
    assert budget.factors(rows, drafters)[0, 1] < factors[0, 1]


class Dear(NodeSeconds):
    """Nodes that are so dear that the unlikely ones do not pay."""

    def of(self, num_lanes: int) -> tuple[float, float]:
        return 0.0, 1e-3


@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_of_a_budget_of_nodes_is_that_of_plain_decoding(depth, monkeypatch) -> None:
    """Law: with nodes left out by what pays, greedy and drawn texts are plain decoding's."""
    choices: list[tuple[int, NodeChoice | None]] = []
    choose = RoundShapes.nodes

    def noted(round_shapes, shapes, requests):
        choice = choose(round_shapes, shapes, requests)
        choices.append((int(round_shapes._num_nodes[shapes].sum()), choice))
        return choice

    monkeypatch.setattr(RoundShapes, "nodes", noted)
    prompts = corpus.prompts(6, 24)
    params = [
        SamplingParams(max_new_tokens=40, temperature=1.3 * (i % 2), seed=i) for i in range(6)
    ]
    options: dict[str, Any] = {
        "draft": "specpool/tiny-eagle",
        "max_batch": 4,
        "max_context_len": 128,
        "overlap_depth": depth,
    }
    auto: dict[str, Any] = {"adaptive": CONFIG, "verify_nodes": "auto"}
    with Engine.from_pretrained(**options, **auto, busy_check=2) as engine:
        budget = engine.core.loop.scheduler.round_shapes.budget
        assert budget is not None and budget.nodes is not None
        budget.nodes._seconds = Dear()
        choices.clear()
        found = [output.token_ids for output in engine.generate(prompts, params)]
    assert any(choice is not None and choice.num_nodes < total for total, choice in choices)
    with Engine.from_pretrained(**options, shape=Shape.none()) as engine:
        assert found == [output.token_ids for output in engine.generate(prompts, params)]


def test_the_seconds_of_a_round_count_as_if_it_had_read_all() -> None:
    """Law: what shapes take is not mixed up with what a choice of nodes spares."""
    shape = CONFIG.candidates[-1]
    whole, partly = (BudgetController(CONFIG) for _ in range(2))
    for budget in (whole, partly):
        budget.attach([*CONFIG.candidates], 2, chooses_nodes=budget is partly)
        for each in CONFIG.candidates:
            budget.on_round_seconds(each, 1, 1.0 + 0.1 * each.num_draft_tokens)
    shapes = np.full(1, len(CONFIG.candidates) - 1, np.int32)
    choice = NodeChoice(3, np.ones((1, 5), np.float32), np.arange(8), spared=0.5)
    for _ in range(20):
        whole.observe(shapes, 1.0 + 0.1 * shape.num_draft_tokens)
        partly.observe(shapes, 0.5 + 0.1 * shape.num_draft_tokens, choice)
    counts = np.bincount(shapes, minlength=len(CONFIG.candidates))
    assert partly._cost.known(counts) == pytest.approx(whole._cost.known(counts))


def test_plain_rounds_do_not_judge_a_choice_of_nodes() -> None:
    """Law: a start that was wrong about plain rounds is no reason to give up a choice of nodes."""
    budget = BudgetController(CONFIG)
    budget.attach([*CONFIG.candidates], 4, chooses_nodes=True)
    for index, shape in enumerate(CONFIG.candidates):
        budget.on_round_seconds(shape, 4, 1.0 + index)
    plain, wide = np.zeros(4, np.int32), np.full(4, len(CONFIG.candidates) - 1, np.int32)
    choice = NodeChoice(8, np.ones((4, 5), np.float32), np.arange(8), spared=0.5)
    rounds = [(wide, 3.0, None)] * 4 + [(plain, 0.5, None)] * 6 + [(wide, 2.5, choice)] * 3
    for shapes, seconds, nodes_read in rounds:
        budget.observe(shapes, seconds, nodes_read)
    assert budget.nodes is not None and budget.nodes.trust == 1.0


def test_the_loop_tells_which_nodes_a_round_has_read() -> None:
    heard: list[object] = []
    step = SimpleNamespace(
        choice=object(),
        plan=SimpleNamespace(shapes=np.zeros(1, np.int32), start=np.array([7], np.int32)),
        nodes=NodeChoice(3, np.ones((1, 2), np.float32), np.arange(8), spared=0.5),
    )
    loop: Any = SimpleNamespace(
        _cache=SimpleNamespace(device=torch.device("cpu")),
        _overlap_depth=0,
        scheduler=SimpleNamespace(
            round_shapes=SimpleNamespace(observe=lambda *told: heard.append(told[2:]))
        ),
        inputs=SimpleNamespace(measured=lambda report, seconds: report(seconds)),
    )
    Loop._observe_round(loop, [], [step], 2.0)  # type: ignore[list-item]
    assert heard == [(2.0, step.nodes, step.plan.start)]


def test_other_policies_learn_from_whole_drafts() -> None:
    for policy in ("ema", "cost"):
        with pytest.raises(ConfigError, match=f"verify_nodes 8 leaves .* adaptive '{policy}'"):
            EngineConfig(adaptive=policy, verify_nodes=8)
    assert EngineConfig(adaptive="budget", verify_nodes=8).verify_nodes == 8
    for policy in ("cost", None):
        with pytest.raises(ConfigError, match=f"'auto' needs adaptive 'budget', got {policy!r}"):
            EngineConfig(adaptive=policy, verify_nodes="auto")
    with pytest.raises(ConfigError, match=r"verify_nodes must be an integer in .* got 'all'"):
        EngineConfig(adaptive="budget", verify_nodes="all")  # type: ignore[arg-type]


def test_the_start_measures_what_a_node_takes() -> None:
    """The tour tells each batch size's rounds with all nodes, all by choice, and some."""
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle",
        max_batch=2,
        max_context_len=128,
        adaptive=CONFIG,
        verify_nodes="auto",
    ) as engine:
        scheduler: Scheduler = engine.core.loop.scheduler
        budget = scheduler.round_shapes.budget
        assert budget is not None
        heard = budget._node_seconds._told
        widest = budget.candidates[-1]
        for size in (1, 2):
            assert {*heard[size, widest]} == {None, 1.0, 0.25}
            assert all(took > 0 for took in heard[size, widest].values())
