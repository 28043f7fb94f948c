"""Tests of what keeps the policy `budget` within bounds, whatever service tells it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specpool import ConfigError
from specpool.adaptive import AdaptiveConfig, BudgetController
from specpool.adaptive import budget as module
from specpool.adaptive.round_cost import RoundCost
from specpool.adaptive.row_acceptance import RowAcceptance
from specpool.shape_names import chain, parse_shape

NAMES = ("none", "chain:1", "chain:3", "tree:3x4x16")
SHAPES = [parse_shape("shape", name) for name in NAMES]
CONFIG = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": [*NAMES]}})

EVERY = np.tile(np.arange(4, dtype=np.int32), (4, 1))
NEVER = 100.0  # seconds of a shape that is not worth them


def of(*counts: int) -> np.ndarray:
    """The lanes of each shape."""
    return np.array(counts, np.int64)


def lanes(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def told(num_rows: int = 4, clock: Any = lambda: 0.0) -> BudgetController:
    controller = BudgetController(CONFIG, clock=clock)
    controller.attach(SHAPES, num_rows)
    for index, shape in enumerate(SHAPES):
        for size in (1, num_rows):
            controller.on_round_seconds(shape, size, 1.0 + 0.1 * index + 0.01 * size)
    return controller


def chosen(controller: BudgetController, rows: np.ndarray, monkeypatch: Any) -> dict[str, Any]:
    """Choose once, and return the first arguments of the core."""
    calls: list[dict[str, Any]] = []
    choose = module.choose_shapes

    def spy(shapes: Any, tokens: Any, **given: Any) -> Any:
        calls.append({"tokens": tokens.copy(), **given})
        return choose(shapes, tokens, **given)

    monkeypatch.setattr(module, "choose_shapes", spy)
    controller.choose(rows, np.tile(np.arange(4, dtype=np.int32), (len(rows), 1)))
    monkeypatch.setattr(module, "choose_shapes", choose)
    return calls[0]


def served(
    controller: BudgetController,
    took: list[float] | Callable[[np.ndarray], float],
    rates: list[float],
    num_rounds: int,
    candidates: np.ndarray | None = None,
) -> np.ndarray:
    """Serve rows with these acceptance rates, and return their shapes, int32 [rounds, rows].

    A round takes the seconds in `took` of the slowest shape that any row has, or as `took` says.
    """
    rng, rows = np.random.default_rng(0), np.arange(len(rates), dtype=np.int32)
    steps = np.array([shape.num_steps for shape in SHAPES])
    every = np.tile(np.arange(4, dtype=np.int32), (len(rates), 1))
    found = []
    for _ in range(num_rounds):
        shapes = controller.choose(rows, every if candidates is None else candidates)
        controller.ran()
        right = rng.random((len(rates), 3)) < np.array(rates)[:, None]
        accept_len = 1 + np.minimum(np.cumprod(right, axis=1).sum(axis=1), steps[shapes])
        controller.learn(rows, shapes, accept_len.astype(np.int32))
        seconds = took(shapes) if callable(took) else max(took[shape] for shape in shapes)
        controller.observe(shapes, seconds)
        found.append(shapes)
    return np.array(found)


def started(seconds: list[float]) -> BudgetController:
    """A budget of four rows, told that a round of each shape takes so long, however many rows."""
    controller = BudgetController(CONFIG)
    controller.attach(SHAPES, 4)
    for shape, took in zip(SHAPES, seconds, strict=True):
        for size in (1, 4):
            controller.on_round_seconds(shape, size, took)
    return controller


def taught(controller: BudgetController, rate: float) -> BudgetController:
    """Tell the budget of rounds in which all rows had chains of three."""
    rng, rows = np.random.default_rng(1), np.arange(4, dtype=np.int32)
    for _ in range(60):
        right = np.cumprod(rng.random((4, 3)) < rate, axis=1).sum(axis=1)
        controller.learn(rows, np.full(4, 2, np.int32), (1 + right).astype(np.int32))
    return controller


def test_more_shapes_than_can_be_told_apart_are_refused() -> None:
    """Law: the number of shapes is checked before a model is loaded, and by the policy itself."""
    names = ["none", *(f"chain:{depth}" for depth in range(1, 65))]
    AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": names[:64]}})
    AdaptiveConfig.from_dict({"policy": "cost", "1": {"candidates": names}})
    for some in (names, names[1:]):  # an engine always has the plain shape
        with pytest.raises(ConfigError, match="at most 64 shapes, `none` included, got 65"):
            AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": some}})
    with pytest.raises(ConfigError, match=r"at most 64 shapes.* got 65"):
        BudgetController(CONFIG).attach([chain(depth) for depth in range(65)], 1)


@pytest.mark.parametrize(
    "names",
    [
        ["chain:1", "chain:3"],
        ["chain:3"],
        ["none"],
        [f"chain:{depth}" for depth in range(1, 64)],
    ],
    ids=["no plain", "one chain", "plain alone", "63 chains"],
)
def test_any_candidates_are_served(names: list[str]) -> None:
    """Law: each row gets one of its own candidates, also if there is no choice, or no plain one."""
    config = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": names}})
    controller, rng = BudgetController(config), np.random.default_rng(0)
    shapes_of_engine = [*dict.fromkeys([SHAPES[0], *config.candidates])]
    controller.attach(shapes_of_engine, 8)
    for shape in config.candidates:
        controller.on_round_seconds(shape, 8, 1.0 + 0.1 * shape.num_steps)
    steps = np.array([shape.num_steps for shape in shapes_of_engine])
    rows, first = np.arange(8, dtype=np.int32), len(steps) - len(names)
    own, most = np.arange(first, len(steps)), rng.integers(first, len(steps), (8, 1))
    candidates = np.minimum(own, most).astype(np.int32)  # each row has a limit of steps
    for _ in range(24):
        shapes = controller.choose(rows, candidates)
        assert all(shape in allowed for shape, allowed in zip(shapes, candidates, strict=True))
        controller.ran()
        accept_len = 1 + (rng.random(8) * (steps[shapes] + 1)).astype(np.int32)
        controller.learn(rows, shapes, accept_len)
        controller.observe(shapes, 1.0 + 0.1 * float(steps[shapes].max()))


def test_priority_is_bounded() -> None:
    """Law: the greatest priority is worth 2^8 times the rent, and does not overflow."""
    controller = told()
    for priority, worth in ((1 << 31, 256.0), (-(1 << 31), 1 / 256), (3, 8.0)):
        controller.admit(0, tpot_ms=None, priority=priority)
        assert controller._worth[0] == worth


def test_what_a_target_asks_of_a_round() -> None:
    """Law: the tokens behind are made up over 32 rounds, one a round at most; load counts."""
    now = 0.0
    controller = told(clock=lambda: now)
    for row in range(3):
        controller.admit(row, tpot_ms=100.0, priority=0)
    rows = np.arange(4, dtype=np.int32)
    assert controller._due(rows).tolist() == [[0.0, 10.0]] * 3 + [[0.0, 0.0]]
    now = 0.8
    controller._num_made[:4] = 0, 1e6, 8, 8
    controller._cost.load = 2.0
    assert controller._due(rows)[:, 0].tolist() == [0.25, -1.0, 0.0, 0.0]
    assert controller._due(rows)[:, 1].tolist() == [20.0, 20.0, 20.0, 0.0]
    now = 1e9
    assert controller._due(rows)[0, 0] == 1.0
    controller.admit(0, tpot_ms=100.0, priority=0)
    assert controller._due(rows)[0, 0] == 0.0, "a new request is not behind"


def test_what_the_core_is_told_of_a_row(monkeypatch: Any) -> None:
    """Law: a row stands for what its latest shape gives, a new one for the mean of the others."""
    controller, rows = told(), np.arange(4, dtype=np.int32)
    assert chosen(controller, rows, monkeypatch)["gives"].tolist() == [1.0] * 4
    controller.narrow(lanes(2, 2, 1, 0))
    controller.ran()
    plain = controller._acceptance.tokens(rows)
    controller.admit(3, tpot_ms=None, priority=0)
    given = chosen(controller, rows, monkeypatch)
    kept = [plain[0, 2], plain[1, 2], plain[2, 1]]
    assert given["gives"].tolist() == pytest.approx([*kept, np.mean(kept)])
    ratio = given["tokens"] / plain
    assert np.argwhere(ratio > 1.01).tolist() == [[0, 2], [1, 2], [2, 1]], "a shape is kept"


def test_hopes_are_saved_up_to_two_rounds() -> None:
    """Law: what may be spent on what is not known does not grow without end."""
    controller, rows = told(), np.arange(4, dtype=np.int32)
    for _ in range(600):
        controller.choose(rows, np.zeros((4, 1), np.int32))
        controller.ran()
    assert controller._saved == 2.0


def test_a_choice_is_kept_for_its_rows_and_their_shapes_alone() -> None:
    """Law: each row gets what its own results are worth, among the shapes that it may have."""
    controller, easy, hard = told(8), lanes(0, 1, 2, 3), lanes(4, 5, 6, 7)
    for _ in range(40):
        controller.learn(easy, np.full(4, 2, np.int32), np.full(4, 4, np.int32))
        controller.learn(hard, np.full(4, 2, np.int32), np.ones(4, np.int32))
    for _ in range(5):
        assert (controller.choose(easy, EVERY) > 0).all()
        controller.ran()
    assert (controller.choose(hard, EVERY) == 0).all(), "other rows"
    assert (controller.choose(easy, EVERY) > 0).all()
    assert (controller.choose(easy, np.ones((4, 4), np.int32)) == 1).all(), "other shapes"


@pytest.mark.parametrize("binds", [True, False])
def test_a_choice_fits_the_pages_of_its_own_round(binds: bool) -> None:
    """Law: a choice is not kept if pages bind, nor if its round found none and was narrowed."""
    controller, rows = taught(told(), 0.9), np.arange(4, dtype=np.int32)
    pages = np.tile(np.arange(4, dtype=np.int32)[:, None], (4, 1, 1))
    enough = (pages, np.array([12])) if binds else None
    for _ in range(5):  # in the fifth round a choice is made that may be kept
        assert (controller.choose(rows, EVERY, lambda: enough) > 0).all()
        if not binds:
            controller.narrow(np.zeros(4, np.int32))
        controller.ran()
    assert (controller.choose(rows, EVERY, lambda: (pages, np.zeros(1, np.int64))) == 0).all()


def test_a_hope_that_costs_more_than_two_rounds_is_not_tried() -> None:
    """Law: drafts that may turn out well are tried only if what they may lose is saved."""
    shapes = served(started([1.0, NEVER, 3.4, NEVER]), [1.0, NEVER, 3.4, NEVER], [0.02] * 4, 400)
    assert (shapes[60:] == 0).all()


def test_the_round_after_a_hope_is_chosen_anew() -> None:
    """Law: what a hope has shown counts at once, and not after the rounds of a kept choice."""
    took = [1.0, 1.5, NEVER, NEVER]
    controller, asked = started(took), []  # whether each round was chosen anew
    choose = controller.choose

    def spare() -> None:
        asked[-1] = True

    def counted(rows: np.ndarray, shapes: np.ndarray) -> np.ndarray:
        asked.append(False)
        return choose(rows, shapes, spare)

    controller.choose = counted  # type: ignore[method-assign]
    drafts = (served(controller, took, [0.02] * 4, 300) > 0).any(axis=1)
    (hopes,) = np.nonzero(drafts[40:-1])
    assert len(hopes) and np.array(asked)[40 + hopes + 1].all()
    assert np.mean(asked) < 0.35, "other choices are kept"


def test_a_look_that_costs_more_than_two_rounds_is_not_taken() -> None:
    """Law: a shape that may be better is looked at only if what that may lose is saved."""
    took = [1.0, NEVER, 4.05, NEVER]  # 3.44 tokens: four rounds of it lose 2.4
    assert (served(taught(started(took), 0.9), took, [0.9] * 4, 400) == 0).all()


@pytest.mark.parametrize("slower", [1.6, 5.0])
def test_looks_at_what_the_start_told_cost_one_percent(slower: float) -> None:
    """Law: shapes that the start told to be fast, and never are, cost eight rounds once at most."""
    tokens = np.array([1.0, 1.9, 3.44, 3.44])
    took = [1.0, *(tokens[1:] + slower)]
    shapes = served(started([1.0, 1.5, 2.7, 2.7]), took, [0.9] * 4, 500)[60:]
    lost = sum(max(took[shape] for shape in each) - tokens[each].mean() for each in shapes)
    assert lost <= 2 + 0.01 * len(shapes) + 8, "what may be saved up, what is saved, what is owed"


def test_looks_become_rare_but_do_not_end() -> None:
    """Law: the rounds from one look at a shape to the next double, up to 1,024."""
    took = [1.0, 2.0, NEVER, NEVER]  # a draft gives 0.9 of what it costs, and 1 at most
    controller = taught(started(took), 0.9)
    (looks,) = np.nonzero(served(controller, took, [0.9] * 4, 6000)[:, 0])
    assert looks.tolist() == [*np.concatenate([np.arange(4) + at for at in looks[::4]])]
    gaps = np.diff(looks[::4])
    assert gaps[0] < 150 and 1024 <= gaps.max() < 1100, gaps


def test_rows_with_shapes_of_their_own_are_not_looked_at_as_one() -> None:
    """Law: what rows would give with a shape that they may not have is no reason to look at it."""
    took = [1.0, 1.5, 2.5, NEVER]
    controller, rows = started(took), np.arange(4, dtype=np.int32)
    for _ in range(60):
        controller.learn(rows, np.full(4, 2, np.int32), lanes(1, 4, 4, 4))
    candidates = np.zeros((4, 4), np.int32)
    candidates[0] = 0, 1, 2, 2
    shapes = served(controller, took, [0.02, 0.95, 0.95, 0.95], 200, candidates)
    assert (shapes[60:, 0] > 0).mean() < 0.1


def test_a_shape_that_runs_beside_others_alone_is_looked_at() -> None:
    """Law: what a shape takes in rounds of several does not say what it takes if all rows have it.

    The first row always has the chain. Rounds in which all have it become fast after a while.
    """
    controller = BudgetController(CONFIG)
    controller.attach(SHAPES, 4)
    for shape, lane in zip(SHAPES, (0.0, 2.0, 0.75, NEVER), strict=True):
        for size in (1, 2, 4):
            controller.on_round_seconds(shape, size, 1.0 + lane * size)
    candidates = np.full((4, 4), 2, np.int32)
    candidates[1:, 0] = 0

    def run(num_rounds: int, alone: float) -> np.ndarray:
        def took(shapes: np.ndarray) -> float:
            num_chains = int((shapes == 2).sum())
            return alone if num_chains == 4 else 1.0 + 0.75 * num_chains

        return served(controller, took, [0.9] * 4, num_rounds, candidates) == 2

    taught(controller, 0.9)
    assert (run(60, 4.0)[20:].sum(axis=1) == 1).all()
    assert run(400, 2.0)[200:].all()


def test_a_shape_that_is_not_served_teaches_nothing() -> None:
    """Law: the start may time shapes that this engine does not have."""
    controller = told()
    before = len(controller._cost._samples)
    controller.on_mixed_seconds({SHAPES[0]: 2, chain(7): 2}, 1.0)
    assert len(controller._cost._samples) == before


def test_of_equal_rounds_of_the_start_the_least_counts() -> None:
    """Law: a stall at the start does not count if the round was timed again."""
    cost = RoundCost(SHAPES)
    for seconds in (2.0, 1.0, 3.0):
        cost.tell(of(4, 0, 0, 0), seconds)
    assert cost.known(of(4, 0, 0, 0)) == 1.0


def test_a_stall_teaches_little() -> None:
    """Law: one round that takes 1,000 times as long is not taken for what the rows take."""
    cost = RoundCost(SHAPES)
    cost.tell(of(4, 0, 0, 0), 1.0)
    cost.tell(of(0, 0, 4, 0), 1.5)
    mixed = of(2, 0, 2, 0)
    cost.observe(of(4, 0, 0, 0), 1.0)
    before = cost.known(mixed)
    cost.observe(mixed, 1e3)
    assert cost.known(mixed) <= 1.5 * before
    learned = cost.known(mixed)
    cost.observe(mixed, before)
    assert cost.known(mixed) < learned, "of two, the lower counts"


def test_compositions_are_forgotten_but_not_those_of_the_start() -> None:
    """Law: memory does not grow with the rounds served."""
    cost = RoundCost(SHAPES)
    cost.tell(of(1, 0, 0, 0), 1.0)
    for size in range(2, 400):
        cost.observe(of(size, 1, 0, 0), 1.0 + 0.01 * size)
    assert len(cost._samples) <= 130
    assert cost.known(of(1, 0, 0, 0)) == 1.0


def test_a_round_of_less_context_takes_more_than_nothing() -> None:
    """Law: what is known of long rows stays above 0 for short ones, however the fit is."""
    cost = RoundCost(SHAPES)
    cost.tell(of(4, 0, 0, 0), 1.0, np.array([4e6, 0, 0, 0]))
    cost.per_token = np.full(4, 1.0)
    assert cost.known(of(4, 0, 0, 0), np.zeros(4)) == 0.25


def test_all_rows_remember_at_most_400_tries() -> None:
    """Law: a change of all texts is seen soon, however many rows there are."""
    rows = np.arange(1000, dtype=np.int32)
    acceptance = RowAcceptance(SHAPES[:3], 1000)
    for _ in range(5):
        acceptance.learn(rows, np.full(1000, 2, np.int32), np.full(1000, 4, np.int32))
    assert acceptance._pooled[1].max() == pytest.approx(400.0)


def test_a_family_that_is_not_drafted_keeps_its_counts_and_ages() -> None:
    """Law: only rounds that draft a family change what all rows say of it."""
    acceptance = RowAcceptance(SHAPES, 2)
    acceptance.learn(lanes(0, 1), lanes(2, 2), lanes(4, 2))
    before = acceptance._pooled[:, 0].copy()
    for _ in range(5):
        acceptance.learn(lanes(0, 1), lanes(3, 3), lanes(1, 1))
    assert (acceptance._pooled[:, 0] == before).all()
    assert acceptance._unseen.tolist() == [5.0, 0.0]
