"""The two ends of the bridge, without a process between them: what is said is heard, in order."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections import deque

import pytest

from specpool import ConfigError, Engine, Grammar, SamplingParams
from specpool.engine.text.structured import compiler
from specpool.serve.bridge.client import EngineClient, EngineFault, EngineGone
from specpool.serve.bridge.frames import SocketLine
from specpool.serve.bridge.messages import (
    Abort,
    Accepted,
    Done,
    Failed,
    Ready,
    Refused,
    Reply,
    Stop,
    Submit,
    Tokens,
    VerbCall,
)
from specpool.serve.bridge.process import EngineProcess
from specpool.serve.bridge.runner import Runner

READY = Ready(64, 256, frozenset({0}), 64, (("kv", 4, 99),), {"speculative_num_steps": 3}, None)


class Wire:
    """The front's carrier; the test says what comes."""

    def __init__(self):
        self.said, self._coming = [], asyncio.Queue()

    async def listen(self, hear):
        while (messages := await self._coming.get()) != [None]:
            hear(messages)

    def send(self, message):
        self.said.append(message)

    async def come(self, *messages):
        """Messages, or None for the engine's end."""
        self._coming.put_nowait(list(messages))
        for _ in range(20):  # what hears them, and who waits for what that makes
            await asyncio.sleep(0)


def done(key, sample=0, reason="stop"):
    return Done(key, sample, reason, None, None, 3, [1, 2], 0, 0, 0, [2], 0.0, 0.1, 0.2)


def with_client(test):
    async def run():
        wire = Wire()
        client = EngineClient(wire)
        await wire.come(READY)
        assert await client.start() == READY
        await test(wire, client)

    asyncio.run(run())


async def submitted(wire, client, n=1):
    stream = client.submit([1], SamplingParams(n=n))
    key = wire.said[-1].key
    await wire.come(Accepted(key))
    await stream.accepted()
    return key, stream


def test_news_come_in_order_and_all_that_is_there_at_once():
    async def test(wire, client):
        key, stream = await submitted(wire, client, n=2)
        assert client.num_open == 2
        first = Tokens(key, 0, [1], [False], None)
        await wire.come(first, Tokens(key, 1, [2], [False], None))
        await wire.come(done(key, 1))
        assert [type(news).__name__ for news in await stream.news()] == ["Tokens", "Tokens", "Done"]
        assert client.num_open == 1
        await wire.come(done(key, 0))
        assert await stream.news() == [done(key, 0)] and await stream.news() == []
        stream.close()
        assert client.num_open == 0 and not any(isinstance(m, Abort) for m in wire.said)

    with_client(test)


def test_a_stream_that_is_closed_early_is_aborted_and_heard_no_more():
    async def test(wire, client):
        key, stream = await submitted(wire, client)
        stream.close()
        stream.close()
        assert wire.said[1:] == [Abort(key)] and client.num_open == 0
        await wire.come(Tokens(key, 0, [1], [False], None), done(key, reason="abort"))
        assert client.num_open == 0

    with_client(test)


def test_a_submit_that_is_closed_before_its_answer_is_aborted():
    async def test(wire, client):
        stream = client.submit([1], SamplingParams())
        assert client.num_open == 1
        stream.close()
        key = wire.said[0].key
        assert wire.said[1:] == [Abort(key)] and client.num_open == 0
        await wire.come(Accepted(key), done(key, reason="abort"))

    with_client(test)


def test_a_stream_that_failed_before_its_answer_can_be_settled():
    """The error is told at once; after `abort` the engine's own words count."""

    async def test(wire, client):
        stream = client.submit([1], SamplingParams())
        key = wire.said[0].key
        stream.fail(ValueError("late"))
        with pytest.raises(ValueError, match="late"):
            await stream.accepted()
        stream.abort()
        waiting = asyncio.create_task(stream.accepted())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await wire.come(Accepted(key), done(key, reason="abort"))
        await waiting
        assert await stream.news() == [done(key, reason="abort")] and await stream.news() == []

    with_client(test)


