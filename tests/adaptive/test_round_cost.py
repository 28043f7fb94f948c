"""Tests of `RoundCost` where rows hold much text, and of the rounds that teach it costs."""

from typing import Any

import numpy as np
import pytest

from specpool.adaptive import AdaptiveConfig, BudgetController
from specpool.adaptive.round_cost import RoundCost
from specpool.shape_names import parse_shape

NAMES = ("none", "chain:1", "chain:3")
SHAPES = [parse_shape("shape", name) for name in NAMES]
CONFIG = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": [*NAMES]}})
PER_TOKEN = 1e-4 * np.array([1.0, 1.6, 2.8])  # one share per token, and 0.6 for each draft


def seconds_of(counts: np.ndarray, context: np.ndarray) -> float:
    """A device that reads the context once for each row and once more, in part, for each draft."""
    drafts = 0.2 * (counts[1] > 0) + 0.5 * (counts[2] > 0)
    return float(1 + 0.05 * counts.sum() + drafts + 0.02 * counts @ [0, 1, 3] + PER_TOKEN @ context)


def all_of(shape: int, size: int, context: float) -> tuple[np.ndarray, np.ndarray]:
    counts = np.zeros(len(SHAPES), np.int64)
    counts[shape] = size
    return counts, counts * context


def told(
    longest: float = 512.0, wrong: dict[int, float] | None = None, num_rows: int = 8
) -> BudgetController:
    """A budget that was told rounds of short rows, and of longer ones of the largest batch.

    `wrong` has factors of what is told of a shape.
    """
    controller = BudgetController(CONFIG)
    controller.attach(SHAPES, num_rows + 1, lens=np.zeros(num_rows + 1, np.int32))
    sizes = [1 << i for i in range(num_rows.bit_length())]
    places = [(size, 64.0) for size in sizes] + [(num_rows, longest)]
    for size, context in places:
        for index, shape in enumerate(SHAPES):
            factor = (wrong or {}).get(index, 1.0)
            seconds = factor * seconds_of(*all_of(index, size, context))
            controller.on_mixed_seconds({shape: size}, seconds, context)
    return controller


def served(
    controller: BudgetController,
    rates: np.ndarray,
    lens: np.ndarray,
    num_rounds: int,
    load: float = 1.0,
    slow: dict[int, float] | None = None,
) -> np.ndarray:
    """Run rounds of rows with these acceptance rates and contexts; return the shapes.

    `slow` has factors of the seconds of rounds in which any row has a shape.
    """
    rng, num_rows = np.random.default_rng(0), len(rates)
    rows = np.arange(num_rows, dtype=np.int32)
    candidates = np.tile(np.arange(len(SHAPES), dtype=np.int32), (num_rows, 1))
    controller._lens[:num_rows] = lens
    found = []
    for _ in range(num_rounds):
        shapes = controller.choose(rows, candidates)
        controller.ran()
        steps = np.array([SHAPES[index].num_steps for index in shapes])
        right = rng.random((num_rows, 3)) < rates[:, None]
        accept_len = 1 + np.minimum(np.cumprod(right, axis=1).sum(axis=1), steps)
        controller.learn(rows, shapes, accept_len.astype(np.int32))
        counts = np.bincount(shapes, minlength=len(SHAPES))
        context = np.bincount(shapes, lens, minlength=len(SHAPES))
        took = load * seconds_of(counts, context) * float(1 + 0.03 * rng.normal())
        took *= max((factor for shape, factor in (slow or {}).items() if counts[shape]), default=1)
        controller.observe(shapes, took, None, lens.astype(np.int32))
        found.append(shapes)
    return np.array(found)


def test_the_start_tells_what_context_costs() -> None:
    """Law: rounds of rows that hold more or less than any that was timed are known."""
    cost = told()._cost
    for context in (16.0, 200.0, 2000.0, 8000.0):
        cost.fit(8, context)
        for index in range(len(SHAPES)):
            counts, held = all_of(index, 8, context)
            assert cost.of(counts, held) == pytest.approx(seconds_of(counts, held), rel=0.05)
            assert cost.known(counts, held) == pytest.approx(seconds_of(counts, held), rel=0.05)
        assert cost.per_token == pytest.approx(PER_TOKEN, rel=0.1)


