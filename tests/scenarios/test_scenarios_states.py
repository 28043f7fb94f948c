"""Regression scenarios about recurrent states: their text, who writes it, when a slot is free.

Numbers, laws and guards as in `test_scenarios_claims.py`.
"""

from __future__ import annotations

from typing import Any

from ledger_kit import CHAIN, assert_all_back, end, extend, make, prefill, refuses, start
from specpool import Ledger, NotReady, OutOfPages, Plan, ShapeError, StateGroup


def stateful(num_slots: int = 3, *, flush: int = 1, eager: bool = False, **options: Any) -> Ledger:
    states = [StateGroup("states", num_slots=num_slots, flush=flush, eager=eager)]
    return make(overlap_depth=1, states=states, **options)


def folds(plan: Plan) -> tuple[int, int, int, int]:
    """(src, dst, from, to) of a plan's only lane."""
    names = ("state_src", "state_dst", "state_from", "state_to")
    src, dst, begin, end = (int(getattr(plan, name)[0, 0]) for name in names)
    return src, dst, begin, end


def state_of(ledger: Ledger, row: int) -> tuple[int, int]:
    """The row's slot, and the tokens of its state."""
    return int(ledger.state_slot(0)[row]), int(ledger.state_len(0)[row])


def launched(ledger: Ledger, row: int, length: int) -> Plan:
    plan = ledger.prepare_extend([row], [length])
    ledger.launch(plan.step)
    return plan


def assert_slots_back(ledger: Ledger) -> None:
    assert_all_back(ledger)
    assert ledger.free_state_slots(0) == ledger.states[0].num_slots


def test_scenario_80_a_round_folds_what_is_resolved():
    """Law: the host knows both ends of a fold; what is in flight is not folded."""
    ledger = stateful()
    row = prefill(ledger, 6)
    first = start(ledger, row)
    second = ledger.prepare_decode([row], [1])
    assert folds(second) == (1, 0, 6, 6)
    ledger.launch(second.step)
    end(ledger, first, 3)
    assert folds(ledger.prepare_decode([row], [1])) == (1, 1, 6, 9)


def test_scenario_80_a_root_that_is_not_certain_is_not_folded():
    """Law: an eager round has nothing in flight before it."""
    ledger = stateful(eager=True)
    row = prefill(ledger, 6)
    start(ledger, row, shape=1)
    assert folds(ledger.prepare_decode([row], [0])) == (1, 0, 6, 6)


def test_scenario_80_a_round_behind_an_eager_one_does_not_fold_back():
    """Law: a fold goes forward. The state has the root of the eager round, the row has not."""
    ledger = stateful(eager=True)
    row = prefill(ledger, 6)
    start(ledger, row, shape=0)
    assert folds(ledger.prepare_decode([row], [0])) == (1, 0, 7, 7)
    assert state_of(ledger, row) == (1, 7)


def test_scenario_80_a_slot_that_another_row_has_is_not_written():
    """Law: a step reads the slot that is shared, and writes another."""
    ledger = stateful()
    row = prefill(ledger, 6)
    child = ledger.fork(row)
    assert folds(ledger.prepare_extend([child], [9])) == (1, 2, 5, 8)
    assert state_of(ledger, row) == (1, 5)


def test_scenario_80_a_slot_that_a_launched_step_reads_is_not_written():
    """Law: the step of a former holder reads it, and another stream may be behind."""
    ledger = stateful()
    row = prefill(ledger, 6)
    child = ledger.fork(row)
    assert folds(launched(ledger, row, 8)) == (1, 2, 5, 7)
    assert folds(ledger.prepare_extend([child], [9])) == (1, 3, 5, 8)


def test_scenario_80_a_new_request_starts_from_zeros():
    """Law: a row without a slot reads slot 0, whatever its former request left behind."""
    ledger = stateful(num_rows=1)
    row = prefill(ledger, 6)
    ledger.finish(row)
    again = ledger.admit()
    assert again == row
    assert folds(ledger.prepare_extend([again], [4])) == (0, 1, 0, 3)


def test_scenario_80_a_cut_to_the_state_moves_no_slot():
    """Law: a cut to a length from c on is a move of the cursor."""
    ledger = stateful()
    row = prefill(ledger, 6)
    assert ledger.trim(row, 5) == 5
    assert state_of(ledger, row) == (1, 5)


def test_scenario_80_a_cut_below_the_state_goes_where_a_state_is():
    """Law: below c a cut ends at the kept state, or at 0."""
    ledger = stateful(sessions=True)
    row = prefill(ledger, 6)
    ledger.end_turn(row, 6)
    extend(ledger, row, 12)
    assert ledger.trim(row, 8) == 5
    assert state_of(ledger, row) == (1, 5)
    assert ledger.trim(row, 3) == 0


def test_scenario_80_a_ring_has_a_place_for_all_that_may_be_in_flight():
    """Law: R = (D + 1) A + N + flush - 1."""
    shape = CHAIN.num_draft_tokens
    assert stateful(flush=3).state_ring_len(0) == 2 * shape + shape + 2


