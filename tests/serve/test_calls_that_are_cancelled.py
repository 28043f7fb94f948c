"""Ray Serve cancels a call when its client leaves: front and engine stay alike."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from moving_fleet import Engine, SimulatedTime
from specpool.engine.scheduler.request import Said
from specpool.serve.answers import whole
from specpool.serve.config import ServeConfig
from specpool.serve.routes.sessions import routes
from specpool.serve.sessions import Sessions

CALLS = [
    ("POST", "/v1/sessions", {}),
    ("POST", "/v1/sessions/{}/rewind", {"offset": 1}),
    ("POST", "/v1/sessions/{}/fork", {}),
    ("DELETE", "/v1/sessions/{}", {}),
]


async def call(app, method: str, path: str, body: dict):
    """One request as Serve passes it on; returns the status."""
    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json")], "app": app}
    scope["specpool.key"] = ""  # as the guard in front says
    sent, content = [], json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize("seconds", [0.0, 0.05, 9.0])
@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_a_call_that_is_cancelled_is_done_or_undone(method, path, body, seconds):
    """Law: the engine has the sessions that have a name, and their texts; none is kept unheard."""

    async def main():
        engine = Engine(random.Random(0), 0.0)
        engine.seconds = [0.1]
        sessions = Sessions(engine, ServeConfig(), "own", loop.time)
        service = SimpleNamespace(sessions=sessions, is_draining=False, check_model=lambda _: None)
        app = FastAPI()
        app.include_router(routes(service))
        record = await sessions.open(None)
        number, tokens = record.conversation.number, [4, 5, 6]
        engine.texts[number] = list(tokens)
        record.conversation.tokens = tokens
        record.conversation.said = [Said(3, None, [6], ())]
        task = asyncio.ensure_future(call(app, method, path.format(record.ident), body))
        await asyncio.sleep(seconds)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result == 200 if seconds > 1 else isinstance(result, asyncio.CancelledError)
        await asyncio.sleep(5)
        texts = {
            session_record.conversation.number: session_record.conversation.tokens
            for session_record in sessions
        }
        assert texts == engine.texts and not any(
            session_record.is_busy for session_record in sessions
        )
        unheard = [
            session_record for session_record in sessions if session_record.ident != record.ident
        ]
        assert len(unheard) == (seconds > 1 and path.endswith(("sessions", "fork")))
        engine.task.cancel()

    loop = SimulatedTime()
    loop.run_until_complete(main())
    loop.close()


def test_work_that_fails_or_ends_early_is_not_undone():
    undone = []

    async def work(seconds, error=None):
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return seconds

    async def undo(result):
        undone.append(result)

    async def main():
        assert await whole(work(1), undo) == 1
        with pytest.raises(ValueError, match="no"):
            await whole(work(1, ValueError("no")), undo)
        for error in (ValueError("no"), None):
            task = asyncio.ensure_future(whole(work(2, error), undo))
            await asyncio.sleep(1)
            task.cancel()
            await asyncio.sleep(2)
        assert undone == [2]

    loop = SimulatedTime()
    loop.run_until_complete(main())
    loop.close()
