"""Regression scenarios about steps: the order of their life, epochs, failures, ranks.

Numbers, laws and guards as in `test_scenarios_claims.py`. `vllm#N` is vllm-project/vllm.
"""

from __future__ import annotations

import pytest

from fake_device import Device, tokens
from ledger_kit import assert_all_back, end, extend, make, prefill, refuses, start
from specpool import DraftLag, NotReady, OrderError, OutOfPages, Shape, StalePlan


def test_scenario_02_a_late_result_after_retract_is_dropped():
    """sgl#11970.

    Law: The result of a lane whose epoch moved is not read, and nothing is freed twice.
    """
    ledger = make(page_size=1, overlap_depth=1)
    row = prefill(ledger, 7)
    step = start(ledger, row)
    ledger.retract(row)
    held = ledger.groups[0].num_pages - ledger.free_pages(0) - ledger.fenced_pages(0)
    assert held == 0
    ledger.resolve(step, [-5])
    assert (ledger.resolved_len[row], ledger.in_flight[row]) == (0, 0)
    ledger.complete(step)
    assert_all_back(ledger)
    refuses(ledger, OrderError, ledger.resolve, step, [1])


def test_scenario_11_drafting_is_refused_until_the_draft_kv_caught_up():
    """vllm#51510, 20 rounds without drafting, then drafting.

    Law: Drafting is refused until `drafted_len` has caught up.
    """
    ledger = make()
    row = prefill(ledger, 5)
    for _ in range(20):
        end(ledger, start(ledger, row, shape=0, writes_draft=False), 1)
    error = refuses(ledger, DraftLag, ledger.prepare_decode, [row], [1])
    assert (error.row, error.drafted, error.resolved) == (row, 5, 25)
    assert ledger.trim(row, int(ledger.drafted_len[row])) == 5
    extend(ledger, row, 25)
    assert ledger.drafted_len[row] == 25
    start(ledger, row)


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scenario_26_late_results_are_dropped_by_epoch_not_by_count(depth, num_steps):
    """vllm#47900, repeated preempts.

    Law: Late results, and only those, are dropped by epoch, each once.
    """
    shape = Shape.eagle(num_steps, 1, num_steps + 1) if num_steps else Shape.none()
    ledger = make(shape, overlap_depth=depth)
    at = min(num_steps, 1)
    row = prefill(ledger, 10)
    late: list[int] = []
    for _ in range(3):
        late += [start(ledger, row, shape=at) for _ in range(depth + 1)]
        assert ledger.trim(row, 10) == 10
        extend(ledger, row, 11)
        fresh = start(ledger, row, shape=at)
        ledger.resolve(fresh, [1])  # It arrives before the dead frames, and counts.
        assert ledger.resolved_len[row] == 12
        ledger.resolve(late.pop(0), [-5])
        assert ledger.resolved_len[row] == 12
    late += [start(ledger, row, shape=at) for _ in range(depth + 1)]
    ledger.retract(row)
    for step in late:
        ledger.resolve(step, [99])
        refuses(ledger, OrderError, ledger.resolve, step, [1])
    ledger.complete(late[-1])
    assert ledger.steps() == []
    assert_all_back(ledger)


LOG = [
    ("admit",),
    ("admit",),
    ("prepare_extend", [1, 2], [9, 14]),
    ("launch", 1),
    ("prepare_decode", [1, 2], [1, 0]),
    ("launch", 2),
    ("prepare_decode", [2], [1]),
    ("abort", 1),
    ("launch", 3),
    ("resolve", 2, [3, 1]),
    ("complete", 2),
    ("resolve", 3, [2]),
    ("complete", 3),
    ("finish", 2),
]


def digests(log: list[tuple], rank: int) -> list[int]:
    """The digest after each call of the log. Ranks differ in tags, queries and deltas."""
    ledger = make(digest=True, overlap_depth=1)
    seen = []
    for at, (verb, *arguments) in enumerate(log):
        if verb == "admit":
            arguments = [f"rank {rank} at {17 * rank + at}"]
        getattr(ledger, verb)(*arguments)
        if verb == "launch" and rank % 2:
            ledger.take_delta(arguments[0])
            ledger.tokens_required([2], [1])
        seen.append(ledger.digest)
    return seen