def test_scenario_80_a_cut_below_a_checkpoint_gives_its_slot_back():
    """Law: each holder lets go of a slot once."""
    ledger = stateful(sessions=True)
    row = prefill(ledger, 6)
    ledger.end_turn(row, 6)
    assert ledger.trim(row, 2) == 0
    assert ledger.kept_state(0, row) is None
    ledger.finish(row)
    assert_slots_back(ledger)


def test_scenario_80_a_slot_waits_for_the_step_of_a_row_that_is_gone():
    """Law: a slot is not handed out before the last step that touches it is complete."""
    ledger = stateful(num_slots=1)
    row = prefill(ledger, 6)
    step = start(ledger, row)
    ledger.finish(row)
    assert (ledger.free_state_slots(0), ledger.fenced_state_slots(0)) == (0, 1)
    ledger.complete(step)
    assert_slots_back(ledger)


def test_scenario_80_a_slot_waits_for_the_step_that_reads_it():
    """Law: the same for a slot that a launched step reads and nobody has any more."""
    ledger = stateful()
    row = prefill(ledger, 6)
    child = ledger.fork(row)
    launched(ledger, row, 8)
    ledger.finish(child)
    assert (ledger.free_state_slots(0), ledger.fenced_state_slots(0)) == (1, 1)


def test_scenario_80_a_cancel_gives_the_state_back():
    """Law: the row has the slot and the tokens of before the prepare."""
    ledger = stateful()
    row = prefill(ledger, 6)
    before = ledger.state_hash()
    ledger.cancel(ledger.prepare_extend([row], [9]).step)
    assert state_of(ledger, row) == (1, 5)
    assert ledger.state_hash() == before


def test_scenario_80_a_cut_undoes_what_is_not_launched():
    """Law: a stale step never writes the state that it was prepared for."""
    ledger = stateful()
    row = prefill(ledger, 6)
    ledger.prepare_extend([row], [9])
    assert ledger.trim(row, 6) == 6
    assert state_of(ledger, row) == (1, 5)


def test_scenario_80_a_failed_step_takes_the_states_of_its_rows():
    """Law: nobody reads a state that a failed step wrote."""
    ledger = stateful()
    row = prefill(ledger, 6)
    plan = launched(ledger, row, 9)
    ledger.abandon(plan.step)
    assert state_of(ledger, row) == (0, 0)
    assert ledger.fenced_state_slots(0) == 1
    ledger.complete(plan.step)
    assert_slots_back(ledger)


# --- What is published: states of the prefix index ----------------------------------------------

TEXT = list(range(12))


def test_scenario_79_what_leaves_keeps_its_state_until_it_has_arrived():
    """A sender still reads the row's slot while others take what is free.

    Law: An export has the tokens of its row's state, holds the slot, and comes back with all of it.
    """
    ledger = stateful(2, num_rows=3)
    row = prefill(ledger, 10)
    export = ledger.export(row)
    assert (ledger.prefix_len(export), ledger.prefix_state_slot(export)) == (9, 1)
    assert ledger.free_state_slots(0) == 1
    refuses(ledger, ShapeError, ledger.admit, prefix=export, length=8, match="must be 0 or 9")
    back = ledger.admit(prefix=export)
    assert state_of(ledger, back) == (1, 9)
    assert folds(launched(ledger, back, 12)) == (1, 2, 9, 11)
    ledger.release_prefix(export)
    ledger.finish(back)
    ledger.complete(1 + ledger.completed)
    assert_slots_back(ledger)


def test_scenario_79_a_row_whose_state_is_empty_does_not_leave():
    """Law: An export needs a state; a round of the row makes one."""
    ledger = stateful()
    row = prefill(ledger, 1)
    refuses(ledger, NotReady, ledger.export, row, match="its state has 0 of 1 tokens")
    end(ledger, start(ledger, row), 2)
    end(ledger, start(ledger, row), 1)
    assert ledger.prefix_len(ledger.export(row)) == 3


def test_scenario_79_what_comes_has_a_slot_of_its_own():
    """Law: An import takes a slot for the state of all of its tokens, or nothing."""
    ledger = stateful(1)
    row = ledger.import_row(10, 10)
    assert state_of(ledger, row) == (1, 10)
    refuses(ledger, OutOfPages, ledger.import_row, 4, 4, match="group states: need 1")
    ledger.abort(row)
    assert_slots_back(ledger)


def test_scenario_79_what_comes_is_of_no_step():
    """A launched step wrote the slot for a request that is gone. On one stream it is free at once.

    Law: The state that arrives serves hits, and a failure of that step leaves it there.
    """
    ledger = stateful(1, page_fencing=False)
    step = launched(ledger, gone := ledger.admit(), 6).step
    ledger.finish(gone)
    row = ledger.import_row(9, 9)
    assert state_of(ledger, row) == (1, 9)
    ledger.index(row, TEXT[:9])
    assert ledger.match_prefix(TEXT[:10])[0] == 9
    ledger.abandon(step)
    assert published(ledger) == [(1, 9)]


def prompt(ledger: Ledger, tokens: list[int]) -> int:
    """A row with the whole prompt, and a soft mark on its state one token before the end."""
    row = ledger.admit_cached([*tokens, -1])
    plan = ledger.prepare_extend([row], [len(tokens)], keep=[0])
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    return row


