"""Laws of `draft_sink`: the draft group keeps a row's first tokens too; the text stays the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specpool import ConfigError, Engine, EngineConfig, Group, Ledger, SamplingParams, Shape
from specpool.capacity.group_sizes import size_groups
from specpool.engine.assets import corpus
from specpool.engine.attention.lanes import Lanes, causal_view, chain_views, last_view, own_view
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.transfer.layout import Layout

PROMPTS = [p[:n] for p, n in zip(corpus.prompts(3), (100, 130, 9), strict=True)]
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 12)
GREEDY = SamplingParams(max_new_tokens=32, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8, seed=3)
SINK = {"draft_window": 16, "draft_sink": 5}


def run(draft, params=GREEDY, prompts=PROMPTS, **options):
    """Return the texts and what the engine's draft group held at most."""
    options = {"page_size": 4, "max_context_len": 200, "prefill_tokens": 16} | options
    with Engine.from_pretrained(draft=draft, busy_check=2, **options) as engine:
        outputs = engine.generate(prompts, params)
        return [output.token_ids for output in outputs], engine.peak_pages[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", ["specpool/tiny-draft", "specpool/tiny-eagle"])
@pytest.mark.parametrize(("shape", "layout"), [(CHAIN, "dense"), (TREE, "dense"), (TREE, "holey")])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_stays_and_the_draft_group_needs_fewer_pages(draft, shape, layout, depth):
    options = {"shape": shape, "overlap_depth": depth, "layout": layout}
    texts, pages = zip(*(run(draft, **options, **more) for more in ({}, SINK)), strict=True)
    assert texts[0] == texts[1]
    assert pages[1] < pages[0] * 0.75


def test_a_drawn_text_stays():
    drawn = [run("specpool/tiny-eagle", DRAWN, shape=TREE, **more)[0] for more in ({}, SINK)]
    assert drawn[0] == drawn[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("host_bytes", [0, 1 << 22])
def test_the_text_stays_when_rows_are_retracted_and_come_back(host_bytes):
    """With host memory they come back by copies, else by a prefill; both bring the sink back."""
    prompts = [prompt[:30] for prompt in corpus.prompts(6)]
    params = SamplingParams(max_new_tokens=36, ignore_eos=True)
    plain = run("specpool/tiny-eagle", params, prompts, shape=CHAIN)[0]
    options = {"shape": CHAIN, "page_size": 4, "max_context_len": 96, "prefill_tokens": 16}
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle",
        num_pages=30,
        host_bytes=host_bytes,
        offload="always" if host_bytes else "cost",
        headroom=0,
        busy_check=2,
        **options,
        **SINK,
    ) as engine:
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == plain
        assert engine.stats().retracted_ct > 0
        if host_bytes:
            assert engine.stats().host.reload_ct > 0


def test_a_session_and_the_prefix_cache_keep_the_text():
    options = {"shape": CHAIN, "page_size": 4, "max_context_len": 200, "prefill_tokens": 16}
    texts, cached = [], []
    for more in ({}, SINK):
        with Engine.from_pretrained(
            draft="specpool/tiny-eagle", busy_check=2, **options, **more
        ) as engine:
            session = engine.open_session()
            turns = [session.append(text[:40], GREEDY).output().token_ids for text in PROMPTS[:2]]
            session.close()
            again = [engine.generate([PROMPTS[1]], GREEDY)[0] for _ in range(2)]
            texts.append([*turns, *(output.token_ids for output in again)])
            cached.append(engine.stats().prefix.hit_ct)
    assert texts[0] == texts[1]
    assert cached[1] > 0


def test_the_busy_check_knows_who_holds_a_shared_sink():
    options = {"shape": CHAIN, "page_size": 4, "max_context_len": 200, "prefill_tokens": 16, **SINK}
    with Engine.from_pretrained(draft="specpool/tiny-eagle", busy_check=2, **options) as engine:
        engine.generate([PROMPTS[1]], GREEDY)
        for _ in range(2):
            engine.submit(PROMPTS[1], GREEDY, on_item=lambda *_: None)
        ledger, check, holders = engine.ledger, engine.core.loop.busy_check, []
        while engine.turn():
            page = ledger.page_table(1)[:, 0]
            for row in np.flatnonzero(ledger.evicted_len(1)):
                assert check._holders(1, int(page[row])) >= set(np.flatnonzero(page == page[row]))
                holders.append(int((page == page[row]).sum()))
        assert max(holders) == 2 and not engine.findings


def test_a_checkpoint_inside_the_sink_keeps_no_page():
    """The busy check counts the pages that checkpoints keep: a sink never leaves the table."""
    options = {"shape": CHAIN, "page_size": 4, "max_context_len": 200, "prefill_tokens": 16, **SINK}
    with (
        Engine.from_pretrained(
            draft="specpool/tiny-eagle", busy_check=2, prefix_cache=False, **options
        ) as engine,
        engine.open_session() as session,
    ):
        for length, num_new in ((3, 2), (60, 20)):
            params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
            session.append(PROMPTS[0][:length], params).output()
        assert not engine.findings


def test_a_row_moves_with_its_sink():
    options = {"draft": "specpool/tiny-eagle", "shape": CHAIN, "page_size": 4, **SINK}
    options |= {"max_context_len": 200, "busy_check": 2}
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with Engine.from_pretrained(**options) as one, Engine.from_pretrained(**options) as two:
        with one.open_session() as stays:
            expected = [stays.append(text[:60], params).output() for text in PROMPTS[:2]]
        leaves = one.open_session()
        assert leaves.append(PROMPTS[0][:60], params).output().token_ids == expected[0].token_ids
        with one.export(leaves) as export:
            arrived = two.import_row(export.image())
            export.arrived()
        found = arrived.append(PROMPTS[1][:60], params).output()
        assert found.token_ids == expected[1].token_ids
        assert found.accept_lens == expected[1].accept_lens, "the draft KV came along"


def _sliding(sink):
    group = Group("draft", page_size=4, num_pages=40, window=5, sink=sink)
    ledger = Ledger([group], [], num_rows=1, max_context_len=60)
    return ledger, Layout.from_ledger(ledger, [8], "model")


def test_a_row_takes_along_what_the_other_side_has_pages_for():
    ledger, layout = _sliding(6)
    for length in range(1, 60):
        row = ledger.import_row(length, length)
        held = np.flatnonzero(ledger.page_table(0)[row]).tolist()
        assert layout.groups[0].columns(length) == held
        assert layout.num_pages(length) == [len(held)]
        ledger.abort(row)


def test_a_row_does_not_move_to_another_sink():
    assert len({_sliding(sink)[1].key for sink in (0, 3, 4)}) == 3


def _views(cache, rows, lens):
    """Every kind of view of the draft group, two queries a lane; the positions of its queries."""
    lanes = Lanes(torch.tensor(rows, dtype=torch.int32), lens, 2)
    starts = lens.on_device.unsqueeze(1)
    at = (starts + torch.arange(2)).int()
    causal = torch.ones(len(rows), 2, 2, dtype=torch.bool).tril()
    tree = own_view(cache, 1, lanes, lanes.slots(cache, 1), causal, at, at)
    yield from ((view, at) for view in (causal_view(cache, 1, lanes), tree))
    yield last_view(cache, 1, lanes), at[:, 1:]
    for step, view in enumerate(chain_views(cache, 1, lanes)):
        yield view, at[:, step : step + 1]


@pytest.mark.parametrize("spread", [0, 1, 60])
def test_a_query_sees_the_sink_and_its_window_and_nothing_else(spread):
    """The law, cell by cell, against every start: [0, sink) and (p - window, p].

    The host knows the starts to within `spread`; if it is large, only the device knows the pages.
    """
    window, sink, size = 6, 3, 2
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle",
        page_size=size,
        max_context_len=60,
        draft_window=window,
        draft_sink=sink,
    ) as engine:
        cache, ledger = engine.cache, engine.ledger
        rows = [ledger.admit(), ledger.admit()]
        for turn in range(1, 15):
            ends = [4 * turn, 2 * turn]
            step = ledger.prepare_extend(rows, ends).step
            ledger.launch(step)
            cache.apply_delta(step)
            ledger.complete(step)
            starts = np.array(ends, np.int32) - 2
            bounds = np.maximum(starts - spread, 0), starts + spread
            lens = SeqLens(torch.from_numpy(starts), *(bounds if spread else (starts, starts)))
            for view, positions in _views(cache, rows, lens):
                # No back end may take a way round the mask: nothing else knows the sink.
                assert view.decode_len is view.causal_lens is view.own_cells is None
                assert not view.is_causal
                for seen, kept in (window, sink), (window - 2, 0):  # a layer's own window
                    mask = view.mask(seen) == 0
                    for lane, query in np.ndindex(*positions.shape):
                        at, table = int(positions[lane, query]), ledger.page_table(1)[rows[lane]]
                        law = {p for p in range(at + 1) if p < kept or p > at - seen}
                        slots = {int(table[p // size]) * size + p % size for p in law}
                        columns = mask[lane, query].nonzero()[:, 0].tolist()
                        pages = view.read_pages[lane].tolist()
                        read = {pages[c // size] * size + c % size for c in columns}
                        assert read == slots, f"lane {lane}, query {at}"
                        assert view.kv_lens is None or max(columns) < view.kv_lens[lane]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_sink_counts_in_sizing(depth):
    """It counts once in each row; no page of it is among those that a window passes."""

    def pages(**more):
        sizes = size_groups(
            EngineConfig(max_batch=4, page_size=4, overlap_depth=depth, **more),
            {None: 1024},
            256,
            shapes=[CHAIN],
            max_context_len=1 << 12,
            kv_bytes=1 << 26,
        )
        needed = sizes.pages_needed(4000, 4000, 1)[1], sizes.most_pages(4000, 4000, 1)[1]
        return sizes.groups[1], np.array(needed)

    window, sink = pages(draft_window=64), pages(draft_window=64, draft_sink=9)
    assert (sink[0].window, sink[0].sink) == (65, 9)
    assert (sink[1] == window[1] + 3).all()
    num_rows = 4 + 16 + 1  # rows, sessions, and one more
    assert sink[0].num_pages == window[0].num_pages + num_rows * 3
    long = pages(draft_window=2048, draft_sink=2048)[0]
    assert (long.window, long.sink) == (None, 0), "a window and a sink that hide nothing"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_sink": -1}, r"draft_sink must be an integer in \[0, "),
        ({"draft_sink": "all"}, "draft_sink"),
        ({"draft_sink": 4}, "draft_sink 4 needs a draft_window .* got no draft_window"),
        ({"draft_sink": 9, "draft_window": 8}, "draft_sink 9 needs .* as many tokens, got 8"),
    ],
)
def test_bad_sinks_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)
