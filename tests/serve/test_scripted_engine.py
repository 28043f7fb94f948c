"""The front beside an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading

import pytest
from test_bridge import READY, Wire, done

from specpool import Engine
from specpool.engine.assets import resolve
from specpool.engine.sampling_params import NEUTRAL
from specpool.engine.scheduler.request import TokenLogprob
from specpool.serve.app import build_app
from specpool.serve.bridge.client import EngineClient
from specpool.serve.bridge.messages import Abort, Accepted, Refused, Reply, Submit, Tokens, VerbCall
from specpool.serve.config import ServeConfig
from specpool.serve.routes.chat import ChatForm
from specpool.serve.routes.completions import CompletionForm
from specpool.serve.server import tokenizer_of
from specpool.serve.service import Service

TEXT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
FORM = TEXT | {"structured_outputs": {"regex": "[a-z]{4}"}}


class Scripted:
    """A front, its engine's words, and clients that can leave."""

    def __init__(self, *, tokenizer=None, ready=READY, wire=None, **options):
        options = {"access_log": False} | options
        self.tokenizer = tokenizer or tokenizer_of(resolve("specpool/tiny"), None, False)
        self.wire, self.ready = Wire() if wire is None else wire, ready
        self.client = EngineClient(self.wire)
        self.config = ServeConfig(**options)
        self.headers = {}  # of the latest answer

    async def start(self):
        await self.wire.come(self.ready)
        await self.client.start()
        self.service = Service(self.config, self.client, self.tokenizer)
        self.app = build_app(self.service)

    async def ask(
        self,
        body,
        path="/v1/completions",
        leaves=None,
        method="POST",
        client=None,
        ends=(),
        **headers,
    ):
        """One request; returns status and JSON, or a text that is none.

        The client leaves with the event `leaves`; a connection that is cut comes into `ends`.
        """
        sent, parts = [], [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if parts:
                return parts.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        given = {"host": "localhost", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        await self.app(
            {
                "type": "http",
                "method": method,
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
                "client": client,
                "specpool.abort": lambda: ends.append(path),
                "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            },
            receive,
            send,
        )
        self.headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
        content = b"".join(message.get("body", b"") for message in sent[1:])
        is_json = content[:1] == b"{"
        return sent[0]["status"], json.loads(content) if is_json else content.decode()

    def begin(self, body, **more):
        return asyncio.create_task(self.ask(body, **more))

    async def said(self, kind, count):
        """The first `count` messages of a kind, once they are said."""
        for _ in range(2000):
            messages = [message for message in self.wire.said if isinstance(message, kind)]
            if len(messages) >= count:
                return messages
            await asyncio.sleep(0.005)
        raise AssertionError(f"{len(messages)} of {count} {kind.__name__} were said")

    async def opened(self):
        """Open a session; returns its name."""
        task = self.begin({}, path="/v1/sessions")
        while not self.wire.said:
            await asyncio.sleep(0.005)
        await self.wire.come(Reply(self.wire.said[0].key, 7))
        return (await task)[1]["id"]


def scripted(test, **options):
    async def run():
        front = Scripted(**options)
        await front.start()
        await asyncio.wait_for(test(front), 60)

    asyncio.run(run())


def test_the_list_of_models_may_end_with_a_slash():
    """Law: it is no name of a model."""

    async def test(front):
        lists = [
            await front.ask(None, path=path, method="GET") for path in ("/v1/models", "/v1/models/")
        ]
        assert lists[0] == lists[1] and lists[0][1]["object"] == "list"

    scripted(test)


def test_forms_that_take_long_to_compile_hold_up_nobody_else():
    """Forty of them wait in the engine; a plain text is sent and answered meanwhile."""

    async def test(front):
        slow = [front.begin(FORM) for _ in range(40)]
        plain = front.begin(TEXT)
        asked = await front.said(Submit, 41)
        (key,) = [message.key for message in asked if message.params.structured is None]
        await front.wire.come(Accepted(key), done(key))
        assert (await plain)[0] == 200 and not any(task.done() for task in slow)
        assert front.service.num_open == 40
        for task in slow:
            task.cancel()

    scripted(test)


def test_all_prompts_of_a_call_are_sent_before_the_first_is_accepted():
    """The engine hears between two turns: one after another, they would wait for as many turns."""

    async def test(front):
        task = front.begin(TEXT | {"prompt": ["ab"] * 20})
        keys = [message.key for message in await front.said(Submit, 20)]
        assert front.service.num_open == 20
        await front.wire.come(*map(Accepted, keys), *map(done, keys))
        status, answer = await task
        assert status == 200 and len(answer["choices"]) == 20 and front.service.num_open == 0

    scripted(test)


def test_concurrent_opens_never_pass_the_most_sessions():
    """Law: sessions that are open or being opened are at most `max_open_sessions`."""

    async def test(front):
        tasks = [front.begin({}, path="/v1/sessions") for _ in range(200)]
        asked = await front.said(VerbCall, 5)
        while sum(task.done() for task in tasks) < 195:
            await asyncio.sleep(0.005)
        assert len(await front.said(VerbCall, 5)) == 5
        refused = Refused(asked[0].key, "max_tokens is wrong", is_users=True)
        await front.wire.come(
            refused, *(Reply(verb_call.key, i) for i, verb_call in enumerate(asked[1:]))
        )
        statuses = [status for status, _ in await asyncio.gather(*tasks)]
        assert sorted(statuses) == [200] * 4 + [400] + [429] * 195
        again = [front.begin({}, path="/v1/sessions") for _ in range(3)]  # one place is free again
        await front.wire.come(Reply((await front.said(VerbCall, 6))[5].key, 9))
        assert sorted([status for status, _ in await asyncio.gather(*again)]) == [200, 429, 429]

    scripted(test, max_open_sessions=5)


def test_forks_count_as_sessions_while_they_are_made():
    async def test(front):
        ident = await front.opened()
        path = f"/v1/sessions/{ident}/fork"
        tasks = [front.begin({}, path=path), front.begin({}, path="/v1/sessions")]
        calls = await front.said(VerbCall, 2)
        assert (await tasks[1])[0] == 429
        await front.wire.come(Reply(calls[1].key, 8))
        assert (await tasks[0])[0] == 200

    scripted(test, max_open_sessions=2)


@pytest.fixture(scope="module")
def stats():
    with Engine.from_pretrained(max_context_len=64) as engine:
        return engine.stats()


@pytest.mark.parametrize("path", ["/metrics", "/server_info"])
def test_polls_share_one_question(path, stats):
    """Law: one question at a time, and no answer is older than the poll that gets it."""

    async def test(front):
        first = front.begin(None, path=path, method="GET")
        (asked,) = await front.said(VerbCall, 1)
        later = [front.begin(None, path=path, method="GET") for _ in range(50)]
        await asyncio.sleep(0.05)
        assert len(await front.said(VerbCall, 1)) == 1
        await front.wire.come(Reply(asked.key, stats))
        assert (await first)[0] == 200
        _, second = await front.said(VerbCall, 2)
        assert not any(task.done() for task in later)
        later[0].cancel()  # one that leaves takes nobody's answer
        await front.wire.come(Reply(second.key, stats))
        assert [status for status, _ in await asyncio.gather(*later[1:])] == [200] * 49
        assert len(await front.said(VerbCall, 2)) == 2

    scripted(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_form_is_compiled_is_forgotten(stream):
    async def test(front):
        leaves = asyncio.Event()
        task = front.begin(FORM | {"stream": stream}, leaves=leaves)
        (asked,) = await front.said(Submit, 1)
        leaves.set()
        assert (await task)[0] == 499
        assert front.wire.said[1:] == [Abort(asked.key)] and front.service.num_open == 0

    scripted(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_request_counts_while_its_form_is_compiled(stream):
    async def test(front):
        status, answer = await front.ask(FORM | {"stream": stream})
        assert status == 504 and answer["error"]["code"] == "request_timeout"
        assert isinstance(front.wire.said[-1], Abort) and front.service.num_open == 0

    scripted(test, request_timeout=0.5)


@pytest.mark.parametrize(("reason", "offset"), [("abort", 0), ("length", 4)])
def test_a_session_whose_turn_was_too_late_is_as_long_as_the_engine_says(reason, offset):
    """It is busy until then: the turn may have ended in the engine just before."""

    async def test(front):
        ident = await front.opened()
        body = TEXT | {"session_offset": 0}
        task = front.begin(body, x_session_id=ident)
        (asked,) = await front.said(Submit, 1)
        await front.wire.come(Accepted(asked.key))
        assert (await task)[0] == 504
        status, answer = await front.ask(body, x_session_id=ident)
        assert status == 409 and answer["error"]["code"] == "session_busy"
        await front.wire.come(done(asked.key, reason=reason))
        assert front.service.sessions.find(ident).body()["busy"] is False
        assert front.service.sessions.find(ident).offset == offset

    scripted(test, request_timeout=0.5)


def test_a_prompt_is_counted_whole_once_for_each_sample():
    """As vLLM counts: cached tokens too, and no tokens behind the end."""

    async def test(front):
        for prompt, reused in (("abcd", 0), ("abcd", 3)):
            task = front.begin(TEXT | {"prompt": [prompt, "ab"], "n": 2})
            for submit in (await front.said(Submit, 2))[-2:]:
                await front.wire.come(Accepted(submit.key))
                for sample in (0, 1):
                    tokens = Tokens(submit.key, sample, [97], [False], None)
                    await front.wire.come(tokens, dataclasses.replace(tokens, ids=[98]))
                    end = done(submit.key, sample)
                    await front.wire.come(dataclasses.replace(end, num_reused=reused))
            assert (await task)[0] == 200
            front.wire.said.clear()
        value = front.service.counters.registry.get_sample_value
        labels = front.service.counters.labels
        assert value("vllm:prompt_tokens_total", labels) == 2 * 2 * (4 + 2)
        assert value("vllm:generation_tokens_total", labels) == 2 * 2 * 2 * 2
        assert value("vllm:request_generation_tokens_sum", labels) == 2 * 2 * 2 * 2

    scripted(test)


def test_what_a_request_does_not_say_is_left_to_the_targets_files():
    fields = {"repetition_penalty": 1, "top_p": 1, "min_p": 0.1, "min_tokens": 9}
    hot = TEXT | {"temperature": 1.5, "top_k": -1}
    asked = [
        ("/v1/completions", {"prompt": "ab", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", hot),
        ("/v1/completions", hot | fields),
    ]

    async def test(front):
        params = []
        for number, (path, body) in enumerate(asked):
            task = front.begin(body, path=path)
            submitted = (await front.said(Submit, number + 1))[-1]
            await front.wire.come(Accepted(submitted.key), done(submitted.key))
            assert (await task)[0] == 200
            params.append(submitted.params)
        for quiet in params[:2]:
            assert quiet.temperature == 0.6
            assert {getattr(quiet, name) for name in NEUTRAL} == {None}
        assert params[2].temperature == 1.5 and params[2].top_k == 0
        assert params[2].top_p is None and params[2].repetition_penalty is None
        assert (params[3].top_p, params[3].repetition_penalty, params[3].min_p) == (1.0, 1.0, 0.1)
        assert params[3].min_new_tokens == 4, "min_tokens, up to max_tokens"

    scripted(test, ready=dataclasses.replace(READY, temperature=0.6))


@pytest.mark.parametrize(
    ("path", "form", "body"),
    [
        ("/v1/completions", CompletionForm, TEXT | {"logprobs": 1, "n": 2}),
        (
            "/v1/chat/completions",
            ChatForm,
            {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "n": 2},
        ),
    ],
)
def test_an_answer_with_many_log_probabilities_holds_up_nobody(monkeypatch, path, form, body):
    """Law: others are answered while it is written, and it is one whole object."""
    begun, goes_on, whole = threading.Event(), threading.Event(), form.whole

    def wait(*args):
        begun.set()
        assert goes_on.wait(30)
        return whole(*args)

    monkeypatch.setattr(form, "whole", wait)
    ids = [97 + i % 26 for i in range(200)]

    async def test(front):
        task = front.begin(body, path=path)
        key = (await front.said(Submit, 1))[0].key
        logs = [TokenLogprob(i, -0.5, {i: -0.5}) for i in ids]
        ends = [dataclasses.replace(done(key, i, "length"), token_ids=ids) for i in range(2)]
        news = [Tokens(key, i, ids, [False] * len(ids), logs) for i in range(2)]
        await front.wire.come(Accepted(key), *news, *ends)
        while not begun.is_set():
            await asyncio.sleep(0.005)
        assert (await front.ask(None, path="/health", method="GET"))[0] == 200
        goes_on.set()
        status, answer = await task
        assert status == 200 and list(answer)[:4] == ["id", "object", "created", "model"]
        assert answer["usage"]["completion_tokens"] == 400
        for index, choice in enumerate(answer["choices"]):
            logprobs = choice["logprobs"]
            assert (
                choice["index"] == index
                and len(logprobs.get("tokens") or logprobs["content"]) == 200
            )

    scripted(test)


def test_a_call_that_does_not_end_with_the_server_is_told_so():
    """Law: uvicorn cancels what is left, such as a body that does not come; it gets an answer."""

    async def test(front):
        calls = [front.begin(FORM), front.begin(TEXT)]
        await front.said(Submit, 2)
        calls[0].cancel()  # its client has left
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        front.service.is_draining = True
        calls[1].cancel()
        status, answer = await calls[1]
        assert status == 503 and answer["error"]["code"] == "server_shutting_down"

    scripted(test)


def test_no_text_waits_for_calls_that_the_queue_does_not_count():
    """Law: a flood of `/detokenize` and `/tokenize` holds up no chat, nor the reading of it."""
    goes_on = threading.Event()

    async def test(front):
        decode = front.tokenizer.decode

        def wait(act):
            def waiting(*args, **more):
                if threading.current_thread() is not threading.main_thread():
                    assert goes_on.wait(30)
                return act(*args, **more)

            return waiting

        front.tokenizer.decode = wait(decode)
        flood = [front.begin({"tokens": [5]}, path="/detokenize") for _ in range(4)]
        flood += [front.begin({"prompt": "ab" * 9000}, path="/tokenize") for _ in range(4)]
        await asyncio.sleep(0.05)
        chat = {"messages": [{"role": "user", "content": "ab"}], "user": "x" * 20_000}
        task = front.begin(chat, path="/v1/chat/completions")
        key = (await front.said(Submit, 1))[0].key
        assert not any(call.done() for call in flood)
        goes_on.set()
        front.tokenizer.decode = decode
        await front.wire.come(Accepted(key), done(key))
        assert (await task)[0] == 200
        assert {status for status, _ in await asyncio.gather(*flood)} == {200, 400}

    scripted(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_fault_of_our_own_gives_the_session_back(monkeypatch, path):
    """Law: whatever fails before a turn is sent, its session goes on; the answer is OpenAI's."""

    def fail(*args):
        raise OverflowError("a tokenizer's own fault")

    monkeypatch.setattr(CompletionForm, "__init__", fail)
    monkeypatch.setattr(ChatForm, "__init__", fail)
    ends = []

    async def test(front):
        ident = await front.opened()
        chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}
        body = (TEXT if path == "/v1/completions" else chat) | {"session_offset": 0}
        for _ in range(2):
            status, answer = await front.ask(body, path=path, ends=ends, x_session_id=ident)
            assert status == 500 and answer["error"]["code"] == "internal_error"
        assert not front.service.sessions.find(ident).is_busy
        assert not any(isinstance(message, Submit) for message in front.wire.said)
        assert not ends  # the answer was whole

    scripted(test)
