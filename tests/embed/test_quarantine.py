"""Laws of the quarantine: free, held and quarantined blocks are all, and nothing else changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specpool import BlockPool
from specpool.plugins import status
from specpool.plugins.quarantine import MOST_LOG_BYTES, SHARE, Quarantine, copy_of
from specpool.plugins.status import EngineStatus


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    monkeypatch.setattr(status, "PERIOD", 1e6)
    return tmp_path


def made(num_blocks: int, first_id: int = 1) -> tuple[BlockPool, Quarantine]:
    core = BlockPool(num_blocks, 1, first_id=first_id)
    return core, Quarantine(EngineStatus("test"), core, None)


@pytest.mark.parametrize("seed", range(12))
def test_random_wrong_frees_change_no_other_block(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPOOL_STATUS", "off")
    rng = random.Random(seed)
    core, quarantine = made(rng.randint(1, 70), rng.randint(0, 1))
    held: dict[int, int] = {}
    wrong_ct = 0
    for turn in range(200):
        verb = rng.randrange(4)
        if verb == 0:
            for block in core.take(rng.randint(0, min(5, core.available())), tag=f"r{turn}"):
                held[int(block)] = 1
        elif verb == 1 and held:
            block = rng.choice([*held])
            held[block] += 1
            core.hold(block)
            core.keep(block)
        elif verb == 2 and held:
            block = rng.choice([*held])
            held[block] -= 1
            assert quarantine.drop([block]) == [block]
        elif verb == 3:
            ids = range(core.first_id, core.first_id + core.num_blocks)
            block = rng.choice([b for b in ids if b not in held] or [99])
            order = [b for b in core.preview().tolist() if b != block]
            owners = {b: core.record_of(b)[2] for b in ids if b != block}
            shut = dict(quarantine.blocks)
            assert quarantine.drop([block]) == []
            wrong_ct += 1
            let_out = shut.keys() - quarantine.blocks
            assert [b for b in core.preview().tolist() if b not in let_out] == order
            assert {b: core.record_of(b)[2] for b in owners} == owners
            if block in ids:
                assert block in quarantine.blocks
                assert core.record_of(block)[:3] == ("owned", 1, quarantine.blocks[block])
        held = {block: count for block, count in held.items() if count}
        assert core.taken().tolist() == sorted([*held, *quarantine.blocks])
        assert all(core.refs(block) == count for block, count in held.items())
        assert len(quarantine.blocks) <= max(1, core.num_blocks // SHARE)
        core.check()
    assert wrong_ct > 20
    quarantine.release()
    assert core.taken().tolist() == sorted(held)


@pytest.mark.parametrize("seed", range(6))
def test_a_copy_has_the_same_blocks_free_cached_and_held(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    core = BlockPool(40, 1, first_id=1)
    for turn in range(60):
        blocks = core.take(rng.randint(0, min(6, core.available())), tag=f"r{turn % 7}").tolist()
        core.keep([block for block in blocks if rng.random() < 0.3])
        core.hold([block for block in blocks if rng.random() < 0.3])
        core.drop([block for block in blocks if rng.random() < 0.8])
    copy_of(core, str(tmp_path / "log")).close()
    copy, _, end = BlockPool.replay(tmp_path / "log")
    assert end == "closed"
    assert copy.preview().tolist() == core.preview().tolist()
    assert (copy.num_free, copy.num_cached) == (core.num_free, core.num_cached)
    for block in core.taken().tolist():
        assert copy.record_of(block)[:3] == core.record_of(block)[:3]


def test_a_long_log_is_not_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.plugins.quarantine.MOST_LOG_BYTES", 100)
    assert MOST_LOG_BYTES > 100
    core = BlockPool(40, 1, record=folder / "log")
    quarantine = Quarantine(EngineStatus("test"), core, str(folder / "log"))
    for _ in range(30):
        core.drop(core.take(1))
    core.take(3, tag="r")
    quarantine.drop([7])
    (report,) = folder.glob("test-*.log")
    state, calls, end = BlockPool.replay(report)
    assert (calls < 10, end, state.taken().tolist()) == (True, "closed", [0, 1, 2, 7])


def test_reports_are_few_and_all_is_counted(folder: Path) -> None:
    engine = EngineStatus("test")
    quarantine = Quarantine(engine, BlockPool(400, 1), None)
    for block in range(status.MOST_REPORTS + 3):
        quarantine.drop([block])
    assert engine.wrong_free_ct == status.MOST_REPORTS + 3
    assert len(list(folder.glob("test-*.log"))) == status.MOST_REPORTS
