"""Regression scenarios of window groups through the engine, with their guards and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from plan_kit import Case as Plans
from plan_kit import Server
from specpool import Engine, Group, NotReady, SamplingParams, Shape, ShapeError
from specpool.capacity import group_sizes as plan_groups
from specpool.capacity import page_needs
from specpool.engine.config import EngineConfig
from specpool.engine.draft import ScriptedDrafter
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models import TargetModel
from specpool.engine.scheduler.admission import Admission
from window_kit import (
    FAMILIES,
    VOCAB,
    assert_speaks,
    open_targets,
    prompt,
    reference_of,
    sizes_of,
)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, TargetModel]]:
    with open_targets() as found:
        yield found


def test_scenario_43_pages_longer_than_the_window(targets, monkeypatch):
    """sgl#22470, #29860: P > W.

    Law: A page is given back only when all of it lies below the window, so never a page of the last
    tokens. Prompts around a page edge, their samples and drafts go on from there.
    """

    def differences(family: str, page_size: int) -> int:
        reference, rng = reference_of(family), random.Random(43)
        texts = [prompt(rng, n) for n in (page_size - 1, page_size, page_size + 1, 150)]
        known = [[*text, *reference.text(text, 24)] for text in texts]
        config = EngineConfig(
            shape=Shape(3, 4, 12), page_size=page_size, prefill_tokens=31, busy_check=2
        )
        engine = Engine(targets[family], ScriptedDrafter(known, vocab_size=VOCAB), config=config)
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, n=2)
        outputs = engine.generate(texts, params)
        assert len(outputs) == 8
        return sum(o.token_ids != reference.text(texts[o.index], 24) for o in outputs)

    assert [differences(family, 16) for family in FAMILIES] == [0] * len(FAMILIES)
    assert differences("mistral", 64) == 0

    pages_of = KVCache.pages_of

    def given_back(
        self: KVCache, group: int, rows: torch.Tensor, least: Any, ends: Any
    ) -> tuple[torch.Tensor, torch.Tensor | int]:
        """A page is gone as soon as the window begins inside it."""
        pages, origins = pages_of(self, group, rows, least, ends)
        window = self.windows[group]
        if window is not None:
            first = torch.as_tensor(least) - window + 1
            pages = pages.clone()
            pages[:, 0] = torch.where(first > origins, 0, pages[:, 0])
        return pages, origins

    monkeypatch.setattr(KVCache, "pages_of", given_back)
    assert all(differences("mistral", page_size) > 0 for page_size in (16, 64))


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
        max_sessions=0,
        busy_check=2,
    )
    engine = Engine(target, drafter, config=config)
    return engine, engine.generate(texts, SamplingParams(max_new_tokens=80, ignore_eos=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "v2"])
def test_scenario_44_the_window_pool_is_the_limit(targets, monkeypatch, drafts, depth):
    """sgl#33805, #28246: the full pool is 10 % used.

    Law: With any worker, a round gives back the pages behind its rows' windows before a request is
    retracted. Admission counts windows, not lengths.
    """
    reference, rng = reference_of("gemma3"), random.Random(44)
    texts = [prompt(rng, 20) for _ in range(4)]

    def drafter() -> Any:
        known = [[*text, *reference.text(text, 80)] for text in texts]
        return ScriptedDrafter(known, vocab_size=VOCAB) if drafts else None

    engine, outputs = long_generations(targets["gemma3"], drafter(), texts, depth)
    assert_speaks(reference, texts, outputs)
    stats = engine.stats()
    (full, window), peak = engine.ledger.groups, engine.core.loop.peak_pages
    assert 0.08 * full.num_pages <= peak[0] <= 0.12 * full.num_pages
    # Under overlap each window has room for the pages that stay fenced behind it.
    assert window.num_pages < (0.6 if depth else 0.5) * peak[0] and stats.retracted_ct == 0

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

    Law: The pages that admission sets aside for a prefill step are there when the step comes.
    Otherwise a row is admitted whose prompt waits until another request has ended.
    """
    how = {"max_batch": 12, "bytes_of": {None: 1, 64: 1000}, "prefill_tokens": 256}
    sizes = sizes_of(kv_bytes=1 << 30, **how).with_rows(12, 3)

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

    Counted by their lengths, as in a full group, the second would wait for the first to end.
    """
    rng = random.Random(7)
    texts = [prompt(rng, 90) for _ in range(2)]

    def most_running() -> int:
        config = EngineConfig(
            page_size=4,
            max_batch=2,
            max_context_len=140,
            prefill_tokens=16,
            max_sessions=0,
            busy_check=2,
        )
        engine = Engine(targets[family], config=config)
        params, most = SamplingParams(max_new_tokens=20, ignore_eos=True), 0
        for text in texts:
            engine.submit(text, params)
        while engine.turn():
            most = max(most, engine.stats().num_running)
        return most

    assert most_running() == 2

    def by_length(needs: page_needs.PageNeeds, lens: Any, shapes: Any) -> Any:
        ledger = needs._ledger
        hi = np.minimum(lens + needs._headroom, ledger.max_context_len - 1)
        sizes = np.array([group.page_size for group in ledger.groups])
        return -(-(hi[:, None] + 1) // sizes)[:, None].repeat(shapes.shape[1], axis=1)

    monkeypatch.setattr(page_needs.PageNeeds, "pages_by_shape", by_length)
    assert most_running() == 1


def test_scenario_55_a_prompt_that_ends_inside_a_pinned_text(targets, monkeypatch):
    """The pages below the window there are gone.

    Law: No row starts at a length whose window is not held: the prompt is computed again. An
    admission there is refused, and a cut back to there returns 0.
    """
    reference, text = reference_of("mistral"), prompt(random.Random(55), 96)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)

    def generated() -> tuple[list[int], int]:
        config = EngineConfig(
            page_size=4, prefill_tokens=32, max_context_len=200, busy_check=2, prefix_cache=False
        )
        engine = Engine(targets["mistral"], config=config)
        pin = engine.pin(text)
        before = engine.stats().prefilled_token_ct
        try:
            (output,) = engine.generate([text[:50]], params)
        finally:
            engine.unpin(pin)
        return output.token_ids, engine.stats().prefilled_token_ct - before

    assert generated() == (reference.text(text[:50], 20), 50)

    def insists(self: Admission, request: Any) -> tuple[int, int]:
        """Start on the pinned text at any length."""
        for pin, length in self._state.pins.shared_with(request.tokens):
            return self._state.ledger.admit(prefix=pin.prefix, length=length), length
        return self._state.ledger.admit(), 0

    monkeypatch.setattr(Admission, "_take_row", insists)
    with pytest.raises(NotReady, match=r"the window below 49 needs the slots from 40 on, held are"):
        generated()

    def believes(self: Admission, request: Any) -> tuple[int, int]:
        """Pretend that a row of all the text was cut to where the prompt ends."""
        length = len(request.tokens) - 1
        for pin, _ in self._state.pins.shared_with(request.tokens):
            row = self._state.ledger.admit(prefix=pin.prefix)
            assert self._state.ledger.trim(row, length) == 0
            return row, length
        return self._state.ledger.admit(), 0

    monkeypatch.setattr(Admission, "_take_row", believes)
    with pytest.raises(ShapeError, match="an extend from 0 to 50 is longer than max_chunk 32"):
        generated()
