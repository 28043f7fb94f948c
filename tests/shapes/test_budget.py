"""Tests of the policy `budget`: estimates, costs, the choice for each row, and the rows' pages."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specpool import ConfigError, Engine, SamplingParams
from specpool._core import Group, Ledger, choose_shapes
from specpool.engine.assembly import calibration
from specpool.engine.assets import corpus
from specpool.engine.scheduler.config import SchedulerConfig
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.round_shapes import RoundShapes
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.engine.scheduler.step import StepResult
from specpool.engine.shape_names import parse_shape
from specpool.engine.shapes import AdaptiveConfig, BudgetController, controller_of
from specpool.engine.shapes.row_acceptance import RowAcceptance
from specpool.errors import ShapeError

NAMES = ("none", "chain:1", "chain:3", "tree:3x4x16")
SHAPES = [parse_shape("shape", name) for name in NAMES]
PLAIN, ONE, THREE, TREE = SHAPES
CONFIG = AdaptiveConfig.from_dict({"policy": "budget", "1": {"candidates": [*NAMES]}})


def seconds_of(counts: np.ndarray) -> float:
    """A device whose rounds are a sum, as the model of costs has it."""
    sizes, nodes = counts.sum(), counts @ [1, 2, 4, 16]
    drafts = 0.2 * (counts[1] > 0) + 0.5 * (counts[2] > 0) + 0.6 * (counts[3] > 0)
    return float(2 + 0.01 * sizes + drafts + 0.02 * max(nodes - 40, 0))


def told(controller: BudgetController, num_rows: int) -> BudgetController:
    controller.attach(SHAPES, num_rows)
    for size in sorted({1, 2, 4, 8, num_rows}):
        for index, shape in enumerate(SHAPES):
            counts = np.zeros(len(SHAPES), np.int64)
            counts[index] = size
            for _ in range(3):
                controller.on_round_seconds(shape, size, seconds_of(counts))
    return controller


def rounds(
    controller: BudgetController, rates: np.ndarray, num_rounds: int, seed: int = 0
) -> np.ndarray:
    """Run rounds of rows with these acceptance rates; return the shapes, int64 [rounds, rows]."""
    rng, num_rows = np.random.default_rng(seed), len(rates)
    rows = np.arange(num_rows, dtype=np.int32)
    candidates = np.tile(np.arange(len(SHAPES), dtype=np.int32), (num_rows, 1))
    found = []
    for _ in range(num_rounds):
        shapes = controller.choose(rows, candidates)
        controller.count_round()
        steps = np.array([SHAPES[index].num_steps for index in shapes])
        right = rng.random((num_rows, 3)) < rates[:, None]
        accept_len = 1 + np.minimum(np.cumprod(right, axis=1).sum(axis=1), steps)
        controller.learn(rows, shapes, accept_len.astype(np.int32))
        controller.observe(shapes, seconds_of(np.bincount(shapes, minlength=len(SHAPES))))
        found.append(shapes)
    return np.array(found)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-300, 1e300, np.nan, np.inf, -np.inf])
def test_seconds_that_no_round_can_take_teach_nothing(seconds: float) -> None:
    """Law: a clock that jumps neither stops a round nor changes what is known, at the start too."""
    controller = BudgetController(CONFIG)
    controller.attach(SHAPES, 8)
    for shape in SHAPES:
        controller.on_round_seconds(shape, 8, seconds)
    told(controller, 8)
    rates = np.linspace(0.1, 0.9, 8)
    rounds(controller, rates, 20)
    shapes = np.full(8, 2, np.int32)
    before = controller._cost.costs(8).seconds(shapes)
    for _ in range(12):
        controller.observe(shapes, seconds)
    assert controller._cost.costs(8).seconds(shapes) == before
    controller.admit(0, tpot_ms=1e-3, priority=8)
    rounds(controller, rates, 20)


def test_a_choice_lasts_while_nothing_changes() -> None:
    """Law: within a few rounds only other rows, shapes, pages or a target make a new choice."""
    controller = told(BudgetController(CONFIG), 8)
    rows = np.arange(8, dtype=np.int32)
    candidates = np.tile(np.arange(4, dtype=np.int32), (8, 1))
    asked = 0

    def spare() -> None:
        nonlocal asked
        asked += 1

    def run(some: np.ndarray) -> None:
        controller.choose(some, candidates[: len(some)], spare)
        controller.count_round()

    for _ in range(16):
        run(rows)
    assert asked == 4
    run(rows)
    run(rows[:7])
    assert asked == 6, "a row has left"
    run(rows[:7])
    assert asked == 6
    controller.admit(3, tpot_ms=5.0, priority=0)
    for _ in range(3):
        run(rows[:7])
    assert asked == 9, "a new request, with a target"


def test_easy_rows_draft_and_hard_rows_do_not() -> None:
    """Law: in one batch, each row gets what its own results are worth."""
    rates = np.array([0.02, 0.95, 0.95, 0.95] * 4)
    shapes = rounds(told(BudgetController(CONFIG), 16), rates, 120)[60:]
    steps = np.array([shape.num_steps for shape in SHAPES])[shapes]
    assert steps[:, rates > 0.5].mean() > 2.5
    assert steps[:, rates < 0.5].mean() < 0.4 * steps[:, rates > 0.5].mean()


def test_rows_that_are_alike_are_treated_alike() -> None:
    """Law: chance alone does not split a batch of equal rows."""
    shapes = rounds(told(BudgetController(CONFIG), 16), np.full(16, 0.7), 120)[60:]
    most = [np.bincount(each).max() for each in shapes]
    assert np.mean(most) > 14


def test_a_row_that_turns_easy_is_found_again() -> None:
    """Law: while all decode plainly, counts fade until drafts are tried; that costs little."""
    controller = told(BudgetController(CONFIG), 8)
    hard = rounds(controller, np.full(8, 0.0), 300)[100:]
    assert (hard > 0).mean() < 0.08
    easy = rounds(controller, np.full(8, 0.95), 200, seed=1)[120:]
    assert (easy > 0).mean() > 0.9


@pytest.mark.parametrize("num_rows", [1, 8])
def test_rows_that_turn_hard_draft_less(num_rows: int) -> None:
    """Law: what rows once were at depths that they no longer reach does not keep them drafting."""
    controller = told(BudgetController(CONFIG), num_rows)
    steps = np.array([shape.num_steps for shape in SHAPES])
    easy = steps[rounds(controller, np.full(num_rows, 0.95), 120)[60:]]
    hard = steps[rounds(controller, np.full(num_rows, 0.03), 160, seed=1)[100:]]
    assert easy.mean() > 2.9 and hard.mean() < 1.7, hard.mean()


def test_equal_results_give_equal_choices() -> None:
    """Law: nothing is random, and choosing twice before a round changes nothing."""
    rates = np.linspace(0.05, 0.95, 12)
    first = rounds(told(BudgetController(CONFIG), 12), rates, 60)
    assert (first == rounds(told(BudgetController(CONFIG), 12), rates, 60)).all()
    controller = told(BudgetController(CONFIG), 12)
    rows = np.arange(12, dtype=np.int32)
    candidates = np.tile(np.arange(4, dtype=np.int32), (12, 1))
    once = controller.choose(rows, candidates).copy()
    assert (controller.choose(rows, candidates) == once).all()


def test_a_new_request_knows_nothing_of_the_row_before() -> None:
    """Law: a row's counts end with its request."""
    acceptance = RowAcceptance(SHAPES, 2)
    rows, shape = np.array([0, 1], np.int32), np.array([2, 2], np.int32)
    for _ in range(40):
        acceptance.learn(rows, shape, np.array([1, 4], np.int32))
    tokens = acceptance.tokens(rows)[:, 2]
    acceptance.reset(0)
    assert tokens[0] < 1.6 < acceptance.tokens(rows)[0, 2] < tokens[1]


