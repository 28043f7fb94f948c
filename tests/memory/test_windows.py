"""Law: sliding layers have groups of their own that hold windows; the text stays the same.

Every case runs with the busy check at level 2, and `conftest` looks for leaks behind each.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import eagle_checkpoints
from device_kit import READS, forbidden, kernels_run, watched
from families import make_model
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter, ScriptedDrafter
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models import TargetModel
from window_kit import (
    FAMILIES,
    ONLY_WINDOWS,
    VOCAB,
    Watch,
    assert_speaks,
    config_of,
    open_targets,
    prompt,
    reference_of,
)

PAGE_SIZES = (1, 3, 4, 16, 64)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, TargetModel]]:
    with open_targets() as found:
        yield found


KINDS = [
    ("plain", (0, 1, 1)),
    ("scripted", (3, 1, 4)),
    ("scripted", (3, 4, 12)),
    ("ngram", (4, 1, 5)),
    ("ngram", (3, 3, 8)),
]


@dataclass(frozen=True)
class Case:
    """A random engine and random requests, a function of the seed."""

    seed: int

    @property
    def rng(self) -> random.Random:
        return random.Random(f"window {self.seed}")

    def run(self, targets: dict[str, TargetModel], num_tokens: int) -> dict[str, int]:
        """Generate and compare; what happened on the way."""
        rng, family = self.rng, FAMILIES[self.seed % len(FAMILIES)]
        reference = reference_of(family)
        page_size = rng.choice(PAGE_SIZES)
        lens = [rng.choice([1, 3, 8, 9, 17, 40, 64]) for _ in range(rng.randint(1, 5))]
        texts = [prompt(rng, n) for n in lens]
        kind, shape = rng.choice(KINDS)
        drafter: Any = None
        if kind == "scripted":
            known = [[*text, *reference.text(text, num_tokens)] for text in texts]
            drafter = ScriptedDrafter(known, vocab_size=VOCAB, seed=self.seed)
        elif kind == "ngram":
            drafter = NgramDrafter(max_ngram=2)
        is_tight, longest = rng.random() < 0.4, max(lens) + num_tokens
        config = EngineConfig(
            shape=Shape(*shape),
            page_size=page_size,
            placement=rng.choice(["split", "shared"]),
            overlap_depth=rng.randint(0, 1),
            prefill_tokens=rng.choice([5, 16, 33, 1024]),
            mixed_chunks=rng.random() < 0.3,
            max_batch=rng.randint(1, 4),
            max_context_len=longest + rng.randint(1, 30),
            headroom=0,
            busy_check=2,
        )
        if is_tight:  # room for little more than one row, so that a request is retracted
            pages = -(-(config.max_context_len + 24) // page_size)
            config = dataclasses.replace(config, num_pages=pages + 1, max_batch=4)
        engine = Engine(targets[family], drafter, config=config)
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        held = Watch(engine)
        outputs = engine.generate(texts, params)
        assert_speaks(reference, texts, outputs)
        assert held.most <= held.limit, (held.most, held.limit)
        stats = engine.stats()
        return {"retracted": stats.retracted_ct, "accepted": sum(stats.accept_cts[2:])}


def cases(num_in_ci: int, num_all: int) -> list[object]:
    marks = (pytest.mark.full,)
    return [pytest.param(s, marks=() if s < num_in_ci else marks) for s in range(num_all)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", cases(32, 400))
def test_the_text_is_transformers_own(targets, seed):
    """Any worker, page size, depth, chunk; with retraction and mixed chunks."""
    Case(seed).run(targets, 40)


@pytest.mark.full
def test_the_cases_are_of_every_kind(targets):
    found = Counter()
    for seed in range(32):  # as many as it takes
        found.update(name for name, count in Case(seed).run(targets, 40).items() if count)
        if found["retracted"] and found["accepted"] >= 2:
            return
    raise AssertionError(found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "layout"), [((3, 1, 4), "dense"), ((3, 2, 6), "holey")])
def test_an_eagle_head_beside_windows(targets, monkeypatch, tmp_path, family, depth, shape, layout):
    """The head's draft group is full. A head of random weights is mostly wrong."""
    monkeypatch.setattr(eagle_checkpoints, "H", 64)
    monkeypatch.setattr(eagle_checkpoints, "VOCAB", VOCAB)
    layer_state = partial(eagle_checkpoints.layer_state, h=64)
    monkeypatch.setattr(eagle_checkpoints, "layer_state", layer_state)
    state = eagle_checkpoints.eagle_state()
    config = eagle_checkpoints.base_config(max_position_embeddings=512, sliding_window=5)
    folder = eagle_checkpoints.write(tmp_path / "head", config, state)
    engine = Engine(
        targets[family],
        EagleDrafter.from_pretrained(folder, targets[family]),
        config=EngineConfig(
            shape=Shape(*shape),
            layout=layout,
            page_size=4,
            overlap_depth=depth,
            max_context_len=160,
            placement="shared" if depth else "split",
            busy_check=2,
        ),
    )
    rng = random.Random(family)
    texts = [prompt(rng, n) for n in (3, 21, 40)]
    outputs = engine.generate(texts, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert_speaks(reference_of(family), texts, outputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_read_the_same(targets, family, page_size):
    """The device's twins, on the host runner."""
    rng = random.Random(page_size)
    texts = [prompt(rng, n) for n in (2, 30, 17)]
    reference = reference_of(family)
    drafter = ScriptedDrafter(
        [[*text, *reference.text(text, 24)] for text in texts], vocab_size=VOCAB
    )
    config = EngineConfig(
        shape=Shape(3, 4, 12),
        page_size=page_size,
        overlap_depth=1,
        max_context_len=100,
        prefill_tokens=13,
        busy_check=2,
    )
    with kernels_run() as seen:
        engine = Engine(targets[family], drafter, config=config)
        outputs = engine.generate(texts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert_speaks(reference, texts, outputs)
    assert seen["compact_accepted"] and seen["apply_table_deltas"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_found_without_asking_the_device(targets, family, monkeypatch):
    """The host's bounds decide where each row's reads begin (docs/contract.md, Window groups)."""
    running, steps = [False], [0]
    rng = random.Random(8)
    texts = [prompt(rng, n) for n in (2, 30, 17)]
    config = EngineConfig(page_size=4, overlap_depth=1, max_context_len=100, prefill_tokens=13)
    with kernels_run():
        engine = Engine(targets[family], config=config)
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, forbidden(name, running))
        monkeypatch.setattr(
            engine.core.worker, "run", watched(engine.core.worker.run, running, steps)
        )
        outputs = engine.generate(texts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert steps[0] > 20
    monkeypatch.undo()
    assert_speaks(reference_of(family), texts, outputs)


def test_samples_share_a_window(targets):
    """Forks of a row whose window begins late, and rows on a pinned text."""
    rng = random.Random(3)
    text = prompt(rng, 45)
    for family in FAMILIES:
        texts = {}
        for page_size, depth, chunk in ((1, 0, 1024), (4, 1, 7), (16, 0, 10), (3, 1, 20)):
            engine = Engine(
                targets[family],
                config=EngineConfig(
                    page_size=page_size,
                    overlap_depth=depth,
                    prefill_tokens=chunk,
                    max_context_len=120,
                    busy_check=2,
                ),
            )
            params = SamplingParams(max_new_tokens=20, n=4, temperature=1.0, seed=5)
            outputs = engine.generate([text], params)
            texts[page_size] = [output.token_ids for output in outputs]
        assert len({str(each) for each in texts.values()}) == 1
        assert len({str(each) for each in texts[1]}) == 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_keep_their_windows(targets, family, page_size, depth):
    """Three at once, five turns each: every turn's text is that of all its tokens, fresh."""
    reference, rng = reference_of(family), random.Random(page_size)
    config = EngineConfig(
        page_size=page_size,
        overlap_depth=depth,
        prefill_tokens=10,
        max_batch=2,
        max_context_len=300,
        busy_check=2,
    )
    engine = Engine(targets[family], config=config)
    params = SamplingParams(max_new_tokens=14, ignore_eos=True)
    sessions, comparison = [engine.open_session() for _ in range(3)], Comparison()
    for _ in range(5):
        turns = [
            session.append(prompt(rng, rng.choice([1, 7, 23])), params) for session in sessions
        ]
        turns[0].close() if rng.random() < 0.4 else None  # back to the last turn's end
        for turn in turns:
            if turn._is_read:
                continue
            output = turn.output()
            assert output.error is None
            comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()
    assert comparison.num_positions >= 5 * 2 * 14
    for session in sessions:
        session.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_abort_gives_windows_back(targets, family, depth):
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    config = EngineConfig(page_size=4, overlap_depth=depth, prefill_tokens=6, busy_check=2)
    engine = Engine(targets[family], config=config)
    rng = random.Random(depth)
    for turns in range(1 + 3 * depth, 30, 6):
        number = engine.submit(prompt(rng, 33), params)
        other = engine.submit(prompt(rng, 5), SamplingParams(max_new_tokens=9))
        for _ in range(turns):
            engine.turn()
        engine.abort(number)
        while engine.turn():
            pass
        assert other
    engine.ledger.check()
    assert all(s.free_pages + s.cached_pages == s.num_pages for s in engine.pool_stats())


# --- Pinned texts -------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pinned_text_keeps_its_windows_and_no_more(targets, family, page_size, depth):
    reference, rng = reference_of(family), random.Random(page_size)
    system = prompt(rng, 155)
    config = EngineConfig(
        page_size=page_size,
        overlap_depth=depth,
        prefill_tokens=40,
        max_context_len=300,
        busy_check=2,
        prefix_cache=False,
    )
    engine = Engine(targets[family], config=config)
    pin = engine.pin(system)
    kept = 155 // page_size * page_size
    assert pin.tokens == system[:kept]
    for g, group in enumerate(engine.ledger.groups):
        held = engine.ledger.pinned_pages(g) * page_size
        if group.window is None:
            assert held == kept
        else:
            assert group.window - 1 <= held <= group.window + 2 * page_size
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    short = engine.pin(system[:64])
    assert len(short.tokens) == 64
    texts = [system + prompt(rng, 9), system[:100] + prompt(rng, 3), system[:30], system[:kept]]
    before = engine.stats().prefilled_token_ct
    outputs = engine.generate(texts, params)
    assert_speaks(reference, texts, outputs)
    # The second begins with the shorter text only. The third lies within both, where their windows
    # are gone, but for that of a single page. The fourth wants the longer text less its last token:
    # a page of one slot below that is gone where a round was prepared behind the prefill.
    fresh = [164 - kept, 103 - 64, 1 if page_size == 64 else 30, 1]
    if (page_size, depth) == (1, 1):
        fresh[3] = kept - 64
    assert engine.stats().prefilled_token_ct - before == sum(fresh)
    engine.unpin(short)
    engine.unpin(pin)
    assert all(s.free_pages + s.cached_pages == s.num_pages for s in engine.pool_stats())


# --- What is no number ---------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("prefill_tokens", [16, 128])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_no_nan_is_left_behind_a_window(family, depth, prefill_tokens):
    """A NaN ends its request, also when the last token no longer sees it or holds its page.

    The next owner of the page would read it under a mask, and a masked NaN is still NaN.
    """
    poison, rng, config = 250, random.Random(2), config_of(family, 8, 512)
    config.tie_word_embeddings = False
    model = make_model(config)
    reference = Reference(model)
    model.get_input_embeddings().weight.data[poison] = torch.nan
    bad, *good = [[min(token, 249) for token in prompt(rng, n)] for n in (100, 40, 40, 40, 40)]
    bad[2] = poison
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    with Engine.from_pretrained(
        model,
        page_size=4,
        prefill_tokens=prefill_tokens,
        overlap_depth=depth,
        max_context_len=160,
        max_batch=2,
        busy_check=2,
    ) as engine:
        first, *others, last = engine.generate([bad, *good, bad], params)
        for output in (first, last):
            assert output.error == "the logits at position 99 are not finite"
        assert_speaks(reference, [bad, *good], others)
        for buffer in engine.cache.keys + engine.cache.values:
            assert buffer.isfinite().all()


# --- What it costs ------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "page_size"), [((0, 1, 1), 1), ((3, 1, 4), 4), ((3, 4, 12), 16)])
def test_reading_a_window_does_not_grow_with_the_context(
    targets, monkeypatch, family, shape, page_size
):
    """Columns gathered in a window group, at lengths from 10 to 400 side by side."""
    seen: dict[int | None, list[int]] = {}
    pages_of = KVCache.pages_of

    def watched(self, group, *args):
        pages, origins = pages_of(self, group, *args)
        seen.setdefault(self.windows[group], []).append(pages.shape[1] * self.page_sizes[group])
        return pages, origins

    monkeypatch.setattr(KVCache, "pages_of", watched)
    rng = random.Random(1)
    texts = [prompt(rng, n) for n in (10, 200, 350)]
    reference, drafter = reference_of(family), None
    if shape[0]:
        known = [[*text, *reference.text(text, 50)] for text in texts]
        drafter = ScriptedDrafter(known, vocab_size=VOCAB)
    config = EngineConfig(
        shape=Shape(*shape), page_size=page_size, prefill_tokens=32, overlap_depth=1
    )
    engine = Engine(targets[family], drafter, config=config)
    outputs = engine.generate(texts, SamplingParams(max_new_tokens=50, ignore_eos=True))
    assert_speaks(reference, texts, outputs)
    # What a query sees behind it, a chunk of 32 or a round whose root lies in [lo, hi].
    assert max(seen[8]) <= 7 + 32 + 2 * page_size
    if family not in ONLY_WINDOWS:
        assert max(seen[None]) >= 390


def test_a_view_begins_no_page_too_early(targets, monkeypatch):
    """If the view began a page later, the logits would be wrong."""
    text = prompt(random.Random(2), 60)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, logprobs=0)
    engine = Engine(targets["mistral"], config=EngineConfig(page_size=1))
    (expected,) = engine.generate([text], params)
    pages_of = KVCache.pages_of

    def beyond(self, group, rows, least, ends):
        least = least if self.windows[group] is None else least + self.page_sizes[group]
        return pages_of(self, group, rows, least, ends)

    monkeypatch.setattr(KVCache, "pages_of", beyond)
    (output,) = engine.generate([text], params)
    pairs = zip(output.logprobs, expected.logprobs, strict=True)
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) > 1e-3


LONG = [
    pytest.param(f, n, marks=() if n < 500 else pytest.mark.full)
    for f in FAMILIES
    for n in (150, 2000)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("family", "num_tokens"), LONG)
def test_a_row_holds_its_window_however_long_it_grows(family, num_tokens, depth):
    """Window 64: pages constant, text transformers' own."""
    window, positions = 64, 2304
    reference, rng = reference_of(family, window, positions), random.Random(family)
    texts = [prompt(rng, n) for n in (70, 5)]
    known = [[*text, *reference.text(text, num_tokens)] for text in texts]
    for shape, page_size in (((3, 1, 4), 16), ((4, 4, 16), 4)):
        drafter = ScriptedDrafter(known, vocab_size=VOCAB, error_rate=0.1)
        with TargetModel(make_model(config_of(family, window, positions))) as target:
            config = EngineConfig(
                shape=Shape(*shape),
                page_size=page_size,
                overlap_depth=depth,
                max_batch=2,
                prefill_tokens=48,
                busy_check=0 if num_tokens > 500 else 2,
            )
            engine = Engine(target, drafter, config=config)
            watch = Watch(engine)
            params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            outputs = engine.generate(texts, params)
            assert_speaks(reference, texts, outputs)
            assert window < watch.steady <= watch.steady_limit
            assert watch.most <= watch.limit
