"""A step in one call, for an engine with a table of slots: the same as its calls one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specpool import Group, Ledger, OrderError, OutOfPages, Shape, ShapeError, StateGroup
from specpool.slot_table import decode_into, launch_into, round_slots

NUM_ROWS = 5


def make(page_size: int, num_pages: int = 400, groups: int = 1) -> Ledger:
    specs = [
        Group(f"g{at}", page_size=page_size, num_pages=num_pages, hosts_drafts=True, layout="holey")
        for at in range(groups)
    ]
    return Ledger(
        specs,
        [Shape(3, 2, 4)],
        num_rows=NUM_ROWS,
        max_context_len=120,
        overlap_depth=1,
        page_fencing=False,
        digest=True,
    )


def launch_plainly(ledger: Ledger, step: int, table: np.ndarray, page_size: int) -> None:
    ledger.launch(step)
    ((rows, columns, pages),) = ledger.take_delta(step)
    for row, column, page in zip(rows.tolist(), columns.tolist(), pages.tolist(), strict=True):
        for at in range(page_size):
            table[row, column * page_size + at] = page * page_size + at
    ledger.ack_delta(step)
    ledger.complete(step)


@pytest.mark.parametrize("seed", range(30))
def test_one_call_does_what_the_calls_do(seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 16])
    ours, plain = make(page_size), make(page_size)
    width = ours.pages_per_row(0) * page_size + rng.choice([0, 3])
    tables = [np.zeros((NUM_ROWS + 1, width), np.int32) for _ in range(2)]
    steps: list[tuple[int, int]] = []
    live: list[int] = []
    for _ in range(60):
        if len(live) < NUM_ROWS and rng.random() < 0.3:
            row = ours.admit()
            assert row == plain.admit()
            length = [rng.randint(1, 40)]
            launch_into(ours, ours.prepare_extend([row], length).step, tables[0])
            launch_plainly(plain, plain.prepare_extend([row], length).step, tables[1], page_size)
            live.append(row)
        elif len(steps) > 1 or (steps and rng.random() < 0.3):
            step, lanes = steps.pop(0)
            accepted = [rng.randint(1, 4) for _ in range(lanes)]
            ours.resolve(step, accepted)
            plain.resolve(step, accepted)
        elif live and rng.random() < 0.2:
            row = live.pop(rng.randrange(len(live)))
            ours.finish(row)
            plain.finish(row)
        elif live and max(ours.resolved_len[live]) < 100:
            rows = np.array(rng.sample(live, rng.randint(1, len(live))), np.int64)
            if max(ours.in_flight[rows]) > 1:
                continue
            required = plain.tokens_required(rows, np.ones(len(rows), np.int32))
            assert round_slots(ours, rows, 1) == sum(required.tolist())
            step, held = decode_into(ours, rows, 1, tables[0])
            plan = plain.prepare_decode(rows, np.ones(len(rows), np.int32))
            launch_plainly(plain, plan.step, tables[1], page_size)
            assert (step, held) == (plan.step, plan.allocated_after[0].tolist())
            steps.append((step, len(rows)))
        assert (ours.digest, ours.state_hash()) == (plain.digest, plain.state_hash())
        assert (tables[0] == tables[1]).all()
        ours.check()


def test_one_shape_for_all_rows_is_an_array_of_it() -> None:
    ledger = make(4)
    rows = [ledger.admit() for _ in range(3)]
    ledger.launch(ledger.prepare_extend(rows, [5, 6, 7]).step)
    expected = ledger.tokens_required(rows, [1, 1, 1]).tolist()
    assert ledger.tokens_required(rows, 1).tolist() == expected
    assert ledger.prepare_decode(rows, 1).shapes.tolist() == [1, 1, 1]


def test_a_wrong_table_is_refused_and_changes_nothing() -> None:
    ledger = make(4)
    row = ledger.admit()
    step = ledger.prepare_extend([row], [5]).step
    width = ledger.pages_per_row(0) * 4
    good = np.zeros((NUM_ROWS + 1, width), np.int32)
    wrong = {
        "must have shape": good[1:].copy(),
        "shape .* or more": np.zeros((NUM_ROWS + 1, width - 1), np.int32),
        "C-contiguous": good[:, 1:],
        "of int32": good.astype(np.int64),
        "must be writable": np.frombuffer(bytes(good.nbytes), np.int32).reshape(good.shape),
    }
    before = ledger.state_hash()
    for match, table in wrong.items():
        with pytest.raises(ShapeError, match=match):
            launch_into(ledger, step, table)
        with pytest.raises(ShapeError, match=match):
            decode_into(ledger, [row], 1, table)
    with pytest.raises(OrderError):
        launch_into(ledger, step + 1, good)
    assert (ledger.state_hash(), good.any()) == (before, False)
    with pytest.raises(ShapeError, match="is of 1 group, the ledger has 2"):
        launch_into(make(4, groups=2), 1, good)


def test_a_round_without_pages_changes_nothing() -> None:
    ledger = make(4, num_pages=60)
    row = ledger.admit()
    table = np.zeros((NUM_ROWS + 1, ledger.pages_per_row(0) * 4), np.int32)
    launch_into(ledger, ledger.prepare_extend([row], [100]).step, table)
    other = [ledger.admit()]
    launch_into(ledger, ledger.prepare_extend(other, [116]).step, table)
    last = [ledger.admit()]
    launch_into(ledger, ledger.prepare_extend(last, [24]).step, table)
    before, cells = ledger.state_hash(), table.copy()
    with pytest.raises(OutOfPages):
        decode_into(ledger, [row, *last], 1, table)
    assert ledger.state_hash() == before
    assert (table == cells).all()


def test_a_round_whose_plan_somebody_has_to_read_is_refused_and_changes_nothing() -> None:
    ledger = make(4)
    row = ledger.admit()
    table = np.zeros((NUM_ROWS + 1, ledger.pages_per_row(0) * 4), np.int32)
    launch_into(ledger, ledger.prepare_extend([row], [5]).step, table)
    plan = ledger.prepare_extend([ledger.admit()], [5])
    before, cells = ledger.digest, table.copy()
    with pytest.raises(OrderError, match=rf"step {plan.step} is not launched: launch or cancel it"):
        decode_into(ledger, [row], 1, table)
    assert (ledger.digest, (table == cells).all()) == (before, True)
    launch_into(ledger, plan.step, table)
    child = ledger.fork(row)
    before, cells = ledger.digest, table.copy()
    with pytest.raises(OrderError, match="the next step carries page copies, 1 of them"):
        decode_into(ledger, [row], 1, table)
    assert (ledger.digest, (table == cells).all()) == (before, True)
    plan = ledger.prepare_extend([child], [6])
    assert len(plan.page_copies) == 1
    launch_into(ledger, plan.step, table)
    states = [StateGroup("ssm", num_slots=4)]
    with_states = Ledger(
        [Group("kv", page_size=4, num_pages=60)],
        [Shape(3, 1, 4)],
        num_rows=2,
        max_context_len=60,
        states=states,
        digest=True,
    )
    row = with_states.admit()
    table = np.zeros((3, with_states.pages_per_row(0) * 4), np.int32)
    launch_into(with_states, with_states.prepare_extend([row], [5]).step, table)
    before, cells = with_states.digest, table.copy()
    with pytest.raises(ShapeError, match='a step with state group "ssm" has slots to read'):
        decode_into(with_states, [row], 1, table)
    assert (with_states.digest, (table == cells).all()) == (before, True)
