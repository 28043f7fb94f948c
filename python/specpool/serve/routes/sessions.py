"""`/v1/sessions`: open, look at, rewind, fork and close a conversation that keeps its KV.

A turn is a chat or a completion with the header `x-session-id` and the field `session_offset`.
"""

from __future__ import annotations

import contextlib

from fastapi import APIRouter
from starlette.responses import Response

from specpool.errors import SpecpoolError
from specpool.serve.answers import whole
from specpool.serve.api.errors import json_response, shutting_down
from specpool.serve.api.requests import RewindRequest, SessionRequest
from specpool.serve.service import Service
from specpool.serve.sessions import SessionRecord


def routes(service: Service) -> APIRouter:
    """Return the routes of sessions."""
    router, sessions = APIRouter(), service.sessions

    async def close_unheard(record: SessionRecord) -> None:
        with contextlib.suppress(SpecpoolError):
            await sessions.close(record.ident)

    @router.post("/v1/sessions", summary="Open a session")
    async def open_session(body: SessionRequest | None = None) -> Response:
        service.check_model(None if body is None else body.model)
        if service.is_draining:
            raise shutting_down()
        most = None if body is None else body.max_tokens
        record = await whole(sessions.open(most), close_unheard)
        return json_response(record.body())

    @router.get("/v1/sessions", summary="List the sessions")
    async def list_sessions() -> Response:
        return json_response({"object": "list", "data": [each.body() for each in sessions]})

    @router.get("/v1/sessions/{ident}", summary="Look at a session")
    async def session(ident: str) -> Response:
        await sessions.reach(ident)
        return json_response(sessions.find(ident).body())

    @router.post("/v1/sessions/{ident}/rewind", summary="Forget the tokens from an offset on")
    async def rewind(ident: str, body: RewindRequest) -> Response:
        await sessions.reach(ident)
        record, kept = await whole(sessions.rewind(ident, body.offset))
        return json_response(record.body() | {"kept_tokens": kept})

    @router.post("/v1/sessions/{ident}/fork", summary="Open a copy of a session")
    async def fork(ident: str) -> Response:
        await sessions.reach(ident)
        return json_response((await whole(sessions.fork(ident), close_unheard)).body())

    @router.delete("/v1/sessions/{ident}", summary="Close a session and abort its turn")
    async def close(ident: str) -> Response:
        await sessions.reach(ident)
        await whole(sessions.close(ident))
        return json_response({"id": ident, "object": "session", "deleted": True})

    return router
