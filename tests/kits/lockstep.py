"""The real ledger, the oracle and the fake device, driven by the same operations and compared."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from oracle import Oracle, Page, Refused, Step
from oracle_index import Text
from oracle_slots import SlotOracle
from oracle_state import Holders
from specpool import NotReady, Plan, SpecpoolError
from specpool.testing import FakeDevice, LedgerConfig, Operation, apply, assert_no_page_leaked
from state_device import StateDevice

# Examples of a long run; 0 = the same ones each time.
SOAK = int(os.environ.get("SPECPOOL_SOAK", "0"))
SETTINGS = settings(
    stateful_step_count=200 if SOAK else 60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not SOAK,
    database=None,
    print_blob=bool(SOAK),
)

# Codes of `Ledger.ownership_map`.
STATES = {"free": 0, "owned": 1, "shared": 2, "fenced": 3, "cached": 4}


class Lockstep:
    """After every operation the two agree in all that can be seen, or both have refused alike."""

    slot_oracle: ClassVar[type[SlotOracle]] = SlotOracle
    state_device: ClassVar[type[StateDevice]] = StateDevice

    def __init__(self, config: LedgerConfig, choose: Callable[[int], int] | None = None) -> None:
        self.ledger = config.build(digest=True)
        options = config.options()
        self.plans: dict[int, Plan] = {}
        self.oracle: Oracle
        self.device: FakeDevice
        if not config.states:
            del options["states"]
            self.oracle = Oracle(config.groups, config.shapes, **options)
            self.device = FakeDevice(self.ledger, choose=choose, acknowledge=False)
        else:
            self.oracle = self.slot_oracle(config.groups, config.shapes, **options)
            self.device = self.state_device(
                self.ledger, self.plans, choose=choose, acknowledge=False
            )
        self.prefix_tokens: dict[int, list[int]] = {}
        # What a cache outside can find: tokens from a start on, and each group's pages of them.
        self.loans: list[tuple[list[int], list[list[int]]]] = []
        self.saved: tuple[Any, ...] | None = None  # The newest snapshot of all three.
        self.counts: Counter[tuple[str, str]] = Counter()  # (verb, "ok" or the error)
        # The newest step's number and the state hash before it, while nothing else was done.
        self.undo: tuple[int, int] | None = None

    def apply(self, operation: Operation) -> Any:
        """Runs it on both; returns the answer, or None where both refused."""
        verb, arguments = self._fit(operation)
        changes = verb not in ("take_delta", "ack_delta")
        hash_before, digest_before = self.ledger.state_hash(), self.ledger.digest
        evicted = self._evictions()
        estimate = self._estimate(verb, arguments)
        try:
            answer = apply(self.ledger, (verb, arguments))
            refusal = None
        except SpecpoolError as error:
            answer, refusal = None, error
        try:
            wanted = getattr(self.oracle, verb)(**without(arguments, "tag"))
            expected = None
        except Refused as error:
            wanted, expected = None, error
        self.counts[verb, type(refusal).__name__ if refusal else "ok"] += 1
        if refusal is not None or expected is not None:
            assert expected is not None, f"{verb}{arguments} is refused: {refusal!r}"
            assert refusal is not None, f"{verb}{arguments} is not refused, should be {expected}"
            assert type(refusal).__name__ == expected.kind, (refusal, expected)
            numbers = {name: vars(refusal)[name] for name in expected.numbers}
            assert numbers == expected.numbers, (refusal, expected.numbers)
            assert self.ledger.state_hash() == hash_before, f"refused {verb} changed the state"
            assert self.ledger.digest == digest_before, f"refused {verb} moved the digest"
        else:
            assert (self.ledger.digest != digest_before) == changes, f"the digest after {verb}"
            if verb in ("admit", "fork", "admit_lent", "import_row", "admit_cached"):
                self.oracle.seat(wanted, answer)
            self._observe(verb, arguments, answer)
            self._follow(verb, arguments, answer, wanted, estimate)
            if isinstance(self.oracle, SlotOracle):
                self.oracle.note_uses()
            if verb == "cancel" and self.undo and self.undo[0] == arguments["step"]:
                assert self.ledger.state_hash() == self.undo[1], "a cancel has not restored all"
            if changes:
                self.undo = None
            # What has left a window does not come back; it may leave pages of a sink behind.
            if verb in ("prepare_extend", "prepare_decode") and self._evictions() == evicted:
                self.undo = answer.step, hash_before
        self.compare()
        return answer

    def _evictions(self) -> list[list[int] | int]:
        lens = [self.ledger.evicted_len(at).tolist() for at in range(len(self.ledger.groups))]
        return [*lens, self.ledger.index_size[2]]

    def _observe(self, verb: str, arguments: dict[str, Any], answer: Any) -> None:
        """Tell the oracle what the prefix index holds."""
        if isinstance(self.oracle, SlotOracle):
            seen = self.ledger.index_entries()
            self.oracle.observe_losses(seen)
            self._bind()
            self.oracle.observe_gains(seen)
            if verb == "index":
                self._follow_index(self.oracle, answer, **arguments)
            keepers: set[tuple[Any, ...]] = set(self._index_states(self.oracle))
            for row in self.oracle.rows:
                keepers |= {(row, length) for _, length in self.ledger.soft_marks(0, row)}
            self.oracle.observe_states(keepers)

    def _index_states(self, oracle: SlotOracle) -> dict[tuple[bytes, Text], int]:
        """The ledger's states of the prefix index: their slots by salt and text."""
        entries, states = oracle.entries, self.ledger.index_states(0)
        return {(entries[at].salt, entries[at].text[:length]): slot for at, slot, length in states}

    def snapshot(self) -> None:
        """Keeps the state of all three, if nothing is in flight."""
        if self.oracle.steps:
            with pytest.raises(NotReady, match=f"step {self.oracle.steps[0].number} is not over"):
                self.ledger.snapshot()
            return
        memory = [vars(self.device)[name] for name in self._memory_names()]
        tokens = copy.deepcopy(self.prefix_tokens), copy.deepcopy(self.loans)
        copies = [self.oracle.snapshot(), copy.deepcopy(memory), tokens]
        self.saved = self.ledger.snapshot(), *copies

    def _memory_names(self) -> list[str]:
        names = ["_target", "_draft", "_sequences"]
        return [*names, "slots", "rings"] if isinstance(self.device, StateDevice) else names

    def restore(self) -> None:
        """Goes back to the newest snapshot, if nothing is in flight; table cells come as deltas."""
        if self.saved is None:
            return
        ledger, oracle, memory, (prefix_tokens, loans) = self.saved
        if self.oracle.steps:
            with pytest.raises(NotReady, match=f"step {self.oracle.steps[0].number} is not over"):
                self.ledger.restore(ledger)
            return
        self.ledger.restore(ledger)
        self.oracle.restore(oracle)
        device = self.device
        vars(device).update(zip(self._memory_names(), copy.deepcopy(memory), strict=True))
        self.prefix_tokens, self.undo = copy.deepcopy(prefix_tokens), None
        self.loans = copy.deepcopy(loans)
        self.compare()

    def finish(self) -> None:
        """Runs everything launched to its end and reads every row and prefix once more."""
        while unlaunched := [step.number for step in self.oracle.steps if not step.launched]:
            self.apply(("cancel", {"step": unlaunched[-1]}))
        if self.oracle.launched:
            self.apply(("complete", {"step": max(self.oracle.launched)}))
        for number, row in self.oracle.rows.items():
            waiting = [page_copy for page_copy in self.oracle.pending if page_copy.row is row]
            whole = min((page_copy.start for page_copy in waiting), default=row.written)
            self.device.check_row(number, min(whole, row.written))
        self._read_prefixes()
        self._read_loans()
        for group in range(len(self.ledger.groups)):
            lent = self.ledger.lent_pages(group).tolist()
            self.apply(("release_lent", {"group": group, "pages": lent}))
        for row in list(self.oracle.rows):
            self.apply(("finish", {"row": row}))
        if isinstance(self.oracle, SlotOracle):
            self.apply(("forget", {}))
        for prefix in list(self.oracle.prefixes):
            self.apply(("release_prefix", {"prefix": prefix}))
        for step in list(self.oracle.steps):
            ones = [1] * len(step.lanes)
            self.apply(("resolve", {"step": step.number, "accept_lens": ones}))
        assert_no_page_leaked(self.ledger)

    def _read_prefixes(self) -> None:
        """Check that each pinned prefix still holds the tokens from when it was pinned."""
        for number, prefix in self.oracle.prefixes.items():
            tokens = self.prefix_tokens[number]
            for at, table in enumerate(prefix.tables):
                size = self.ledger.groups[at].page_size
                for position in range(prefix.evicted[at], prefix.length):
                    slot = table[position // size].number * size + position % size
                    assert self.device._target[at][slot] == tokens[position], (number, position)
            if isinstance(self.device, StateDevice):
                self.device.check_exported(self.ledger.prefix_state_slot(number), tuple(tokens))

    def _read_loans(self) -> None:
        """Check that lent pages still hold the tokens from when they were lent."""
        for tokens, tables in self.loans:
            for at, pages in enumerate(tables):
                size = self.ledger.groups[at].page_size
                for position, token in enumerate(tokens):
                    if page := pages[position // size]:
                        slot = page * size + position % size
                        assert self.device._target[at][slot] == token, (page, position)

    # --- The device takes part ---

    def _fit(self, operation: Operation) -> Operation:
        """If the operation asks for a real round, let the device decide what it accepts."""
        verb, arguments = operation
        if verb in ("rebind", "admit_lent"):
            return self._fit_loan(verb, arguments)
        if verb == "complete" and arguments["step"] in self.oracle.launched:
            self.device.finish(arguments["step"])
        plan = self.plans.get(arguments["step"]) if verb == "resolve" else None
        if plan is None or plan.kind == "extend" or plan.step not in self.oracle.launched:
            return operation
        steps = [step for step in self.oracle.steps if step.number == plan.step]
        if not steps:
            return operation  # Over: to be refused.
        wish = arguments["accept_lens"]
        limits = [self.ledger.shapes[shape].max_accept_len for shape in plan.shapes]
        if len(wish) != len(plan):
            return operation
        # What is said of a lane whose row has moved on is not read.
        stands = [self.oracle._stands(lane) for lane in steps[0].lanes]
        lanes = zip(wish, limits, stands, strict=True)
        if any(counts and not 1 <= accept_len <= limit for accept_len, limit, counts in lanes):
            return operation
        accepted = zip(self.device.accept_lens(plan.step, wish), wish, stands, strict=True)
        accept_lens = [there if counts else said for there, said, counts in accepted]
        return verb, {**arguments, "accept_lens": accept_lens}

    def _prompt(self, tokens: Sequence[int]) -> list[int]:
        """What a row's extends write behind the tokens that it begins with: often the same."""
        length = self.ledger.max_context_len
        branch = self.device._choose(4)
        return [*tokens, *(at % 3 + 10 * branch for at in range(len(tokens), length))][:length]

    def _fit_loan(self, verb: str, arguments: dict[str, Any]) -> Operation:
        """If all its pages are lent, name those of one sequence: the device knows contents."""
        pages = arguments["pages"]
        lent = {0, *(page.number for page in self.oracle.lent)}
        if not lent.issuperset(pages):
            return verb, arguments
        start, end = arguments.get("start", 0), arguments.get("end", arguments.get("length", 0))
        live = verb == "admit_lent" or arguments["row"] in self.oracle.rows
        if not 0 <= start < end or not live or not self.oracle._is_edge(start):
            return verb, arguments
        fitting = [loan for loan in self.loans if len(loan[0]) >= end]
        if not fitting or not self.oracle._is_edge(end):
            return ("admit", {}) if verb == "admit_lent" else (verb, {**arguments, "pages": [-1]})
        named_pages = self._loaned(fitting[sum(pages) % len(fitting)], start, end)
        if verb == "rebind":
            row = self.oracle.rows[arguments["row"]]
            cells = self.oracle._range(row, start, end)
            named_pages = [
                page if is_own else 0
                for page, (_, _, is_own) in zip(named_pages, cells, strict=True)
            ]
        return verb, {**arguments, "pages": named_pages}

    def _loaned(self, loan: tuple[list[int], list[list[int]]], start: int, end: int) -> list[int]:
        sizes = [group.page_size for group in self.ledger.groups]
        tables = zip(loan[1], sizes, strict=True)
        return [page for table, size in tables for page in table[start // size : end // size]]

    def _note_loan(self, row: int, end: int) -> None:
        tables = []
        for at, group in enumerate(self.ledger.groups):
            tables.append(self.ledger.page_table(at)[row, : end // group.page_size].tolist())
            if not {0, *self.ledger.lent_pages(at).tolist()}.issuperset(tables[-1]):
                return
        self.loans.append((self.device.tokens(row)[:end], tables))

    def _arrive(self, row: int, length: int, drafted_len: int) -> list[int]:
        """Write the KV of a row that comes from elsewhere, behind every launched forward."""
        device = self.device
        if device._in_order:  # pages are not fenced: a forward may still write them
            device._run_up_to(device._newest)
        first = device._next_token
        device._next_token += length
        for at, group in enumerate(self.ledger.groups):
            line, size = self.ledger.page_table(at)[row], group.page_size
            begin = int(self.ledger.evicted_len(at)[row])
            sink = min(-(-group.sink // size) * size, begin)  # a cut may end in any of these cells
            for position in (*range(sink), *range(begin, length)):
                slot = int(line[position // size]) * size + position % size
                device._target[at][slot] = first + position
                if position < drafted_len:
                    device._draft[at][slot] = first + position
        tokens = list(range(first, first + length))
        if isinstance(self.oracle, SlotOracle) and isinstance(device, StateDevice):
            slot = int(self.ledger.state_slot(0)[row])
            self.oracle.row_states[self.oracle.rows[row]].slot.number = slot
            device.slots[slot] = tuple(tokens)
        return tokens

    def _equate(self, row: int, start: int, end: int, pages: list[int]) -> None:
        """The caller says that the row and the pages hold the same tokens there."""
        if not any(pages):
            return  # The row's window has passed the range.
        (loan, *_) = [
            loan
            for loan in self.loans
            if len(loan[0]) >= end
            and all(
                page in (0, loaned)
                for page, loaned in zip(pages, self._loaned(loan, start, end), strict=True)
            )
        ]
        new = dict(zip(self.device.tokens(row)[start:end], loan[0][start:end], strict=True))
        device = self.device
        for memory in (*device._target, *device._draft):
            memory.update({slot: new[token] for slot, token in memory.items() if token in new})
        lists = [sequence.tokens for sequence in device._sequences.values()]
        for tokens in (*lists, *self.prefix_tokens.values(), *(loan[0] for loan in self.loans)):
            tokens[:] = [new.get(token, token) for token in tokens]

    def _estimate(self, verb: str, arguments: dict[str, Any]) -> list[int] | None:
        if verb != "prepare_decode":
            return None
        try:
            lanes = arguments["rows"], arguments["shapes"]
            return self.ledger.tokens_required(*lanes).tolist()
        except SpecpoolError:
            return None

    def _follow(
        self, verb: str, arguments: dict[str, Any], answer: Any, wanted: Any, estimate: Any
    ) -> None:
        if verb in ("admit", "fork", "admit_lent", "import_row", "admit_cached"):
            if verb == "import_row":
                tokens = self._arrive(answer, **without(arguments, "tag"))
            elif verb == "fork":
                tokens = self.device.tokens(arguments["row"])
            elif verb == "admit_lent":
                length, pages = arguments["length"], arguments["pages"]
                (tokens, *_) = [
                    loan[0]
                    for loan in self.loans
                    if len(loan[0]) >= length and self._loaned(loan, 0, length) == pages
                ]
            elif verb == "admit_cached":
                tokens = arguments["tokens"]
            else:
                tokens = self.prefix_tokens.get(arguments.get("prefix"), [])
            prompt = self._prompt(tokens) if isinstance(self.device, StateDevice) else []
            self.device.begin(answer, tokens[: wanted.resolved], prompt=prompt)
        elif verb in ("prepare_extend", "prepare_decode"):
            self.plans[answer.step] = answer
            self._bind()
            if isinstance(self.oracle, SlotOracle):
                self._compare_folds(self.oracle, answer)
            self._compare_plan(answer, wanted)
            if estimate is not None:
                took = (answer.allocated_after - answer.allocated_before).sum(axis=1)
                assert took.tolist() == estimate, "estimate and claim differ"
        elif verb == "launch":
            self.device.launch(self.plans[arguments["step"]])
            self.oracle.take_delta(arguments["step"])
        elif verb == "take_delta":
            self.device.apply_delta(answer)
        elif verb == "abandon":
            self.device.fail(arguments["step"])
        elif verb == "lend":
            self._note_loan(arguments["row"], arguments["end"])
        elif verb == "rebind":
            self._equate(**arguments)
        elif verb == "release_lent":
            at, gone = arguments["group"], set(arguments["pages"])
            self.loans = [loan for loan in self.loans if gone.isdisjoint(loan[1][at])]
        elif verb in ("pin_prefix", "export"):
            assert answer == wanted
            length = self.ledger.prefix_len(answer)
            self.prefix_tokens[answer] = self.device.tokens(arguments["row"])[:length]
        elif verb != "index":
            assert answer == wanted, (verb, answer, wanted)

    def _follow_index(
        self, oracle: SlotOracle, known: int, row: int, tokens: list[int], salt: bytes
    ) -> None:
        text, ledger = tuple(tokens[:known]), self.ledger
        # An entry may have no page, if a window has passed it, and is gone then.
        has_pages = oracle.is_known(salt, text) or known == 0
        assert has_pages or all(group.window for group in ledger.groups), text
        protected = [int(ledger.protected_len(at)[row]) for at in range(len(ledger.groups))]
        oracle.observe_protected(row, protected, known)
        oracle.take_states(row, text, salt)

    # --- Comparison ---

    def compare(self) -> None:
        """Check that everything visible of the ledger equals the oracle."""
        ledger, oracle = self.ledger, self.oracle
        self._bind()
        size = ledger.num_rows + 1
        for name in ("resolved", "drafted"):
            expected = [getattr(oracle.rows.get(row), name, 0) for row in range(size)]
            assert getattr(ledger, f"{name}_len").tolist() == expected, name
        rounds = [len(oracle.rows[row].rounds) if row in oracle.rows else 0 for row in range(size)]
        assert ledger.in_flight.tolist() == rounds
        assert ledger.epoch.tolist() == oracle.epochs
        assert ledger.idle.tolist() == [
            row in oracle.rows and oracle.rows[row].idle for row in range(size)
        ]
        assert ledger.num_free_rows == oracle.num_free_rows()
        assert ledger.prefixes == list(oracle.prefixes)
        for number, prefix in oracle.prefixes.items():
            assert ledger.prefix_len(number) == prefix.length
            slot = oracle.exported_states[number] if isinstance(oracle, SlotOracle) else None
            assert ledger.prefix_state_slot(number) == (slot.number if slot else 0)
        assert ledger.steps() == oracle.unfinished()
        holders_by_page = oracle.holders()
        for group in range(len(ledger.groups)):
            self._compare_group(group, holders_by_page)
        if isinstance(oracle, SlotOracle):
            self._compare_states(oracle)
        ledger.check()

    def _compare_states(self, oracle: SlotOracle) -> None:
        ledger = self.ledger
        slots, lengths = np.zeros_like(ledger.state_slot(0)), np.zeros_like(ledger.state_len(0))
        for number, row in oracle.rows.items():
            state = oracle.row_states[row]
            slots[number], lengths[number] = state.slot.number if state.slot else 0, state.length
            kept = (state.kept[0].number, state.kept[1]) if state.kept else None
            assert ledger.kept_state(0, number) == kept
            marks = [(mark.slot.number, mark.length) for mark in state.marks]
            assert ledger.soft_marks(0, number) == marks
            assert ledger.checkpoint_len(number) == row.checkpoint
        assert ledger.state_slot(0).tolist() == slots.tolist()
        assert ledger.state_len(0).tolist() == lengths.tolist()
        assert ledger.free_state_slots(0) == oracle.free_state_slots()
        assert ledger.fenced_state_slots(0) == len(oracle.fenced_slots())
        assert ledger.cached_state_slots(0) == len(oracle.cached_slots())
        assert ledger.reclaimable_state_slots(0) == oracle.reclaimable_state_slots()
        states = self._index_states(oracle)
        assert len(states) == len(ledger.index_states(0)), "a text has two states"
        assert states == {key: slot.number for key, slot in oracle.indexed_states.items()}
        all_slots = {*oracle.held_slots(), *oracle.fenced_slots(), *oracle.cached_slots()}
        in_use = [slot.number for slot in all_slots]
        assert len(set(in_use)) == len(in_use), f"a slot is handed out twice: {sorted(in_use)}"
        assert all(1 <= slot <= oracle.group.num_slots for slot in in_use)
        assert isinstance(self.device, StateDevice)
        self.device.check_states()
        for (_, text), slot in oracle.indexed_states.items():
            if not oracle._is_waiting(slot):
                self.device.check_indexed(slot.number, text)

    def _compare_group(self, group: int, holders_by_page: Holders) -> None:
        ledger, oracle = self.ledger, self.oracle
        lent = sorted(page.number for page in oracle.lent if page.group == group)
        assert ledger.lent_pages(group).tolist() == lent
        for name in ("allocated", "protected", "evicted"):
            expected = [
                getattr(oracle.rows[row].parts[group], name) if row in oracle.rows else 0
                for row in range(ledger.num_rows + 1)
            ]
            assert getattr(ledger, f"{name}_len")(group).tolist() == expected, name
        page_states = oracle.states(group, holders_by_page)
        num_pages = Counter(page_states.values())
        assert ledger.free_pages(group) == oracle.free_pages(group)
        assert ledger.cached_pages(group) == num_pages["cached"]
        assert ledger.fenced_pages(group) == num_pages["fenced"]
        assert ledger.reclaimable_pages(group) == oracle.reclaimable_pages(group, holders_by_page)
        table = np.zeros_like(ledger.full_table(group))
        for number, row in oracle.rows.items():
            for column, page in row.parts[group].table.items():
                table[number, column] = page.number
        assert (ledger.page_table(group) == table).all()
        states, _, holders = ledger.ownership_map(group)
        expected_states, expected_holders = np.zeros_like(states), np.zeros_like(holders)
        for page, state in page_states.items():
            expected_states[page.number] = STATES[state]
            expected_holders[page.number] = len(holders_by_page[page])
        assert states.tolist() == expected_states.tolist()
        assert holders.tolist() == expected_holders.tolist()

    def _bind(self) -> None:
        """Tells the oracle's new pages their numbers; no two pages in use have the same."""
        for group in range(len(self.ledger.groups)):
            table = self.ledger.page_table(group)
            for number, row in self.oracle.rows.items():
                for column, page in row.parts[group].table.items():
                    page.number = page.number or int(table[number, column])
            in_use = [page.number for page in self.oracle.pages if page.group == group]
            assert len(set(in_use)) == len(in_use), f"a page is handed out twice: {sorted(in_use)}"
            assert all(1 <= page <= self.ledger.groups[group].num_pages for page in in_use)

    def _compare_folds(self, oracle: SlotOracle, plan: Plan) -> None:
        """Tells the oracle's new slots their numbers, and compares what the lanes fold."""
        folds = oracle.folds[plan.step]
        for fold, number in zip(folds, plan.state_dst[0].tolist(), strict=True):
            if fold.is_fresh and fold.dst:
                fold.dst.number = number
        assert plan.state_src[0].tolist() == [fold.src.number if fold.src else 0 for fold in folds]
        assert plan.state_dst[0].tolist() == [fold.dst.number if fold.dst else 0 for fold in folds]
        assert plan.state_from[0].tolist() == [fold.start for fold in folds]
        assert plan.state_to[0].tolist() == [fold.end for fold in folds]

    def _compare_plan(self, plan: Plan, step: Step) -> None:
        def number(page: Page) -> int:
            return page.number

        lanes = step.lanes
        assert (plan.step, plan.kind, plan.writes_draft, len(plan)) == (
            step.number,
            step.kind,
            step.writes_draft,
            len(lanes),
        )
        assert plan.rows.tolist() == [lane.row.number for lane in lanes]
        assert plan.shapes.tolist() == [lane.shape for lane in lanes]
        assert plan.epochs.tolist() == [lane.epoch for lane in lanes]
        assert plan.lo.tolist() == [lane.lo for lane in lanes]
        assert plan.hi.tolist() == [lane.hi for lane in lanes]
        assert plan.start.tolist() == [lane.resolved for lane in lanes]
        assert plan.new_len.tolist() == [lane.row.resolved for lane in lanes]
        assert plan.allocated_before.T.tolist() == [lane.allocated for lane in lanes]
        assert plan.allocated_after.T.tolist() == [
            [part.allocated for part in lane.row.parts] for lane in lanes
        ]
        assert plan.page_copies.tolist() == [
            [page_copy.group, number(page_copy.src), number(page_copy.dst), page_copy.tokens]
            for page_copy in step.copies
        ]


def without(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}
