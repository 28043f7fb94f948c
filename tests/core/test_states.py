"""Law: docs/contract.md, Recurrent state. The ledger against its oracle and a device with states.

`SPECPOOL_SOAK=N pytest tests/core/test_states.py` runs N examples of 200 operations each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import log_reference
from lockstep import SETTINGS, SOAK, Lockstep
from oracle_slots import SlotOracle
from specpool import ConfigError, Group, Ledger, OutOfPages, Shape, ShapeError, StateGroup
from specpool._core import Replay
from specpool.testing import (
    DeviceFault,
    LedgerConfig,
    Operation,
    decode_op,
    ledger_configs,
    operation_codes,
)
from state_plants import (
    PLANTS,
    ForgetsNoStates,
    HasAShorterRing,
    IgnoresReaders,
    IgnoresWindows,
    KeepsSpoiled,
    KeepsWhatLaterStepsSpoiled,
    ServesWaiting,
    planted,
)

# What a run must have met, or it proves little: every verb done, these refusals and these cases.
# The draws depend on which modules the process has loaded; rarer cases have scenarios below.
VERBS = (
    "admit fork prepare_extend prepare_decode launch resolve complete cancel abandon trim end_turn "
    "retract finish abort index admit_cached forget export import_row release_prefix"
).split()
REFUSALS = {
    ("fork", "NotReady"),
    ("pin_prefix", "ConfigError"),
    ("prepare_extend", "OutOfPages"),
    ("prepare_decode", "OutOfPages"),
    ("end_turn", "ConfigError"),
    ("abandon", "OrderError"),
    ("index", "NotReady"),
    ("admit_cached", "OutOfRows"),
    ("export", "NotReady"),
    ("import_row", "OutOfPages"),
}
CASES = {
    "cut to a soft mark",
    "cut to no state",
    "eviction",
    "eviction of a mark",
    "hit",
    "soft mark undone",
    "state dropped with its KV",
    "state indexed",
    "state known already",
    "steal",
    "eager round",
    "fold undone by a cut",
    "out of slots",
    "round behind an eager one",
    "state written beside a shared one",
    "state written in place",
    "export of a state",
    "admission on an export",
    "import without a slot",
}


@st.composite
def state_configs(draw: st.DrawFn) -> LedgerConfig:
    """Draw ledgers with states, with few slots."""
    config = draw(ledger_configs(max_groups=2))
    flush, eager = draw(st.sampled_from([1, 1, 2, 4])), draw(st.booleans())
    least = 2 if config.sessions else 1
    num_slots = least + draw(st.integers(0, config.num_rows + 1))
    states = StateGroup("s", num_slots=num_slots, flush=flush, eager=eager)
    return replace(config, states=(states,))


def instead_of_a_pin(ledger: Ledger, operation: Operation) -> Operation:
    """Do something with states where the operations pin a prefix, which is refused."""
    verb, arguments = operation
    if verb != "pin_prefix":
        return operation
    row = arguments["row"]
    checkpoint = ledger.kept_state(0, row)
    return (
        ("end_turn", arguments),
        ("trim", arguments if checkpoint is None else {"row": row, "length": checkpoint[1]}),
        ("fork", {"row": row}),
        operation,
    )[arguments["length"] % 4]


def keeping(operation: Operation) -> Operation:
    """Let most lanes of an extend leave soft marks."""
    verb, arguments = operation
    if verb != "prepare_extend":
        return operation
    lanes = [at for at, length in enumerate(arguments["new_lens"]) if (length + at) % 4]
    keep = lanes if len(arguments["rows"]) == len(arguments["new_lens"]) else []
    return verb, {**arguments, "keep": keep}


SALTS = [b"", b"", b"tenant"]


def of_the_index(both: Lockstep, rng: random.Random) -> Iterator[Operation]:
    """Index rows, admit on what is indexed or make room for that, and now and then forget."""
    oracle, lengths = both.oracle, both.ledger.resolved_len
    assert isinstance(oracle, SlotOracle)
    for _ in range(rng.randrange(8)):
        both.device.run_some()
    for row in both.ledger.live_rows().tolist():
        # The device may not have run as far as the ledger counts, and knows no tokens then.
        tokens = both.device.tokens(row)[: lengths[row]]
        if len(tokens) < lengths[row] or both.device._sequence(row).failed or rng.random() < 0.3:
            continue
        longest = min(len(tokens), oracle._first_written(oracle.rows[row]))
        length = longest if rng.random() < 0.8 else rng.randint(0, len(tokens))
        if length or rng.random() < 0.1:
            yield "index", {"row": row, "tokens": tokens[:length], "salt": rng.choice(SALTS)}
    if rng.random() < 0.02:
        yield "forget", {"salt": rng.choice([None, *SALTS])}
    if rng.random() < 0.6:
        return
    if oracle.num_free_rows() == 0 and oracle.rows:
        yield "finish", {"row": max(oracle.rows, key=lambda row: lengths[row] * rng.random())}
    texts = [list(text) for _, text in oracle.indexed_states] or [[]]
    texts += [list(entry.text) for entry in oracle.entries]
    tokens = rng.choice(texts)
    if rng.random() < 0.3:
        tokens = tokens[: rng.randint(0, len(tokens))]
    tokens = tokens + [rng.randrange(3) for _ in range(rng.randint(1, 4))]
    limit = rng.randint(0, len(tokens) + 1) if rng.random() < 0.1 else None
    yield "admit_cached", {"tokens": tokens, "salt": rng.choice(SALTS), "limit": limit}


class StatesAgainstOracle(RuleBasedStateMachine):
    """The operations, the snapshots, and the device in between."""

    lockstep: ClassVar[type[Lockstep]] = Lockstep
    counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    met: ClassVar[Counter[str]] = Counter()

    @initialize(config=state_configs(), seed=st.integers(0, 2**32 - 1))
    def start(self, config: LedgerConfig, seed: int) -> None:
        self.both = self.lockstep(config, random.Random(seed).randrange)

    @rule(codes=st.lists(operation_codes(), min_size=1, max_size=5), runs=st.integers(0, 3))
    def operate(self, codes: list[bytes], runs: int) -> None:
        for code in codes:
            ledger = self.both.ledger
            operation = decode_op(ledger, code, has_moves=True)
            self.both.apply(keeping(instead_of_a_pin(ledger, operation)))
            for _ in range(runs):
                self.both.device.run_some()

    @rule(code=st.integers(0, 2**32 - 1))
    def use_index(self, code: int) -> None:
        for operation in of_the_index(self.both, random.Random(code)):
            self.both.apply(operation)

    @rule(restores=st.booleans())
    def snapshot(self, restores: bool) -> None:
        self.both.restore() if restores else self.both.snapshot()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.both.finish()
            self.counts.update(self.both.counts)
            assert isinstance(self.both.oracle, SlotOracle)
            self.met.update(self.both.oracle.met)


def test_the_states_agree_with_the_oracle():
    counts, met = StatesAgainstOracle.counts, StatesAgainstOracle.met
    counts.clear()
    met.clear()
    examples = settings(SETTINGS, max_examples=SOAK or 150)
    run_state_machine_as_test(StatesAgainstOracle, settings=examples)
    assert not [verb for verb in VERBS if not counts[verb, "ok"]]
    assert not [refusal for refusal in REFUSALS if not counts[refusal]]
    assert not [case for case in CASES if not met[case]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_broken_rule_is_noticed(plant):
    """Each plant breaks one rule, in the oracle or in what the device is told."""

    class Planted(StatesAgainstOracle):
        lockstep = PLANTS[plant]

        def teardown(self) -> None:
            pass

    examples = settings(
        SETTINGS, max_examples=2000, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Planted, settings=examples)


# --- Cases that chance meets too rarely ---

FULL = LedgerConfig(
    (Group("kv", page_size=4, num_pages=40, hosts_drafts=True),),
    (Shape.eagle(2, 1, 3),),
    num_rows=4,
    max_context_len=32,
    overlap_depth=1,
    states=(StateGroup("ssm", num_slots=3),),
)
SESSIONS = replace(FULL, sessions=True)


def with_slots(config: LedgerConfig, num_slots: int, **options: Any) -> LedgerConfig:
    return replace(config, states=(StateGroup("ssm", num_slots=num_slots, **options),))


def prepare(both: Lockstep, row: int, length: int) -> Any:
    return both.apply(("prepare_extend", {"rows": [row], "new_lens": [length]}))


def launched(both: Lockstep, row: int, length: int) -> Any:
    plan = prepare(both, row, length)
    both.apply(("launch", {"step": plan.step}))
    return plan


def extend(both: Lockstep, row: int, length: int) -> Any:
    plan = launched(both, row, length)
    both.apply(("complete", {"step": plan.step}))
    return plan


def prefilled(both: Lockstep, length: int) -> int:
    row: int = both.apply(("admit", {}))
    extend(both, row, length)
    return row


def decode(both: Lockstep, row: int, accept_len: int, shape: int = 1) -> Any:
    """A whole round."""
    plan = both.apply(("prepare_decode", {"rows": [row], "shapes": [shape]}))
    both.apply(("launch", {"step": plan.step}))
    both.apply(("resolve", {"step": plan.step, "accept_lens": [accept_len]}))
    both.apply(("complete", {"step": plan.step}))
    return plan


def state(both: Lockstep, row: int) -> tuple[int, int]:
    """The row's slot and c."""
    return int(both.ledger.state_slot(0)[row]), int(both.ledger.state_len(0)[row])


