"""Regression scenarios of the host tier, numbered as in docs/failures.md.

Each runs once more without its guard and must reach the failing state.
"""

from __future__ import annotations

import numpy as np
import pytest

from host_kit import World, groups
from specpool import ConfigError, NotReady
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.texts import HostTexts
from specpool.engine.memory.host.tier import HostTier


class Hasty:
    """A ledger in which every row counts as quiet."""

    def __init__(self, ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    def check_quiet(self, row) -> None:
        pass


def refused(world: World, row: int, *, guarded: bool) -> bool:
    """Whether the row is not taken over, as it should; unguarded it is."""
    if not guarded:
        world.tier.ledger = Hasty(world.ledger)
    state = world.state()
    try:
        handle = world.tier.save(row)
    except NotReady:
        assert world.state() == state
        return True
    world.ledger.retract(row)
    world.away[handle] = world.kv.pop(row)
    world.tier.ledger = world.ledger
    return False


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_45_what_was_accepted_is_final_before_anything_is_freed(guarded):
    """sgl#24086, a round in flight.

    Law: A row whose round is not resolved, or not complete, is not offloaded. Otherwise the tokens
    that the round gave the client would be missing after the reload.
    """
    world = World(groups(4, 1), overlap_depth=1)
    row = world.admit(9)
    plan = world.decode(row)
    if guarded:
        assert refused(world, row, guarded=True)
        world.ledger.resolve(plan.step, [3])
        assert refused(world, row, guarded=True)  # its KV may still be on its way
        world.ledger.complete(plan.step)
        row = world.reload(world.offload(row))
        assert world.ledger.resolved_len[row] == 12
        world.check()
    else:
        assert not refused(world, row, guarded=False)
        world.ledger.resolve(plan.step, [3])
        world.ledger.complete(plan.step)
        row = world.reload(world.tier.handles[0])
        assert world.ledger.resolved_len[row] == 9  # three tokens are lost


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("what", ["extend", "tail"])
def test_scenario_45_the_newest_slot_is_written_before_it_is_copied(what, guarded):
    """sgl#24086, a prefill that has not run and the copy of a fork's tail that is still to come.

    Law: Everything below a row's length is on the device before the row goes to the host.
    """
    world = World(groups(4, 1))
    row = world.admit(9)
    if what == "extend":
        plan = world.ledger.prepare_extend([row], [14])
        if not guarded:
            world.ledger.launch(plan.step)
            world.cache.apply_delta(plan.step)
    else:
        row = world.fork(row)
    assert refused(world, row, guarded=guarded) == guarded
    if guarded:
        return
    if what == "extend":
        for kv in world.away[world.tier.handles[0]]:
            kv[9:14] = world.noise(5, *kv.shape[1:])  # by the forward, into pages given back
        world.ledger.complete(plan.step)
    row = world.reload(world.tier.handles[0])
    assert world.wrong(row)


class Late:
    """Copies to the host that run when the device gets to them, in no stream's order."""

    def __init__(self, monkeypatch) -> None:
        self.waiting = []
        save = HostMemory.save

        def later(memory, moves) -> None:
            held = [(device_pages.copy(), pages) for device_pages, pages in moves]
            self.waiting.append(lambda: save(memory, held))

        monkeypatch.setattr(HostMemory, "save", later)

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_45_a_copy_to_the_host_comes_before_the_next_owners_writes(monkeypatch, guarded):
    """sgl#24086, the copy asynchronous.

    Law: The copy is enqueued before its row is given back, so the next owner of the pages writes
    them behind the copy. Without the guard, the copy runs on a stream of its own.
    """
    world = World(groups(4, 1), num_rows=2)
    row = world.admit(9)
    late = Late(monkeypatch)
    owners = [int(world.ledger.page_table(0)[row][0])]
    handle = world.tier.save(row)
    world.ledger.retract(row)
    world.away[handle] = world.kv.pop(row)
    if guarded:
        late.run()  # a stream runs what is enqueued in its order
    other = world.admit(9)
    owners.append(int(world.ledger.page_table(0)[other][0]))
    assert owners[0] == owners[1]
    late.run()
    row = world.reload(handle)
    assert bool(world.wrong(row)) != guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_45_an_abort_in_the_middle_of_a_reload(monkeypatch, guarded):
    """sgl#24086.

    Law: A page is free, on the device or on the host, and a request is in one of these places. An
    abort between two chunks gives back its row and drops its handle, and changes nothing else.
    """
    if not guarded:
        monkeypatch.setattr(HostTier, "_give_back", lambda self, handle: None)
    world = World(groups(4, 1, windows=[(2, 5)]), max_chunk=16)
    away, other = world.admit(37), world.admit(10)
    handle = world.offload(away)
    row = world.ledger.admit("back")
    new_len, writes_draft = world.tier.next_extend(handle, 0)
    plan = world.ledger.prepare_extend([row], [new_len], writes_draft=writes_draft)
    world.launch(plan)
    world.tier.restore(plan, [handle])
    assert world.tier.handles == [handle]  # in transit: the host's pages are not given back yet
    world.ledger.abort(row)
    world.tier.drop(handle)
    world.away.pop(handle)
    assert world.ledger.fenced_pages(1) > 0
    world.ledger.complete(plan.step)
    world.give_back(other)
    if guarded:
        world.is_clean()
    else:
        with pytest.raises(AssertionError):
            world.is_clean()


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("short", [0, 1])
def test_scenario_46_groups_of_two_page_sizes_are_counted_in_their_own_pages(
    monkeypatch, short, guarded
):
    """sgl#24039, page sizes 16 and 4.

    Law: A row goes to the host if every group has the host pages for it; else no page is taken.
    Counted in the pages of one group, another group would run out in between.
    """
    world = World(groups(16, 4, num_slots=256), host_rows=2)
    row = world.admit(40)
    need, pool = [3, 10][short], world.tier._pages[short]
    pool.take(pool.num_free - need + 1, 99)  # one too few
    state, stats = world.state(), world.tier.stats()
    if guarded:
        assert world.offload(row) is None
        assert world.state() == state and world.tier.stats().full_ct == stats.full_ct + 1
        pool.give_back(np.flatnonzero(pool._owners == 99)[:1])
        row = world.reload(world.offload(row))
        assert not world.wrong(row)
    else:
        ample = 1 - short
        monkeypatch.setattr(
            HostTexts,
            "make_room",
            lambda self, num_pages: num_pages[ample] <= self._pages[ample].num_free,
        )
        world.offload(row)
        num_free = np.count_nonzero(pool._owners == 0)  # it took pages that it did not get
        assert world.tier.stats().groups[short].free_pages < num_free


@pytest.mark.parametrize("guarded", [True, False])
def test_scenario_47_the_host_holds_a_whole_generation(monkeypatch, guarded):
    """sgl#23704.

    Law: A host pool that holds a prompt but not the whole context is refused when it is built, with
    both numbers. Otherwise a request could grow until it fits nowhere.
    """
    prompt_len, context = 12, 48
    if not guarded:
        monkeypatch.setattr(
            "specpool.engine.memory.host.copies.whole_row_pages",
            lambda ledger: [-(-prompt_len // group.page_size) for group in ledger.groups],
        )
    rows = prompt_len / context
    if guarded:
        whole = World(groups(4, 1), context=context).row_bytes()
        message = f"{context} tokens needs {whole} bytes on the host, host_bytes is {whole // 4}"
        with pytest.raises(ConfigError, match=message):
            World(groups(4, 1), context=context, host_rows=rows)
        with pytest.raises(ConfigError, match=f"host_bytes is {whole - 1}"):
            World(groups(4, 1), context=context, host_rows=(whole - 1) / whole)
        world = World(groups(4, 1), context=context, host_rows=1)
    else:
        world = World(groups(4, 1), context=context, host_rows=rows)
    row = world.admit(prompt_len)
    row = world.reload(world.offload(row))
    world.extend(row, context)
    assert (world.offload(row) is not None) == guarded
