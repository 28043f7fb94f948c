"""Laws of `draft_window`: the draft group keeps a window alone, and the text stays the same."""

from __future__ import annotations

import pytest

from specpool import ConfigError, Engine, EngineConfig, SamplingParams, Shape
from specpool.assets import corpus
from specpool.memory.group_sizes import size_groups

PROMPTS = [p[:n] for p, n in zip(corpus.prompts(3), (100, 130, 9), strict=True)]
PARAMS = SamplingParams(max_new_tokens=32, ignore_eos=True)
SHAPES = [Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)]


@pytest.mark.parametrize("draft", ["specpool/tiny-draft", "specpool/tiny-eagle"])
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