def reader_in_flight(lockstep: type[Lockstep], num_slots: int) -> tuple[Lockstep, int, int]:
    """A row whose slot a launched step of its parent, which no longer holds it, still reads."""
    both = lockstep(with_slots(FULL, num_slots))
    parent = prefilled(both, 6)
    child = both.apply(("fork", {"row": parent}))
    plan = launched(both, parent, 8)
    assert (plan.state_src[0, 0], plan.state_dst[0, 0]) == (1, 2)
    return both, child, plan.step


def test_a_slot_that_a_former_holder_still_reads_is_not_written():
    both, child, _ = reader_in_flight(Lockstep, num_slots=3)
    assert state(both, child) == (1, 5)
    assert prepare(both, child, 7).state_dst[0, 0] == 3
    both.finish()


def test_a_row_may_write_its_slot_once_the_former_holders_step_is_complete():
    """No slot is free; the refusal counts the row's own slot as fenced, so waiting helps."""
    both, child, step = reader_in_flight(Lockstep, num_slots=2)
    with pytest.raises(OutOfPages, match="group ssm") as refusal:
        both.ledger.prepare_extend([child], [7])
    error = refusal.value
    assert (error.group, error.need, error.free, error.fenced) == ("ssm", 1, 0, 1)
    assert prepare(both, child, 7) is None
    both.apply(("complete", {"step": step}))
    assert prepare(both, child, 7).state_dst[0, 0] == 1
    both.finish()


def test_writing_it_anyway_is_noticed():
    with pytest.raises(AssertionError):
        both, child, _ = reader_in_flight(planted(IgnoresReaders), num_slots=3)
        prepare(both, child, 7)


