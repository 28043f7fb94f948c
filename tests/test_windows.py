"""Law: sliding layers live in groups of their own, which hold windows, and the text stays the same.

Every case runs with the busy check at level 2, and `conftest` looks for leaks behind each.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import eagle_checkpoints
from families import make_config, make_model
from lossless import Comparison, Reference
from specpool import (
    ConfigError,
    Engine,
    Group,
    Ledger,
    NotReady,
    SamplingParams,
    Shape,
    ShapeError,
    page_needs,
    plan_groups,
)
from specpool.cli import main
from specpool.config import EngineConfig
from specpool.draft import EagleDrafter, ScriptedDrafter
from specpool.kv_cache import KVCache
from specpool.layer_kv import LayerKV, bytes_by_window
from specpool.models import TargetModel
from specpool.plan_groups import size_groups
from specpool.scheduler import Scheduler
from test_device_worker import READS, forbidden, kernels_run, watched
from test_plan import Case as Plans
from test_plan import Server

FAMILIES = ("mistral", "gemma2", "gemma3", "gpt_oss")
ONLY_WINDOWS = {"mistral"}  # the others have full layers too
VOCAB = 259
PAGE_SIZES = (1, 3, 4, 16, 64)


def config_of(family: str, window: int, positions: int) -> Any:
    config = make_config(family)
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    config.sliding_window, config.max_position_embeddings = window, positions
    return config


_references: dict[tuple[str, int, int], Reference] = {}


def reference_of(family: str, window: int = 8, positions: int = 512) -> Reference:
    key = family, window, positions
    if key not in _references:
        _references[key] = Reference(make_model(config_of(*key)))
    return _references[key]


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, TargetModel]]:
    """Of each family, windows of 8."""
    found = {family: TargetModel(make_model(config_of(family, 8, 512))) for family in FAMILIES}
    yield found
    for target in found.values():
        target.close()


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def windows_of(engine: Engine) -> list[int]:
    """The window groups."""
    return [g for g, group in enumerate(engine.ledger.groups) if group.window is not None]


def assert_speaks(reference: Reference, texts: list[list[int]], outputs: list) -> None:
    comparison = Comparison()
    for output in outputs:
        assert output.error is None
        comparison.add(reference, texts[output.index], output.token_ids)
    comparison.finish()


# --- Which groups, and how large ----------------------------------------------------------------


@pytest.mark.parametrize("placement", ["split", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_are_the_models_windows(targets, family, placement):
    options = {"placement": placement, "max_context_len": 300, "page_size": 4}
    engine = Engine(targets[family], config=EngineConfig(**options))
    names = [(group.name, group.window) for group in engine.ledger.groups]
    assert names == [("kv", None)] * (family not in ONLY_WINDOWS) + [("window 8", 8)]
    worker = engine._worker
    of_layers = [engine.ledger.groups[g].window for g in worker._forward._groups]
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


def sizes_of(*, kv_bytes: int = 0, bytes_of: dict[int | None, int] | None = None, **options: Any):
    return size_groups(
        EngineConfig(**{"page_size": 16, "prefill_tokens": 128, **options}),
        {None: 4, 64: 20} if bytes_of is None else bytes_of,
        0,
        shapes=[Shape.eagle(3, 1, 4)],
        max_context_len=4096,
        kv_bytes=kv_bytes,
    )


def test_windows_are_sized_by_need():
    """A row: window + reserve + 2 pages; in all: a chunk, and one row's share more."""
    how = {"max_batch": 8, "kv_bytes": 1 << 30, "bytes_of": {None: 4, 61: 20}}
    full, window = sizes_of(**how).groups
    assert full.num_pages == 8 * full.pages_per_row == 8 * 257
    of_row, of_chunk = (60 + 4) // 16 + 2, -(-(60 + 128) // 16) - (60 + 4) // 16
    assert window.num_pages == 9 * of_row + of_chunk
    # A round in flight may be 4 tokens further on: a page more in each row, and less in the chunk.
    (_, overlapped) = sizes_of(**how, overlap_depth=1).groups
    assert overlapped.num_pages == window.num_pages + 9 - 1
    # Never more than the rows have columns.
    (short,) = sizes_of(max_batch=2, kv_bytes=1 << 30, bytes_of={4000: 4}).groups
    assert short.num_pages == 2 * 257


@pytest.mark.parametrize("num_pages", [257, 400])
def test_num_pages_are_of_full_groups(num_pages):
    full, window = sizes_of(max_batch=8, num_pages=num_pages).groups
    (_, needed) = sizes_of(max_batch=8, kv_bytes=1 << 30).groups
    assert (full.num_pages, window.num_pages) == (num_pages, needed.num_pages)
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
            assert group.num_pages == sizes.window_pages(group, max_batch)


