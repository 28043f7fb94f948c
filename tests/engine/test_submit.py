"""Laws of a loop of your own: submit, turn, callbacks, pins; each item is delivered once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import pytest

from specpool import ConfigError, Engine, SamplingParams
from specpool.engine.output import Chunk, Report

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=1.0, seed=1)


@pytest.fixture
def engine():
    with Engine.from_pretrained(max_context_len=256) as engine:
        yield engine


def test_a_callback_that_raises_on_the_last_chunk_still_hears_the_output(engine):
    told = []

    def on_item(number, item):
        told.append(item)
        if len(told) == 1:
            raise RuntimeError("the user's own")

    engine.submit("abc", SamplingParams(max_new_tokens=1), on_item=on_item)
    with pytest.raises(RuntimeError, match="the user's own"):
        engine.turn()
    turns = 0
    while engine.turn():
        turns += 1
        assert turns < 10, "turn never says that nothing is left"
    assert [isinstance(item, Chunk) for item in told] == [True, False]


def test_a_turn_within_a_callback_tells_everything_once(engine):
    told = []

    def on_item(number, item):
        told.append(item)
        engine.turn()

    engine.submit("abc", PARAMS, on_item=on_item)
    while engine.turn():
        pass
    assert [isinstance(item, Chunk) for item in told].count(False) == 1
    assert sum(len(item.token_ids) for item in told if isinstance(item, Chunk)) == 8


def end_by_abort(engine, number):
    engine.abort(number)


def end_by_close(engine, number):
    engine.close()


def end_by_turns(engine, number):
    engine.generate(["abc"], PARAMS, progress=False)


@pytest.mark.parametrize("end", [end_by_abort, end_by_close, end_by_turns])
@pytest.mark.parametrize("overlap", [0, 1])
def test_who_ends_in_its_own_callback_is_told(end, overlap):
    """Its output comes with the next turn, as `abort` says, and the turns have an end."""
    told = []

    def on_item(number, item):
        told.append((number, item))
        if len(told) == 1:
            end(engine, number)

    with Engine.from_pretrained(max_context_len=256, overlap_depth=overlap) as engine:
        numbers = [engine.submit(text, PARAMS, on_item=on_item) for text in ("abc", "def")]
        turns = 0
        while engine.turn():
            turns += 1
            assert turns < 30, "turn never says that nothing is left"
    outputs = [(number, item) for number, item in told if not isinstance(item, Chunk)]
    assert sorted(number for number, _ in outputs) == numbers
    for number, output in outputs:
        chunks = [item for of, item in told if of == number and isinstance(item, Chunk)]
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
        assert "".join(chunk.text for chunk in chunks) == output.text


def test_samples_of_a_submitted_request_are_refused_in_a_list_too(engine):
    with pytest.raises(ConfigError, match="params must be SamplingParams or None"):
        engine.submit("abc", [SamplingParams(n=2)])


def test_samples_of_a_submitted_prompt_are_those_of_generate(engine):
    """Law: sample i has the number of the first + i, and is told by it."""
    params = dataclasses.replace(SAMPLED, max_new_tokens=12, n=3, logprobs=1)
    told = []
    first = engine.submit("abc", params, on_item=lambda n, item: told.append((n, item)))
    while engine.turn():
        pass
    expected = engine.generate("abc", params)
    for sample, output in enumerate(expected):
        mine = [item for number, item in told if number == first + sample]
        assert mine[-1].token_ids == output.token_ids and mine[-1].sample == sample
        chunks = mine[:-1]
        assert [f for c in chunks for f in c.from_draft] == output.from_draft
        assert [e for c in chunks for e in c.logprobs] == output.logprobs


def test_samples_are_aborted_one_by_one(engine):
    told = {}
    params = dataclasses.replace(SAMPLED, n=3)
    first = engine.submit("abc", params, on_item=told.__setitem__)
    engine.abort(first + 1)
    engine.abort(first)
    while engine.turn():
        pass
    assert [told[first + i].finish_reason for i in range(3)] == ["abort", "abort", "length"]


def test_without_decoding_there_are_token_ids_and_no_text(engine):
    """A stop string ends the request all the same."""
    told = []
    params = SamplingParams(max_new_tokens=40, stop=("\n",))
    (expected,) = engine.generate("seq: 2, 4, ", params)
    engine.submit("seq: 2, 4, ", params, decode=False, on_item=lambda n, item: told.append(item))
    while engine.turn():
        pass
    assert expected.stop_hit == "\n" and told[-1].stop_hit == "\n"
    assert told[-1].token_ids == expected.token_ids and told[-1].text == ""
    assert all(chunk.pieces == [] for chunk in told[:-1])


def test_a_request_without_a_callback_is_decoded_at_its_end_alone(engine, monkeypatch):
    """Law: a turn makes no text that nobody gets."""
    decoded = []
    news = Report.news

    def counted(report):
        decoded.append(report)
        return news(report)

    monkeypatch.setattr(Report, "news", counted)
    engine.submit("abc", PARAMS)
    turns = 0
    while engine.turn():
        turns += 1
    assert turns >= 7 and len(decoded) == 1


def test_a_pin_of_another_engine_releases_nothing(engine):
    with Engine.from_pretrained(max_context_len=256) as other:
        engine.pin("a" * 40)
        engine.unpin(other.pin("a" * 40))
        assert [group.pinned_pages for group in engine.stats().groups] == [2]
    engine.unpin(next(iter(engine.core.scheduler.pins)))


def test_a_prompt_is_pinned_while_an_asynchronous_stream_runs(engine):
    """Forwards run in a thread, so calls from the event loop must wait for their turn."""

    async def stream():
        items = [item async for item in engine.stream_async("abc", SAMPLED)]
        return items[-1].finish_reason

    async def both():
        task = asyncio.create_task(stream())
        for _ in range(40):
            await asyncio.sleep(0.001)
            engine.unpin(engine.pin("a" * 60))
        return await task

    assert asyncio.run(both()) == "length"


@pytest.mark.parametrize("at", ["start", "add"])
def test_ctrl_c_between_the_queues_loses_no_request(at, monkeypatch):
    """Admission and retraction move a request from one queue to the other: it is in neither."""
    with Engine.from_pretrained(max_context_len=256, num_pages=16, headroom=0) as engine:
        scheduler, told = engine.core.scheduler, []
        owner = scheduler.state.running if at == "start" else scheduler.state.waiting
        for prompt in ("a" * 40, "b" * 40):
            params = SamplingParams(max_new_tokens=120, ignore_eos=True)
            engine.submit(prompt, params, on_item=lambda number, item: told.append(item))
        method = getattr(owner, at)

        def interrupted(*args):
            monkeypatch.setattr(owner, at, method)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            while engine.turn():
                pass
        for _ in range(300):
            if not engine.turn():
                break
        else:
            pytest.fail("turn never says that nothing is left")
        assert [isinstance(item, Chunk) for item in told].count(False) == 2


def test_what_is_no_callback_is_refused(engine):
    with pytest.raises(ConfigError, match="on_item must be a function, got 5"):
        engine.submit("abc", PARAMS, on_item=5)


def test_a_stream_that_is_read_after_the_close_says_so():
    with Engine.from_pretrained(max_context_len=64) as engine:
        stream = engine.stream("abc", PARAMS)
    with pytest.raises(ConfigError, match="has been closed"):
        next(stream)


def test_an_engine_is_closed_while_an_asynchronous_stream_runs():
    """The close waits for the forward that runs in a thread."""
    engine = Engine.from_pretrained(max_context_len=256)
    started, closed = [], []
    run = engine.core.worker.run

    def slow(steps):
        started.append(steps)
        time.sleep(0.2)
        closed.append(engine.ledger.closed)
        return run(steps)

    engine.core.worker.run = slow

    async def both():
        stream = engine.stream_async("abc", SAMPLED)
        task = asyncio.create_task(stream.__anext__())
        while not started:
            await asyncio.sleep(0.001)
        engine.close()
        with contextlib.suppress(ConfigError, StopAsyncIteration):
            await task
        await stream.aclose()

    asyncio.run(both())
    assert closed and not any(closed)
    assert all(pool.used_pages == 0 for pool in engine.pool_stats())
