"""The host tier: what goes there comes back byte by byte, in whole or not at all."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch

from host_kit import TREE, World, groups
from specpool import (
    ConfigError,
    CorruptState,
    NotReady,
    OrderError,
    OutOfPages,
    OutOfRows,
    ShapeError,
    SpecpoolError,
)
from specpool.engine.memory.host import copies as host_memory
from specpool.engine.memory.host.reload import reload
from specpool.engine.memory.host.tier import HostTier

LAYOUTS = [
    groups(4),
    groups(4, 1),
    groups(3, 16),
    groups(4, windows=[(2, 7)]),
    groups(8, 2, windows=[(1, 4), (4, 9)]),
    groups(4, windows=[(1, 1), (3, 3)]),
    groups(4, windows=[(2, 5, 3), (1, 1, 2)]),
    groups(4, num_slots=72),  # six rows do not fit beside each other
]


# --- against the oracle --------------------------------------------------------------------------


class HostAgainstOracle:
    """Rows and handles; `World` checks every held slot of every layer after each operation."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.draw, self.counts = random.Random(seed), counts
        self.world = World(
            self.draw.choice(LAYOUTS),
            host_rows=self.draw.choice([1, 1.4, 3]),
            overlap_depth=1,
            max_chunk=self.draw.choice([5, 16]),
            page_fencing=self.draw.random() < 0.5,
            sessions=True,
        )
        self.flying: dict[int, Any] = {}  # by row

    def run(self, num_steps: int) -> None:
        verbs = [self.admit, self.reload_into_a_crowd, self.extend, self.launch, self.cancel]
        verbs += [self.finish, self.fork, self.cut, self.abort, self.offload, self.drop]
        verbs += [self.offload_in_flight, self.reload, self.trim]
        for _ in range(num_steps):
            self.draw.choice(verbs)()
        self.land()
        for row in list(self.world.kv):
            self.world.give_back(row)
        self.world.tier.close()
        self.world.is_clean()

    def row(self) -> int | None:
        rows = [row for row in self.world.kv if row not in self.flying]
        return self.draw.choice(rows) if rows else None

    def writes_draft(self) -> bool:
        return self.draw.random() < 0.5

    def land(self) -> None:
        """Every round comes to its end, the oldest first."""
        for row, (plan, most) in list(self.flying.items()):
            self.world.finish(plan, self.draw.randint(1, most))
            del self.flying[row]

    @contextlib.contextmanager
    def doing(self, name: str):
        try:
            yield
            self.counts[name] += 1
        except SpecpoolError as error:
            self.counts[f"{name} {type(error).__name__}"] += 1
        self.world.check()

    def admit(self) -> None:
        with self.doing("admit"):
            self.world.admit(self.draw.randint(1, 40))

    def reload_into_a_crowd(self) -> None:
        """Short rows use up the rows, long ones the pages."""
        length = self.draw.choice([2, 30])
        if self.world.away and self.draw.random() < 0.3:  # or little else happens
            self.land()
            with contextlib.suppress(OutOfPages, OutOfRows):
                while True:
                    self.world.admit(length)
            self.reload()

    def extend(self) -> None:
        row = self.row()
        if row is not None:
            length = int(self.world.ledger.resolved_len[row]) + self.draw.randint(1, 12)
            with self.doing("extend"):
                self.world.extend(row, min(length, self.world.context), self.writes_draft())

    def launch(self) -> None:
        row, shape = self.row(), self.draw.randint(0, 1)
        if row is not None:
            with self.doing("launch"):
                plan = self.world.decode(row, shape, self.writes_draft())
                self.flying[row] = plan, TREE.max_accept_len if shape else 1

    def cancel(self) -> None:
        """Cancel the step; pages that its prepare evicted stay evicted."""
        row = self.row()
        if row is not None:
            with self.doing("cancel"):
                ledger = self.world.ledger
                ledger.cancel(ledger.prepare_decode([row], [0], writes_draft=False).step)
                self.offload_now(row)

    def finish(self) -> None:
        self.land()
        self.world.check()

    def fork(self) -> None:
        row = self.row()
        if row is not None:
            with self.doing("fork"):
                self.world.fork(row)

    def cut(self) -> None:
        row, back = self.row(), self.draw.randint(0, 20)
        if row is not None:
            ledger = self.world.ledger
            verb = self.draw.choice([ledger.end_turn, ledger.trim])
            with self.doing("cut"):
                verb(row, max(int(ledger.resolved_len[row]) - back, 0))

    def abort(self) -> None:
        row = self.row()
        if row is not None:
            with self.doing("abort"):
                self.world.give_back(row)

    def offload(self) -> None:
        row = self.row()
        if row is not None:
            self.offload_now(row)

    def offload_now(self, row: int) -> None:
        before, ledger = self.world.tier.stats(), self.world.ledger
        lengths = int(ledger.resolved_len[row]), int(ledger.drafted_len[row])
        state = self.world.state()
        with self.doing("offload"):
            handle = self.world.offload(row)
            after = self.world.tier.stats()
            if handle is None:
                assert self.world.state() == state
                self.counts["full"] += after.full_ct - before.full_ct
                self.counts["unfit"] += after.unfit_ct - before.unfit_ct
            else:
                assert not ledger.is_live(row) and after.offload_ct == before.offload_ct + 1
                assert (handle.length, handle.drafted_len) == lengths

    def offload_in_flight(self) -> None:
        for row in self.flying:
            state = self.world.state()
            with pytest.raises(NotReady):
                self.world.offload(row)
            assert self.world.state() == state

    def reload(self) -> None:
        if self.world.away:
            self.land()
            handle, state = self.draw.choice(list(self.world.away)), self.world.state()
            ledger = self.world.ledger
            with self.doing("reload"):
                try:
                    row = self.world.reload(handle)
                except (OutOfPages, OutOfRows):
                    assert self.world.state() == state
                    raise
                assert ledger.resolved_len[row] == handle.length
                assert ledger.drafted_len[row] == handle.drafted_len

    def trim(self) -> None:
        back = self.draw.choice([0, 1, 4, 9, 40])
        if self.world.away and self.draw.random() < 0.2:  # or the host is never full
            handle = self.draw.choice(list(self.world.away))
            kv, length = self.world.away.pop(handle), max(handle.length - back, 0)
            with self.doing("trim"):
                shorter = self.world.tier.trim(handle, length)
                if shorter is None:
                    self.counts["trimmed away"] += 1
                    assert length <= handle.last_start and length < handle.length
                else:
                    self.world.away[shorter] = kv
                    drafted_len = min(handle.drafted_len, length)
                    assert (shorter.length, shorter.drafted_len) == (length, drafted_len)

    def drop(self) -> None:
        if self.world.away:
            handle = self.draw.choice(list(self.world.away))
            del self.world.away[handle]
            with self.doing("drop"):
                self.world.tier.drop(handle)


