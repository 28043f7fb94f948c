"""Laws of the scheduler: each request's text is the one that it has alone, in any workload."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from lossless import Comparison
from specpool import ConfigError, Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import TargetModel
from specpool.engine.output import Chunk
from specpool.engine.text.tokenizer import load_tokenizer
from workload import HEADS, SEEDS, Workload, run_mixed


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads_speak_as_alone(seed, target, heads, reference):
    work = Workload(seed)
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in work.news]
    engine = work.tight(target, heads)
    if work.shape is None:
        outputs = engine.generate(work.prompts, params)
    else:
        outputs = run_mixed(engine, work, params)
    comparison = Comparison()
    for prompt, output, n in zip(work.prompts, outputs, work.news, strict=True):
        if output is not None:
            assert output.finish_reason == "length" and len(output.token_ids) == n, output.error
            comparison.add(reference, prompt, output.token_ids)
    comparison.finish()


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [*range(8), *SEEDS[40:80]])
def test_sampled_workloads_speak_as_alone(seed, target, heads):
    """At D = 0 and 1, with retractions, chunks, and other requests beside it."""
    work = Workload(seed)
    params = [
        SamplingParams(
            max_new_tokens=n, ignore_eos=True, temperature=0.9, top_p=0.95, seed=seed + i
        )
        for i, n in enumerate(work.news)
    ]
    texts = None
    for depth in (1, 0):
        work.options["overlap_depth"] = depth
        engine = work.tight(target, heads)
        outputs = engine.generate(work.prompts, params)
        assert texts in (None, [o.token_ids for o in outputs]), [o.error for o in outputs]
        texts = [o.token_ids for o in outputs]
    work.options["max_batch"] = 1
    alone = work.engine(target, heads, None).generate(work.prompts, params)
    assert texts == [o.token_ids for o in alone]


@pytest.mark.sample(1)
@pytest.mark.parametrize("draft", [*HEADS, "ngram", None])
@pytest.mark.parametrize("depth", [0, 1])
def test_everyone_is_retracted_and_speaks_as_alone(target, heads, reference, draft, depth):
    """The pool holds little more than one row, and later requests have higher priority."""
    shape = Shape.eagle(3, 1, 4) if draft else None
    drafter = NgramDrafter() if draft == "ngram" else draft and EagleDrafter(heads[draft])
    options = {"page_size": 4, "max_context_len": 64, "max_batch": 5, "overlap_depth": depth}
    engine = Engine(
        target, drafter, config=EngineConfig(shape=shape, num_pages=20, headroom=0, **options)
    )
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    outputs, requests = {}, []
    for i, prompt in enumerate(corpus.prompts(5, 12)):
        number = engine.submit(
            prompt, params, priority=i, on_item=lambda n, item: outputs.__setitem__(n, item)
        )
        requests.append(engine.core._submitted[number].request)
        for _ in range(3):
            engine.turn()
    while engine.turn():
        pass
    assert all(request.num_retractions for request in requests[:-1])
    comparison = Comparison()
    for output in outputs.values():
        assert len(output.token_ids) == 40, output.error
        comparison.add(reference, output.prompt_ids, output.token_ids)
    comparison.finish()


# --- the user's face ----------------------------------------------------------------------------


@pytest.fixture
def engine(target, heads) -> Iterator[Engine]:
    config = EngineConfig(shape=Shape.eagle(3, 1, 4), max_context_len=300, max_batch=3)
    tokenizer = load_tokenizer(resolve("specpool/tiny"))
    yield Engine(target, EagleDrafter(heads[HEADS[0]]), config=config, tokenizer=tokenizer)


PROMPTS = corpus.prompts(5, 60)
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def test_submitted_requests_are_told_what_is_new(engine):
    expected = engine.generate(PROMPTS, PARAMS)
    heard: dict[int, list] = {}
    numbers = [
        engine.submit(p, PARAMS, on_item=lambda n, item: heard.setdefault(n, []).append(item))
        for p in PROMPTS
    ]
    assert len(set(numbers)) == 5
    while engine.turn():
        pass
    for number, output in zip(numbers, expected, strict=True):
        *chunks, last = heard[number]
        assert last.token_ids == output.token_ids and last.text == output.text
        assert [t for chunk in chunks for t in chunk.token_ids] == output.token_ids
        assert "".join(chunk.text for chunk in chunks) == output.text


def test_a_callback_may_submit_and_abort(engine):
    outputs = {}

    def on_item(number, item):
        if isinstance(item, Chunk):
            if number == first and len(numbers) == 2:
                numbers.append(engine.submit(PROMPTS[2], PARAMS, on_item=on_item))
                engine.abort(second)
        else:
            outputs[number] = item

    first = engine.submit(PROMPTS[0], PARAMS, on_item=on_item)
    second = engine.submit(PROMPTS[1], PARAMS, on_item=on_item)
    numbers = [first, second]
    while engine.turn():
        pass
    assert [outputs[n].finish_reason for n in numbers] == ["length", "abort", "length"]
    for number in (*numbers, 99, None):
        with pytest.raises(ConfigError, match=r"no request .* is running or waiting"):
            engine.abort(number)


def test_the_greater_priority_comes_first(engine):
    order = []
    for i, priority in enumerate([0, 0, 0, 0, 5, -1]):
        engine.submit(
            PROMPTS[i % 5][: 20 + i],
            SamplingParams(max_new_tokens=5),
            priority=priority,
            on_item=lambda n, item: order.append(n) if not isinstance(item, Chunk) else None,
        )
    while engine.turn():
        pass
    first = min(order)
    assert order[:3] == [first, first + 1, first + 4] and order[-1] == first + 5


@pytest.mark.parametrize("depth", [0, 1])
def test_asynchronous_streams_share_batches(target, heads, depth):
    config = EngineConfig(shape=Shape.eagle(3, 1, 4), max_batch=4, overlap_depth=depth)
    engine = Engine(target, EagleDrafter(heads[HEADS[0]]), config=config)
    expected = engine.generate(PROMPTS, PARAMS)

    async def one(prompt):
        async for item in engine.stream_async(prompt, PARAMS):
            if not isinstance(item, Chunk):
                return item.token_ids

    async def some(prompt):
        async with contextlib.aclosing(engine.stream_async(prompt, PARAMS)) as stream:
            async for item in stream:
                return item

    async def all_of_them():
        return await asyncio.gather(some(PROMPTS[0]), *map(one, PROMPTS))

    first, *texts = asyncio.run(all_of_them())
    assert isinstance(first, Chunk)
    assert texts == [output.token_ids for output in expected]


@pytest.mark.sample(2)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stops", [("e",), ("the", "an"), ("zzzz",), (" t", "he ")])
def test_text_ends_before_a_stop_string(target, heads, depth, stops):
    config = EngineConfig(shape=Shape.eagle(4, 4, 16), max_batch=3, overlap_depth=depth)
    tokenizer = load_tokenizer(resolve("specpool/tiny"))
    engine = Engine(target, EagleDrafter(heads[HEADS[1]]), config=config, tokenizer=tokenizer)
    whole = engine.generate(PROMPTS, PARAMS)
    params = dataclasses.replace(PARAMS, stop=stops, logprobs=0)
    texts = [""] * len(PROMPTS)
    for item in engine.stream(PROMPTS, params):
        if isinstance(item, Chunk):
            texts[item.index] += item.text
            continue
        full = whole[item.index]
        found = [full.text.find(stop) for stop in stops if stop in full.text]
        assert item.text == texts[item.index] == (full.text[: min(found)] if found else full.text)
        assert item.finish_reason == ("stop" if found else "length")
        assert item.token_ids == full.token_ids[: len(item.token_ids)]
        assert len(item.token_ids) == len(item.from_draft) == len(item.logprobs)
        if found:  # the last token is the one that completes the stop string
            shorter = tokenizer.decode(item.token_ids[:-1])
            assert any(stop in tokenizer.decode(item.token_ids) for stop in stops)
            assert not any(stop in shorter for stop in stops)


def test_bad_requests_are_refused_with_the_numbers():
    """A refused request is not queued, and a closed engine takes no more requests."""
    target = TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32")
    config = EngineConfig(num_pages=9, page_size=16, max_context_len=128)
    engine = Engine(target, config=config)
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        engine.generate([[1, 2]], SamplingParams(stop=("x",)))
    with pytest.raises(ConfigError, match="priority must be an integer"):
        engine.generate([[1, 2]], priority="high")
    with pytest.raises(ConfigError, match=r"n must be an integer in \[1, 65536\], got 0"):
        SamplingParams(n=0)
    with pytest.raises(ConfigError, match=r"overlap_depth must be an integer in \[0, 1\], got 2"):
        EngineConfig(overlap_depth=2)
    assert not engine.turn()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.submit([1, 2])


@pytest.mark.parametrize("n", [1, 3])
def test_ctrl_c_while_prompts_are_submitted_ends_them_all(engine, monkeypatch, n):
    """Some have not come as far as the queue; giving those up must not hide the interrupt."""
    submit, calls = engine.core.scheduler.submit, []

    def interrupted(request):
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        submit(request)

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.scheduler, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, dataclasses.replace(PARAMS, n=n))
    assert not engine.core.scheduler.requests()
    assert len(engine.generate(PROMPTS[:1], PARAMS)[0].token_ids) == 40


def test_overlap_runs_few_rounds_in_vain(target, heads):
    """A row that is likely to end with what is in flight waits for it."""
    lanes, texts = [], []
    for depth in (0, 1):
        config = EngineConfig(shape=Shape.eagle(3, 1, 4), max_batch=4, overlap_depth=depth)
        engine = Engine(target, EagleDrafter(heads[HEADS[0]]), config=config)
        run = engine.core.worker.run
        counts = []
        engine.core.worker.run = lambda steps, run=run, counts=counts: (
            counts.extend(len(step.plan) for step in steps if step.is_decode),
            run(steps),
        )[1]
        texts.append([o.token_ids for o in engine.generate(PROMPTS * 3, PARAMS)])
        lanes.append(sum(counts))
    assert texts[0] == texts[1]
    assert lanes[0] <= lanes[1] <= lanes[0] + 5  # of 15 requests


# --- sharing --------------------------------------------------------------------------------------


def computed(engine: Engine, monkeypatch) -> list[int]:
    """Tokens of each of the target's forwards from now on."""
    forward, counts = engine.target.forward, []

    def counting(tokens, *args, **options):
        counts.append(len(tokens))
        return forward(tokens, *args, **options)

    monkeypatch.setattr(engine.target, "forward", counting)
    return counts


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("placement", ["split", "shared"])
def test_samples_share_their_prompt(target, heads, monkeypatch, depth, page_size, placement):
    """Each sample equals a request of its own with its seed; the prompt is computed once."""
    shape = Shape.eagle(4, 4, 16)
    config = EngineConfig(
        shape=shape,
        page_size=page_size,
        placement=placement,
        overlap_depth=depth,
        max_batch=4,
        max_context_len=256,
        prefix_cache=False,
    )
    engine = Engine(target, EagleDrafter(heads[HEADS[0]]), config=config)
    prompts = [PROMPTS[0][:50], PROMPTS[1][:1], PROMPTS[2][:33]]
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=2**64 - 2, n=4)
    alone = [
        engine.generate(prompt, dataclasses.replace(params, n=1, seed=(2**64 - 2 + i) % 2**64))[0]
        for prompt in prompts
        for i in range(4)
    ]
    counts = computed(engine, monkeypatch)
    outputs = engine.generate(prompts[:1], params)
    assert counts[:2] == [49, 4]  # all but the last token once, the last one for each
    outputs += engine.generate(prompts[1:], params)
    assert [(o.index, o.sample) for o in outputs[:4]] == [(0, i) for i in range(4)]
    for one, other in zip(outputs, alone, strict=True):
        assert one.token_ids == other.token_ids and one.seed == other.seed
    assert len({tuple(o.token_ids) for o in outputs[:4]}) == 4


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pinned_text_is_computed_once(target, heads, monkeypatch, page_size):
    config = EngineConfig(
        shape=Shape.eagle(3, 1, 4), page_size=page_size, max_context_len=256, prefix_cache=False
    )
    engine = Engine(target, EagleDrafter(heads[HEADS[0]]), config=config)
    system = PROMPTS[0][:37]
    prompts = [system + PROMPTS[i][:10] for i in (1, 2, 3)] + [system, system[:20], PROMPTS[4]]
    expected = engine.generate(prompts, PARAMS)
    pin = engine.pin(system)
    kept = 37 - 37 % page_size
    assert pin.tokens == system[:kept]
    counts = computed(engine, monkeypatch)
    outputs = engine.generate(prompts, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert counts[0] == 3 * (47 - kept) + (37 - min(kept, 36)) + 1 + 60
    engine.unpin(pin)
    engine.unpin(pin)
    assert [s.free_pages + s.cached_pages == s.num_pages for s in engine.pool_stats()] == [
        True,
        True,
    ]
    assert [o.token_ids for o in engine.generate(prompts, PARAMS)] == [
        o.token_ids for o in expected
    ]
    if page_size == 16:
        with pytest.raises(ConfigError, match="cannot be pinned"):
            engine.pin(system[:15])


def test_a_pinned_text_gives_way_to_running_requests(target):
    config = EngineConfig(page_size=4, num_pages=40, max_context_len=160, max_batch=4)
    engine = Engine(target, config=config)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    expected = engine.generate(PROMPTS[1:3], params)
    engine.pin(PROMPTS[0])
    outputs = engine.generate(PROMPTS[1:3], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert all(s.free_pages + s.cached_pages == s.num_pages for s in engine.pool_stats())


def test_closing_an_engine_ends_samples_that_have_no_row_yet():
    engine = Engine.from_pretrained(max_batch=2)
    stream = engine.stream(PROMPTS[0], dataclasses.replace(PARAMS, n=5))
    next(stream)
    late = engine.submit(PROMPTS[1], PARAMS)
    held = engine.core.prompts.requests([PROMPTS[2]], dataclasses.replace(PARAMS, n=3), None, 0)
    engine.core.scheduler.submit(held[0])
    engine.close()
    assert late and not engine.core.scheduler.requests()
    assert {request.finish_reason for request in held} == {"abort"}
