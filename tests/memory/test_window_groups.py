"""Law: sliding layers get groups of their own, sized by need; a plan computes the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from specpool import ConfigError, Engine, Group, Ledger, SamplingParams, Shape
from specpool.capacity.layer_kv import LayerKV, bytes_by_window
from specpool.cli import main
from specpool.engine.config import EngineConfig
from specpool.engine.draft import ScriptedDrafter
from specpool.engine.models import TargetModel
from window_kit import (
    FAMILIES,
    ONLY_WINDOWS,
    VOCAB,
    assert_speaks,
    config_of,
    fits,
    open_targets,
    reference_of,
    sizes_of,
)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, TargetModel]]:
    with open_targets() as found:
        yield found


@pytest.mark.parametrize("placement", ["split", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_are_the_models_windows(targets, family, placement):
    options = {"placement": placement, "max_context_len": 300, "page_size": 4}
    engine = Engine(targets[family], config=EngineConfig(**options))
    names = [(group.name, group.window) for group in engine.ledger.groups]
    assert names == [("kv", None)] * (family not in ONLY_WINDOWS) + [("window 8", 8)]
    worker = engine.core.worker
    of_layers = [engine.ledger.groups[g].window for g in worker._context.forward.groups]
    assert of_layers == [layer.window for layer in targets[family].layer_kv]


def test_a_window_as_long_as_the_context_is_full_attention(targets):
    for length, windows in ((9, [8]), (8, [None])):
        engine = Engine(targets["mistral"], config=EngineConfig(max_context_len=length))
        assert [group.window for group in engine.ledger.groups] == windows
        outputs = engine.generate([[5, 6, 7]], SamplingParams(ignore_eos=True))
        assert_speaks(reference_of("mistral"), [[5, 6, 7]], outputs)
    group = Group("kv", page_size=1, num_pages=99, window=9)
    with pytest.raises(ConfigError, match=r"group kv: window 9 must be at most max_context_len 8"):
        Ledger([group], [Shape.none()], num_rows=1, max_context_len=8)


def test_the_draft_has_a_full_group(targets):
    """The target's where it has one and placement is shared, else its own."""

    class Layered(ScriptedDrafter):
        layers = (LayerKV(2, 16, 16),)

    for family in FAMILIES:
        for placement in ("split", "shared"):
            drafter = Layered([], vocab_size=VOCAB)
            config = EngineConfig(placement=placement, max_context_len=300)
            engine = Engine(targets[family], drafter, config=config)
            groups = [(g.name, g.window, g.hosts_drafts) for g in engine.ledger.groups]
            own = [("draft", None, True)]
            if family in ONLY_WINDOWS:
                assert groups == [("window 8", 8, False), *own]
            elif placement == "shared":
                assert groups == [("kv", None, True), ("window 8", 8, False)]
            else:
                assert groups == [("target", None, False), ("window 8", 8, False), *own]


def test_windows_are_sized_by_need():
    """A row: window + reserve + 2 pages; in all: two chunks, and one row's share more."""
    how = {"max_batch": 8, "kv_bytes": 1 << 30, "bytes_of": {None: 4, 61: 20}}
    full, window = sizes_of(**how).groups
    assert full.num_pages == 8 * full.pages_per_row == 8 * 257
    of_row, of_chunk = (60 + 4) // 16 + 2, -(-(60 + 128) // 16) - (60 + 4) // 16
    assert window.num_pages == 9 * of_row + 2 * of_chunk
    # A round in flight may be 4 tokens further on: a page more in each row, and less in a chunk.
    # What passes below the window is fenced behind it; and a third chunk may be.
    (_, overlapped) = sizes_of(**how, overlap_depth=1).groups
    fenced = 1 + (4 + 4) // 16 + 1
    assert overlapped.num_pages == 9 * (of_row + 1 + fenced) + 3 * (of_chunk - 1)
    # A window for each session, none of the full pages.
    talks = sizes_of(**how, max_sessions=5).groups
    assert [g.num_pages for g in talks] == [full.num_pages, window.num_pages + 5 * of_row]
    # Never more than the rows have columns.
    (short,) = sizes_of(max_batch=2, kv_bytes=1 << 30, bytes_of={4000: 4}).groups
    assert short.num_pages == 2 * 257


@pytest.mark.parametrize("num_pages", [257, 400])
def test_num_pages_are_of_full_groups(num_pages):
    sizes = sizes_of(max_batch=8, num_pages=num_pages)
    full, window = sizes.groups
    assert (full.num_pages, window.num_pages) == (num_pages, sizes.window_pages(window, 8))
    (_, window) = sizes_of(max_batch=60, num_pages=num_pages).groups
    assert window.num_pages == num_pages  # enough for fewer rows at once
    sizes_of(max_batch=60, num_pages=num_pages).ledger()


@pytest.mark.parametrize("max_batch", [1, 3, 64, 1000])
@pytest.mark.parametrize(
    "bytes_of", [{None: 4, 64: 20}, {None: 20, 512: 4}, {64: 4}, {8: 1, 64: 9}]
)
def test_bytes_are_divided_between_full_and_window_groups(bytes_of, max_batch):
    """Never more than there are, never too little for one row, and a ledger takes it."""
    how = {"max_batch": max_batch, "bytes_of": bytes_of}
    least = next(n for n in range(0, 1 << 22, 4096) if fits(kv_bytes=n, **how))
    before = [0] * len(bytes_of)
    for kv_bytes in (least, 2 * least, 3 * least + 77, 10 * least, 100 * least, 10_000 * least):
        sizes = sizes_of(kv_bytes=kv_bytes, **how)
        assert sizes.num_bytes <= kv_bytes
        sizes.ledger()
        num_pages = [group.num_pages for group in sizes.groups]
        assert all(a <= b for a, b in zip(before, num_pages, strict=True))
        before = num_pages
    for group in sizes.groups:
        if group.window is None:
            assert group.num_pages == max_batch * group.pages_per_row
        else:
            assert group.num_pages == sizes.window_pages(group, max_batch, sizes.most_steps)


def test_short_requests_have_their_windows_first():
    """Memory for 2.5 rows of the whole context: more than three short ones run at once."""
    row = 257 * 16 * 4 + 16 * 20 * 6
    sizes = sizes_of(max_batch=64, kv_bytes=int(2.5 * row) + 60_000)
    full, window = sizes.groups
    assert full.num_pages >= full.pages_per_row
    assert window.num_pages * window.page_bytes <= sizes.num_bytes // 2 + 1
    assert window.num_pages // 7 > 12


def test_the_plan_says_the_same(targets, monkeypatch, capsys, tmp_path):
    """`specpool plan` of a model's config, and the engine of the model."""
    config_of("gemma3", 8, 512).save_pretrained(tmp_path)
    args = ["--target", str(tmp_path), "--dtype", "float32", "--weights", "0", "--workspace", "0"]
    args += ["--memory", "4MB", "--max-batch", "8", "--json"]
    monkeypatch.setattr("sys.argv", ["specpool", "plan", *args])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = json.loads(capsys.readouterr().out)["groups"]
    engine = Engine(targets["gemma3"], config=EngineConfig(kv_bytes=4_000_000))
    groups = engine.ledger.groups
    assert [(g["name"], g["window"], g["num_pages"]) for g in said] == [
        (g.name, g.window, g.num_pages) for g in groups
    ]
    by_window = bytes_by_window(targets["gemma3"].layer_kv, 4)
    assert [g["page_bytes"] for g in said] == [16 * by_window[g.window] for g in groups]
