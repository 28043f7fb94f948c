"""Texts that have left the device come back from the host, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.output import RequestOutput

Build = Callable[..., Engine]
HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
#: Prompts of 100 tokens that have nothing in common; a pool of 200 slots holds not two of them.
PROMPTS = [[65 + i, *corpus.prompts(6, 100)[i][1:]] for i in range(6)]
TIGHT: dict[str, Any] = {
    "max_context_len": 128,
    "host_bytes": 1 << 24,
    "offload": "always",
    "page_size": 4,
}


def tight(build: Build, draft: str | None, shape: Shape | None, **options: Any) -> Engine:
    """An engine whose pools hold little more than one request."""
    options = {**TIGHT, **options}
    roomy = build(draft, shape if draft else None, **{**options, "host_bytes": 0})
    widest = max(roomy.ledger.pages_per_row(g) for g in range(len(roomy.ledger.groups)))
    return build(draft, shape if draft else None, **options, num_pages=widest + 8)


def run(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    return [engine.generate([prompt], PARAMS)[0] for prompt in prompts]


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [*HEADS, "ngram", None])
@pytest.mark.parametrize(
    ("placement", "layout", "shape"), [("split", "dense", CHAIN), ("shared", "holey", TREE)]
)
def test_a_text_comes_back(
    build: Build, draft: str | None, placement: str, layout: str, shape: Shape
) -> None:
    """Law: a text that the device had no room for is copied back, with its draft KV."""
    engine = tight(build, draft, shape, placement=placement, layout=layout)
    first, again = run(engine, PROMPTS), run(engine, PROMPTS)
    stats = engine.stats()
    assert stats.prefix is not None and stats.host is not None
    assert stats.prefix.eviction_ct > 0
    assert [output.token_ids for output in again] == [output.token_ids for output in first]
    # All but the last token, or what is behind the last whole block of a text.
    assert min(output.num_reused for output in again) == 99
    assert stats.prefix.host_ct > 300 and stats.prefix.miss_ct == 6 * 100 + 6
    assert stats.prefilled_token_ct == stats.prefix.miss_ct
    assert stats.host.text_tokens >= 600 and stats.host.lent_ct == stats.host.reload_ct >= 4
    if draft in HEADS:
        before, after = (
            sum(len(output.token_ids) for output in outputs)
            / sum(len(output.accept_lens) for output in outputs)
            for outputs in (first, again)
        )
        assert after >= 0.99 * before


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(40))
def test_texts_do_not_change(build: Build, reference: Reference, seed: int) -> None:
    """Law: with texts that come and go, failed copies and retractions, greedy texts are those of
    the model alone."""
    rng = random.Random(seed)
    draft = rng.choice([*HEADS, "ngram", None])
    options = {
        "page_size": rng.choice([1, 3, 4, 16]),
        "overlap_depth": rng.randint(0, 1),
        "placement": rng.choice(["split", "shared"]),
        "prefill_tokens": rng.choice([16, 1024]),
        "max_batch": rng.randint(1, 4),
        "host_bytes": rng.choice([1 << 19, 1 << 20, 1 << 24]),
    }
    engine, comparison = tight(build, draft, rng.choice([CHAIN, TREE]), **options), Comparison()
    host, fails = engine.core.host, rng.choice([0.0, 0.3, 1.0])
    assert host is not None
    load = host._copies.load

    def faulty(moves: Any) -> None:
        if rng.random() < fails:
            raise RuntimeError("planted")
        load(moves)

    host._copies.load = faulty  # type: ignore[method-assign]
    prompts = [PROMPTS[rng.randrange(6)][: rng.randint(20, 100)] for _ in range(5)]
    prompts += [[*prompt[: rng.randint(1, 20)], *PROMPTS[5][:50]] for prompt in prompts]
    for _ in range(3):
        chosen = rng.choices(prompts, k=rng.randint(2, 6))
        for prompt, output in zip(chosen, engine.generate(chosen, PARAMS), strict=True):
            assert output.finish_reason == "length", output.error
            comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    host.check()
    host.close()
    assert [group.free_pages for group in host.stats().groups] == host._copies.num_pages


def test_a_salt_that_is_forgotten_is_forgotten_on_the_host(build: Build) -> None:
    engine = tight(build, None, None)
    salted = SamplingParams(max_new_tokens=4, cache_salt="tenant")
    for params in (PARAMS, salted):
        engine.generate([PROMPTS[0]], params)
    run(engine, PROMPTS[1:])
    engine.forget_prefixes("tenant")
    assert engine.generate([PROMPTS[0]], salted)[0].num_reused == 0
    assert engine.generate([PROMPTS[0]], PARAMS)[0].num_reused == 99
    engine.forget_prefixes()
    assert engine.stats().host.text_tokens == 0
    assert engine.generate([PROMPTS[1]], PARAMS)[0].num_reused == 0


def test_samples_do_not_wait_for_the_host(build: Build) -> None:
    """Law: samples are forked behind a prefill, so their prompt is computed."""
    engine = tight(build, None, None, max_batch=2)
    run(engine, PROMPTS)
    outputs = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=4, n=2))
    assert len(outputs) == 2 and engine.stats().host.lent_ct == 0


def test_a_turn_finds_its_session_s_text_on_the_host(build: Build) -> None:
    engine = tight(build, None, None, max_sessions=1)
    session = engine.open_session()
    four = SamplingParams(max_new_tokens=4, ignore_eos=True)
    said = session.append(PROMPTS[0][:60], four).output()
    session.rewind(0)
    run(engine, PROMPTS[1:])
    again = session.append(PROMPTS[0][:60], four).output()
    assert again.num_reused == 59 and again.token_ids == said.token_ids


def test_a_request_that_loses_its_row_gives_back_what_it_was_lent(build: Build) -> None:
    """Law: a lent handle is for one row; the next row asks anew."""
    engine = build(None, None, **TIGHT, prefill_tokens=16)
    first = run(engine, PROMPTS[:2])
    engine.ledger.forget()  # on the host the texts stay
    told: dict[int, RequestOutput] = {}
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, PARAMS, on_item=told.__setitem__)
    engine.turn()
    scheduler, host = engine.core.scheduler, engine.core.host
    assert host is not None
    assert [bool(request.handle and request.handle.blocks) for request in scheduler.requests()] == [
        True,
        True,
    ]
    engine.core.loop.drain()
    scheduler._reclaim.make_room()  # as if a step found no pages
    (waiting,) = (request for request in scheduler.requests() if not request.row)
    assert waiting.handle is None and host.stats().num_handles == 1
    while engine.turn():
        pass
    assert [told[n].token_ids for n in sorted(told)] == [output.token_ids for output in first]
    assert host.stats().num_handles == 0 and host.stats().lent_ct >= 2
    host.check()