def longest_read(lockstep: type[Lockstep]) -> None:
    """A round reads the records of two rounds in flight, and has written its own nodes."""
    both = lockstep(FULL)
    row = prefilled(both, 6)
    plans = []
    for _ in range(3):
        plans.append(both.apply(("prepare_decode", {"rows": [row], "shapes": [1]})))
        both.apply(("launch", {"step": plans[-1].step}))
        if len(plans) > 1:
            both.apply(("resolve", {"step": plans[-2].step, "accept_lens": [3]}))
    assert (plans[-1].state_from[0, 0], plans[-1].state_to[0, 0]) == (6, 9)
    both.apply(("complete", {"step": plans[-1].step}))
    both.finish()


def test_the_ring_is_long_enough_and_not_longer():
    longest_read(Lockstep)
    with pytest.raises(DeviceFault, match="the record of position 6 is"):
        longest_read(planted(HasAShorterRing))


def test_an_extend_leaves_the_last_token_to_an_identical_prompt():
    both = Lockstep(FULL)
    row = both.apply(("admit", {}))
    plan = extend(both, row, 6)
    folds = (plan.state_src, plan.state_dst, plan.state_from, plan.state_to)
    assert [fold.tolist() for fold in folds] == [[[0]], [[1]], [[0]], [[5]]]
    both.finish()


def test_a_round_folds_what_was_resolved_at_its_prepare():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    first = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]}))
    second = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]}))
    assert (first.state_from[0, 0], first.state_to[0, 0]) == (5, 6)
    assert (second.state_from[0, 0], second.state_to[0, 0], second.state_dst[0, 0]) == (6, 6, 0)
    both.finish()


def test_flush_gathers_tokens_before_a_fold():
    both = Lockstep(with_slots(FULL, 1, flush=4))
    row = prefilled(both, 6)
    ends = [int(decode(both, row, accept_len=1).state_to[0, 0]) for _ in range(6)]
    assert ends == [5, 5, 5, 9, 9, 9]
    both.finish()


def test_an_eager_round_folds_its_own_root():
    both = Lockstep(with_slots(FULL, 1, eager=True))
    row = prefilled(both, 6)
    assert decode(both, row, accept_len=1, shape=0).state_to[0, 0] == 7
    assert decode(both, row, accept_len=3).state_to[0, 0] == 7
    both.finish()


def test_a_cut_to_c_or_more_moves_no_slot():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    decode(both, row, accept_len=3)
    assert both.apply(("trim", {"row": row, "length": 7})) == 7
    assert state(both, row) == (1, 6)
    plan = extend(both, row, 8)
    assert (plan.start[0], plan.state_from[0, 0], plan.state_src[0, 0]) == (7, 6, 1)
    both.finish()


def test_a_cut_below_c_goes_back_to_the_checkpoint_or_to_nothing():
    both = Lockstep(SESSIONS)
    row = prefilled(both, 6)
    assert both.apply(("end_turn", {"row": row, "length": 6})) == 6
    assert both.ledger.kept_state(0, row) == (1, 5)
    assert extend(both, row, 12).state_dst[0, 0] == 2
    assert both.apply(("trim", {"row": row, "length": 7})) == 5
    assert state(both, row) == (1, 5)
    assert both.apply(("trim", {"row": row, "length": 4})) == 0
    assert (state(both, row), both.ledger.kept_state(0, row)) == ((0, 0), None)
    both.finish()


def test_a_cut_ends_where_pages_and_state_agree():
    """Counterexample to one cut after the other: the pages allow 4, the state 5 or 0."""
    both = Lockstep(SESSIONS)
    row = prefilled(both, 6)
    both.apply(("end_turn", {"row": row, "length": 6}))
    extend(both, row, 12)
    both.apply(
        ("fork", {"row": row})
    )  # Pages below 8 are shared: a cut inside them ends at an edge.
    assert both.apply(("trim", {"row": row, "length": 7})) == 0
    both.finish()


def test_a_checkpoint_is_not_written_and_needs_two_slots():
    both = Lockstep(with_slots(SESSIONS, 2))
    row = both.apply(("admit", {}))
    for turn in range(1, 6):
        extend(both, row, 5 * turn)
        both.apply(("end_turn", {"row": row, "length": 5 * turn}))
        assert both.ledger.kept_state(0, row) == (state(both, row)[0], 5 * turn - 1)
        assert both.ledger.reclaimable_state_slots(0) == 1
    both.finish()


def test_a_failed_step_takes_the_states_of_its_rows_and_no_others():
    both = Lockstep(FULL)
    parent = prefilled(both, 6)
    child = both.apply(("fork", {"row": parent}))
    extend(both, child, 7)
    failed = launched(both, parent, 8)
    later = both.apply(("prepare_decode", {"rows": [parent], "shapes": [1]}))
    both.apply(("launch", {"step": later.step}))
    both.apply(("abandon", {"step": failed.step}))
    assert not both.ledger.is_live(parent)
    assert both.ledger.fenced_state_slots(0) > 0
    decode(both, child, accept_len=2)
    assert state(both, child)[1] == 7
    both.finish()


def test_a_complete_step_cannot_be_abandoned():
    """So a fork, which needs complete steps, never reads what a failed step wrote."""
    both = Lockstep(FULL)
    row = both.apply(("admit", {}))
    plan = extend(both, row, 6)
    both.apply(("abandon", {"step": plan.step}))
    assert both.counts["abandon", "OrderError"] == 1
    both.finish()