def test_hard_rows_do_not_spoil_a_family_for_easy_ones() -> None:
    """Law: what a row is told of a family does not depend on which rows happen to draft it."""
    acceptance, rng = RowAcceptance(SHAPES, 16), np.random.default_rng(0)
    rows, is_easy = np.arange(16, dtype=np.int32), np.arange(16) % 2 == 0

    def run(shapes: np.ndarray) -> None:
        right = rng.random((16, 3)) < np.where(is_easy, 0.9, 0.1)[:, None]
        accept_len = 1 + np.cumprod(right, axis=1).sum(axis=1)
        acceptance.learn(rows, shapes.astype(np.int32), accept_len.astype(np.int32))

    for turn in range(20):
        run(np.full(16, 2 + turn % 2))
    for _ in range(200):
        run(np.where(is_easy, 3, 2))
    tokens = acceptance.tokens(rows)
    assert tokens[is_easy, 2].mean() > 2.7, "chains, which only hard rows have drafted"
    assert tokens[~is_easy, 3].mean() < 1.6, "trees, which only easy rows have drafted"


def test_a_new_row_is_told_what_rows_of_all_kinds_gave() -> None:
    """Law: rows that chose a family by their own results do not decide what new rows hear of it."""
    acceptance, rng = RowAcceptance(SHAPES, 33), np.random.default_rng(0)
    rows, is_easy = np.arange(32, dtype=np.int32), np.arange(32) % 2 == 0
    for turn in range(600):
        for row in np.flatnonzero(turn % 96 == 3 * rows).tolist():  # a new request after 96 rounds
            acceptance.reset(row)
        age = (turn - 3 * rows) % 96
        shapes = np.where(is_easy & (age >= 8), 3, 2).astype(np.int32)
        right = rng.random((32, 3)) < np.where(is_easy, 0.9, 0.1)[:, None]
        accept_len = (1 + np.cumprod(right, axis=1).sum(axis=1)).astype(np.int32)
        acceptance.learn(rows, shapes, accept_len)
    (new,) = acceptance.tokens(np.array([32], np.int32))
    mean = (3.44 + 1.11) / 2
    assert abs(new[2] - mean) < 0.5, "chains, which easy rows leave after eight rounds"
    assert abs(new[3] - mean) < 0.5, "trees, which easy rows alone have drafted"


