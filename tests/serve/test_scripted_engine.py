"""The front beside an engine that answers when the test says so."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_bridge import READY, Wire, done

from specpool.assets import resolve
from specpool.serve.app import build_app
from specpool.serve.bridge.client import EngineClient
from specpool.serve.bridge.messages import Abort, Accepted, Reply, Submit
from specpool.serve.config import ServeConfig
from specpool.serve.server import tokenizer_of
from specpool.serve.service import Service

TEXT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
FORM = TEXT | {"structured_outputs": {"regex": "[a-z]{4}"}}


class Scripted:
    """A front, its engine's words, and clients that can leave."""

    def __init__(self, **options):
        options = {"access_log": False} | options
        self.wire = Wire()
        self.client = EngineClient(self.wire)
        self.config = ServeConfig(**options)

    async def start(self):
        await self.wire.come(READY)
        await self.client.start()
        self.service = Service(
            self.config, self.client, tokenizer_of(resolve("specpool/tiny"), None, False)
        )
        self.app = build_app(self.service)

    async def ask(self, body, path="/v1/completions", leaves=None, **headers):
        """One request; returns status and JSON. The client leaves with the event `leaves`."""
        told, parts = [], [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if parts:
                return parts.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            told.append(message)

        given = {"host": "localhost", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        await self.app(
            {
                "type": "http",
                "method": "POST",
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
                "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            },
            receive,
            send,
        )
        content = b"".join(message.get("body", b"") for message in told[1:])
        return told[0]["status"], json.loads(content) if content else None

    def begin(self, body, **more):
        return asyncio.create_task(self.ask(body, **more))

    async def said(self, kind, count):
        """The first `count` messages of a kind, once they are said."""
        for _ in range(2000):
            found = [message for message in self.wire.said if isinstance(message, kind)]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.005)
        raise AssertionError(f"{len(found)} of {count} {kind.__name__} were said")

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
        status, found = await task
        assert status == 200 and len(found["choices"]) == 20 and front.service.num_open == 0

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
        status, found = await front.ask(FORM | {"stream": stream})
        assert status == 504 and found["error"]["code"] == "request_timeout"
        assert isinstance(front.wire.said[-1], Abort) and front.service.num_open == 0

    scripted(test, request_timeout=0.1)


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
        status, found = await front.ask(body, x_session_id=ident)
        assert status == 409 and found["error"]["code"] == "session_busy"
        await front.wire.come(done(asked.key, reason=reason))
        assert front.service.sessions.find(ident).body()["busy"] is False
        assert front.service.sessions.find(ident).offset == offset

    scripted(test, request_timeout=0.1)