def fits(**options: Any) -> bool:
    try:
        sizes_of(**options)
    except ConfigError as error:
        assert "one row of 4096 tokens needs" in str(error)
        return False
    return True


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


# --- The text -----------------------------------------------------------------------------------


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
        kind = rng.choice(["plain", "chain", "tree", "tree", "ngram"])
        shape = {"plain": None, "chain": (3, 1, 4), "ngram": (4, 1, 5)}.get(kind, (3, 4, 12))
        drafter: Any = {"plain": None, "ngram": "ngram:2"}.get(
            kind,
            ScriptedDrafter(
                [[*text, *reference.text(text, num_tokens)] for text in texts],
                vocab_size=VOCAB,
                seed=self.seed,
            ),
        )
        is_tight, longest = rng.random() < 0.4, max(lens) + num_tokens
        config = EngineConfig(
            shape=None if shape is None else Shape(*shape),
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
        if is_tight:  # a row and a little: somebody is retracted
            pages = -(-(config.max_context_len + 24) // page_size)
            config = dataclasses.replace(config, num_pages=pages + 1, max_batch=4)
        if isinstance(drafter, str):
            from specpool.draft import named_drafter

            drafter = named_drafter(drafter)
        engine = Engine(targets[family], drafter, config=config)
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        held = Watch(engine)
        outputs = engine.generate(texts, params)
        assert_speaks(reference, texts, outputs)
        assert held.most <= held.limit, (held.most, held.limit)
        stats = engine.stats()
        return {"retracted": stats.retracted_ct, "accepted": sum(stats.accept_cts[2:])}


class Watch:
    """What rows hold of windows, most at any launch, in slots."""

    def __init__(self, engine: Engine) -> None:
        self._ledger, self.most, self.steady = engine.ledger, 0, 0
        config, ledger = engine.config, engine.ledger
        depth, shape = ledger.overlap_depth, engine.shape
        reserve = shape.num_draft_tokens + depth * shape.max_accept_len
        self._groups = windows_of(engine)
        (window,) = {ledger.groups[g].window for g in self._groups}
        #: of a row that decodes
        self.steady_limit = window + reserve + 2 * config.page_size
        self.limit = window + max(reserve, ledger.max_chunk) + 2 * config.page_size
        launch = engine._scheduler.launch

        def watched(step):
            launch(step)
            for g in self._groups:
                held = (self._ledger.allocated_len(g) - self._ledger.evicted_len(g))[step.plan.rows]
                self.most = max(self.most, int(held.max()))
                if step.is_decode:
                    self.steady = max(self.steady, int(held.max()))

        engine._scheduler.launch = watched  # type: ignore[method-assign]


def cases(num_in_ci: int, num_all: int) -> list[object]:
    marks = (pytest.mark.full,)
    return [pytest.param(s, marks=() if s < num_in_ci else marks) for s in range(num_all)]


@pytest.mark.parametrize("seed", cases(32, 400))
def test_the_text_is_transformers_own(targets, seed):
    """Any worker, page size, depth, chunk; with retraction and mixed chunks."""
    Case(seed).run(targets, 40)


def test_the_cases_are_of_every_kind(targets):
    seen = [Case(seed).run(targets, 40) for seed in range(32)]
    assert sum(each["retracted"] > 0 for each in seen) >= 2
    assert sum(each["accepted"] > 0 for each in seen) >= 4


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "layout"), [((3, 1, 4), "dense"), ((3, 2, 6), "holey")])
def test_an_eagle_head_beside_windows(targets, monkeypatch, tmp_path, family, depth, shape, layout):
    """Its draft group is full; a head of random weights errs, but for the shapes' widths."""
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
    assert seen["compact_accepted"] and seen["apply_table_delta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_found_without_asking_the_device(targets, family, monkeypatch):
    """Spec 8: where each row's reads begin follows from the host's bounds."""
    running, steps = [False], [0]
    rng = random.Random(8)
    texts = [prompt(rng, n) for n in (2, 30, 17)]
    config = EngineConfig(page_size=4, overlap_depth=1, max_context_len=100, prefill_tokens=13)
    with kernels_run():
        engine = Engine(targets[family], config=config)
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, forbidden(name, running))
        monkeypatch.setattr(engine._worker, "run", watched(engine._worker.run, running, steps))
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


def test_abort_gives_windows_back(targets):
    for family in FAMILIES:
        for depth in (0, 1):
            config = EngineConfig(page_size=4, overlap_depth=depth, prefill_tokens=6, busy_check=2)
            engine = Engine(targets[family], config=config)
            rng = random.Random(depth)
            for turns in range(1, 30, 3):
                number = engine.submit(prompt(rng, 33), SamplingParams(max_new_tokens=60))
                other = engine.submit(prompt(rng, 5), SamplingParams(max_new_tokens=9))
                for _ in range(turns):
                    engine.turn()
                engine.abort(number)
                while engine.turn():
                    pass
                assert other
            engine.ledger.check()
            assert all(s.free_pages == s.num_pages for s in engine.pool_stats())