def test_without_longer_rows_context_costs_nothing() -> None:
    """Law: contexts that are not told leave the estimate as it was."""
    cost = RoundCost(SHAPES)
    for size in (1, 2, 4, 8):
        for index in range(len(SHAPES)):
            counts, held = all_of(index, size, 0.0)
            cost.tell(counts, seconds_of(counts, held))
    cost.fit(8)
    assert cost.per_token.tolist() == [0, 0, 0]
    assert cost.of(all_of(2, 8, 0.0)[0]) == pytest.approx(seconds_of(*all_of(2, 8, 0.0)))


def test_what_a_draft_costs_grows_with_the_context() -> None:
    """Law: the rows that draft while they are short decode plainly once they hold much."""
    rates = np.full(8, 0.35)
    short = served(told(), rates, np.full(8, 64), 160)[40:]
    long = served(told(), rates, np.full(8, 6000), 160)[40:]
    assert (short > 0).mean() > 0.9
    assert (long == 0).mean() > 0.8


def test_each_row_is_chosen_for_by_what_it_holds() -> None:
    """Law: of rows that guess alike the short ones draft, and the long ones decode plainly."""
    lens = np.where(np.arange(16) < 12, 64, 8000)
    shapes = served(told(num_rows=16), np.full(16, 0.5), lens, 240)[80:]
    drafting = (shapes > 0).mean(axis=0)
    assert drafting[:12].mean() > 0.8 and drafting[12:].mean() < 0.2, drafting


