"""The prefix cache in an engine: what is found, what is computed, and that no text changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lossless import Comparison, Reference
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.config import EngineConfig
from specpool.engine.output import RequestOutput

Build = Callable[..., Engine]
HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3")
CHAIN, TREE = Shape.eagle(3, 1, 4), Shape.eagle(3, 2, 6)
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
SYSTEM = corpus.prompts(1, 90)[0]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def least(prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> int:
    """Tokens that prompts must compute one after the other; the last one of each always."""
    computed, seen = 0, list[list[int]]()
    for prompt, text in zip(prompts, texts, strict=True):
        longest = max((common(prompt, other) for other in seen), default=0)
        computed += len(prompt) - min(longest, len(prompt) - 1)
        seen.append(text[:-1])  # the last token has no KV
    return computed


def said(output: RequestOutput) -> list[int]:
    return output.prompt_ids + output.token_ids


def trace(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts from a tree of common beginnings: some go on from anywhere in an earlier one."""
    prompts = [SYSTEM[: rng.randint(1, 90)]]
    while len(prompts) < num:
        start = rng.choice(prompts)
        more = [rng.randrange(40, 120) for _ in range(rng.randint(1, 40))]
        prompts.append((start[: rng.randint(0, len(start))] + more)[:120])
    return prompts


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("draft", [*HEADS, "ngram", None])
@pytest.mark.parametrize(
    ("placement", "layout", "shape"),
    [("split", "dense", CHAIN), ("split", "holey", TREE), ("shared", "dense", TREE)],
)
def test_nothing_is_computed_twice(
    build: Build, page_size: int, draft: str | None, placement: str, layout: str, shape: Shape
) -> None:
    """Law: prefills compute the tokens behind the longest common beginning, and no more."""
    options = {"placement": placement, "layout": layout, "page_size": page_size}
    engine = build(draft, shape if draft else None, **options)
    prompts = trace(random.Random(page_size), 12)
    outputs = [engine.generate([prompt], PARAMS)[0] for prompt in prompts]
    expected = least(prompts, [said(output) for output in outputs])
    stats = engine.stats()
    assert stats.prefilled_token_ct == expected
    assert stats.prefix is not None
    assert (stats.prefix.hit_ct, stats.prefix.miss_ct) == (
        sum(output.num_reused for output in outputs),
        expected,
    )
    assert sum(output.num_reused for output in outputs) > 100


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(200))
def test_texts_do_not_change(build: Build, reference: Reference, seed: int) -> None:
    """Law: with common beginnings, retractions, sessions and tiny pools, greedy texts are those of
    the model alone."""
    rng = random.Random(seed)
    draft = rng.choice([*HEADS, "ngram", None])
    options: dict[str, Any] = {
        "page_size": rng.choice([1, 3, 4, 16, 64]),
        "overlap_depth": rng.randint(0, 1),
        "placement": rng.choice(["split", "shared"]),
        "layout": rng.choice(["dense", "holey"]),
        "prefill_tokens": rng.choice([16, 64, 1024]),
        "max_batch": rng.randint(2, 5),
        "headroom": rng.choice([0, 16]),
        "max_context_len": 192,
    }
    shape = rng.choice([CHAIN, TREE]) if draft else None
    if options["overlap_depth"] == 0:
        options["worker"] = rng.choice(["v1", "v2"])
    if rng.random() < 0.6:
        roomy = build(draft, shape, **options).ledger
        widest = max(roomy.pages_per_row(g) for g in range(len(roomy.groups)))
        options["num_pages"] = widest + rng.randint(0, widest)
    engine, comparison = build(draft, shape, **options), Comparison()
    prompts = trace(rng, rng.randint(3, 9))
    params = SamplingParams(max_new_tokens=rng.randint(1, 40), ignore_eos=True)
    session = engine.open_session()
    for _ in range(3):
        chosen = rng.choices(prompts, k=rng.randint(1, 6))
        told: dict[int, RequestOutput] = {}
        numbers = {
            engine.submit(
                prompt,
                params,
                on_item=lambda number, item, told=told: told.update({number: item}),
            ): prompt
            for prompt in chosen
        }
        if rng.random() < 0.5 and session.num_tokens < 100:
            session.rewind(rng.randint(0, session.num_tokens))
            before = session.tokens
            more = prompts[0][:5] or [65]
            output = session.append(
                more, SamplingParams(max_new_tokens=9, ignore_eos=True)
            ).output()
            comparison.add(reference, before + more, output.token_ids)
        if rng.random() < 0.3:
            engine.abort(next(iter(numbers)))
        while engine.turn():
            pass
        for number, prompt in numbers.items():
            assert told[number].error is None
            if told[number].token_ids:
                comparison.add(reference, prompt, told[number].token_ids)
    session.close()
    comparison.finish()
    assert engine.stats().finding_ct == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [*HEADS, None])
