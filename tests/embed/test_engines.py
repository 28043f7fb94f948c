"""Other engines' managers on `BlockPool`: their schedulers' stand-ins read no foreign block."""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from mini_stand_in import MiniScheduler
from nano_stand_in import NanoScheduler
from paths import ROOT
from specpool import SpecpoolError
from specpool.testing import BlockDevice, BlockMachine, assert_no_page_leaked


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / "engines" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


nano, mini = example("nano_vllm"), example("mini_sglang")
Scheduler = NanoScheduler | MiniScheduler


class NanoMachine(BlockMachine):
    """nano-vllm's scheduler on the example's manager."""

    def make_scheduler(self, num_blocks: int, block_size: int, device: BlockDevice):
        return NanoScheduler(nano.BlockManager(num_blocks, block_size), device)


class MiniMachine(BlockMachine):
    """mini-sglang's scheduler on the example's manager."""

    def make_scheduler(self, num_blocks: int, block_size: int, device: BlockDevice):
        return MiniScheduler(mini.CacheManager, num_blocks, block_size, device)


TestNano, TestMini = NanoMachine.TestCase, MiniMachine.TestCase
TestNano.settings = TestMini.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def served(scheduler: Scheduler, block_size: int, num_blocks: int) -> Scheduler:
    """Forty requests with common beginnings, served to the end."""
    rng = random.Random(0)
    system = [rng.randrange(7) for _ in range(5 * block_size)]
    for number in range(40):
        own = [rng.randrange(7) for _ in range(rng.randint(1, 3 * block_size))]
        tokens = system[: rng.randint(0, len(system))] + own
        most = min(20, num_blocks * block_size - len(tokens))
        scheduler.submit(number, tokens, rng.randint(1, most))
    for _ in range(2_000):
        if not scheduler.step():
            return scheduler
    raise AssertionError("not at rest after 2,000 turns")


def on_nano(num_blocks: int, block_size: int) -> NanoScheduler:
    manager = nano.BlockManager(num_blocks, block_size)
    return NanoScheduler(manager, BlockDevice(num_blocks, block_size))


def on_mini(num_blocks: int, block_size: int) -> MiniScheduler:
    device = BlockDevice(num_blocks, block_size)
    return MiniScheduler(mini.CacheManager, num_blocks, block_size, device)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("make", [on_nano, on_mini])
def test_forty_requests_on_few_blocks(make, block_size: int) -> None:
    scheduler = served(make(24, block_size), block_size, 24)
    scheduler.pool.check()
    assert_no_page_leaked(scheduler.pool)
    assert scheduler.reused > 10 * block_size
    if make is on_nano and block_size < 16:
        assert scheduler.preemptions


def test_mini_sglangs_integrity_check_names_what_is_held() -> None:
    scheduler = served(on_mini(24, 4), 4, 24)
    scheduler.manager.check_integrity()
    block = scheduler.pool.take(1)[0]
    with pytest.raises(RuntimeError, match=rf"blocks \[{block}\] are still held"):
        scheduler.manager.check_integrity()


def drop_no_hold(manager):
    """The hit is not held."""
    take = manager.pool.take

    class Pool:
        def __getattr__(self, name):
            return getattr(pool, name)

        def take(self, count, hold=None, tag=None):
            return take(count)

    pool, manager.pool = manager.pool, Pool()


def notes_the_wrong_block(manager):
    """What the first block holds is noted for the second one."""

    def wrong(seq):
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        if not seq.num_cached_tokens and len(seq.block_table) > 1:
            manager.pool.put(seq.token_ids[:end][: manager.block_size], seq.block_table[1:])

    manager.hash_blocks = wrong


def keeps_the_last_block(manager):
    """A block is not given back."""
    change_drop(manager, lambda drop, blocks: drop(blocks[:-1]))


def gives_back_twice(manager):
    """The first block is given back a second time."""
    change_drop(manager, lambda drop, blocks: (drop(blocks), drop(blocks[:1])))


def change_drop(manager, other):
    class Pool:
        def __getattr__(self, name):
            return getattr(pool, name)

        def drop(self, blocks):
            other(pool.drop, blocks)

    pool, manager.pool = manager.pool, Pool()


@pytest.mark.parametrize(
    ("make", "plant", "says"),
    [
        (on_nano, drop_no_hold, "nobody holds it|reads position"),
        (on_nano, notes_the_wrong_block, "reads position"),
        (on_nano, keeps_the_last_block, "blocks are not free|not at rest"),
        (on_nano, gives_back_twice, "nobody holds it|reads position"),
        (on_mini, drop_no_hold, "nobody holds it|reads position"),
        (on_mini, keeps_the_last_block, "blocks are not free|not at rest"),
        (on_mini, gives_back_twice, "nobody holds it|reads position"),
    ],
)
def test_a_fault_in_the_adapter_is_found(make, plant, says: str) -> None:
    scheduler = make(40, 4)
    plant(scheduler.manager)
    with pytest.raises((AssertionError, SpecpoolError), match=says):
        served(scheduler, 4, 40)
        assert_no_page_leaked(scheduler.pool)


@pytest.mark.parametrize("name", ["nano_vllm", "mini_sglang"])
def test_an_adapter_is_short(name: str) -> None:
    assert len((ROOT / "examples" / "engines" / f"{name}.py").read_text("utf-8").splitlines()) <= 70