@pytest.mark.parametrize("size", [8, 32])
def test_nodes_ride_along_for_as_long_as_context_is_read(size: int) -> None:
    """Law: where reading weights and rows hides the nodes, the ridge grows with the context."""
    cost = RoundCost(SHAPES)

    def took(counts: np.ndarray, held: np.ndarray) -> float:
        reading = 20.0 + 2e-3 * held.sum()
        return float(max(reading, 0.5 * counts @ [1, 2, 4]))

    for each in (1, 2, 4, 8, 16, 32, 64):
        for index in range(len(SHAPES)):
            for context in (64.0,) if each < 32 else (64.0, 1024.0):
                counts, held = all_of(index, each, context)
                cost.tell(counts, took(counts, held), held)
    for context in (64.0, 1024.0, 4096.0):
        cost.fit(size, context)
        assert cost.slope == pytest.approx(0.5, rel=0.3)
        assert cost.ridge_per_token == pytest.approx(4e-3, rel=0.35)
        for index in range(len(SHAPES)):
            counts, held = all_of(index, size, context)
            assert cost.of(counts, held) == pytest.approx(took(counts, held), rel=0.05)
    # Half of the rows draft: nobody has timed that.
    mixed = np.array([size // 2, 0, size // 2])
    assert cost.of(mixed, 4096.0 * mixed) == pytest.approx(took(mixed, 4096.0 * mixed), rel=0.05)


@pytest.mark.parametrize("load", [1.0, 1.7])
def test_a_composition_is_known_after_its_first_visit(load: float) -> None:
    """Law: four rounds in service put right a fit that is wrong by half; load is not learned."""
    cost = told()._cost
    plain, drafts = all_of(0, 8, 4000.0), all_of(2, 8, 4000.0)

    def took(counts: np.ndarray, held: np.ndarray) -> float:
        wrong = 1.5 if counts[2] else 1.0
        return load * wrong * seconds_of(counts, held)

    cost.fit(8, 4000.0)
    for _ in range(8):
        cost.observe(plain[0], took(*plain), plain[1])
    for _ in range(4):
        cost.observe(drafts[0], took(*drafts), drafts[1])
    expected = 1.5 * seconds_of(*drafts) / seconds_of(*plain)
    found = cost.known(*drafts) / cost.known(*plain)
    assert found == pytest.approx(expected, rel=0.1)
    cost.fit(8, 4000.0)
    assert cost.of(*drafts) / cost.of(*plain) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("wrong", [{}, {0: 1.15}, {0: 1.36, 1: 0.68}, {2: 0.5}])
def test_plain_rounds_are_tried_where_they_may_be_better(wrong: dict[int, float]) -> None:
    """Law: drafts do not lose to plain decoding because the start told wrong seconds."""
    shapes = served(told(wrong=wrong), np.full(8, 0.15), np.full(8, 64), 260)
    assert (shapes[140:] == 0).mean() > 0.9, "plain decoding is best"


def test_of_several_contexts_the_nearest_decides() -> None:
    """Law: a round of one shape takes what was measured of rows that hold about as much."""
    cost = RoundCost(SHAPES)
    bent = {64.0: 1.0, 512.0: 1.4, 4096.0: 1.1}  # no sum of shares has these seconds
    for context, factor in bent.items():
        for index in range(len(SHAPES)):
            counts, held = all_of(index, 8, context)
            cost.tell(counts, factor * seconds_of(counts, held), held)
    for context, factor in bent.items():
        cost.fit(8, context)
        counts, held = all_of(2, 8, context)
        assert cost.of(counts, held) == pytest.approx(factor * seconds_of(counts, held), rel=1e-6)


def test_no_plain_round_is_tried_while_a_row_has_a_target() -> None:
    """Law: what the policy wants to know must not make a row late."""
    rates, lens = np.full(8, 0.4), np.full(8, 64)
    assert (served(told(), rates, lens, 160)[40:] == 0).all(axis=1).any(), "without targets"
    controller = told()
    plain = seconds_of(*all_of(0, 8, 64.0))
    for row in range(8):
        controller.admit(row, tpot_ms=1e3 * 0.98 * plain, priority=0)
    controller._clock = lambda: 0.0  # type: ignore[misc]
    assert (served(controller, rates, lens, 160)[40:] > 0).any(axis=1).all()


def test_plain_rounds_are_not_tried_where_they_cannot_be_better() -> None:
    """Law: plain rounds that would cost more than they may teach are not run."""
    shapes = served(told(), np.full(8, 0.95), np.full(8, 64), 400)[20:]
    assert (shapes == 2).mean() > 0.97


def test_drafts_are_hoped_for_where_plain_rounds_cannot_be_better() -> None:
    """Law: that no plain round has run for long does not end the search for better drafts."""
    controller, asked = told(), [False, False]
    estimate = controller._acceptance.tokens

    def tokens(rows: np.ndarray, *, hopes: bool = False) -> np.ndarray:
        asked[hopes] = True
        return estimate(rows, hopes=hopes)

    controller._acceptance.tokens = tokens  # type: ignore[method-assign]
    served(controller, np.full(8, 0.95), np.full(8, 64), 200)
    assert asked == [True, True]


@pytest.mark.parametrize("lens", [None, np.zeros(3, np.int32)])
def test_contexts_that_are_not_known_count_as_nothing(lens: Any) -> None:
    controller = told()
    before = controller._cost.known(*all_of(0, 3, 0.0))
    for _ in range(3):
        controller.observe(np.zeros(3, np.int32), before, None, lens)
    assert controller._cost.known(*all_of(0, 3, 0.0)) == pytest.approx(before)


def test_a_shape_that_was_slow_for_a_while_is_tried_again() -> None:
    """Law: what service taught of a shape in a bad hour does not keep it from its rows."""
    controller, rates, lens = told(), np.full(8, 0.9), np.full(8, 64)
    slow = served(controller, rates, lens, 60, slow={2: 15.0})
    assert (slow[30:] != 2).mean() > 0.9
    after = served(controller, rates, lens, 700)
    assert (after[500:] == 2).mean() > 0.9, "as before the bad hour"


@pytest.mark.parametrize("wrong", [{0: 1.4}, {0: 1.6}])
def test_a_new_policy_looks_at_plain_rounds_first(wrong: dict[int, float]) -> None:
    """Law: a start may be wrong by more than a later look hopes for; a look counts as spent."""
    controller = told(wrong=wrong)
    shapes = served(controller, np.full(8, 0.45), np.full(8, 64), 4)
    assert (shapes == 0).all()
    assert controller._saved < 0.7


def test_what_service_has_learned_stays_however_much_the_start_told() -> None:
    """Law: the bound on the compositions that are kept counts those of service alone."""
    cost, rng = RoundCost(SHAPES), np.random.default_rng(0)
    for _ in range(1000):
        counts = rng.multinomial(40, [1 / 3] * 3)
        cost.tell(counts, seconds_of(counts, 64.0 * counts), 64.0 * counts)
    assert len(cost._told) > 150
    mixed = np.array([1, 2, 37])
    fitted = cost.known(mixed, 64.0 * mixed)
    for _ in range(20):
        cost.observe(mixed, 1.5 * fitted, 64.0 * mixed)
    cost.observe(np.array([2, 2, 36]), fitted, 64.0 * np.array([2, 2, 36]))
    assert cost.known(mixed, 64.0 * mixed) > 1.3 * fitted


def test_rounds_that_take_what_their_context_takes_can_be_chosen() -> None:
    """Law: no measured seconds make a share of a round fall below 0, or a round take nothing."""
    controller = BudgetController(CONFIG)
    controller.attach(SHAPES, 8, lens=np.full(8, 100, np.int32))
    for size in (1, 2, 4, 8):
        for context in (64.0, 512.0):
            for index, shape in enumerate(SHAPES):
                seconds = 1e-4 * size * context * (1 + 0.1 * index)
                controller.on_mixed_seconds({shape: size}, seconds, context)
    rows = np.arange(8, dtype=np.int32)
    candidates = np.tile(np.arange(len(SHAPES), dtype=np.int32), (8, 1))
    assert len(controller.choose(rows, candidates)) == 8


def test_what_a_round_takes_stays_known_as_its_rows_grow() -> None:
    """Law: what service has learned of a composition is not lost where its context doubles."""
    cost, mixed = told()._cost, np.array([4, 0, 4])
    for _ in range(12):
        for counts, factor in (
            (mixed, 1.5),
            (np.array([5, 0, 3]), 1.0),
            (np.array([3, 0, 5]), 1.0),
        ):
            cost.observe(counts, factor * seconds_of(counts, 100 * counts), 100.0 * counts)
    longer = 200.0 * mixed
    assert cost.known(mixed, longer) == pytest.approx(1.5 * seconds_of(mixed, longer), rel=0.1)


def test_a_round_that_is_known_is_corrected_by_a_fifth() -> None:
    """Law: half of an error is corrected in the first four rounds of a composition alone."""
    cost, mixed = told()._cost, np.array([4, 0, 4])
    took = 1.5 * seconds_of(mixed, 64 * mixed)
    for _ in range(4):
        cost.observe(mixed, took, 64.0 * mixed)
    known = cost.known(mixed, 64.0 * mixed)
    assert known > 0.9 * took
    for _ in range(3):  # the first two may be a stall
        cost.observe(mixed, 2 * known, 64.0 * mixed)
    assert 1.1 * known < cost.known(mixed, 64.0 * mixed) < 1.3 * known


def test_fits_become_rarer_down_to_one_in_256_rounds() -> None:
    """Law: the first rounds of service soon count in all estimates, and fits take little time."""
    cost, mixed = told()._cost, np.array([4, 0, 4])
    fitted = []
    for number in range(1300):
        cost.fit(8, 64.0)
        fitted.append(cost.of(mixed, 64.0 * mixed))
        seconds = (1.2 + 1e-3 * number) * seconds_of(mixed, 64 * mixed)
        cost.observe(mixed, seconds, 64.0 * mixed)
    (fits,) = np.nonzero(np.diff(fitted))
    assert (fits + 1).tolist() == [16, 48, 112, 240, 496, 752, 1008, 1264]