def test_sampled_texts_do_not_change(build: Build, draft: str | None) -> None:
    shape = TREE if draft else None
    params = SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.95, seed=3, n=2)
    prompts = trace(random.Random(1), 5)
    engine, alone = build(draft, shape), build(draft, shape, prefix_cache=False)
    expected = [output.token_ids for output in alone.generate(prompts, params)]
    for _ in range(2):
        assert [output.token_ids for output in engine.generate(prompts, params)] == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", HEADS)
def test_drafts_on_a_hit_are_as_good(build: Build, draft: str) -> None:
    """Law: at most one draft entry of a hit is another text's; the accept length stays."""
    prompts = [SYSTEM[:60] + prompt[:20] for prompt in corpus.prompts(16, 60)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    lens = []
    for is_on in (False, True):
        engine = build(draft, CHAIN, prefix_cache=is_on, max_batch=4)
        engine.generate([SYSTEM[:61]], params)
        before = sum(engine.stats().accept_cts), engine.stats().correct_draft_ct
        outputs = engine.generate(prompts, params)
        assert all(output.num_reused >= 60 for output in outputs) == is_on
        rounds = sum(engine.stats().accept_cts) - before[0]
        lens.append(1 + (engine.stats().correct_draft_ct - before[1]) / rounds)
    print(f"accept length of {draft}: {lens[0]:.3f} without the cache, {lens[1]:.3f} with it")
    assert lens[1] >= 0.99 * lens[0]


def test_requests_that_come_together_compute_their_beginning_once(build: Build) -> None:
    prompts = [[*SYSTEM, 65 + i, 66, 67] for i in range(6)]
    expected = [o.token_ids for o in build(None, prefix_cache=False).generate(prompts, PARAMS)]
    # Nobody waits for 32 tokens or fewer: all prompts of a model may begin alike.
    for prefill_tokens, most in ((1024, 0), (32, 5 * 32)):
        engine = build(None, prefill_tokens=prefill_tokens, max_batch=6)
        assert [output.token_ids for output in engine.generate(prompts, PARAMS)] == expected
        assert 0 <= engine.stats().prefilled_token_ct - (90 + 6 * 3) <= most


def test_a_prompt_is_found_chunk_by_chunk(build: Build) -> None:
    """A request that comes while another one's prompt is prefilled finds what is done."""
    engine = build(None, prefill_tokens=16, max_batch=4)
    first = engine.submit(SYSTEM, PARAMS)
    for _ in range(3):
        engine.turn()
    outputs: dict[int, Any] = {}
    for prompt in ([*SYSTEM[:40], 7, 8], [9] * 10):
        engine.submit(prompt, PARAMS, on_item=lambda number, item: outputs.update({number: item}))
    engine.turn()
    assert engine.stats().num_running == 3
    engine.abort(first)
    while engine.turn():
        pass
    assert [output.num_reused for output in outputs.values()] == [40, 0]


def test_what_an_aborted_request_computed_is_kept(build: Build) -> None:
    engine = build(HEADS[0], CHAIN)
    stream = engine.stream([SYSTEM], SamplingParams(max_new_tokens=60, ignore_eos=True))
    for _ in range(5):
        next(stream)
    stream.close()
    (output,) = engine.generate([SYSTEM], PARAMS)
    assert output.num_reused == len(SYSTEM) - 1


def test_a_rewound_session_finds_more_than_its_own_row_keeps(build: Build) -> None:
    """Law: a row cannot be cut within a page that a fork shares; the prefix cache has the rest.

    A pin of less changes nothing.
    """
    engine = build(None, page_size=16)
    session = engine.open_session()
    session.append(SYSTEM[:40], PARAMS).output()
    fork, pin = session.fork(), engine.pin(SYSTEM[:16])
    assert session.rewind(37) == 32
    output = session.append([7, 8], PARAMS).output()
    assert output.prompt_ids == [*SYSTEM[:37], 7, 8] and output.num_reused == 37
    fork.close(), session.close(), engine.unpin(pin)


def test_salts_share_nothing(build: Build) -> None:
    engine = build(HEADS[0], CHAIN)

    def reused(salt: str) -> int:
        params = SamplingParams(max_new_tokens=4, cache_salt=salt)
        return engine.generate([SYSTEM], params)[0].num_reused

    assert [reused(""), reused("a"), reused("b"), reused("a")] == [0, 0, 0, 89]
    engine.forget_prefixes("a")
    assert [reused("a"), reused("b"), reused("")] == [0, 89, 89]
    engine.forget_prefixes()
    assert engine.stats().prefix.num_entries == 0
    assert all(group.used_pages == group.cached_pages == 0 for group in engine.stats().groups)
    assert [reused("b"), reused("")] == [0, 0]


def test_pages_are_given_up_when_they_are_needed(build: Build) -> None:
    """Law: kept texts never keep a request out, and the newest stay the longest."""
    engine = build(None, page_size=4, num_pages=64, max_context_len=128)
    prompts = [[65 + i] * 60 for i in range(12)]
    for prompt in prompts:
        engine.generate([prompt], PARAMS)
    stats = engine.stats()
    assert stats.retracted_ct == 0 and stats.prefix.eviction_ct > 0
    assert stats.groups[0].cached_pages + stats.groups[0].free_pages == 64
    reused = [engine.generate([prompt], PARAMS)[0].num_reused for prompt in prompts[:1:-1][:2]]
    assert reused == [59, 59]


def test_a_text_with_a_nan_is_forgotten(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(None)
    engine.generate([SYSTEM], SamplingParams(max_new_tokens=4, cache_salt="other"))
    forward, calls = engine.target.forward, []

    def failing(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        calls.append(args)
        return replace(output, logits=output.logits * float("nan")) if len(calls) == 3 else output

    monkeypatch.setattr(engine.target, "forward", failing)
    (output,) = engine.generate([SYSTEM], PARAMS)
    assert output.finish_reason == "error" and "not finite" in output.error
    (again,) = engine.generate([SYSTEM], PARAMS)
    assert (again.num_reused, again.error) == (0, None)
    params = SamplingParams(max_new_tokens=4, cache_salt="other")
    assert engine.generate([SYSTEM], params)[0].num_reused == 89


def test_a_row_out_of_use_makes_the_engine_forget_all(build: Build) -> None:
    engine = build(None, on_finding="quarantine")
    engine.generate([SYSTEM], PARAMS)
    stream = engine.stream([[5] * 20, SYSTEM[:50]], SamplingParams(max_new_tokens=40))
    next(stream)
    running = engine.core.scheduler.running
    engine.core.scheduler.quarantine(running[0].row, "a test")
    assert engine.stats().prefix.num_entries == 0
    assert any(isinstance(item, RequestOutput) and item.error == "a test" for item in stream)


def test_it_can_be_turned_off(build: Build) -> None:
    engine = build(HEADS[0], CHAIN, prefix_cache=False)
    for _ in range(2):
        (output,) = engine.generate([SYSTEM], PARAMS)
        assert output.num_reused == 0
    assert engine.stats().prefix is None
    assert all(group.free_pages == group.num_pages for group in engine.pool_stats())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_salt": "x" * 257}, "cache_salt must be at most 256 bytes, got 257"),
        ({"cache_salt": "ä" * 129}, "at most 256 bytes, got 258"),
        ({"cache_salt": "x" * (1 << 20)}, "at most 256 bytes, got 1048576"),
        ({"cache_salt": b"x"}, r"cache_salt must be a string, got b'x'"),
        ({"cache_salt": None}, "cache_salt must be a string, got None"),
        ({"cache_salt": "\ud800"}, "lone surrogate at position 0"),
    ],
)
def test_bad_salts_are_refused(build: Build, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**options)
    if options["cache_salt"] is not None:
        with pytest.raises(ConfigError, match=says):
            build(None).forget_prefixes(options["cache_salt"])


def test_the_option_is_a_bool() -> None:
    with pytest.raises(ConfigError, match="prefix_cache must be True or False, got 1"):
        EngineConfig(prefix_cache=1)  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [*HEADS, "ngram"])