def test_a_round_behind_an_eager_one_does_not_fold_back():
    """Counterexample to `to = r` alone: c is r + 1 while the eager round is in flight."""
    both = Lockstep(with_slots(FULL, 1, eager=True))
    row = prefilled(both, 6)
    plans = [both.apply(("prepare_decode", {"rows": [row], "shapes": [0]})) for _ in range(2)]
    assert [int(plan.state_to[0, 0]) for plan in plans] == [7, 7]
    assert [int(plan.state_dst[0, 0]) for plan in plans] == [1, 0]
    both.finish()


def test_a_round_is_eager_only_if_nothing_is_in_flight():
    """The root of a round behind another is not known to the host."""
    both = Lockstep(with_slots(FULL, 1, eager=True))
    row = prefilled(both, 6)
    plans = [both.apply(("prepare_decode", {"rows": [row], "shapes": [at]})) for at in (1, 0)]
    assert [int(plan.state_to[0, 0]) for plan in plans] == [6, 6]
    both.finish()


def test_a_slot_waits_for_the_steps_of_the_row_that_gave_it_up():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    plan = launched(both, row, 8)
    assert both.apply(("trim", {"row": row, "length": 3})) == 0
    assert (both.ledger.free_state_slots(0), both.ledger.fenced_state_slots(0)) == (2, 1)
    both.apply(("complete", {"step": plan.step}))
    assert (both.ledger.free_state_slots(0), both.ledger.fenced_state_slots(0)) == (3, 0)
    both.finish()


def test_a_row_that_goes_gives_back_what_its_unlaunched_steps_took():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    both.apply(("fork", {"row": row}))
    plan = prepare(both, row, 9)
    assert both.ledger.free_state_slots(0) == 1
    both.apply(("finish", {"row": row}))
    assert both.ledger.free_state_slots(0) == 2
    both.apply(("cancel", {"step": plan.step}))
    both.finish()


def test_a_cut_undoes_what_is_not_launched():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    both.apply(("fork", {"row": row}))
    plan = prepare(both, row, 9)
    assert (state(both, row), both.ledger.free_state_slots(0)) == ((2, 8), 1)
    both.apply(("trim", {"row": row, "length": 6}))
    assert (state(both, row), both.ledger.free_state_slots(0)) == ((1, 5), 2)
    both.apply(("cancel", {"step": plan.step}))
    both.finish()


def test_a_cancelled_prepare_that_evicted_leaves_the_checkpoint_reclaimable():
    """The checkpoint is at c, below r, so the prepare already takes its pages out of the table."""
    windowed = Group("kv", page_size=4, num_pages=40, hosts_drafts=True, window=4)
    both = Lockstep(
        replace(SESSIONS, groups=(windowed,), states=(StateGroup("ssm", num_slots=3, flush=8),))
    )
    row = prefilled(both, 12)
    decode(both, row, accept_len=3)
    both.apply(("end_turn", {"row": row, "length": 15}))
    assert both.ledger.checkpoint_len(row) == 11
    reclaimable = both.ledger.reclaimable_pages(0)
    plan = prepare(both, row, 17)
    both.apply(("cancel", {"step": plan.step}))
    assert both.ledger.reclaimable_pages(0) == reclaimable
    both.finish()


def test_without_the_window_below_its_state_a_row_cannot_go_back_there():
    """Its checkpoint is at r then, and a fork, which would start at c, has to wait."""
    windowed = Group("kv", page_size=4, num_pages=40, hosts_drafts=True, window=4)
    both = Lockstep(replace(with_slots(SESSIONS, 3, flush=8), groups=(windowed,)))
    row = prefilled(both, 10)
    for _ in range(2):
        decode(both, row, accept_len=3)
    assert (state(both, row)[1], both.ledger.evicted_len(0)[row]) == (9, 8)
    assert both.apply(("fork", {"row": row})) is None
    assert both.counts["fork", "NotReady"] == 1
    both.apply(("end_turn", {"row": row, "length": 16}))
    assert both.ledger.checkpoint_len(row) == 16
    both.finish()


# --- States that outlive their rows ---

TEXT = list(range(12))


def index(both: Lockstep, row: int, length: int, salt: bytes = b"") -> None:
    tokens = both.device.tokens(row)[:length]
    both.apply(("index", {"row": row, "tokens": tokens, "salt": salt}))


def hit(both: Lockstep, tokens: list[int], **options: Any) -> Any:
    return both.apply(("admit_cached", {"tokens": tokens, "salt": b"", **options}))


def keeping_extend(both: Lockstep, row: int, length: int) -> Any:
    arguments = {"rows": [row], "new_lens": [length], "keep": [0]}
    plan = both.apply(("prepare_extend", arguments))
    both.apply(("launch", {"step": plan.step}))
    return plan


def kept_prompt(both: Lockstep, tokens: list[int]) -> int:
    """A row with the whole prompt, and a soft mark on its state one token before the end."""
    row: int = hit(both, [*tokens, -1])
    plan = keeping_extend(both, row, len(tokens))
    both.apply(("complete", {"step": plan.step}))
    return row


def indexed(both: Lockstep) -> list[tuple[int, int]]:
    """The (slot, tokens) of the states in the index."""
    return [(slot, length) for _, slot, length in both.ledger.index_states(0)]


def test_an_identical_prompt_computes_one_token():
    """Counterexample to indexing alone: a round has folded the last token before the index."""
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    decode(both, row, accept_len=2)
    assert (state(both, row), both.ledger.soft_marks(0, row)) == ((2, 9), [(1, 8)])
    index(both, row, 9)
    assert sorted(indexed(both)) == [(1, 8), (2, 9)]
    other = hit(both, TEXT[:9])
    assert (both.ledger.resolved_len[other], state(both, other)) == (8, (1, 8))
    both.finish()