@pytest.mark.parametrize("num_runs", [25, pytest.param(200, marks=pytest.mark.full)])
def test_what_comes_back_is_what_went_byte_by_byte(num_runs):
    counts: Counter[str] = Counter()
    for seed in range(num_runs):
        HostAgainstOracle(seed, counts).run(80)
    wanted = ["offload", "reload", "drop", "trim", "trimmed away", "full", "unfit", "fork", "cut"]
    for name in [*wanted, "launch", "offload NotReady", "reload OutOfPages", "reload OutOfRows"]:
        assert counts[name] >= 1, (name, counts)


def test_a_window_that_a_cut_has_shortened_is_not_taken_over(monkeypatch):
    """A reload would hold slots that were not on the host; it does without the guard."""

    def shortened() -> tuple[World, int]:
        world = World(groups(4, windows=[(1, 4)]), sessions=True, max_chunk=16)
        row = world.admit(12)
        world.ledger.cancel(world.ledger.prepare_decode([row], [0]).step)  # evicts by r
        assert world.ledger.evicted_len(0)[row] == 9
        return world, row

    world, row = shortened()
    assert world.offload(row) is None and world.tier.stats().unfit_ct == 1
    world.check()
    monkeypatch.setattr(HostTier, "_last_start", lambda self, row: 0)
    world, row = shortened()
    row = world.reload(world.offload(row))
    assert world.wrong(row)


# --- all or nothing ------------------------------------------------------------------------------


THREE = {"windows": [(2, 5)], "num_slots": 160}


@pytest.mark.parametrize("group", [0, 1, 2])
def test_the_nth_host_page_refused_changes_nothing(group):
    """Each group in turn is the only one that is short, from one page to all."""
    num_free, taken = 0, False
    while not taken:
        world = World(groups(4, 1, **THREE), max_chunk=16)
        row, pool = world.admit(21), world.tier._pages[group]
        pool.take(pool.num_free - num_free, 99)
        state = world.state()
        taken = world.tier.save(row) is not None
        if not taken:
            assert world.state() == state
            assert world.tier.stats().full_ct == 1
            num_free += 1
    assert num_free == [5, 6, 21][group]  # of the window, the slots from 12 on