def test_scenario_48_replicas_of_one_log_have_equal_digests_each_step():
    """sgl#40250, four replicas.

    Law: The digest covers calls and the ids that they gave, and nothing else.
    """
    ranks = [digests(LOG, rank) for rank in range(4)]
    assert ranks[1:] == ranks[:1] * 3
    assert len(set(ranks[0])) == len(LOG)
    abort = LOG.index(("abort", 1))
    early = [*LOG]
    early[abort - 1 : abort + 1] = [LOG[abort], LOG[abort - 1]]  # One clock runs ahead.
    drifted = digests(early, 0)
    assert drifted[: abort - 1] == ranks[0][: abort - 1]
    assert not set(drifted[abort - 1 :]) & set(ranks[0])


def test_scenario_52_a_stale_plan_is_never_launched():
    """Prepare with a row, retract it, admit another to it.

    Law: A step is never launched if the epoch of one of its rows has moved.
    """
    ledger = make(num_pages=17)
    row = prefill(ledger, 20)
    plan = ledger.prepare_decode([row], [1])
    ledger.retract(row)
    error = refuses(ledger, StalePlan, ledger.launch, plan.step)
    assert (error.step, error.row) == (plan.step, row)
    owner = ledger.admit()
    assert owner == row
    refuses(ledger, StalePlan, ledger.launch, plan.step)
    refuses(
        ledger, NotReady, ledger.prepare_extend, [owner], [5], match=f"step {plan.step} is stale"
    )
    ledger.cancel(plan.step)
    extend(ledger, owner, 60)
    ledger.finish(owner)
    assert_all_back(ledger)


def test_scenario_54_a_cut_counts_the_roots_that_launched_rounds_wrote():
    """Law: A cut goes to at most what is written; it ends the rounds, and the row needs a root."""
    ledger = make(overlap_depth=2)
    row = prefill(ledger, 10)
    launched, second = start(ledger, row), start(ledger, row)
    waiting = ledger.prepare_decode([row], [1])
    assert ledger.trim(row, 99) == 12
    assert (ledger.resolved_len[row], ledger.in_flight[row]) == (12, 0)
    ledger.check()
    refuses(ledger, StalePlan, ledger.launch, waiting.step)
    ledger.cancel(waiting.step)
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    ledger.resolve(launched, [4])
    ledger.resolve(second, [4])
    assert ledger.resolved_len[row] == 12
    extend(ledger, row, 13)
    start(ledger, row)


@pytest.mark.parametrize("page_size", [1, 4])
def test_scenario_54_a_cut_that_takes_nothing_keeps_the_root(page_size):
    """The synchronous worker gives back what a round did not need, after each.

    Law: A trim to r drops the root only with a round in flight; else it frees the reserve.
    """
    ledger = make(page_size=page_size)
    row = prefill(ledger, 10)
    for accept_len in (1, 4, 2):
        end(ledger, start(ledger, row), accept_len)
        length = int(ledger.resolved_len[row])
        assert ledger.trim(row, length) == length
        assert ledger.allocated_len(0)[row] == -(-length // page_size) * page_size
        ledger.check()
    flying = start(ledger, row)
    assert ledger.trim(row, 17) == 17
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    ledger.resolve(flying, [1])
    ledger.complete(flying)
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])
    extend(ledger, row, 18)
    assert ledger.end_turn(row, 18) == 18
    refuses(ledger, NotReady, ledger.prepare_decode, [row], [1])


def test_scenario_54_a_cut_does_not_count_an_unlaunched_extend():
    """Law: An extend that is not launched has written nothing."""
    ledger = make()
    row = prefill(ledger, 10)
    plan = ledger.prepare_extend([row], [30])
    assert ledger.trim(row, 99) == 10
    ledger.cancel(plan.step)
    assert (ledger.resolved_len[row], ledger.allocated_len(0)[row]) == (10, 12)
    ledger.check()


def test_scenario_60_a_fence_seen_by_polling_shows_in_the_digest():
    """Rank 0 polls an event and prepares, rank 1 must retract.

    Law: `complete` is part of the digest.
    """
    ranks = []
    for polls in (True, False):
        ledger = make(digest=True, num_rows=2, num_pages=17)
        rows = [prefill(ledger, 28), prefill(ledger, 36)]
        step = start(ledger, rows[1], shape=0)
        ledger.resolve(step, [1])
        ledger.trim(rows[1], 20)
        if polls:
            ledger.complete(step)
        ranks.append((ledger, rows[0], ledger.digest))
    (first, row, one), (second, same_row, other) = ranks
    assert one != other  # Before the collective.
    first.prepare_extend([row], [48])
    refuses(second, OutOfPages, second.prepare_extend, [same_row], [48])


