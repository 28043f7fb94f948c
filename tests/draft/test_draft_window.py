"""Laws of `draft_window`: the draft group keeps a window alone, and the text stays the same."""

from __future__ import annotations

import pytest
import torch

from flashinfer_kit import Pages, Rig
from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.capacity.group_sizes import size_groups
from specpool.engine.assets import corpus
from specpool.engine.attention import attend
from specpool.engine.attention.lanes import Lanes, last_view

PROMPTS = [p[:n] for p, n in zip(corpus.prompts(3), (100, 130, 9), strict=True)]
PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)
SHAPES = [Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "draft", ["specpool/tiny-draft", "specpool/tiny-eagle", "specpool/tiny-block"]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_stays_and_the_draft_group_needs_fewer_pages(draft, shape, depth):
    options = {"shape": shape, "page_size": 4, "overlap_depth": depth, "max_context_len": 200}
    texts, pages, lens = [], [], []
    for window in (None, 16):
        with Engine.from_pretrained(
            draft=draft, draft_window=window, prefill_tokens=16, busy_check=2, **options
        ) as engine:
            outputs = engine.generate(PROMPTS, PARAMS)
            texts.append([output.token_ids for output in outputs])
            pages.append(engine.peak_pages[1])
            lens.append(sum(sum(o.accept_lens) for o in outputs))
    assert texts[0] == texts[1]
    assert pages[1] < pages[0] * 0.6


def test_a_window_as_long_as_the_text_drafts_as_without_one():
    outputs = []
    for window in (None, 199, 160):
        with Engine.from_pretrained(
            draft="specpool/tiny-eagle", shape=SHAPES[1], draft_window=window, max_context_len=200
        ) as engine:
            outputs.append([o.accept_lens for o in engine.generate(PROMPTS[2:], PARAMS)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_window_counts_in_sizing():
    """A row's draft pages do not grow with the context."""
    sizes = {}
    for context in (1 << 12, 1 << 14):
        for window in (None, 512):
            found = size_groups(
                EngineConfig(max_batch=4, draft_window=window),
                {None: 1024},
                256,
                shapes=SHAPES,
                max_context_len=context,
                kv_bytes=1 << 28,
            )
            assert found.groups[1].window == (window and window + 1)
            sizes[context, window] = found.pages_needed(context - 1, context - 1, 1)[1]
    assert sizes[1 << 14, None] > 3 * sizes[1 << 12, None]
    assert sizes[1 << 14, 512] <= sizes[1 << 12, None] // 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_window": 1}, r"draft_window must be an integer in \[2, "),
        ({"draft_window": "all"}, "draft_window"),
        ({"draft_window": 64, "placement": "shared"}, "draft_window 64 needs placement 'split'"),
    ],
)
def test_bad_windows_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


@pytest.mark.parametrize("page_size", [1, 3])
def test_lanes_that_end_at_one_position_may_begin_at_different_pages(page_size):
    """In a window group each lane's pages begin at the window of its first token.

    Law: the last tokens of such lanes see what each alone would see.
    """
    rig = Rig(None, torch.device("cpu"), torch.float32, 8, 1e-5)
    starts, widths = [20, 23], [5, 2]
    pages = Pages(rig, page_size, 2, window=4)
    view = last_view(pages, 0, pages.lanes(starts, widths))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, heads, 8, generator=generator) for n, heads in ((2, 4), (7, 2), (7, 2))
    )
    together = attend(view, *pages.buffers, q, k, v, scaling=0.3, window=3)
    begin = 0
    for lane, (start, width) in enumerate(zip(starts, widths, strict=True)):
        alone = Pages(rig, page_size, 2, window=4)
        lanes = alone.lanes([0] * lane + [start], width)
        lanes = Lanes(lanes.rows[lane:], lanes.seq_lens.filter(slice(lane, None)), width)
        mine = slice(begin, begin + width)
        out = attend(
            last_view(alone, 0, lanes),
            *alone.buffers,
            q[lane : lane + 1],
            k[mine],
            v[mine],
            scaling=0.3,
            window=3,
        )
        torch.testing.assert_close(out[0], together[lane])
        begin += width
