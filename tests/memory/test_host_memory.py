"""Host memory: kernels, costs, and a text that was there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from host_kit import World, groups
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.copy_cost import CopyCost
from specpool.engine.memory.host.tier import HostTier

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


@pytest.mark.sample(2)
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