def test_scenario_39_tokens_past_a_stop_are_not_kept(build: Build, draft: str) -> None:
    """Law: what a round accepts beyond the token that ends a request is no text."""
    engine = build(draft, Shape.eagle(7, 1, 8), page_size=16)
    (whole,) = engine.generate([SYSTEM], SamplingParams(max_new_tokens=60, ignore_eos=True))
    cut = False
    for position in range(4, 40):
        engine.forget_prefixes()
        stop = whole.token_ids[position]
        params = SamplingParams(max_new_tokens=60, stop_token_ids=(stop,), ignore_eos=True)
        (output,) = engine.generate([SYSTEM], params)
        length = len(SYSTEM) + len(output.token_ids)
        entries = engine.ledger.index_entries()
        kept = max(start + len(tokens) for _, start, tokens, _, _ in entries)
        assert kept <= length
        cut |= sum(output.accept_lens) > len(output.token_ids)
        text = [*SYSTEM, *output.token_ids]
        for _, start, tokens, _, _ in entries:
            assert tokens.tolist() == text[start : start + len(tokens)]
    assert cut or draft == "ngram", "no round went past a stop"


def test_scenario_20_a_tail_that_is_kept_and_written_on_keeps_its_bytes(build: Build) -> None:
    """Law: drafts behind a kept text in the same page leave the text's own KV as it was."""
    engine = build(HEADS[0], TREE, page_size=64)
    stream = engine.stream([SYSTEM], SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    entry = engine.ledger.index_entries()[-1]
    start, tokens, page = entry[1], entry[2], int(entry[4][0][0])
    slots = [page * 64 + offset for offset in range(len(tokens))]
    layers = range(len(engine.target.layer_kv))

    def bytes_of() -> list[torch.Tensor]:
        buffers = [
            *(engine.cache.keys[i] for i in layers),
            *(engine.cache.values[i] for i in layers),
        ]
        return [buffer[slots].clone() for buffer in buffers]

    before = bytes_of()
    assert start == 64 and len(tokens) < 64
    for _ in stream:
        assert all(torch.equal(a, b) for a, b in zip(before, bytes_of(), strict=True))