class Peaks:
    """A ledger that remembers most pages of each group that were taken after a prepare."""

    def __init__(self, ledger) -> None:
        self._ledger = ledger
        self.most = [0] * len(ledger.groups)

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def prepare_extend(self, *args, **options):
        plan = self._ledger.prepare_extend(*args, **options)
        for g, group in enumerate(self._ledger.groups):
            self.most[g] = max(self.most[g], group.num_pages - self._ledger.free_pages(g))
        return plan


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [5, 16, 17, 21, 40])
def test_the_nth_device_page_refused_changes_nothing(length):
    _refused_where_it_runs_dry(groups(4, 1, **THREE), length)


def test_a_reload_counts_the_pages_of_a_sink():
    """The window group is the only one that is short."""
    tight = groups(4, windows=[(2, 5, 3)], num_slots=44)[0]
    _refused_where_it_runs_dry([tight, *groups(4, 1, num_slots=160)], 32)


def _refused_where_it_runs_dry(of, length):
    """Law: a reload is refused exactly where it would run out of pages, before it takes a row."""
    alone = World(of, max_chunk=16)
    handle = alone.offload(alone.admit(length))
    alone.tier.ledger = peaks = Peaks(alone.ledger)
    alone.reload(handle)
    outcomes = Counter()
    for num_others in range(1, 60):
        world = World(of, max_chunk=16, num_rows=8)
        handle = world.offload(world.admit(length))
        with contextlib.suppress(OutOfPages):
            for _ in range(4):
                world.admit(num_others % 40 + 1)
        free = [world.ledger.free_pages(g) for g in range(3)]
        fits = all(n <= most for n, most in zip(peaks.most, free, strict=True))
        state = world.state()
        if fits:
            world.reload(handle)
        else:
            with pytest.raises(OutOfPages, match=r"needs \d+ pages, \d+ free") as refusal:
                reload(world.tier, world.cache, handle)
            assert refusal.value.need > refusal.value.free
            assert world.state() == state
        world.check()
        outcomes[fits] += 1
    assert min(outcomes[True], outcomes[False]) >= 1, outcomes


def test_no_row_for_a_reload():
    world = World(groups(4), num_rows=2)
    handle = world.offload(world.admit(9))
    for _ in range(2):
        world.admit(3)
    state = world.state()
    with pytest.raises(OutOfRows):
        reload(world.tier, world.cache, handle)
    assert world.state() == state
    world.give_back(1)
    assert world.reload(handle) == 1
    world.check()


# --- a reload is a step --------------------------------------------------------------------------


def reload_by_steps(world: World, handle, between=lambda: None) -> int:
    """Reload as a scheduler does: prepare, launch, restore, and complete later."""
    row, start, steps = world.ledger.admit(handle.tag), 0, []
    kv = world.away.pop(handle)
    while start < handle.length:
        new_len, writes_draft = world.tier.next_extend(handle, start)
        plan = world.ledger.prepare_extend([row], [new_len], writes_draft=writes_draft)
        world.launch(plan)
        world.tier.restore(plan, [handle])
        steps.append(plan.step)
        start = new_len
        between()
    world.kv[row] = kv
    return row


@pytest.mark.parametrize("page_fencing", [True, False])
def test_a_reload_runs_beside_rounds_in_flight(page_fencing):
    """Law: its steps complete in order, after the rounds that were launched before."""
    of = groups(4, 1, windows=[(2, 5)], num_slots=256)
    world = World(of, max_chunk=16, overlap_depth=1, page_fencing=page_fencing)
    away, other = world.admit(37), world.admit(10)
    handle = world.offload(away)
    plans = [world.decode(other, 0)]

    def between():
        if len(plans) == 2:
            world.ledger.resolve(plans[0].step, [1])  # but not complete
            del plans[0]
        plans.append(world.decode(other, 0))

    row = reload_by_steps(world, handle, between)
    assert world.ledger.completed < plans[0].step
    while plans:
        world.finish(plans.pop(0), 1)
    world.ledger.complete(world.ledger.steps()[-1][0] if world.ledger.steps() else 1)
    assert not world.wrong(row)
    world.extend(row, 40)
    world.check()