# --- Pinned texts -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pinned_text_keeps_its_windows_and_no_more(targets, family, page_size, depth):
    reference, rng = reference_of(family), random.Random(page_size)
    system = prompt(rng, 150)
    config = EngineConfig(
        page_size=page_size,
        overlap_depth=depth,
        prefill_tokens=40,
        max_context_len=300,
        busy_check=2,
    )
    engine = Engine(targets[family], config=config)
    pin = engine.pin(system)
    kept = 150 // page_size * page_size
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
    fresh = [159 - kept, 103 - 64, 1 if page_size == 64 else 30, 1]
    if (page_size, depth) == (1, 1):
        fresh[3] = kept - 64
    assert engine.stats().prefilled_token_ct - before == sum(fresh)
    engine.unpin(short)
    engine.unpin(pin)
    assert all(s.free_pages == s.num_pages for s in engine.pool_stats())


# --- What it costs ------------------------------------------------------------------------------


def test_reading_a_window_does_not_grow_with_the_context(targets, monkeypatch):
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
    for family in FAMILIES:
        reference = reference_of(family)
        for shape, page_size in (((0, 1, 1), 1), ((3, 1, 4), 4), ((3, 4, 12), 16)):
            drafter = None
            if shape[0]:
                known = [[*text, *reference.text(text, 50)] for text in texts]
                drafter = ScriptedDrafter(known, vocab_size=VOCAB)
            config = EngineConfig(
                shape=Shape(*shape), page_size=page_size, prefill_tokens=32, overlap_depth=1
            )
            engine = Engine(targets[family], drafter, config=config)
            seen.clear()
            outputs = engine.generate(texts, SamplingParams(max_new_tokens=50, ignore_eos=True))
            assert_speaks(reference, texts, outputs)
            # What a query sees behind it, a chunk of 32 or a round whose root lies in [lo, hi].
            assert max(seen[8]) <= 7 + 32 + 2 * page_size
            if family not in ONLY_WINDOWS:
                assert max(seen[None]) >= 390


def test_a_view_begins_no_page_too_early(targets, monkeypatch):
    """From a page further on, the logits are wrong."""
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


# --- Scenarios ----------------------------------------------------------------------------------


def test_scenario_43_pages_longer_than_the_window(targets):
    """sgl#22470, #29860: P > W.

    Law: The page of the last token is never given back, whatever the window; so prompts around a
    page's edge, and every cut, go on from there.
    """
    for family in FAMILIES:
        reference, rng = reference_of(family), random.Random(43)
        for page_size in (16, 64):
            texts = [prompt(rng, n) for n in (page_size - 1, page_size, page_size + 1, 150)]
            known = [[*text, *reference.text(text, 40)] for text in texts]
            config = EngineConfig(
                shape=Shape(3, 4, 12), page_size=page_size, prefill_tokens=31, busy_check=2
            )
            drafter = ScriptedDrafter(known, vocab_size=VOCAB)
            engine = Engine(targets[family], drafter, config=config)
            params = SamplingParams(max_new_tokens=40, ignore_eos=True, n=2)
            outputs = engine.generate(texts, params)
            assert_speaks(reference, texts, outputs)


def long_generations(
    target: TargetModel, drafter: Any, texts: list[list[int]], depth: int
) -> tuple[Engine, list]:
    """Four rows of 100 tokens in the end, window pages for four windows, full pages in plenty."""
    config = EngineConfig(
        shape=Shape(3, 1, 4) if drafter else None,
        page_size=4,
        max_batch=4,
        num_pages=1000,
        max_context_len=120,
        prefill_tokens=48,
        overlap_depth=depth,
        busy_check=2,
    )
    engine = Engine(target, drafter, config=config)
    return engine, engine.generate(texts, SamplingParams(max_new_tokens=80, ignore_eos=True))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "v2"])
def test_scenario_44_the_window_pool_is_the_limit(targets, monkeypatch, drafts, depth):
    """sgl#33805, #28246: the full pool is 10 % used.

    Law: Whatever the worker, a round gives back what its rows' windows have passed before anybody
    is retracted, and admission reckons with windows, not with lengths.
    """
    reference, rng = reference_of("gemma3"), random.Random(44)
    texts = [prompt(rng, 20) for _ in range(4)]

    def drafter() -> Any:
        known = [[*text, *reference.text(text, 80)] for text in texts]
        return ScriptedDrafter(known, vocab_size=VOCAB) if drafts else None

    engine, outputs = long_generations(targets["gemma3"], drafter(), texts, depth)
    assert_speaks(reference, texts, outputs)
    stats = engine.stats()
    (full, window), peak = engine.ledger.groups, engine._loop.peak_pages
    assert 0.08 * full.num_pages <= peak[0] <= 0.12 * full.num_pages
    assert window.num_pages < peak[0] / 2 and stats.retracted_ct == 0

    # As many pages of a group that never evicts.
    def no_window(*args: Any, window: int | None, **options: Any) -> Group:
        return Group(*args, **options)

    monkeypatch.setattr(plan_groups, "Group", no_window)
    engine, outputs = long_generations(targets["gemma3"], drafter(), texts, depth)
    assert engine.ledger.groups[1].num_pages == window.num_pages
    assert_speaks(reference, texts, outputs)
    assert engine.stats().retracted_ct > 0


