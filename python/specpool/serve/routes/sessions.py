"""`/v1/sessions`: open, look at, rewind, fork and close a conversation that keeps its KV.

A turn is a chat or a completion with the header `x-session-id` and the field `session_offset`.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from specpool.errors import SpecpoolError
from specpool.serve.answers import whole
from specpool.serve.api.errors import json_response, shutting_down
from specpool.serve.api.requests import RewindRequest, SessionRequest
from specpool.serve.keys import KeyId
from specpool.serve.service import Service
from specpool.serve.sessions import SessionRecord, ident_of


async def _full_name(ident: str, key_id: KeyId) -> str:
    return ident_of(ident, key_id)


#: The full name of the session whose id is in the path.
FullName = Annotated[str, Depends(_full_name)]


def routes(service: Service) -> APIRouter:
    """Return the routes of sessions."""
    router, sessions = APIRouter(), service.sessions

    async def close_unheard(record: SessionRecord) -> None:
        with contextlib.suppress(SpecpoolError):
            await sessions.close(record.ident)

    @router.post("/v1/sessions", summary="Open a session")
    async def open_session(key_id: KeyId, body: SessionRequest | None = None) -> Response:
        service.check_model(None if body is None else body.model)
        if service.is_draining:
            raise shutting_down()
        max_tokens = None if body is None else body.max_tokens
        record = await whole(sessions.open(max_tokens, key_id), close_unheard)
        return json_response(record.body())

    @router.get("/v1/sessions", summary="List the sessions of the key")
    async def list_sessions(key_id: KeyId) -> Response:
        records = [record.body() for record in sessions.of_key(key_id)]
        return json_response({"object": "list", "data": records})

    @router.get("/v1/sessions/{ident}", summary="Look at a session")
    async def session(name: FullName) -> Response:
        await sessions.reach(name)
        return json_response(sessions.find(name).body())

    @router.post("/v1/sessions/{ident}/rewind", summary="Forget the tokens from an offset on")
    async def rewind(name: FullName, body: RewindRequest) -> Response:
        await sessions.reach(name)
        record, num_kept = await whole(sessions.rewind(name, body.offset))
        return json_response(record.body() | {"kept_tokens": num_kept})

    @router.post("/v1/sessions/{ident}/fork", summary="Open a copy of a session")
    async def fork(name: FullName) -> Response:
        await sessions.reach(name)
        return json_response((await whole(sessions.fork(name), close_unheard)).body())

    @router.delete("/v1/sessions/{ident}", summary="Close a session and abort its turn")
    async def close(ident: str, name: FullName) -> Response:
        await sessions.reach(name)
        await whole(sessions.close(name))
        return json_response({"id": ident, "object": "session", "deleted": True})

    return router