def published(ledger: Ledger) -> list[tuple[int, int]]:
    """The (slot, tokens) of the states in the index."""
    return [(slot, length) for _, slot, length in ledger.index_states(0)]


def test_scenario_81_a_published_state_is_not_written():
    """Law: the row goes on in another slot, and the state stays that of its own tokens."""
    ledger = stateful()
    row = prompt(ledger, TEXT[:9])
    ledger.index(row, TEXT[:9])
    assert published(ledger) == [(1, 8)]
    assert folds(ledger.prepare_decode([row], [1])) == (1, 2, 8, 9)
    assert state_of(ledger, row) == (2, 9)
    assert published(ledger) == [(1, 8)]


def test_scenario_81_a_row_alone_takes_its_slot_back():
    """Law: who has no other slot does not wait for what the index and soft marks hold."""
    ledger = stateful(1)
    row = prompt(ledger, TEXT[:9])
    ledger.index(row, TEXT[:9])
    assert folds(ledger.prepare_decode([row], [1])) == (1, 1, 8, 9)
    assert published(ledger) == []


def test_scenario_82_an_extend_folds_its_own_tokens_but_the_last():
    """Law: a chunk of one token, beside lanes of any width, folds the token before it."""
    ledger = stateful()
    start(ledger, prefill(ledger, 6))
    row = prefill(ledger, 6)
    assert folds(launched(ledger, row, 7)) == (2, 2, 5, 6)
    assert folds(ledger.prepare_decode([row], [1])) == (2, 2, 6, 7)


def test_scenario_82_each_lane_reads_the_slot_of_its_row():
    """Law: a state is found by its row, in whatever order the lanes are."""
    ledger = stateful()
    rows = [prefill(ledger, length) for length in (6, 9)]
    plan = ledger.prepare_decode(rows[::-1], [1, 1])
    assert plan.state_src[0].tolist() == [2, 1]
    assert plan.state_from[0].tolist() == [8, 5]


def test_scenario_83_an_identical_prompt_computes_one_token():
    """Law: the state before a prompt's last token is kept until the index takes it."""
    ledger = stateful()
    row = prompt(ledger, TEXT[:9])
    end(ledger, start(ledger, row), 2)
    ledger.index(row, TEXT[:9])
    again = ledger.admit_cached(TEXT[:9])
    assert int(ledger.resolved_len[again]) == 8
    assert state_of(ledger, again) == (1, 8)


def test_scenario_83_a_second_branch_begins_at_the_branching_token():
    """Law: the first branch learns how far its text is known, and leaves a state there."""
    ledger = stateful(num_rows=4)
    ledger.index(prompt(ledger, TEXT), TEXT)
    branch = [*TEXT[:7], 50, 51]
    assert (ledger.match_prefix(branch)[0], ledger.known_prefix(branch)) == (0, 7)
    ledger.index(prompt(ledger, branch[:8]), branch[:8])
    assert ledger.match_prefix([*TEXT[:7], 60])[0] == 7


def test_scenario_84_kv_without_a_state_is_no_hit():
    """Law: a hit ends where a state is; without one the request starts from zeros."""
    ledger = stateful()
    row = prefill(ledger, 12)
    ledger.index(row, TEXT[:9])
    assert published(ledger) == []
    other = ledger.admit_cached(TEXT[:10])
    assert int(ledger.resolved_len[other]) == 0
    assert folds(ledger.prepare_extend([other], [4])) == (0, 2, 0, 3)


def test_scenario_84_a_state_that_is_still_written_serves_nobody():
    """Law: a hit goes back to a state whose writer is complete."""
    ledger = stateful()
    row = prompt(ledger, TEXT[:9])
    step = start(ledger, row)
    ledger.index(row, TEXT[:9])
    assert published(ledger) == [(1, 8), (2, 9)]
    assert ledger.match_prefix([*TEXT[:9], 99])[0] == 8
    ledger.complete(step)
    assert ledger.match_prefix([*TEXT[:9], 99])[0] == 9


def test_scenario_84_what_a_failed_step_wrote_is_not_served():
    """Law: `abandon` takes it out of the index."""
    ledger = stateful()
    row = prompt(ledger, TEXT[:9])
    step = start(ledger, row)
    ledger.index(row, TEXT[:9])
    ledger.abandon(step)
    ledger.complete(step)
    assert published(ledger) == [(1, 8)]


def test_scenario_85_the_state_of_a_hit_is_not_recycled():
    """Law: a request holds the state that it goes on from, also under pressure."""
    ledger = stateful(2, num_rows=3)
    row = prompt(ledger, TEXT[:9])
    ledger.index(row, TEXT[:9])
    ledger.finish(row)
    hit = ledger.admit_cached(TEXT[:9])
    assert ledger.cached_state_slots(0) == 0
    prefill(ledger, 6)
    row = ledger.admit()
    refuses(ledger, OutOfPages, ledger.prepare_extend, [row], [6], match="states")
    assert folds(ledger.prepare_extend([hit], [9]))[0] == 1