def test_a_row_alone_is_not_given_up_for_its_first_drafts() -> None:
    """Law: an unlucky start is forgotten, also if later requests draft only after many rounds."""
    acceptance, row = RowAcceptance(SHAPES, 1), np.zeros(1, np.int32)
    plain, chain = np.zeros(1, np.int32), np.full(1, 2, np.int32)

    def rate() -> float:
        return float(acceptance.tokens(row)[0, 1]) - 1

    for _ in range(8):
        acceptance.learn(row, chain, np.ones(1, np.int32))
    acceptance.reset(0)
    assert 0.1 < rate() < 0.3, "2 tries of 0.6 and 8 of 0, less what the row owes to its odds"
    for _ in range(4):
        for turn in range(40):
            shapes = chain if turn >= 30 else plain
            accept_len = 3 if turn >= 30 and turn % 2 else 1
            acceptance.learn(row, shapes, np.array([accept_len], np.int32))
        acceptance.reset(0)
    assert rate() > 0.3


def test_a_target_makes_rounds_shorter() -> None:
    """Law: rows with a target draft, the others stop drafting, until the target is met."""
    now = 0.0
    controller = BudgetController(CONFIG, clock=lambda: now)
    told(controller, 16)
    rates = np.full(16, 0.6)
    before = rounds(controller, rates, 60)[40:]
    plain, most = (seconds_of(np.array(n)) for n in ([16, 0, 0, 0], [0, 0, 0, 16]))
    assert (before > 0).all()
    assert most > 1.5 * plain
    for row in range(0, 16, 8):
        controller.admit(row, tpot_ms=1e3 * 0.62 * plain, priority=0)
    rows = np.arange(16, dtype=np.int32)
    candidates = np.tile(np.arange(4, dtype=np.int32), (16, 1))
    shapes = controller.choose(rows, candidates)
    assert (shapes[::8] > 0).all()
    controller.count_round()
    for row in range(0, 16, 8):
        controller.admit(row, tpot_ms=1e-3, priority=0)
    shapes = controller.choose(rows, candidates)
    controller.count_round()
    assert controller.missed_ct >= 2, "a target that cannot be met is counted"
    assert (shapes > 0).any(), "and the round is chosen for throughput"