def test_scenario_44_a_prefill_step_finds_its_pages(monkeypatch):
    """Windows for three rows, and twelve requests that want them.

    Law: What admission sets aside for a prefill step is there when it comes; without that a row is
    admitted whose prompt waits until another request has ended.
    """
    how = {"max_batch": 12, "bytes_of": {None: 1, 64: 1000}, "prefill_tokens": 256}
    least = next(n for n in range(0, 1 << 24, 1 << 14) if fits(kv_bytes=n, **how))
    sizes = sizes_of(kv_bytes=least + 2 * 1000 * 120, **how)

    def num_refused() -> int:
        case = Plans(
            sizes=sizes, reads_tokens=False, shape=0, num_tokens=300, prompt_len=300, max_len=420,
            prefill_tokens=256, headroom=0, seed=0,
        )  # fmt: skip
        server = Server(case).serve([case.arrival(i + 1, 0.0) for i in range(12)])
        assert server.scheduler.num_retracted == 0 and server.most_running >= 3
        return server.ledger.num_refused

    assert num_refused() == 0
    monkeypatch.setattr(page_needs, "step_pages", lambda ledger: [0] * len(ledger.groups))
    assert num_refused() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_scenario_44_admission_by_length_keeps_requests_out(targets, monkeypatch, family):
    """Law: Two requests far longer than the window's pages run side by side.

    Reckoned by their lengths, as in a full group, the second one waits for the first to end.
    """
    rng = random.Random(7)
    texts = [prompt(rng, 90) for _ in range(2)]

    def most_running() -> int:
        config = EngineConfig(
            page_size=4, max_batch=2, max_context_len=140, prefill_tokens=16, busy_check=2
        )
        engine = Engine(targets[family], config=config)
        params, most = SamplingParams(max_new_tokens=20, ignore_eos=True), 0
        for text in texts:
            engine.submit(text, params)
        while engine.turn():
            most = max(most, engine.stats().num_running)
        return most

    assert most_running() == 2

    def by_length(ledger: Any, lo: int, hi: int, shape: int) -> list[int]:
        return [-(-(hi + 1) // group.page_size) for group in ledger.groups]

    monkeypatch.setattr(page_needs, "row_pages", by_length)
    assert most_running() == 1


def test_scenario_55_a_prompt_that_ends_inside_a_pinned_text(targets, monkeypatch):
    """The pages below the window there are gone.

    Law: Nobody goes on from a length whose window is not held: the prompt is computed anew. Who
    insists is refused; a cut back to there goes to 0 and says so.
    """
    reference, text = reference_of("mistral"), prompt(random.Random(55), 96)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)

    def generated() -> tuple[list[int], int]:
        config = EngineConfig(page_size=4, prefill_tokens=32, max_context_len=200, busy_check=2)
        engine = Engine(targets["mistral"], config=config)
        pin = engine.pin(text)
        before = engine.stats().prefilled_token_ct
        try:
            (output,) = engine.generate([text[:50]], params)
        finally:
            engine.unpin(pin)
        return output.token_ids, engine.stats().prefilled_token_ct - before

    assert generated() == (reference.text(text[:50], 20), 50)

    def insists(self: Scheduler, request: Any) -> tuple[int, int]:
        """On the pinned text, at whatever length."""
        for pin, length in self._pins_of(request.tokens):
            return self._ledger.admit(prefix=pin.prefix, length=length), length
        return self._ledger.admit(), 0

    monkeypatch.setattr(Scheduler, "_take_row", insists)
    with pytest.raises(NotReady, match=r"the window below 49 needs the slots from 40 on, held are"):
        generated()

    def believes(self: Scheduler, request: Any) -> tuple[int, int]:
        """That a row of all the text was cut to where the prompt ends."""
        length = len(request.tokens) - 1
        for pin, _ in self._pins_of(request.tokens):
            row = self._ledger.admit(prefix=pin.prefix)
            assert self._ledger.trim(row, length) == 0
            return row, length
        return self._ledger.admit(), 0

    monkeypatch.setattr(Scheduler, "_take_row", believes)
    with pytest.raises(ShapeError, match="an extend from 0 to 50 is longer than max_chunk 32"):
        generated()
