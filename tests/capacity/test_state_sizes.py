"""Slots and rings of recurrent layers come out of the same bytes as the KV."""

from __future__ import annotations

import bisect
import random
from dataclasses import replace

import pytest

import recurrent_families
from specpool import ConfigError, Engine, Shape
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.config import EngineConfig
from specpool.engine.models import TargetModel

CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(5, 8, 64)
STATES = StateBytes(slot=5000, record=70, flush=16)


def sized(kv_bytes: int, states: StateBytes | None = STATES, **options: object) -> GroupSizes:
    shapes = options.pop("shapes", [CHAIN])
    config = EngineConfig(page_size=4, **{"max_batch": 4, **options})
    how = {"shapes": shapes, "max_context_len": 100, "kv_bytes": kv_bytes, "states": states}
    return size_groups(config, {None: 24, 9: 8}, 4, **how)


def draw(seed: int) -> tuple[int, StateBytes, dict[str, object]]:
    rng = random.Random(seed)
    states = StateBytes(rng.randint(1, 20_000), rng.randint(1, 200), rng.choice([1, 16]))
    options = {
        "max_batch": rng.randint(1, 12),
        "max_sessions": rng.choice([0, 1, 16]),
        "overlap_depth": rng.randint(0, 1),
        "prefix_cache": rng.random() < 0.7,
        "cached_states": rng.choice([None, 0, 3, 50]),
        "shapes": rng.choice([[], [CHAIN], [TREE]]),
    }
    return int(10 ** rng.uniform(4, 7)), states, options


def test_states_and_kv_stay_within_the_bytes():
    """Law: each running row has a state slot, and nothing is allocated beyond the budget."""
    num_refused = num_short = 0
    for seed in range(400):
        kv_bytes, states, options = draw(seed)
        try:
            sizes = sized(kv_bytes, states, **options)
        except ConfigError:
            num_refused += 1
            with pytest.raises(ConfigError):
                sized(kv_bytes, replace(states, slot=states.slot + 1), **options)
            continue
        size, ledger = sizes.states, sizes.ledger()
        assert sizes.num_bytes <= kv_bytes, seed
        assert size.num_slots == ledger.states[0].num_slots >= max(sizes.num_rows, 2), seed
        assert size.ring_len == ledger.state_ring_len(0), seed
        assert size.num_rings == ledger.num_rows + 1, seed
        least = replace(size, num_slots=max(sizes.num_rows, 2)).num_bytes
        assert 4 * (size.num_bytes - least) <= kv_bytes - least, seed
        whole = sized(1 << 40, states, **options).states
        cached = options["cached_states"]
        cached = sizes.num_rows if cached is None else cached
        num_kept = sizes.max_sessions + (cached if options["prefix_cache"] else 0)
        assert whole.num_slots == max(sizes.num_rows + num_kept, 2)
        num_short += size.num_slots < whole.num_slots
    assert min(num_refused, num_short) > 40


def test_the_least_bytes_are_those_of_the_error():
    least = bisect.bisect_left(range(10**6), True, key=fits)
    sizes = sized(least)
    assert sizes.states.num_slots == sizes.num_rows
    assert sizes.num_bytes <= least
    with pytest.raises(ConfigError, match=r"4 rows 5\d\.\d+ KiB of recurrent states, .* are to be"):
        sized(least - 1)


def fits(kv_bytes: int) -> bool:
    try:
        sized(kv_bytes)
    except ConfigError:
        return False
    return True


def test_without_recurrent_layers_all_is_as_before():
    assert sized(10**6, None).states is None
    assert sized(10**6, None, cached_states=7) == sized(10**6, None)


def test_pages_that_are_asked_for_have_all_states():
    sizes = sized(0, num_pages=1000, max_sessions=3, cached_states=5)
    assert sizes.states.num_slots == 4 + 3 + 5


def test_a_row_of_snapshots_has_a_state_for_each_draft_token():
    """Law: N states a running row, as vLLM's 1 + num_speculative_tokens; other slots as here."""
    ours = sized(10**7, shapes=[TREE]).states
    theirs = sized(10**7, replace(STATES, snapshots=True), shapes=[TREE]).states
    assert theirs.num_slots == ours.num_slots
    assert theirs.row_bytes == 64 * STATES.slot
    assert theirs.num_bytes == (theirs.num_slots + 1 + 4 * 63) * STATES.slot
    assert ours.row_bytes == STATES.slot + ours.ring_len * STATES.record


@pytest.mark.parametrize("options", [{"kv_bytes": 200_000}, {"num_pages": 30}], ids=str)
def test_an_engine_allocates_what_is_planned(options):
    """Law: the tensors of slots and rings have the bytes that were counted."""
    model = recurrent_families.make_model(recurrent_families.make_config("qwen3_next"))
    with TargetModel.from_pretrained(model) as target:
        config = EngineConfig(max_batch=2, max_sessions=1, max_context_len=64, **options)
        with Engine(target, config=config) as engine:
            states = target.state_bytes.size(
                engine.ledger.shapes,
                num_slots=engine.ledger.states[0].num_slots,
                num_rows=2,
                num_sessions=1,
                overlap_depth=0,
            )
            assert engine.state_bytes == states.num_bytes
            assert engine.state_bytes > 20_000
            assert engine.kv_bytes + engine.state_bytes <= options.get("kv_bytes", 1 << 40)