def test_without_keep_the_state_before_the_end_is_gone():
    both = Lockstep(FULL)
    row = hit(both, [*TEXT[:9], -1])
    extend(both, row, 9)
    decode(both, row, accept_len=2)
    index(both, row, 9)
    assert indexed(both) == [(1, 9)]
    assert both.ledger.resolved_len[hit(both, TEXT[:9])] == 0
    both.finish()


def test_a_hit_ends_at_a_state_and_the_caller_learns_how_far_the_text_is_known():
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT)
    index(both, row, 12)
    tokens = [*TEXT[:7], 50, 51]
    assert both.ledger.match_prefix(tokens)[0] == 0
    assert both.ledger.known_prefix(tokens) == 7
    branch = hit(both, tokens)
    plan = keeping_extend(both, branch, 8)  # Cut one token behind the branching point.
    both.apply(("complete", {"step": plan.step}))
    index(both, branch, 8)
    assert sorted(indexed(both)) == [(1, 11), (2, 7)]
    assert both.ledger.match_prefix([*TEXT[:7], 60, 61])[0] == 7
    assert [both.ledger.match_state(TEXT, limit=n) for n in (12, 11, 10, 6)] == [
        *[(1, 11)] * 2,
        *[(2, 7), (0, 0)],
    ]
    both.finish()


def test_the_index_has_one_state_of_a_text():
    """Two rows computed the same prompt: the second one's slot stays its own."""
    both = Lockstep(with_slots(FULL, 4))
    rows = [hit(both, [*TEXT[:9], -1]) for _ in range(2)]
    for row in rows:
        both.apply(("complete", {"step": keeping_extend(both, row, 9).step}))
    index(both, rows[0], 9)
    index(both, rows[1], 9)
    assert indexed(both) == [(1, 8)]
    assert both.ledger.soft_marks(0, rows[1]) == []
    assert extend(both, rows[1], 11).state_dst[0, 0] == 2
    both.finish()


def test_a_slot_is_in_the_index_once():
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    index(both, row, 9)
    index(both, row, 9, salt=b"tenant")
    assert len(indexed(both)) == 1
    both.finish()


def waiting_state(lockstep: type[Lockstep]) -> tuple[Lockstep, int, Any]:
    """The index has a state that a launched round still writes."""
    both = lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    plan = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]}))
    both.apply(("launch", {"step": plan.step}))
    index(both, row, 9)
    assert (2, 9) in indexed(both)
    return both, row, plan


def test_a_state_that_is_still_written_serves_nobody():
    both, _, plan = waiting_state(Lockstep)
    assert both.ledger.match_prefix([*TEXT[:9], 99])[0] == 8
    both.apply(("complete", {"step": plan.step}))
    assert both.ledger.match_prefix([*TEXT[:9], 99])[0] == 9
    both.finish()


def test_a_failed_step_takes_its_states_out_of_the_index():
    """Also that of a row which has gone since, and not the one that a complete step wrote."""
    for goes in (False, True):
        both, row, plan = waiting_state(Lockstep)
        if goes:
            both.apply(("finish", {"row": row}))
        both.apply(("abandon", {"step": plan.step}))
        assert indexed(both) == [(1, 8)]
        both.apply(("complete", {"step": plan.step}))
        both.finish()


def test_a_failed_step_spoils_no_states_of_other_rows():
    both = Lockstep(with_slots(FULL, 6))
    rows = [kept_prompt(both, [first, *TEXT[:8]]) for first in (20, 30)]
    plans = []
    for row in rows:
        plans.append(both.apply(("prepare_decode", {"rows": [row], "shapes": [1]})))
        both.apply(("launch", {"step": plans[-1].step}))
        index(both, row, 9)
    both.apply(("abandon", {"step": plans[0].step}))
    assert sorted(length for _, length in indexed(both)) == [8, 8, 9]
    both.apply(("complete", {"step": plans[1].step}))
    assert both.ledger.match_prefix([30, *TEXT[:8], 99])[0] == 9
    both.finish()


def later_spoiled_state(lockstep: type[Lockstep]) -> Lockstep:
    """A round fails behind which its row was cut, and wrote a state that the index took."""
    both = lockstep(with_slots(FULL, 4, flush=2))
    row = kept_prompt(both, TEXT[:9])
    failed = both.apply(("prepare_decode", {"rows": [row], "shapes": [1]}))
    both.apply(("launch", {"step": failed.step}))
    both.apply(("trim", {"row": row, "length": 9}))
    keeping_extend(both, row, 10)
    index(both, row, 9)
    assert sorted(indexed(both)) == [(1, 8), (2, 9)]
    both.apply(("abandon", {"step": failed.step}))
    return both


def test_what_a_failed_row_wrote_later_leaves_the_index_too():
    both = later_spoiled_state(Lockstep)
    assert indexed(both) == [(1, 8)]
    both.finish()
    with pytest.raises(AssertionError):
        later_spoiled_state(planted(KeepsWhatLaterStepsSpoiled))


def test_the_plants_of_waiting_states_are_noticed():
    with pytest.raises(AssertionError):
        both, _, _ = waiting_state(planted(ServesWaiting))
        hit(both, [*TEXT[:9], 99])
    with pytest.raises(AssertionError):
        both, _, plan = waiting_state(planted(KeepsSpoiled))
        both.apply(("abandon", {"step": plan.step}))


