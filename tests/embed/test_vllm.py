"""The plug-in for vLLM. What needs vLLM itself is in `vllm_*cases.py`; here a stand-in serves."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specpool.plugins.vllm
from engine_kit import SECONDS, run, run_cases
from specpool import PageStateError
from specpool.testing import assert_no_page_leaked
from vllm_stand_in import KVCacheBlock, stand_in


@pytest.mark.timeout(SECONDS)
def test_on_vllm() -> None:
    run_cases("vllm", ["vllm_cases.py", "vllm_quarantine_cases.py", "vllm_speculative_cases.py"])


def test_vllm_finds_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="specpool")
    assert entry.load() is specpool.plugins.vllm.register


def test_without_the_setting_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, specpool.plugins.vllm as s; s.register(); s.register(); "
        "print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = run("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.fixture
def unknown(tmp_path: Path) -> str:
    """A path with a vLLM that has none of the names, and a torch that is imported at once."""
    for package in ("vllm", "torch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"SPECPOOL_VLLM": "block"}, "SPECPOOL_VLLM='block' is not one of off, blocks, spec"),
        ({"SPECPOOL_VLLM_DRIFT": "x"}, "SPECPOOL_VLLM_DRIFT='x' is not one of own, exit, trust"),
        ({"SPECPOOL_VLLM_FAULTS": "x"}, "SPECPOOL_VLLM_FAULTS='x' is not one of quarantine, raise"),
        ({"SPECPOOL_VLLM": "blocks", "SPECPOOL_VLLM_DRIFT": "exit"}, "vLLM is not as known: "),
    ],
)
def test_a_wrong_setting_and_an_unknown_vllm_end_the_process(
    settings: dict[str, str], message: str, unknown: str
) -> None:
    code = "import specpool.plugins.vllm as s; s.register(); print('served')"
    done = run("-c", code, PYTHONPATH=unknown, **settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("level", ["blocks", "speculative"])
def test_an_unknown_vllm_keeps_its_own_pool(level: str, unknown: str) -> None:
    code = "import specpool.plugins.vllm as s; s.register(); print('served')"
    done = run("-c", code, PYTHONPATH=unknown, SPECPOOL_VLLM=level)
    assert done.stdout.strip() == "served"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("specpool: vLLM's own block pool serves: ") and "torch" not in line


def take(made: Any, name: str, count: int) -> list[Any]:
    blocks: list[Any] = made.coordinator.allocate_new_blocks(name, count)
    return blocks


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setenv("SPECPOOL_STATUS", "off")
    monkeypatch.setenv("SPECPOOL_VLLM_FAULTS", "raise")
    with stand_in() as vllm:
        pool = vllm.kv_cache_coordinator.BlockPool(9)
        coordinator = vllm.kv_cache_coordinator.KVCacheCoordinator(pool)
        yield SimpleNamespace(pool=pool, coordinator=coordinator, module=vllm.pool)


def test_a_stand_ins_blocks_are_counted_found_and_given_up(made: Any) -> None:
    pool = made.pool
    blocks = take(made, "a", 4)
    keys = SimpleNamespace(block_hashes=["w", "x", "y", "z"])
    pool.cache_full_blocks(keys, blocks, 0, 2, 1, 0)
    blocks[0].ref_cnt += 1
    assert [block.ref_cnt for block in blocks] == [2, 1, 1, 1]
    pool.free_blocks(reversed(blocks))
    assert (pool.get_num_free_blocks(), pool.core.taken().tolist()) == (7, [1])
    blocks[0].ref_cnt -= 1
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert order == [4, 3, 5, 6, 7, 8, 2, 1]
    pool.touch([pool.null_block, blocks[1]])
    assert [block.block_id for block in take(made, "b", 7)] == [4, 3, 5, 6, 7, 8, 1]
    assert (pool.known, pool.removed) == ({"x": blocks[1]}, ["w"])
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    pool.free_blocks(pool.blocks)
    order = pool.core.preview().tolist()
    assert pool.reset_prefix_cache()
    assert_no_page_leaked(pool.core)
    assert pool.core.preview().tolist() == order
    assert len(order) == 8


def test_a_stand_ins_wrong_frees_are_refused(made: Any) -> None:
    pool, blocks = made.pool, take(made, "a", 3)
    before = pool.core.state_hash()
    with pytest.raises(made.module.ForeignBlockError, match="free of blocks 2: they are of no"):
        pool.free_blocks([blocks[0], KVCacheBlock(2)])
    with pytest.raises(PageStateError, match=r'block 3: it is named more often .*last tag "a"'):
        pool.free_blocks([blocks[0], blocks[2], blocks[2]])
    with pytest.raises(PageStateError, match="take of block 7: nobody holds it and it is not"):
        pool.touch([blocks[0], pool.blocks[7]])
    with pytest.raises(made.module.ForeignBlockError, match="cache of block 2: it is not of this"):
        pool._insert_block_hash("w", KVCacheBlock(2), None)
    assert pool.core.state_hash() == before


def test_random_calls_leak_nothing(made: Any) -> None:
    rng, pool, held, keys = random.Random(1), made.pool, [], iter(range(10**6))
    for _ in range(2000):
        count = rng.randint(1, 3)
        if rng.random() < 0.5 and count <= pool.get_num_free_blocks():
            blocks = take(made, "r", count)
            names = [f"{next(keys)}" for _ in blocks]
            pool.cache_full_blocks(
                SimpleNamespace(block_hashes=names), blocks, 0, rng.randint(0, count), 1, 0
            )
            held.append(blocks)
        elif held:
            pool.free_blocks(reversed(held.pop(rng.randrange(len(held)))))
        pool.core.check()
        assert sorted(b.block_id for blocks in held for b in blocks) == pool.core.taken().tolist()
        kept = sum(block._block_hash is not None for block in pool.blocks)
        assert pool.core.index_size[0] == kept
        assert sorted(b.block_id for b in pool.known.values()) == sorted(
            block.block_id for block in pool.blocks if block._block_hash is not None
        )