@pytest.mark.parametrize(("is_users", "kind"), [(True, ConfigError), (False, EngineFault)])
def test_a_refusal_is_an_error_of_its_kind(is_users, kind):
    async def test(wire, client):
        stream = client.submit([1], SamplingParams())
        for start in (stream.accepted(), client.call("open", None)):
            task = asyncio.create_task(start)
            await asyncio.sleep(0)
            await wire.come(Refused(wire.said[-1].key, "no", is_users))
            with pytest.raises(kind, match="no"):
                await task
        assert client.num_open == 0

    with_client(test)


def test_a_call_gets_its_reply_or_is_late():
    async def test(wire, client):
        task = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
        await wire.come(Reply(wire.said[-1].key, {"a": 1}))
        assert await task == {"a": 1}
        with pytest.raises(asyncio.TimeoutError):
            await client.call("stats", timeout=0.01)
        await wire.come(Reply(wire.said[-1].key, 2))  # nobody waits for it any more

    with_client(test)


@pytest.mark.parametrize("how", [None, Failed("CorruptState: x", False)])
def test_a_dead_engine_is_told_to_all(how):
    async def test(wire, client):
        _, stream = await submitted(wire, client)
        waiting = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
        await wire.come(how)
        assert client.ended.is_set() and client.num_open == 0
        for late in (waiting, stream.news(), client.call("stats")):
            with pytest.raises(EngineGone):
                await late
        stream.close()
        assert not any(isinstance(m, Abort) for m in wire.said)

    with_client(test)


def test_an_engine_that_does_not_load_says_why():
    async def run(message, kind):
        wire = Wire()
        client = EngineClient(wire)
        start = asyncio.create_task(client.start())
        await wire.come(message)
        with pytest.raises(kind, match=r"^no weights$"):
            await start

    asyncio.run(run(Failed("CheckpointError: no weights", True), ConfigError))
    asyncio.run(run(Failed("RuntimeError: no weights", False), EngineGone))