def test_two_reloads_share_a_step():
    world = World(groups(4, 1))
    handles = [world.offload(world.admit(n)) for n in (9, 14)]
    rows = [world.ledger.admit() for _ in handles]
    plan = world.ledger.prepare_extend(rows, [handle.length for handle in handles])
    world.launch(plan)
    world.tier.restore(plan, handles)
    world.ledger.complete(plan.step)
    for row, handle in zip(rows, handles, strict=True):
        world.kv[row] = world.away.pop(handle)
    world.check()
    assert world.tier.stats().reload_ct == 2


def test_draft_kv_comes_back_as_far_as_it_was_valid():
    world = World(groups(4, 1))
    row = world.admit(11)
    world.extend(row, 17, writes_draft=False)
    assert world.ledger.drafted_len[row] == 11
    handle = world.offload(row)
    assert world.tier.next_extend(handle, 0) == (11, True)
    assert world.tier.next_extend(handle, 11) == (17, False)
    row = world.reload(handle)
    assert (world.ledger.resolved_len[row], world.ledger.drafted_len[row]) == (17, 11)
    world.check()


def test_a_reload_goes_on_behind_a_shared_prefix():
    """A row admitted on pinned pages takes from the host what it does not share."""
    world = World(groups(4, 1))
    first = world.admit(10)
    prefix = world.ledger.pin_prefix(first, 8)
    row = world.fork(first)
    world.extend(row, 19)
    world.give_back(first)
    handle = world.offload(row)
    row = world.ledger.admit(prefix=prefix, length=7)  # its tail is copied, then filled
    plan = world.ledger.prepare_extend([row], [19])
    world.launch(plan)
    world.tier.restore(plan, [handle])
    world.ledger.complete(plan.step)
    world.kv[row] = world.away.pop(handle)
    world.check()
    world.give_back(row)
    world.ledger.release_prefix(prefix)
    world.is_clean()


# --- what goes wrong -----------------------------------------------------------------------------


def failing(monkeypatch, way: str, nth: int, error: type[BaseException] = RuntimeError) -> None:
    """The n-th copy of that way fails."""
    copy, calls = getattr(host_memory._Group, way), Counter()

    def run(self, *args):
        calls[way] += 1
        if calls[way] == nth:
            raise error("the copy is lost")
        copy(self, *args)

    monkeypatch.setattr(host_memory._Group, way, run)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_copy_to_the_host_leaves_the_row(monkeypatch, nth):
    world = World(groups(4, 1))
    row = world.admit(9)
    state = world.state()
    with monkeypatch.context() as patch:
        failing(patch, "save", nth)
        assert world.offload(row) is None
    assert world.state() == state and world.tier.stats().failed_ct == 1
    world.check()
    row = world.reload(world.offload(row))
    world.check()
    world.give_back(row)
    world.is_clean()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_copy_back_ends_in_a_prefill(monkeypatch, nth):
    """The handle, its host pages, the row and its pages are all back; others are as they were."""
    world = World(groups(4, 1, windows=[(2, 5)]), max_chunk=16)
    handle, other = world.offload(world.admit(21)), world.admit(13)
    with monkeypatch.context() as patch:
        failing(patch, "load", nth)
        assert world.reload(handle) is None
    assert world.tier.stats().failed_ct == 1 and not world.tier.handles
    assert not world.ledger.steps()
    world.check()
    row = world.admit(21)  # the prefill
    world.check()
    world.give_back(row)
    world.give_back(other)
    world.is_clean()


