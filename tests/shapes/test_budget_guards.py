"""Tests of what keeps the policy `budget` within bounds, whatever service tells it."""

from typing import Any

import numpy as np
import pytest

from specpool import ConfigError
from specpool.engine.shape_names import chain, parse_shape
from specpool.engine.shapes import AdaptiveConfig, BudgetController
from specpool.engine.shapes import budget as module
from specpool.engine.shapes.row_acceptance import RowAcceptance

NAMES = ("none", "chain:1", "chain:3", "tree:3x4x16")
SHAPES = [parse_shape("shape", name) for name in NAMES]
CONFIG = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": [*NAMES]}})

EVERY = np.tile(np.arange(4, dtype=np.int32), (4, 1))


def lanes(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def told(num_rows: int = 4, clock: Any = lambda: 0.0) -> BudgetController:
    controller = BudgetController(CONFIG, clock=clock)
    controller.attach(SHAPES, num_rows)
    for index, shape in enumerate(SHAPES):
        for size in (1, num_rows):
            for _ in range(3):
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
        controller.count_round()
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
    """Law: the tokens behind are made up over 32 rounds, one a round at most."""
    now = 0.0
    controller = told(clock=lambda: now)
    for row in range(3):
        controller.admit(row, tpot_ms=100.0, priority=0)
    rows = np.arange(4, dtype=np.int32)
    assert controller._due(rows).tolist() == [[0.0, 10.0]] * 3 + [[0.0, 0.0]]
    now = 0.8
    controller._num_made[:4] = 0, 1e6, 8, 8
    assert controller._due(rows)[:, 0].tolist() == [0.25, -1.0, 0.0, 0.0]
    assert controller._due(rows)[:, 1].tolist() == [10.0, 10.0, 10.0, 0.0]
    now = 1e9
    assert controller._due(rows)[0, 0] == 1.0
    controller.admit(0, tpot_ms=100.0, priority=0)
    assert controller._due(rows)[0, 0] == 0.0, "a new request is not behind"


def test_what_the_core_is_told_of_a_row(monkeypatch: Any) -> None:
    """Law: a row stands for what its latest shape gives, a new one for the mean of the others."""
    controller, rows = told(), np.arange(4, dtype=np.int32)
    assert chosen(controller, rows, monkeypatch)["gives"].tolist() == [1.0] * 4
    controller.narrow(lanes(2, 2, 1, 0))
    controller.count_round()
    plain = controller._acceptance.tokens(rows)
    controller.admit(3, tpot_ms=None, priority=0)
    given = chosen(controller, rows, monkeypatch)
    kept = [plain[0, 2], plain[1, 2], plain[2, 1]]
    assert given["gives"].tolist() == pytest.approx([*kept, np.mean(kept)])
    ratio = given["tokens"] / plain
    assert np.argwhere(ratio > 1.01).tolist() == [[0, 2], [1, 2], [2, 1]], "a shape is kept"


def test_a_choice_is_kept_for_its_rows_and_their_shapes_alone() -> None:
    """Law: each row gets what its own results are worth, among the shapes that it may have."""
    controller, easy, hard = told(8), lanes(0, 1, 2, 3), lanes(4, 5, 6, 7)
    for shape in [2, 3] * 20:
        controller.learn(easy, np.full(4, shape, np.int32), np.full(4, 4, np.int32))
        controller.learn(hard, np.full(4, shape, np.int32), np.ones(4, np.int32))
    for _ in range(5):
        assert (controller.choose(easy, EVERY) > 0).all()
        controller.count_round()
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
        controller.count_round()
    assert (controller.choose(rows, EVERY, lambda: (pages, np.zeros(1, np.int64))) == 0).all()


def test_all_rows_remember_at_most_400_tries() -> None:
    """Law: a change of all texts is seen soon, however many rows there are."""
    rows = np.arange(1000, dtype=np.int32)
    acceptance = RowAcceptance(SHAPES[:3], 1000)
    for _ in range(5):
        acceptance.learn(rows, np.full(1000, 2, np.int32), np.full(1000, 4, np.int32))
    assert acceptance._pooled[1].max() == pytest.approx(400.0)


def test_a_shape_that_is_not_served_teaches_nothing() -> None:
    """Law: the start may time shapes that this engine does not have."""
    controller = BudgetController(CONFIG)
    controller.on_round_seconds(SHAPES[2], 4, 1.5)
    controller.attach(SHAPES[:2], 4)
    assert not any(controller._cost._table.is_measured(shape) for shape in SHAPES[:2])


def test_a_family_that_is_not_drafted_is_tried_again() -> None:
    """Law: what all rows say of a family fades, and a family without tries may be better."""
    acceptance = RowAcceptance(SHAPES, 2)
    for _ in range(20):
        acceptance.learn(lanes(0, 1), lanes(3, 3), lanes(1, 1))
    acceptance.reset(0)
    bad = acceptance.tokens(lanes(0))[0]
    for _ in range(200):
        acceptance.learn(lanes(1), lanes(2), lanes(3))
    good = acceptance.tokens(lanes(0))[0]
    assert bad[3] < 1.3 and good[2] > good[3] > 2.5