def test_frames_larger_than_the_sockets_buffers_pass_both_ways():
    """The front's end never waits, while the engine's end reads and writes as it comes to it."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    big = Submit(1, list(range(200_000)), SamplingParams(), None, 0)

    def echo():
        line = SocketLine(far)
        assert not line.poll(0) or line.poll(None)
        for _ in range(20):
            line.send(line.recv())
        far.close()

    async def run():
        process = object.__new__(EngineProcess)
        process._near, process._early, process._writer = near, [], None
        process.send(big)  # before anybody listens
        heard = []
        listening = asyncio.create_task(process.listen(heard.extend))
        await asyncio.sleep(0)
        for _ in range(19):
            process.send(big)
        await asyncio.wait_for(listening, 60)  # it ends with the other end
        assert heard == [big] * 20

    thread = threading.Thread(target=echo)
    thread.start()
    asyncio.run(run())
    thread.join()


# --- the engine's end


class Line:
    """The runner's line: the test's messages, one list a look, then `Stop`."""

    def __init__(self, lists):
        self._lists, self.said = deque(lists), []

    def poll(self, timeout):
        """The front stops the engine once it would wait for ever."""
        if timeout:
            time.sleep(timeout)
        return bool(self._lists) or timeout is None

    def recv(self):
        messages = self._lists.popleft() if self._lists else [Stop()]
        return pickle.loads(pickle.dumps(messages))

    def send(self, messages):
        self.said += pickle.loads(pickle.dumps(messages))


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=256) as engine:
        yield engine


def run(engine, *lists):
    line = Line(lists)
    Runner(engine, line).run()
    assert isinstance(line.said[0], Ready)
    return line.said[1:]


def test_samples_are_told_by_key_and_sample(engine):
    params = SamplingParams(
        max_new_tokens=9, n=2, temperature=1.0, seed=3, logprobs=2, logit_bias={5: 1.0}
    )
    expected = engine.generate("abc", params)
    said = run(engine, [Submit(7, [97, 98, 99], params, None, 0)])
    assert said[0] == Accepted(7) and {m.key for m in said} == {7}
    for sample, output in enumerate(expected):
        messages = [m for m in said[1:] if m.sample == sample]
        assert (
            [t for m in messages[:-1] for t in m.ids] == output.token_ids == messages[-1].token_ids
        )
        assert [f for m in messages[:-1] for f in m.from_draft] == output.from_draft
        assert [e for m in messages[:-1] for e in m.logprobs] == output.logprobs
        assert messages[-1].num_drafts == output.num_drafts
        assert messages[-1].num_accepted == sum(output.from_draft)


def test_errors_are_answers_and_disturb_nobody(engine):
    good = Submit(1, [97], SamplingParams(max_new_tokens=3), None, 0)
    bad = Submit(2, [999], SamplingParams(), None, 0)
    form = SamplingParams(structured=Grammar.json_schema({"type": "nonsense"}))
    said = run(
        engine,
        [bad, good, VerbCall(3, "rewind", (9, 0)), Submit(4, [97], form, None, 0), Abort(77)],
    )
    refused = {m.key: m for m in said if isinstance(m, Refused)}
    assert set(refused) == {2, 3, 4} and all(m.is_users for m in refused.values())
    assert "999" in refused[2].message and "structured: " in refused[4].message
    assert [m.finish_reason for m in said if isinstance(m, Done)] == ["length"]


class PanicException(BaseException):
    pass


@pytest.mark.parametrize("fault", [TypeError, KeyError, OSError, PanicException])
def test_an_unexpected_error_of_one_call_leaves_the_engine_to_the_others(
    engine, monkeypatch, fault
):
    """Law: a call that fails by our own fault is refused, and no other call hears of it."""
    submit = engine.submit

    def failing(prompt, *args, **options):
        if prompt == [98]:
            raise fault("planted")
        return submit(prompt, *args, **options)

    def fail() -> None:
        raise fault("planted")

    monkeypatch.setattr(engine, "submit", failing)
    monkeypatch.setattr(engine, "stats", fail)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    calls = [
        Submit(1, [97], params, None, 0),
        Submit(2, [98], params, None, 0),
        VerbCall(3, "stats", ()),
    ]
    said = run(engine, [*calls, Submit(4, [99], params, None, 0)])
    refused = {m.key: m for m in said if isinstance(m, Refused)}
    assert set(refused) == {2, 3} and not any(m.is_users for m in refused.values())
    assert all("planted" in m.message for m in refused.values())
    assert {m.key: m.finish_reason for m in said if isinstance(m, Done)} == {
        1: "length",
        4: "length",
    }


@pytest.mark.parametrize("fault", [RuntimeError("planted"), PanicException("planted")])
def test_a_form_whose_compiler_fails_is_refused_and_waits_for_nothing(engine, monkeypatch, fault):
    def fail(*args):
        raise fault

    monkeypatch.setattr(compiler, "compiled", fail)
    form = SamplingParams(structured=Grammar.regex(f"a{type(fault).__name__}"))
    plain = SamplingParams(max_new_tokens=3, ignore_eos=True)
    said = run(engine, [Submit(1, [97], form, None, 0), Submit(2, [97], plain, None, 0)])
    (refused,) = [m for m in said if isinstance(m, Refused)]
    assert refused.key == 1 and "planted" in refused.message
    assert [m.key for m in said if isinstance(m, Done)] == [2]


def test_an_abort_ends_every_sample(engine):
    params = SamplingParams(max_new_tokens=200, n=3, ignore_eos=True)
    said = run(engine, [Submit(1, [97], params, None, 0)], [], [Abort(1)])
    assert [m.finish_reason for m in said if isinstance(m, Done)] == ["abort"] * 3
    assert engine.stats().num_running == 0


def test_the_pool_is_told_in_runs(engine):
    """Law: the runs spell the map of pages that the ledger gives."""
    said = run(
        engine,
        [VerbCall(1, "open", (None,))],
        [VerbCall(2, "pool", ()), VerbCall(3, "close", (1,))],
    )
    pool = next(m.value for m in said if isinstance(m, Reply) and m.key == 2)
    for index, group in enumerate(pool):
        states, _, _ = engine.ledger.ownership_map(index)
        spelt = [state for count, state, _ in group["runs"] for _ in range(count)]
        assert spelt == states[1 : len(spelt) + 1].tolist()
        assert not states[len(spelt) + 1 :].any() and group["num_pages"] == len(states) - 1