@pytest.mark.parametrize("way", ["save", "load"])
def test_ctrl_c_in_a_copy_loses_nothing(monkeypatch, way):
    world = World(groups(4, 1))
    row = world.admit(9)
    handle = world.offload(row) if way == "load" else None
    with monkeypatch.context() as patch:
        failing(patch, way, 2, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            world.offload(row) if handle is None else reload(world.tier, world.cache, handle)
    for step, _, _ in world.ledger.steps():
        world.ledger.complete(step)
    for row in range(1, world.ledger.num_rows + 1):
        if world.ledger.is_live(row):
            world.ledger.abort(row)
    world.is_clean()


def test_after_ctrl_c_only_what_a_request_has_is_kept():
    """After Ctrl-C at any line, pages of handles without a request are free."""
    world = World(groups(4, 1))
    handles = [world.offload(world.admit(n)) for n in (5, 9, 7)]
    dropped, lost, kept = handles
    world.tier.drop(dropped)
    world.tier._pages[0].take(2, 4)  # of an offload that has not come to its end
    assert world.tier.recover([dropped, kept]) == [kept] == world.tier.handles
    for handle in (dropped, lost):
        del world.away[handle]
    world.reload(kept)
    world.check()
    world.give_back(next(iter(world.kv)))
    world.is_clean()


def test_a_handle_is_good_once():
    world = World(groups(4))
    gone, back = (world.offload(world.admit(n)) for n in (5, 9))
    world.tier.drop(gone)
    world.reload(back)
    plan = world.ledger.prepare_extend([world.ledger.admit()], [5])
    world.ledger.cancel(plan.step)
    for handle in (gone, back):
        for call in (
            lambda handle=handle: world.tier.drop(handle),
            lambda handle=handle: reload(world.tier, world.cache, handle),
            lambda handle=handle: world.tier.next_extend(handle, 0),
            lambda handle=handle: world.tier.restore(plan, [handle]),
        ):
            with pytest.raises(OrderError, match=f"handle {handle.number} .* not held"):
                call()
    world.tier.check()


@pytest.mark.parametrize("sink", [0, 3])
def test_a_trimmed_handle_gives_back_the_pages_behind_it(sink):
    """A window's first pages, long slid away, are not held: less than it reads is no use."""
    world = World(groups(4, windows=[(1, 4, sink)]), max_chunk=16, sessions=True)
    row = world.admit(12)
    world.extend(row, 21)
    handle, free = world.offload(row), [pages.num_free for pages in world.tier._pages]
    assert world.tier.trim(handle, 21) is handle
    assert handle.last_start == 12 and handle.columns == (9, 0)
    shorter = world.tier.trim(handle, 15)
    world.away[shorter] = world.away.pop(handle)
    assert [pages.num_free for pages in world.tier._pages] == [free[0] + 6, free[1] + 2]
    world.tier.check()
    with pytest.raises(ShapeError, match=r"length must be in \[0, 15\], got 16"):
        world.tier.trim(shorter, 16)
    with pytest.raises(OrderError, match=r"handle 1 .* not held"):
        world.tier.trim(handle, 13)
    row = world.reload(shorter)
    assert world.ledger.resolved_len[row] == 15
    world.check()
    handle = world.offload(row)
    del world.away[handle]
    assert world.tier.trim(handle, 12) is None and not world.tier.handles
    assert world.tier.stats().drop_ct == 1
    world.is_clean()


def test_what_cannot_be_offloaded_or_reloaded_is_said():
    world = World(groups(4))
    with pytest.raises(ShapeError, match="row 3"):
        world.tier.save(3)
    empty = world.ledger.admit()
    assert world.tier.save(empty) is None
    handle = world.offload(world.admit(5))
    with pytest.raises(ShapeError, match=r"start must be in \[0, 5\), got 5"):
        world.tier.next_extend(handle, 5)
    plan = world.decode(world.admit(5))
    with pytest.raises(NotReady, match=f"step {plan.step} is not over"):
        reload(world.tier, world.cache, handle)
    world.finish(plan, 1)
    world.reload(handle)


def test_the_audit_sees_a_page_held_twice():
    world = World(groups(4))
    handles = [world.offload(world.admit(n)) for n in (5, 9)]
    world.tier.check()
    handles[0].pages[0][0] = handles[1].pages[0][0]
    with pytest.raises(CorruptState, match="group full0: host pages of handle 2 are held twice"):
        world.tier.check()


def test_host_memory_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"host_bytes is \d+, \d+ are free on the host"):
        World(groups(4), host_rows=1e12)


def test_pinned_memory_is_as_large_as_it_says(monkeypatch):
    """torch's own pinned memory takes the next power of two; a fake driver counts here."""
    calls: list[tuple[str, int, int]] = []

    class Driver:
        error = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            assert flags == 1  # for every device, whichever the thread's current one is
            calls.append(("pin", address, size))
            return self.error

        def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
            calls.append(("unpin", address, 0))

    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert host_memory._host_memory(3, 1001, torch.device("cpu")).shape == (3, 1001) and not calls
    memory = host_memory._host_memory(3, 1001, torch.device("cuda"))
    assert memory.shape == (3, 1001) and memory.dtype == torch.uint8
    address, part = memory.data_ptr(), memory[1]
    assert calls == [("pin", address, 3003)] and memory.untyped_storage().nbytes() == 3003
    del memory
    assert len(calls) == 1 and part.numel()  # a view keeps it
    del part
    assert calls[1:] == [("unpin", address, 0)]
    driver.error = 2
    refused = torch.empty(7, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"cannot pin 7 bytes of host memory \(error 2\): lower"):
        host_memory._pin(refused)
    del refused
    assert calls[-1][0] == "pin"