def test_the_index_does_not_take_what_is_not_written_yet():
    """An extend of one token writes at r, and the state at r is its own."""
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    plan = both.apply(("prepare_extend", {"rows": [row], "new_lens": [10], "keep": [0]}))
    assert both.ledger.soft_marks(0, row) == [(1, 8), (2, 9)]
    index(both, row, 9)
    assert (indexed(both), both.ledger.soft_marks(0, row)) == ([(1, 8)], [(2, 9)])
    both.apply(("cancel", {"step": plan.step}))
    both.finish()


def test_a_cancel_drops_the_mark_and_restores_the_hash():
    both = Lockstep(FULL)
    row = both.apply(("admit", {}))
    for end in (6, 7):  # A fresh slot; then nothing is folded, and the slot is marked as it is.
        before = both.ledger.state_hash()
        plan = both.apply(("prepare_extend", {"rows": [row], "new_lens": [end], "keep": [0]}))
        assert len(both.ledger.soft_marks(0, row)) == 1
        both.apply(("cancel", {"step": plan.step}))
        assert (both.ledger.soft_marks(0, row), both.ledger.state_hash()) == ([], before)
        extend(both, row, 6) if end == 6 else None
        both.apply(("trim", {"row": row, "length": 6}))
    both.finish()


def test_a_cut_below_c_goes_back_to_a_soft_mark():
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    decode(both, row, accept_len=2)
    assert both.apply(("trim", {"row": row, "length": 8})) == 8
    assert state(both, row) == (1, 8)
    assert both.apply(("trim", {"row": row, "length": 7})) == 0
    assert both.ledger.soft_marks(0, row) == []
    both.finish()


def test_soft_marks_and_indexed_states_go_least_recently_used_first():
    both = Lockstep(with_slots(FULL, 3))
    for at in range(3):
        row = kept_prompt(both, [20 + at, *TEXT[:8]])
        index(both, row, 9)
        both.apply(("finish", {"row": row}))
    assert (both.ledger.free_state_slots(0), both.ledger.cached_state_slots(0)) == (0, 3)
    used = hit(both, [20, *TEXT[:8]])
    both.apply(("finish", {"row": used}))
    row = both.apply(("admit", {}))
    assert extend(both, row, 3).state_dst[0, 0] == 2
    assert sorted(indexed(both)) == [(1, 8), (3, 8)]
    both.finish()


def test_an_index_that_finds_a_state_there_uses_it():
    both = Lockstep(FULL)
    for first in (20, 30):
        row = kept_prompt(both, [first, *TEXT[:8]])
        index(both, row, 9)
        both.apply(("finish", {"row": row}))
    row = both.apply(("admit", {}))
    both.device.begin(row, prompt=[20, *TEXT[:8]])
    extend(both, row, 9)
    index(both, row, 9)
    both.apply(("finish", {"row": row}))
    slots = [extend(both, both.apply(("admit", {})), 3).state_dst[0, 0] for _ in range(2)]
    assert slots == [3, 2]
    both.finish()


def test_a_row_alone_goes_on_with_one_slot():
    """Its own slot is kept, and nothing else is there: the index and the mark give it up."""
    both = Lockstep(with_slots(FULL, 1))
    row = kept_prompt(both, TEXT[:9])
    evictions = both.ledger.index_size[2]
    plan = decode(both, row, accept_len=2)
    assert (plan.state_dst[0, 0], both.ledger.soft_marks(0, row)) == (1, [])
    assert both.ledger.index_size[2] == evictions + 1
    index(both, row, 10)
    assert indexed(both) == [(1, 9)]
    assert decode(both, row, accept_len=1).state_dst[0, 0] == 1
    assert indexed(both) == []
    both.finish()


def test_a_slot_stays_as_long_as_anything_keeps_it():
    """The marks of two rows are on one slot, and the index takes it and gives it up."""
    for is_indexed in (False, True):
        both = Lockstep(FULL)
        parent = kept_prompt(both, TEXT[:9])
        child = both.apply(("fork", {"row": parent}))
        both.apply(("complete", {"step": keeping_extend(both, child, 9).step}))
        assert [both.ledger.soft_marks(0, row) for row in (parent, child)] == [[(1, 8)]] * 2
        if is_indexed:
            index(both, parent, 9)
            both.apply(("forget", {}))
        both.apply(("finish", {"row": parent}))
        decode(both, child, accept_len=1)
        assert (both.ledger.soft_marks(0, child), state(both, child)) == ([(1, 8)], (2, 9))
        assert both.ledger.cached_state_slots(0) == 1
        both.finish()


def test_a_shortage_counts_what_is_cached():
    both = Lockstep(with_slots(FULL, 2))
    row = kept_prompt(both, TEXT[:9])
    index(both, row, 9)
    both.apply(("finish", {"row": row}))
    rows = [both.apply(("admit", {})) for _ in range(3)]
    with pytest.raises(OutOfPages, match="group ssm: need 3 pages, 1 free, 1 cached, 0 fenced"):
        both.ledger.prepare_extend(rows, [3, 3, 3])
    both.finish()


def forgotten_text(lockstep: type[Lockstep]) -> Lockstep:
    both = lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    index(both, row, 9)
    both.apply(("finish", {"row": row}))
    both.apply(("forget", {}))
    return both


def test_a_state_goes_with_the_kv_of_its_text():
    both = forgotten_text(Lockstep)
    assert (both.ledger.free_state_slots(0), indexed(both)) == (3, [])
    both.finish()
    with pytest.raises(AssertionError):
        forgotten_text(planted(ForgetsNoStates))


