"""A draft window gives its bytes to the target, and takes no page from it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from specpool import ConfigError, Shape
from specpool.capacity.capacity import Capacity
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.cli import main
from specpool.engine.config import EngineConfig

SHAPES = [(1, 1, 2), (3, 1, 4), (7, 1, 8), (15, 1, 16), (2, 2, 4), (4, 4, 16)]


def pairs(num_seeds: int) -> Iterator[tuple[int, int, GroupSizes | None, GroupSizes | None]]:
    """Seeds, bytes, and the sizes of these bytes without a draft window and with one.

    None means that the bytes do not hold one row.
    """
    for seed in range(num_seeds):
        rng = random.Random(seed)
        context = rng.choice([40, 300, 2000])
        config = EngineConfig(
            page_size=rng.choice([1, 2, 3, 4, 16]),
            policy=rng.choice(["exact", "double_buffer"]),
            max_batch=rng.choice([1, 2, 5, 12, 30, 200, 4000]),
            overlap_depth=rng.randint(0, 1),
            prefill_tokens=rng.choice([5, 64, 4096]),
            max_sessions=rng.choice([0, 2, 16]),
        )
        hides = rng.randint(1, context + 2)
        target_bytes = rng.choice(
            [{None: 64}, {None: 16, hides: 64}, {hides: 32}, {None: 4, hides: 4, hides + 3: 9}, {}]
        )
        draft_bytes = rng.choice([1, 4, 32, 128])
        shape = Shape(*rng.choice(SHAPES))
        window = rng.randint(2, context // rng.choice([1, 8]) + 2)
        sink = rng.randint(0, min(window, 8))

        def sized(
            config: EngineConfig,
            kv_bytes: int,
            target_bytes: dict[int | None, int] = target_bytes,
            draft_bytes: int = draft_bytes,
            shape: Shape = shape,
            context: int = context,
        ) -> GroupSizes | None:
            try:
                return size_groups(
                    config,
                    target_bytes,
                    draft_bytes,
                    shapes=[shape],
                    max_context_len=context,
                    kv_bytes=kv_bytes,
                )
            except ConfigError:
                return None

        least = sized(replace(config, num_pages=1), 0)
        assert least is not None
        row_bytes = sum(group.pages_per_row * group.page_bytes for group in least.groups)
        rows = rng.choice([0.3, 0.7, 1, 1.01, 1.5, 2.2, 3, 6.7, 15, 60])
        kv_bytes = sum(group.page_bytes for group in least.groups) + int(rows * row_bytes) + 1
        windowed = replace(config, draft_window=window, draft_sink=sink)
        yield seed, kv_bytes, sized(config, kv_bytes), sized(windowed, kv_bytes)


def test_a_draft_window_takes_no_page_from_the_target():
    """Laws: the target has no page fewer, the draft none that its rows cannot use."""
    num_gains, num_new = {True: 0, False: 0}, 0
    for seed, kv_bytes, whole, windowed in pairs(3500):
        if windowed is None:
            assert whole is None, seed
            continue
        assert windowed.num_bytes <= kv_bytes, seed
        draft = windowed.groups[windowed.draft_group]
        if draft.window is not None:
            num_windows = windowed.num_rows + windowed.max_sessions
            steps = windowed.most_steps
            assert draft.num_pages <= windowed.window_pages(draft, num_windows, steps), seed
            assert draft.num_pages >= windowed.window_pages(draft, 1, steps), seed
        if whole is None:
            num_new += 1
            continue
        assert draft.num_pages <= whole.groups[-1].num_pages, seed
        for before, after in zip(whole.groups[:-1], windowed.groups, strict=False):
            assert after.num_pages >= before.num_pages, (seed, before.name)
            num_gains[after.window is None] += after.num_pages > before.num_pages
    assert num_gains[True] > 100 and num_gains[False] > 10 and num_new > 10


def test_a_draft_window_lowers_no_number_of_requests():
    """Law: at any length, of equal bytes, however many rows there may be."""
    num_more = num_same = num_tight = 0
    for seed, _, whole, windowed in pairs(1000):
        if whole is None or windowed is None:
            continue
        context, draft = windowed.max_context_len, windowed.groups[windowed.draft_group]
        rng = random.Random(seed)
        for length in {1, context - 1, *(rng.randint(1, context - 1) for _ in range(10))}:
            before, after = (
                Capacity(sizes).at_once(length).num_requests for sizes in (whole, windowed)
            )
            assert after >= before, (seed, length)
            num_more += after > before
            num_same += after == before
        num_tight += draft.window is not None and draft.num_pages == whole.groups[-1].num_pages
    assert num_more > 200 and num_same > 200 and num_tight > 20


def planned(monkeypatch, capsys, *args: str) -> dict:
    numbers = "--layers 32 --kv-heads 8 --head-dim 128 --draft-layers 16 --draft-kv-heads 8"
    memory = "--draft-head-dim 64 --memory 80GiB --weights 18GiB --shape 3x1x4 --json"
    monkeypatch.setattr("sys.argv", ["specpool", "plan", *f"{numbers} {memory}".split(), *args])
    with pytest.raises(SystemExit):
        main()
    return json.loads(capsys.readouterr().out)


def test_a_plan_without_max_batch_gains_by_a_draft_window(monkeypatch, capsys):
    """It takes as many rows as fit of the shortest requests asked about, and says what limits."""
    window = ("--draft-window", "512", "--draft-sink", "4")
    for lives in (("8192",), ("2048", "8192", "32768")):
        ask = ["--max-context-len", str(int(lives[-1]) + 128)]
        for live in lives:
            ask += ["--live", live]
        whole, windowed = (planned(monkeypatch, capsys, *ask, *more) for more in ((), window))
        for before, after in zip(whole["fits"], windowed["fits"], strict=True):
            assert after["num_requests"] >= 1.15 * before["num_requests"], after["question"]
        shortest = windowed["fits"][0]
        assert shortest["num_requests"] == windowed["max_batch"]
        assert shortest["limit"] == "pages of all groups together"
        # As many rows for the engine: every one has its window.
        given = planned(monkeypatch, capsys, *ask, *window, "--max-batch", "256")
        for before, after in zip(whole["fits"], given["fits"], strict=True):
            assert after["num_requests"] > before["num_requests"], after["question"]