def test_priority_is_worth_seconds() -> None:
    """Law: the time of a row of more priority is worth more, so it drafts where others do not."""
    controller = told(BudgetController(CONFIG), 16)
    rates = np.full(16, 0.12)
    rounds(controller, rates, 80)
    candidates = np.tile(np.arange(4, dtype=np.int32), (16, 1))
    controller.admit(0, tpot_ms=None, priority=5)
    shapes = controller.choose(np.arange(16, dtype=np.int32), candidates)
    assert SHAPES[shapes[0]].num_steps >= max(SHAPES[i].num_steps for i in shapes[1:])


def a_scheduler(num_pages: int, **options: Any) -> Scheduler:
    group = Group("all", page_size=4, num_pages=num_pages, hosts_drafts=True)
    ledger = Ledger(
        [group],
        SHAPES,
        num_rows=8,
        max_batch=8,
        max_context_len=128,
        overlap_depth=0,
        max_chunk=64,
        sessions=True,
    )
    controller = told(BudgetController(CONFIG), 9)
    config = SchedulerConfig(max_batch=8, prefill_tokens=64, keeps_draft_kv=True, **options)
    return Scheduler(ledger, config, controller=controller)


def a_request(scheduler: Scheduler, number: int, *, max_len: int = 100) -> Request:
    _, index, choices = scheduler.round_shapes.allowed(PLAIN, None)
    return Request(
        request_id=number,
        index=0,
        prompt_len=9,
        tokens=[*range(9)],
        params=SamplingParams(),
        shape=TREE,
        shape_index=index,
        choices=choices,
        max_len=max_len,
        stop_ids=frozenset(),
        seed=0,
    )


def a_turn(scheduler: Scheduler, correct: int) -> list[np.ndarray]:
    """One turn; a draft is right for `correct` tokens. Returns the shapes of its round."""
    found = []
    for step in scheduler.schedule():
        scheduler.launch(step)
        plan, lanes = step.plan, len(step.requests)
        steps = [SHAPES[i].num_steps for i in plan.shapes] if step.is_decode else [0] * lanes
        lens = np.array([1 + min(correct, each) for each in steps], np.int32)
        done = [step.is_decode or r.prefilled_len >= r.prefill_len for r in step.requests]
        tokens = [[7] * n if is_done else [] for n, is_done in zip(lens, done, strict=True)]
        scheduler.take_over(step, StepResult.of_lanes(tokens))
        if step.is_decode:
            found.append(plan.shapes.copy())
    return found


def test_admission_counts_the_narrowest_shape() -> None:
    """Law: rows that could be wide are admitted as narrow ones, and widen only within the pages."""
    scheduler, num_narrowed = a_scheduler(num_pages=36), 0
    narrow = scheduler.round_shapes.narrow

    def counted(limits: np.ndarray) -> Any:
        nonlocal num_narrowed
        num_narrowed += 1
        return narrow(limits)

    scheduler.round_shapes.narrow = counted  # type: ignore[method-assign]
    for number in range(8):
        scheduler.submit(a_request(scheduler, number, max_len=14))
    widths = []
    for turn in range(6):
        if turn == 2:
            rows = np.arange(1, 9)
            spare = scheduler._admission.spare(rows, np.tile(np.arange(4, dtype=np.int32), (8, 1)))
            assert spare is not None, "eight trees do not fit"
            pages, free = spare
            assert (pages[:, 0] == 0).all()
            assert 0 <= free[0] < pages[:, 3].sum()
            assert free[0] <= scheduler.state.ledger.free_pages(0)
        for shapes in a_turn(scheduler, 0):
            widths.append(shapes)
            assert scheduler.num_running <= 8
    assert scheduler.num_retracted == 0
    assert num_narrowed == 0, "the choice knew the pages"
    assert max(len(each) for each in widths) == 8
    assert not any((each == 3).all() and len(each) == 8 for each in widths)