def test_a_state_stays_while_another_entry_has_its_text():
    """Counterexample to states of entries: two texts part behind the state, and one is dropped."""
    both = Lockstep(with_slots(replace(FULL, groups=(Group("kv", page_size=8, num_pages=20),)), 4))
    first = kept_prompt(both, TEXT[:4])
    index(both, first, 4)
    for end in (20, 30):
        row = kept_prompt(both, [*TEXT[:3], end, *TEXT[:4]])
        index(both, row, 8)
        both.apply(("finish", {"row": row}))
    both.apply(("trim", {"row": first, "length": 3}))
    both.apply(("finish", {"row": first}))
    assert 3 in [length for _, length in indexed(both)]
    both.finish()


def lost_window(lockstep: type[Lockstep]) -> Lockstep:
    """The index has two states of a text, and the page below the newer one was evicted."""
    windowed = Group("swa", page_size=4, num_pages=20, window=4)
    both = lockstep(replace(with_slots(FULL, 6), groups=(*FULL.groups, windowed)))
    row = hit(both, [*TEXT[:9], -1])
    for end in (5, 9):
        both.apply(("complete", {"step": keeping_extend(both, row, end).step}))
        index(both, row, end)
    assert sorted(length for _, length in indexed(both)) == [4, 8]
    assert both.ledger.match_prefix([*TEXT[:9], 99])[0] == 8
    both.apply(("finish", {"row": row}))
    for length in (32, 32, 12):
        extend(both, both.apply(("admit", {})), length)
    assert (both.ledger.cached_pages(1), both.ledger.index_size[2]) == (1, 2)
    return both


def test_a_hit_takes_an_older_state_if_the_window_below_a_newer_one_is_not_held():
    both = lost_window(Lockstep)
    assert both.ledger.resolved_len[hit(both, [*TEXT[:9], 99])] == 4
    both.finish()
    with pytest.raises(AssertionError):
        hit(lost_window(planted(IgnoresWindows)), [*TEXT[:9], 99])


def test_the_slot_of_a_hit_is_held_before_pages_are_evicted():
    """The page for the tail comes from the very entry whose state the row begins with."""
    groups = (Group("narrow", page_size=4, num_pages=9), Group("wide", page_size=8, num_pages=20))
    both = Lockstep(replace(with_slots(FULL, 6), groups=groups, max_context_len=24))
    text = [*TEXT, 12, 13, 14, 15]
    row = hit(both, [*text, -1])
    for end in (10, 16):
        both.apply(("complete", {"step": keeping_extend(both, row, end).step}))
    index(both, row, 16)
    both.apply(("finish", {"row": row}))
    extend(both, both.apply(("admit", {})), 20)
    assert (both.ledger.free_pages(0), both.ledger.cached_pages(0)) == (0, 4)
    other = hit(both, [*text[:9], 99])
    assert (both.ledger.resolved_len[other], state(both, other)) == (9, (1, 9))
    assert indexed(both) == []
    both.finish()


def test_a_restored_index_has_its_states():
    both = Lockstep(FULL)
    row = kept_prompt(both, TEXT[:9])
    index(both, row, 9)
    both.snapshot()
    both.apply(("forget", {}))
    both.apply(("finish", {"row": row}))
    both.restore()
    assert indexed(both) == [(1, 8)]
    other = hit(both, TEXT[:9])
    assert state(both, other) == (1, 8)
    both.finish()


@pytest.mark.parametrize("keep", [[1], [-1], [0, 0], [1, 0]])
def test_lanes_that_are_not_there_are_not_kept(keep):
    ledger = FULL.build()
    rows = [ledger.admit()]
    with pytest.raises(ShapeError, match=r"keep must name lanes in 0\.\.1, ascending, got"):
        ledger.prepare_extend(rows, [6], keep=keep)


def test_without_states_nothing_is_kept():
    ledger = replace(FULL, states=()).build()
    row = ledger.admit()
    with pytest.raises(ConfigError, match="keep names 1 lanes, but this ledger has no state group"):
        ledger.prepare_extend([row], [6], keep=[0])
    ledger.prepare_extend([row], [6], keep=())


def test_a_log_has_the_kept_lanes_and_a_replay_finds_the_same_states(tmp_path):
    path = tmp_path / "log"
    ledger = FULL.build(record=path)
    rows = [ledger.admit(), ledger.admit()]
    plan = ledger.prepare_extend(rows, [6, 4], keep=[0], writes_draft=False)
    ledger.launch(plan.step)
    ledger.complete(plan.step)
    ledger.index(rows[0], TEXT[:6])
    ledger.admit_cached(TEXT[:6])
    hash_at_end = ledger.state_hash()
    ledger.close()
    log = log_reference.read(path.read_bytes())
    arguments = {"rows": [1, 2], "new_lengths": [6, 4], "kept_lanes": [0], "writes_draft": False}
    assert log.records[2].arguments == arguments
    replay = Replay(path)
    texts = []
    while (event := replay.advance()) is not None:
        texts.append(event.text)
    assert (replay.end, replay.ledger.state_hash()) == ("closed", hash_at_end)
    assert texts[2] == "prepare_extend([1, 2], [6, 4], keep=[0], writes_draft=False) -> step 1"
    assert replay.ledger.index_states(0) == [(1, 1, 5)]