def test_scenario_61_a_failed_forward_takes_its_rows_and_no_other():
    """Law: `abandon` retracts only the step's rows; their pages wait for `complete`."""
    ledger = make(overlap_depth=1)
    broken, other = prefill(ledger, 9), prefill(ledger, 9)
    free = ledger.free_pages(0)
    failed, beside = start(ledger, broken), start(ledger, other)
    refuses(ledger, OrderError, ledger.abandon, beside + 1)
    ledger.abandon(failed)
    assert (ledger.is_live(broken), ledger.is_live(other)) == (False, True)
    assert (ledger.free_pages(0), ledger.fenced_pages(0)) == (free - 2, 4)
    refuses(ledger, OrderError, ledger.resolve, failed, [1])
    refuses(ledger, OrderError, ledger.abandon, failed)
    ledger.resolve(beside, [2])
    third = start(ledger, other)
    ledger.complete(failed)
    assert ledger.fenced_pages(0) == 0
    end(ledger, third, 1)
    assert ledger.resolved_len[other] == 12
    ledger.finish(other)
    assert_all_back(ledger)


def test_scenario_63_launch_in_step_order_only():
    """Prepare two, launch and complete the second, launch the first.

    Law: Steps are launched in the order in which they were prepared.
    """
    ledger = make()
    row, other = prefill(ledger, 5), prefill(ledger, 5)
    first = ledger.prepare_decode([row], [1]).step
    second = ledger.prepare_decode([other], [1]).step
    refuses(ledger, OrderError, ledger.launch, second, match=f"next step to launch is {first}")
    ledger.launch(first)
    ledger.launch(second)
    refuses(ledger, OrderError, ledger.launch, second)


def test_scenario_65_a_stale_step_is_cancelled_and_blocks_nobody():
    """Step 5 {A, B} goes stale, 6 {B} is behind it.

    Law: A stale step must be cancelled; newer steps are cancelled before it.
    """
    ledger = make(overlap_depth=1)
    gone, stays = prefill(ledger, 5), prefill(ledger, 6)
    before = ledger.allocated_len(0)[stays]
    stale = ledger.prepare_decode([gone, stays], [1, 1]).step
    behind = ledger.prepare_decode([stays], [1]).step
    ledger.abort(gone)
    refuses(ledger, StalePlan, ledger.launch, stale)
    refuses(ledger, OrderError, ledger.launch, behind)
    refuses(ledger, OrderError, ledger.cancel, stale)
    refuses(ledger, NotReady, ledger.prepare_decode, [stays], [1])
    ledger.cancel(behind)
    refuses(ledger, NotReady, ledger.prepare_decode, [stays], [1])
    ledger.cancel(stale)
    assert (ledger.in_flight[stays], ledger.allocated_len(0)[stays]) == (0, before)
    ledger.check()
    end(ledger, start(ledger, stays), 2)
    ledger.finish(stays)
    assert_all_back(ledger)


def test_scenario_66_no_extend_over_a_round_in_flight():
    """r=10, a round in flight, extend to 14, resolve 3.

    Law: An extend is refused while a round of the row is in flight.
    """
    ledger = make()
    row = prefill(ledger, 10)
    step = start(ledger, row)
    refuses(ledger, NotReady, ledger.prepare_extend, [row], [14], match="1 rounds in flight")
    end(ledger, step, 3)
    extend(ledger, row, 14)
    assert ledger.resolved_len[row] == 14


def test_scenario_69_a_session_keeps_no_token_that_was_never_written():
    """Law: `abandon` also takes a row that was cut since its launch."""
    ledger = make(overlap_depth=1)
    row = prefill(ledger, 10)
    failed = start(ledger, row)
    assert ledger.end_turn(row, 11) == 11  # It counts the root, which the forward never wrote.
    ledger.abandon(failed)
    assert not ledger.is_live(row)
    ledger.complete(failed)
    assert_all_back(ledger)
    assert ledger.admit() == row
    assert ledger.resolved_len[row] == 0


def test_scenario_75_a_decode_behind_a_failed_extend_stays_inside_its_plan():
    """The device's length is an earlier holder's.

    Law: A plan's `[lo, hi]` never reaches a shared page.
    """
    ledger = make(overlap_depth=1)
    device = Device(ledger)
    parent = ledger.admit()
    device.extend(parent, 8, mark=1)
    device.run()
    child = ledger.fork(parent)
    failed = device.extend(child, 10, mark=2)
    device.queue.clear()  # The forward raised: its length never reached the device.
    decode = device.launch(ledger.prepare_decode([child], [1]), mark=3, lengths=[3])
    ledger.abandon(failed)
    device.run()
    assert device.read(parent) == tokens((1, 0, 8))
    ledger.resolve(decode, [-5])
    ledger.finish(parent)
    assert_all_back(ledger)