def test_width_gives_way_before_a_row_does() -> None:
    """Law: a round that finds no pages is tried with the narrowest shapes before it starves."""
    scheduler = a_scheduler(num_pages=60)
    scheduler.submit(a_request(scheduler, 1))
    for _ in range(6):
        a_turn(scheduler, 3)
    ledger = scheduler.state.ledger
    others = [ledger.admit(f"other {i}") for i in range(4)]
    for row in others:  # hold all pages but a few, behind the scheduler's back
        free = ledger.free_pages(0)
        if free <= 1:
            break
        length = min(4 * (free - 1), 124)
        for end in range(64, length + 64, 64):
            plan = ledger.prepare_extend([row], [min(end, length)])
            ledger.launch(plan.step)
            ledger.complete(plan.step)
    chosen = scheduler.round_shapes.choose
    wide = np.full(9, 3, np.int32)

    def always_wide(limits: np.ndarray, spare: object = None) -> Any:
        chosen(limits)
        (rows,) = limits.nonzero()
        return scheduler.round_shapes._set_choice(rows, wide[rows])

    scheduler.round_shapes.choose = always_wide  # type: ignore[method-assign]
    needs = ledger.tokens_required([1], [3])
    assert needs[0] > 4 * ledger.free_pages(0), "the test needs a round that finds no pages"
    (shapes,) = a_turn(scheduler, 0)
    assert shapes.tolist() == [0]


def test_a_limit_of_steps_binds_each_row() -> None:
    """Law: no row drafts deeper than its request allows, nor than it names."""
    controller = controller_of(CONFIG)
    round_shapes = RoundShapes(SHAPES, 4, controller)
    params = SimpleNamespace(tpot_ms=None)
    for row, most in ((1, 1), (2, None), (3, 0)):
        _, index, choices = round_shapes.allowed(PLAIN, most)
        request: Any = SimpleNamespace(
            choices=choices, shape_index=index, params=params, priority=0
        )
        round_shapes.admit(row, request, row)
    for _ in range(30):
        shapes, _ = round_shapes.choose(np.array([0, 1, 1, 1], np.int32))
        steps = [SHAPES[index].num_steps for index in shapes]
        assert steps[1] <= 1
        assert steps[3] == 0
        choice = round_shapes.run()
        assert choice is not None
        requests: Any = [SimpleNamespace(forced=[], row=row) for row in (1, 2, 3)]
        lens = np.array([1 + s for s in steps[1:]], np.int32)
        round_shapes.learn(choice, shapes[1:].copy(), lens, requests)


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_is_that_of_plain_decoding(depth: int) -> None:
    """Law: whatever each row drafts, greedy and drawn texts are those of plain decoding."""
    prompts = corpus.prompts(6, 24)
    params = [
        SamplingParams(max_new_tokens=40, temperature=1.3 * (i % 2), seed=i, priority=i)
        for i in range(6)
    ]
    params[0] = SamplingParams(max_new_tokens=40, tpot_ms=0.01)
    options: dict[str, Any] = {
        "draft": "specpool/tiny-eagle",
        "max_batch": 4,
        "max_context_len": 128,
        "overlap_depth": depth,
    }
    with Engine.from_pretrained(**options, adaptive=CONFIG, busy_check=2) as engine:
        found = [output.token_ids for output in engine.generate(prompts, params)]
        stats = engine.stats().adaptive
        assert stats is not None
        assert stats.missed_ct > 0
        assert sum(stats.round_cts.values()) > 10
    params[0] = SamplingParams(max_new_tokens=40)
    with Engine.from_pretrained(**options, shape=PLAIN) as engine:
        assert found == [output.token_ids for output in engine.generate(prompts, params)]


