"""Host memory: kernels, costs, and a text that was there and back."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
import torch

from host_kit import World, groups
from specpool import (
    ConfigError,
    Engine,
    EngineConfig,
    Group,
    Ledger,
    NotReady,
    OutOfPages,
    OutOfRows,
    SamplingParams,
    Shape,
    StateGroup,
)
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.assets import corpus
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.copy_cost import CopyCost
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.reload import reload
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache

# --- kernels -------------------------------------------------------------------------------------


def test_the_kernels_carry_it(kit, monkeypatch):
    """The way of a CUDA device: through space that holds a few pages, any width, any page size."""
    monkeypatch.setattr("specpool.engine.memory.host.copies._STAGED_BYTES", 200)
    world = World(groups(4, 1, windows=[(2, 5)]), max_chunk=16, context=24, device=kit.device)
    handles = [world.offload(world.admit(n)) for n in (18, 7)]
    world.tier.drop(handles.pop(0))  # a hole in the host pages
    del world.away[next(iter(world.away))]
    handles.append(world.offload(world.admit(22)))
    for handle in reversed(handles):
        world.reload(handle)
        world.check()


# --- what it costs -------------------------------------------------------------------------------


def test_a_copy_costs_a_fixed_part_and_each_byte():
    cost = CopyCost((1000, 3e-3), (5000, 7e-3))
    assert cost.seconds(0) == pytest.approx(2e-3)
    assert cost.seconds(10_000) == pytest.approx(12e-3)
    for _ in range(4):
        cost.observe(1000, 30e-3)  # a stall is no trend
    cost.observe(1000, 3e-3)
    assert cost.seconds(1000) < 31e-3
    for _ in range(9):
        cost.observe(1000, 6e-3)
    assert cost.seconds(10_000) == pytest.approx(24e-3)
    assert CopyCost((100, 1.0), (100, 1.0)).seconds(200) == pytest.approx(2.0)
    assert CopyCost((100, 2.0), (200, 1.0)).seconds(1000) == pytest.approx(2.0)  # noise


def test_it_pays_where_a_prefill_takes_longer():
    world = World(groups(4, 1))
    row = world.admit(20)
    world.memory.out, world.memory.back = (
        CopyCost((1, 0.5), (2, 0.5)),
        CopyCost((1, 0.5), (2, 0.5)),
    )
    assert world.tier.pays(row, token_seconds=0.06)
    assert not world.tier.pays(row, token_seconds=0.04)


def test_it_pays_by_bytes_of_every_group():
    world = World(groups(4, 1))
    row = world.admit(20)
    per_byte = CopyCost((1, 1.0), (2, 2.0))
    world.memory.out = world.memory.back = per_byte
    num_bytes = sum(
        20 * buffer[0].numel() * buffer.element_size() for buffer in world.buffers
    )  # whole pages
    assert world.tier.pays(row, token_seconds=2 * num_bytes / 20 * 1.01)
    assert not world.tier.pays(row, token_seconds=2 * num_bytes / 20 * 0.99)


@pytest.mark.parametrize(("policy", "pays"), [("always", True), ("never", False)])
def test_an_option_says_what_pays(policy, pays):
    world = World(groups(4))
    tier = HostTier(world.ledger, world.memory, policy=policy)
    row = world.admit(20)
    assert {tier.pays(row, seconds) for seconds in (0.0, 1e9)} == {pays}


def test_copies_are_watched_on_a_cpu():
    world = World(groups(4, 1))
    for _ in range(9):
        world.reload(world.offload(world.admit(20)))
        world.give_back(next(iter(world.kv)))
    assert len(world.memory.out.ratios) == len(world.memory.back.ratios) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": -1}, r"host_bytes must be an integer in \[0, \d+\], got -1"),
        ({"host_bytes": 1.5}, "host_bytes must be an integer .* got 1.5"),
        ({"offload": "maybe"}, "offload must be one of cost, always, never, got 'maybe'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


# --- through an engine ---------------------------------------------------------------------------

SAMPLED = SamplingParams(max_new_tokens=60, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)


def bring_back(engine: Engine, tier: HostTier, handle, row: int) -> None:
    """The steps of a reload, on a row that the scheduler has taken."""
    start = 0
    while start < handle.length:
        new_len, writes_draft = tier.next_extend(handle, start)
        plan = engine.ledger.prepare_extend([row], [new_len], writes_draft=writes_draft)
        engine.ledger.launch(plan.step)
        engine.cache.apply_delta(plan.step)
        engine.core.loop.busy_check.note_tables(plan.step)
        engine.cache.copy_pages(plan.page_copies)
        tier.restore(plan, [handle])
        engine.ledger.complete(plan.step)
        start = new_len


@pytest.mark.sample(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("draft", "shape"),
    [
        (None, None),
        ("specpool/tiny-eagle", Shape.eagle(3, 1, 4)),
        ("specpool/tiny-eagle3", Shape.eagle(4, 4, 16)),
    ],
    ids=["plain", "chain", "tree"],
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_text_that_was_on_the_host_is_the_same(monkeypatch, draft, shape, params, page_size):
    """Two requests go to the host and come back by turns; what they give back is written over."""
    options = {"page_size": page_size, "max_batch": 3, "max_context_len": 256, "shape": shape}
    options["prefix_cache"] = False  # a row starts empty
    prompts = corpus.prompts(3, 40)
    with Engine.from_pretrained("specpool/tiny", draft=draft, **options) as engine:
        wanted = [output.token_ids for output in engine.generate(prompts, params)]
        tier = HostTier(engine.ledger, HostMemory(engine.ledger, engine.cache, 1 << 24))
        scheduler, away, kept = engine.core.scheduler, {}, []
        running = scheduler.state.running
        start = running.start

        def start_where_it_was(request, row, prefilled_len):
            handle = away.pop(request, None)
            if handle is not None:
                bring_back(engine, tier, handle, row)
                prefilled_len = handle.length
                kept.append(prefilled_len)
            start(request, row, prefilled_len)

        monkeypatch.setattr(running, "start", start_where_it_was)
        outputs = {}
        for prompt in prompts:
            engine.submit(
                prompt, params, on_item=lambda number, item: outputs.update({number: item})
            )
        for turn in range(400):
            if not engine.turn():
                break
            requests = scheduler.running
            if turn % 4 == 2 and len(requests) > 1:
                for request in requests[turn // 4 % 2 : 2]:
                    handle = tier.save(request.row)
                    engine.ledger.retract(request.row)
                    assert handle is not None and handle.length == len(request.tokens) - 1
                    away[request] = handle
                    scheduler._reclaim.requeue(request)
                for group, spec in enumerate(engine.ledger.groups):
                    free = np.flatnonzero(engine.ledger.ownership_map(group)[0] == 0)
                    layers = [i for i, g in enumerate(engine.cache.layer_groups) if g == group]
                    for buffer in engine.cache.buffers(layers):
                        pages = buffer.view(-1, spec.page_size, *buffer.shape[1:])
                        pages[torch.from_numpy(free[free > 0])] = 1e3
        assert [outputs[number].token_ids for number in sorted(outputs)] == wanted
        assert len(kept) >= 6 and min(kept) > 40
        assert tier.stats().reload_ct == len(kept) and not tier.handles
        tier.check()


STATEFUL = [
    Group("full", page_size=4, num_pages=40, hosts_drafts=True),
    Group("window", page_size=2, num_pages=60, window=7, sink=3),
]


class StatefulSide:
    """A ledger with a state group, and host memory for its pages and slots."""

    def __init__(self, host_rows: float = 3.0) -> None:
        states = [StateGroup("ssm", num_slots=4, flush=3)]
        self.ledger = Ledger(
            STATEFUL, [Shape.eagle(1, 1, 2)], num_rows=4, max_context_len=40, states=states
        )
        device, layers = torch.device("cpu"), [LayerKV(2, 3, 5), LayerKV(1, 4, 4)]
        self.cache = KVCache(self.ledger, layers, [0, 1], dtype=torch.float32, device=device)
        self.slots = [torch.zeros(5, 3, 2), torch.zeros(5, 7, dtype=torch.bfloat16)]
        sizes = [24 * (2 * 3 + 2 * 5), 24 * 8, 3 * 2 * 4 + 7 * 2]
        host_bytes = int(host_rows * 2 * sum(sizes) * 4)
        self.memory = HostMemory(self.ledger, self.cache, host_bytes, self.slots)
        self.tier = HostTier(self.ledger, self.memory, policy="always")
        for buffer in [*self.cache.keys, *self.cache.values, *self.slots]:
            buffer[:] = torch.randn(buffer.shape)

    def step(self, plan) -> None:
        self.ledger.launch(plan.step)
        if plan.kind == "decode":
            self.ledger.resolve(plan.step, [1] * len(plan))
        self.ledger.complete(plan.step)

    def content(self, row: int, length: int) -> list[torch.Tensor]:
        """The KV that a row of so many tokens needs, and its state."""
        found = []
        for group, spec in enumerate(STATEFUL):
            start = 0 if spec.window is None else max(length - spec.window + 1, 0)
            positions = [p for p in range(length) if p >= start or p < spec.sink]
            table, size = self.ledger.page_table(group)[row], spec.page_size
            slots = [int(table[p // size]) * size + p % size for p in positions]
            assert all(slot >= size for slot in slots)
            found += [
                self.cache.keys[group][slots].clone(),
                self.cache.values[group][slots].clone(),
            ]
        slot = int(self.ledger.state_slot(0)[row])
        return [*found, *(tensor[slot].clone() for tensor in self.slots)]


def test_rows_come_back_with_their_states_whatever_was_where():
    """Random rows, rounds, cuts, ways to the host and back: pages, windows, sinks and slots."""
    random, side = np.random.default_rng(0), StatefulSide()
    ledger, tier = side.ledger, side.tier
    away: list[tuple[Handle, list[torch.Tensor]]] = []
    counts = Counter[str]()
    for _ in range(600):
        live = ledger.live_rows().tolist()
        row = int(random.choice(live)) if live else 0
        length = int(ledger.resolved_len[row])
        match random.integers(6):
            case 0 if len(live) < 4:
                new = ledger.admit()
                with contextlib.suppress(OutOfPages):
                    side.step(ledger.prepare_extend([new], [int(random.integers(1, 20))]))
            case 1 if row and 0 < length < 36:
                with contextlib.suppress(OutOfPages, NotReady):
                    side.step(ledger.prepare_decode([row], [0]))
            case 2 if row and random.random() < 0.3:
                ledger.trim(row, int(random.integers(length + 1)))
            case 3 if row:
                handle = tier.save(row)
                if handle is not None:
                    assert handle.length == ledger.state_len(0)[row]
                    away.append((handle, side.content(row, handle.length)))
                counts["saved" if handle else "not saved"] += 1
                ledger.retract(row)
            case 4 if away:
                handle, content = away[random.integers(len(away))]
                before = ledger.state_hash()
                try:
                    back = reload(tier, side.cache, handle)
                except (OutOfPages, OutOfRows) as error:
                    counts[type(error).__name__] += 1
                    assert ledger.state_hash() == before and tier.holds(handle)
                    continue
                away = [pair for pair in away if pair[0] is not handle]
                assert ledger.resolved_len[back] == ledger.state_len(0)[back] == handle.length
                for now, then in zip(side.content(back, handle.length), content, strict=True):
                    assert torch.equal(now, then)
                counts["back"] += 1
            case 5 if away and random.random() < 0.3:
                handle, _ = away.pop()
                cut = int(random.integers(handle.length + 1))
                assert (tier.trim(handle, cut) is handle) == (cut == handle.length)
                if tier.holds(handle):
                    tier.drop(handle)
        tier.check()
        ledger.check()
    assert min(counts[name] for name in ("saved", "not saved", "back")) > 20, counts
    assert counts["OutOfPages"] + counts["OutOfRows"] > 5, counts
    tier.close()
    assert all(group.free_pages == group.num_pages for group in tier.stats().groups)


@pytest.mark.parametrize("context", [40, 4096, 1 << 20])
@pytest.mark.parametrize("state_len", [3, 1 << 14])
def test_host_slots_are_for_rows_of_usual_length(context: int, state_len: int) -> None:
    """Law: as many rows as the bytes hold have a slot; one of the whole context always fits."""
    states = [StateGroup("ssm", num_slots=2)]
    group = Group("full", page_size=16, num_pages=1 << 16, hosts_drafts=True)
    ledger = Ledger([group], [], num_rows=2, max_context_len=context, states=states)
    cache = KVCache(
        ledger, [LayerKV(1, 1, 1)], [0], dtype=torch.float16, device=torch.device("cpu")
    )
    slots = [torch.zeros(3, state_len, 2)]
    page_bytes, slot_bytes = 16 * 2 * 2, state_len * 2 * 4
    row_bytes = -(-context // 16) * page_bytes + slot_bytes
    for factor in (1.0, 1.5, 20.0):
        host_bytes = int(row_bytes * factor)
        num_pages, num_slots = HostMemory(ledger, cache, host_bytes, slots).num_pages
        assert num_pages * page_bytes + num_slots * slot_bytes <= host_bytes
        assert num_pages * 16 >= context and num_slots >= 1
        usual = min(max(2048 * 4, slot_bytes), row_bytes - slot_bytes) + slot_bytes
        whole_rows = host_bytes // row_bytes
        if factor == 20.0:  # one row of the whole context no longer decides
            assert num_slots == host_bytes // usual >= whole_rows
            assert num_pages * page_bytes >= num_slots * (usual - slot_bytes) * 0.99
