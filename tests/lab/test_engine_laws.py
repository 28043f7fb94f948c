"""Each law of the laboratory of engines finds the fault planted for it, and none in a clean run."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from lab.engines.accounts import Accounts
from lab.engines.content import Text, tokens_of
from lab.engines.device import LateDevice, LateWrite, LaunchedStep, SlotMemory
from lab.engines.laws import (
    IDLE_TURNS,
    LAWS,
    CachedEntry,
    EngineView,
    Extent,
    Lengths,
    RequestView,
)

BLOCKS, SIZE = 8, 2


def clean_view() -> EngineView:
    """Two requests share a cached block; one block is kept by neither, three are free."""
    accounts = Accounts(LateDevice(), BLOCKS)
    accounts.take([1, 2, 3, 7])
    accounts.share([1])
    text = Text(tokens_of(0, 1, 4))
    entry = CachedEntry("2 tokens", 1, text.keys(0, 2), text.keys(0, 2))
    return EngineView(
        accounts,
        free=[4, 5, 6],
        num_free=3,
        rows={"a": [[1, 2]], "b": [[1, 3]]},
        lengths={"a": Lengths(known=4, computed=3, in_flight=0, placeholders=0)},
        requests={"a": RequestView(text, 3, said=text.answer(2))},
        mirrored={"a": [[1, 2]]},
        others=Counter([7]),
        entries=[entry],
        extents={"a": Extent(shared=2, committed=3, allocated=4, width=8)},
        locks={"node": (2, 2)},
    )


def broken(view: EngineView) -> list[str]:
    return [law.name for law in LAWS if list(law.at_turn(view))]


def test_a_clean_engine_keeps_every_law() -> None:
    view = clean_view()
    assert broken(view) == []
    assert not view.accounts.device.findings
    empty = EngineView(Accounts(LateDevice(), BLOCKS), list(range(1, BLOCKS)), 7, {}, {}, {})
    assert not [line for law in LAWS for line in (*law.at_turn(empty), *law.at_rest(empty))]


#: The law, and the fault that it must see alone.
PLANTED = {
    "the free counter drifts": ("conservation", {"num_free": 4}),
    "a block is twice in the free list": ("conservation", {"free": [4, 5, 5], "num_free": 3}),
    "a held block is free": ("conservation", {"free": [3, 4, 5, 6], "num_free": 4}),
    "a block is lost": ("conservation", {"free": [4, 5], "num_free": 2}),
    "a row names a block without holding it": ("rows", {"rows": {"a": [[1, 2]], "b": [[1, 2]]}}),
    "a kept block is forgotten": ("rows", {"others": Counter()}),
    "the worker's row is not the engine's": ("rows", {"mirrored": {"a": [[1, 3]]}}),
    "more is computed than known": ("lengths", {"lengths": {"a": Lengths(4, 4, 0, 0)}}),
    "a placeholder is taken twice": ("lengths", {"lengths": {"a": Lengths(4, 3, 1, -1)}}),
    "more is committed than allocated": ("lengths", {"extents": {"a": Extent(2, 5, 4, 8)}}),
    "the cache owns what is not written": ("lengths", {"extents": {"a": Extent(4, 3, 4, 8)}}),
    "a row is too long": ("lengths", {"extents": {"a": Extent(2, 3, 9, 8)}}),
    "a lock outlives its holder": ("locks", {"locks": {"node": (2, 1)}}),
    "a holder has no lock": ("locks", {"locks": {"node": (0, 1)}}),
    "nothing runs": ("progress", {"idle_turns": IDLE_TURNS, "num_waiting": 1}),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_breaks_its_law(what: str) -> None:
    law, change = PLANTED[what]
    assert broken(dataclasses.replace(clean_view(), **change)) == [law]


def test_an_entry_that_names_another_block_is_untrue() -> None:
    view = clean_view()
    (entry,) = view.entries or ()
    other = Text(tokens_of(0, 2, 2)).keys(0, 2)
    assert broken(dataclasses.replace(view, entries=[dataclasses.replace(entry, held=other)])) == [
        "cache truth"
    ]


@pytest.mark.parametrize("fault", ["lost", "twice", "short"])
def test_a_lost_token_a_token_said_twice_and_an_early_end_break_a_text(fault: str) -> None:
    view = clean_view()
    request = view.requests["a"]
    full = request.text.answer(3)
    request.said = {"lost": full[1:], "twice": [full[0], *full], "short": full[:2]}[fault]
    request.is_finished = True
    assert broken(view) == ["text"]
    request.said = full
    assert broken(view) == []


def test_at_rest_nothing_is_held_or_locked() -> None:
    view = dataclasses.replace(clean_view(), locks={"node": (1, 1)})
    assert [law.name for law in LAWS if list(law.at_rest(view))] == ["conservation", "locks"]


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        (lambda accounts: accounts.take([1]), "take"),
        (lambda accounts: accounts.take([0]), "take"),
        (lambda accounts: accounts.give_back([1, 1]), "free"),
        (lambda accounts: accounts.give_back([4]), "free"),
    ],
)
def test_a_block_has_one_owner(calls, place: str) -> None:
    device = LateDevice()
    accounts = Accounts(device, BLOCKS)
    accounts.take([1])
    accounts.share([1, 0])
    accounts.give_back([1, 0])
    assert not device.findings
    calls(accounts)
    assert {(finding.law, finding.where) for finding in device.findings} == {("one owner", place)}


@dataclasses.dataclass
class Late:
    """A device with a text of four tokens in blocks 1 and 2."""

    device: LateDevice = dataclasses.field(default_factory=LateDevice)
    text: Text = dataclasses.field(default_factory=lambda: Text(tokens_of(0, 0, 4)))

    def __post_init__(self) -> None:
        self.memory = self.device.add(SlotMemory("target KV", BLOCKS, SIZE))
        self.device.write(self.memory, [1, 2], SIZE, 0, self.text.keys(0, 4))

    def reader(self, row: list[int], text: Text | None = None) -> LaunchedStep:
        keys = (text or self.text).keys(0, 4)
        return LaunchedStep(
            frozenset(row), lambda: self.device.read(self.memory, row, SIZE, 0, keys, "a")
        )

    def transfer(self, blocks: list[int]) -> LateWrite:
        slots = [(block, at) for block in blocks for at in range(SIZE)]
        return LateWrite("b", self.memory, slots, np.arange(1, 1 + len(slots)))


def test_a_step_reads_what_is_there_when_it_runs() -> None:
    late = Late()
    step = late.device.launch(late.reader([1, 2]))
    assert not late.device.findings  # it has not run
    late.device.run_through(step)
    assert not late.device.findings
    step = late.device.launch(late.reader([1, 2]))
    late.memory.keys[2, 1] = 5  # somebody else's KV, behind the launch
    late.device.run_through(step)
    (finding,) = late.device.findings
    assert (finding.law, finding.where) == ("content", "target KV read")
    assert "1 of 4 slots" in finding.text and "position 3, block 2" in finding.text


def test_steps_run_in_the_order_of_their_launch() -> None:
    late, order = Late(), list[int]()
    first = late.device.launch(LaunchedStep(frozenset(), lambda: order.append(1)))
    last = late.device.launch(LaunchedStep(frozenset(), lambda: order.append(2)))
    late.device.run_through(last)
    assert order == [1, 2] and first.has_run


def test_what_is_known_of_every_wrong_block_is_said() -> None:
    late, other = Late(), Text(tokens_of(0, 2, 4))
    late.device.notes[1] = ", and is noted"
    late.device.run_through(late.device.launch(late.reader([1, 2], other)))
    late.device.notes[2] = ", and is noted"
    late.device.run_through(late.device.launch(late.reader([1, 2], other)))
    assert ["noted" in finding.text for finding in late.device.findings] == [False, True]


def test_slots_of_another_text_and_unwritten_ones_are_wrong() -> None:
    late = Late()
    other = Text([*late.text.tokens[:3], 9])
    late.device.run_through(late.device.launch(late.reader([1, 2], other)))
    late.device.run_through(late.device.launch(late.reader([1, 3])))
    assert ["nobody wrote" in finding.text for finding in late.device.findings] == [False, True]


def test_a_transfer_may_not_touch_what_a_launched_step_uses() -> None:
    late = Late()
    step = late.device.launch(late.reader([1, 2]))
    late.device.land(late.device.start_late(late.transfer([3])), {3})
    assert not late.device.findings
    late.device.start_late(late.transfer([2]))
    (finding,) = late.device.findings
    assert (finding.law, finding.where) == ("order", "late write")
    late.device.run_through(step)
    late.device.start_late(late.transfer([2]))
    assert len(late.device.findings) == 1


def test_a_transfer_lands_in_blocks_of_its_request() -> None:
    late = Late()
    write = late.device.start_late(late.transfer([3, 4]))
    late.device.land(write, {3})
    (finding,) = late.device.findings
    assert (finding.law, finding.where) == ("order", "landing") and "[4]" in finding.text
    assert late.memory.keys[4].tolist() == [3, 4]


def test_keys_differ_by_salt_and_next_token() -> None:
    prompt = tokens_of(0, 0, 3)
    plain, salted, longer = Text(prompt), Text(prompt, salt=1), Text([*prompt, 9])
    assert (plain.keys(0, 3) != salted.keys(0, 3)).all()
    assert (plain.keys(0, 3) == longer.keys(0, 3)).all()
    assert (plain.draft_keys(0, 3) == longer.draft_keys(0, 3)).tolist() == [True, True, False]
    assert len({plain.state_key(length) for length in range(4)}) == 4