def test_a_target_needs_the_policy() -> None:
    """Law: a target that nothing would look at is refused, and so is one that is no time."""
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=64) as engine:
        with pytest.raises(ConfigError, match="tpot_ms 20, which needs an engine with adaptive="):
            engine.generate("seq: 1, 2,", SamplingParams(tpot_ms=20))
    for wrong in (0, -1, float("nan"), "fast", True):
        with pytest.raises(ConfigError, match="tpot_ms must be a number in"):
            SamplingParams(tpot_ms=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="priority must be"):
        SamplingParams(priority=1.5)  # type: ignore[arg-type]


def test_one_range_of_batch_sizes() -> None:
    """Law: a table by batch size has no meaning for a policy of rows."""
    with pytest.raises(ConfigError, match="takes one range of batch sizes, got 1, 8"):
        AdaptiveConfig.from_dict(
            {"policy": "budget", "1": {"candidates": ["none"]}, "8": {"candidates": ["none"]}}
        )


def test_the_core_refuses_arrays_that_do_not_fit() -> None:
    """Law: one `ShapeError` with the numbers, for any array that is wrong."""
    good: dict[str, Any] = {
        "worth": np.ones(2),
        "gives": np.ones(2),
        "due": np.zeros((2, 2)),
        "base": 1.0,
        "charge": np.zeros(3),
        "lane": np.zeros(3),
    }
    shapes, tokens = np.zeros((2, 2), np.int32), np.ones((2, 3))
    assert choose_shapes(shapes, tokens, **good)[0].tolist() == [0, 0]
    wrong: list[dict[str, Any]] = [
        {"worth": np.ones(3)},
        {"gives": np.ones(3)},
        {"gives": np.zeros(2)},
        {"due": np.zeros((2, 3))},
        {"lane": np.zeros(2)},
        {"base": 0.0},
        {"base": float("nan")},
        {"mixed": -1.0},
        {"pages": np.zeros((2, 2, 1), np.int32)},
        {"pages": np.zeros((2, 2, 2), np.int32), "free": np.zeros(1, np.int64)},
    ]
    for fields in wrong:
        with pytest.raises(ShapeError):
            choose_shapes(shapes, tokens, **{**good, **fields})
    with pytest.raises(ShapeError, match=r"tokens must be finite and 1 or more, got 0\.5"):
        choose_shapes(shapes, 0.5 * tokens, **good)


def test_a_new_scheduler_knows_what_the_start_has_measured() -> None:
    """Law: rows are forgotten when a scheduler takes the controller, measured seconds are not."""
    controller = told(BudgetController(CONFIG), 8)
    RoundShapes(SHAPES, 4, controller)
    plain = controller._cost.costs(8).seconds(np.zeros(8, np.int32))
    assert plain == pytest.approx(seconds_of(np.array([8, 0, 0, 0])), rel=0.1)


def test_an_engine_knows_what_its_rounds_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: before the first request the policy has the seconds that the start has measured."""
    monkeypatch.setattr(calibration, "_MOST_SECONDS", 1e9)
    options: dict[str, Any] = {"draft": "specpool/tiny-eagle", "max_context_len": 512}
    with Engine.from_pretrained(**options, max_batch=4, adaptive=CONFIG) as engine:
        budget = engine.core.loop.scheduler.round_shapes.budget
        assert budget is not None
        measured = {(shape, size) for shape, size, _ in budget._start}
    assert measured == {(shape, size) for shape in SHAPES for size in (1, 2, 4)}
