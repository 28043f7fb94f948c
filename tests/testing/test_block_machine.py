"""`BlockMachine` passes the example's scheduler, and finds the mistakes of embedders."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from paths import ROOT
from specpool import BlockPool, PageStateError
from specpool.testing import BlockDevice, BlockMachine, DeviceFault
from specpool.testing.block_device import answer

_spec = importlib.util.spec_from_file_location(
    "block_scheduler", ROOT / "examples" / "block_scheduler.py"
)
assert _spec is not None and _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
# A dataclass looks for its module there.
__import__("sys").modules["block_scheduler"] = example
_spec.loader.exec_module(example)

QUICK = settings(
    max_examples=150,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=(Phase.generate,),
)


def run(make: Callable[..., Any], examples: settings = QUICK) -> None:
    """Test a scheduler; raises what the machine finds."""

    class Machine(BlockMachine):
        def make_scheduler(self, num_blocks: int, block_size: int, device: BlockDevice) -> Any:
            return make(num_blocks, block_size, device)

    run_state_machine_as_test(Machine, settings=examples)


def test_a_device_of_ones_own_serves() -> None:
    class Counting(BlockDevice):
        num_forwards = 0

        def forward(self, *given: Any) -> int:
            Counting.num_forwards += 1
            return super().forward(*given)

    class Machine(BlockMachine):
        def make_device(self, num_blocks: int, block_size: int) -> Counting:
            return Counting(num_blocks, block_size)

        def make_scheduler(self, num_blocks: int, block_size: int, device: Any) -> Any:
            assert type(device) is Counting
            return example.BlockScheduler(num_blocks, block_size, device)

    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=10))
    assert Counting.num_forwards > 0


class DropsTwice(example.BlockScheduler):
    def give_back(self, request):
        self.pool.drop(request.blocks, tag=self.name_of(request))
        super().give_back(request)


class DropsNothing(example.BlockScheduler):
    def give_back(self, request):
        request.blocks = []
        super().give_back(request)


class HoldsNoHit(example.BlockScheduler):
    def admit(self, request):
        self.pool = _Pool(self.pool, take=lambda take, count, hold=None, tag=None: take(count))
        try:
            return super().admit(request)
        finally:
            self.pool = self.pool.inner


class MatchesAll(example.BlockScheduler):
    """Also the last token, whose forward would give the next one."""

    def admit(self, request):
        self.pool = _Pool(self.pool, match=lambda match, tokens, limit: match(tokens))
        try:
            return super().admit(request)
        finally:
            self.pool = self.pool.inner


class NotesTheNewToken(example.BlockScheduler):
    """The new token has no KV before its own forward."""

    def forward(self, request):
        super().forward(request)
        whole = len(request.tokens) // self.pool.block_size
        if request.blocks and request.noted < whole <= len(request.blocks):
            self.pool.put(request.tokens, request.blocks, request.noted)
            request.noted = whole


class ComputesHitsAgain(example.BlockScheduler):
    """It writes blocks that others read, with the same content as before."""

    def admit(self, request):
        admitted = super().admit(request)
        request.computed = 0
        return admitted


class _Pool:
    """A pool with one verb replaced."""

    def __init__(self, inner: BlockPool, **verbs: Callable[..., Any]) -> None:
        self.inner, self._verbs = inner, verbs

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        verb = self._verbs.get(name)
        return method if verb is None else lambda *args, **options: verb(method, *args, **options)


def test_the_examples_scheduler_passes() -> None:
    run(example.BlockScheduler)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (DropsTwice, r'drop by "request \d+" of block \d+: nobody holds it'),
        (DropsNothing, r"blocks are not free"),
        (HoldsNoHit, r"holds (another text|nothing) there|nobody holds it"),
        (MatchesAll, r"a forward of \d+ tokens that all have KV"),
        (NotesTheNewToken, r"holds nothing there|which is read-only"),
        (ComputesHitsAgain, r"writes positions from 0 on, into block \d+, which is read-only"),
    ],
)
def test_a_mistake_is_found(plant: Callable[..., Any], says: str) -> None:
    with pytest.raises((AssertionError, PageStateError, DeviceFault)) as caught:
        run(plant)
    assert re.search(says, str(caught.value)), caught.value


def test_who_never_comes_to_rest_is_told_what_is_held(monkeypatch) -> None:
    class Holds(example.BlockScheduler):
        def submit(self, request, tokens, max_new_tokens):
            self.pool.take(1, tag=f"request {request}")

        def step(self):
            return len(self.pool.taken()) > 0

    monkeypatch.setattr(BlockMachine, "max_turns", 50)
    with pytest.raises(AssertionError) as caught:
        run(Holds)
    assert "not at rest after 50 turns" in str(caught.value)
    assert re.search(r"block \d+: held 1 times, last tag 'request 1'", str(caught.value))


def test_who_waits_for_room_that_never_comes_is_told(monkeypatch) -> None:
    """A scheduler that always wants room for drafts behind the last token."""

    class Drafts(example.BlockScheduler):
        def submit(self, request, tokens, max_new_tokens):
            super().submit(request, tokens, max_new_tokens)
            self.waiting[-1].end += 3

        def admit(self, request):
            return self.pool.fits(-(-request.end // self.pool.block_size)) and super().admit(
                request
            )

    monkeypatch.setattr(BlockMachine, "max_turns", 50)
    with pytest.raises(AssertionError, match="no block is held: a request waits") as caught:
        run(Drafts, settings(QUICK, phases=(Phase.generate, Phase.shrink)))
    assert "with its new tokens and no drafts behind them" in str(caught.value)


def test_texts_are_those_of_the_model() -> None:
    """Whatever is shared, preempted and computed again, the answers are the device's own."""
    scheduler = example.BlockScheduler(12, 4, BlockDevice(12, 4))
    prompts = {n: [*range(n % 6 + 1), n % 7] for n in range(30)}
    for number, prompt in prompts.items():
        scheduler.submit(number, prompt, 9)
    while scheduler.step():
        pass
    assert scheduler.num_preempted
    for number, prompt in prompts.items():
        assert scheduler.texts[number] == prompt + answer(prompt, 9)


def test_a_double_drop_names_who_dropped() -> None:
    """The block's own tag is of the request that took it, which may be another."""
    pool = BlockPool(8, 4)
    first = pool.take(2, tag="request 1")
    pool.drop(first, tag="request 1")
    message = (
        'drop by "request 2" of block 0: nobody holds it; .* last tag "request 1", '
        'last verb drop by "request 1"'
    )
    with pytest.raises(PageStateError, match=message) as caught:
        pool.drop(first, tag="request 2")
    assert caught.value.page == 0
    with pytest.raises(PageStateError, match=r'(hold|take) by "request 3"'):
        pool.take(1, hold=first, tag="request 3")
    # An error can be raised again with more words.
    assert str(PageStateError("more words")) == "more words"


def test_a_block_that_is_named_twice_is_told_so() -> None:
    pool = BlockPool(8, 2)
    block = int(pool.take(1)[0])
    with pytest.raises(PageStateError, match="put of block 0: it is named twice"):
        pool.put([1, 2, 3, 4], [block, block])