# --- What is refused, and what is not there ---

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pin_prefix": (1, 4),
    "lend": (1, 0, 4),
    "rebind": (1, 0, 4, [1]),
    "admit_lent": ([1], 4),
    "watch_kv": (),
}


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_a_verb_that_does_not_move_states_is_refused(verb):
    both = Lockstep(FULL)
    prefilled(both, 6)
    before = both.ledger.state_hash(), both.ledger.digest
    with pytest.raises(ConfigError, match=f'{verb} is not supported with a state group.*"ssm": '):
        getattr(both.ledger, verb)(*ARGUMENTS[verb])
    assert (both.ledger.state_hash(), both.ledger.digest) == before


def test_a_log_has_the_states_and_a_replay_gives_them_again(tmp_path):
    path = tmp_path / "log"
    config = with_slots(FULL, 3, flush=2, eager=True)
    ledger = config.build(record=path)
    row = ledger.admit()
    ledger.launch(ledger.prepare_extend([row], [6]).step)
    child = ledger.prepare_decode([row], [0])
    ledger.launch(child.step)
    ledger.resolve(child.step, [1])
    ledger.complete(child.step)
    ledger.launch(ledger.prepare_extend([ledger.fork(row)], [9]).step)
    hash_at_end = ledger.state_hash()
    ledger.close()
    replay = Replay(path)
    assert replay.config["states"] == [*config.states]
    while replay.advance() is not None:
        pass
    assert (replay.end, replay.ledger.state_hash()) == ("closed", hash_at_end)
    log = log_reference.read(path.read_bytes())
    assert log.config["states"] == [{"name": "ssm", "num_slots": 3, "flush": 2, "eager": True}]


def test_a_ledger_of_full_groups_needs_sessions_for_a_checkpoint():
    with pytest.raises(ConfigError, match="state group ssm: build the ledger with sessions"):
        FULL.build().end_turn(1, 0)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"name": ""}, "a state group needs a name"),
        ({"num_slots": 0}, r"state group ssm: num_slots must be in \[1, 2147483647\], got 0"),
        ({"flush": 0}, r"state group ssm: flush must be in \[1, 2147483647\], got 0"),
    ],
)
def test_a_state_group_out_of_range_is_refused(group, message):
    with pytest.raises(ConfigError, match=message):
        StateGroup(**{"name": "ssm", "num_slots": 1, **group})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_slots(SESSIONS, 1), "num_slots must be at least 2 with sessions.*got 1"),
        (replace(FULL, states=(StateGroup("kv", num_slots=1),)), 'called "kv"'),
        (replace(FULL, states=FULL.states * 2), "at most one state group.*got 2"),
    ],
)
def test_a_ledger_with_unfit_states_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        config.build()


def test_a_ledger_without_states_has_empty_arrays():
    ledger = replace(FULL, states=()).build()
    plan = ledger.prepare_extend([ledger.admit()], [3])
    assert ledger.states == []
    folds = (plan.state_src, plan.state_dst, plan.state_from, plan.state_to)
    assert [fold.shape for fold in folds] == [(0, 1)] * 4
    with pytest.raises(ShapeError, match=r"state group 0 is not in 0\.\.0"):
        ledger.state_len(0)


def test_the_ring_holds_what_may_be_in_flight():
    """R = (D + 1) A + N + flush - 1."""
    assert FULL.build().state_ring_len(0) == 2 * 3 + 3
    assert with_slots(FULL, 1, flush=4).build().state_ring_len(0) == 2 * 3 + 3 + 3


def test_the_hash_and_the_digest_see_the_states():
    """The same calls, with one fold more or less."""
    ledgers = [with_slots(FULL, 3, flush=flush).build(digest=True) for flush in (1, 4)]
    for ledger in ledgers:
        row = ledger.admit()
        ledger.launch(ledger.prepare_extend([row], [6]).step)
        ledger.launch(ledger.prepare_decode([row], [1]).step)
    assert ledgers[0].state_hash() != ledgers[1].state_hash()
    assert ledgers[0].digest != ledgers[1].digest


def test_a_view_of_the_states_shows_a_restored_snapshot():
    both = Lockstep(FULL)
    row = prefilled(both, 6)
    slots, lengths, saved = (
        both.ledger.state_slot(0),
        both.ledger.state_len(0),
        both.ledger.snapshot(),
    )
    both.ledger.finish(row)
    assert (slots[row], lengths[row], both.ledger.free_state_slots(0)) == (0, 0, 3)
    both.ledger.restore(saved)
    assert (slots[row], lengths[row], both.ledger.free_state_slots(0)) == (1, 5, 2)


def test_a_restored_session_has_its_checkpoint():
    both = Lockstep(SESSIONS)
    row = prefilled(both, 6)
    both.apply(("end_turn", {"row": row, "length": 6}))
    both.snapshot()
    extend(both, row, 9)
    both.apply(("finish", {"row": row}))
    both.restore()
    assert both.ledger.kept_state(0, row) == (1, 5)
    extend(both, row, 9)
    assert both.apply(("trim", {"row": row, "length": 6})) == 5
    both.finish()


def test_a_snapshot_of_other_states_is_refused():
    saved = FULL.build().snapshot()
    for other in (with_slots(FULL, 2), replace(FULL, states=())):
        with pytest.raises(ConfigError, match="built otherwise"):
            other.build().restore(saved)


def test_a_group_says_what_it_is():
    group = StateGroup("ssm", num_slots=3, flush=2, eager=True)
    assert repr(group) == "StateGroup('ssm', num_slots=3, flush=2, eager=True)"
    assert group == StateGroup("ssm", num_slots=3, flush=2, eager=True)
    assert group != StateGroup("ssm", num_slots=3, flush=2)
    assert hash(group) == hash(StateGroup("ssm", num_slots=3, flush=2, eager=True))
