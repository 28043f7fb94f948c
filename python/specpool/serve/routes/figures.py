"""What the engine does: `/server_info`, `/metrics`, `/pool`."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from specpool._core import __version__
from specpool.engine.stats import EngineStats
from specpool.serve.api.errors import ApiError, json_response
from specpool.serve.exposition import exposition
from specpool.serve.routes.shared import Shared
from specpool.serve.service import Service

#: Seconds that the engine's answer may take; it comes between two turns.
_PATIENCE = 10.0
#: Seconds for which an answer of `/pool` is good: several pages may ask.
_FRESH = 0.2


def routes(service: Service) -> APIRouter:
    """Return the routes of the engine's figures."""
    router = APIRouter()
    stats = Shared(lambda: stats_of(service))
    pool = Pool(service, stats)

    @router.get("/server_info", summary="The engine's options and how drafting goes")
    async def server_info() -> Response:
        engine_stats = await stats.get()
        return json_response(
            {
                "version": __version__,
                "served_model_name": service.config.names[0],
                **service.client.ready.config,
                "internal_states": [
                    {
                        "avg_spec_accept_length": engine_stats.accept_len,
                        "num_running_reqs": engine_stats.num_running,
                        "num_waiting_reqs": engine_stats.num_waiting,
                    }
                    | _figures(service, engine_stats)
                ],
            }
        )

    @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text, kind = exposition(service.counters, await stats.get())
        return Response(text, media_type=kind)

    @router.get("/pool", summary="Which pages are held")
    async def pages() -> Response:
        return json_response(await pool.answer())

    return router


class Pool:
    """The answers of `/pool`."""

    def __init__(self, service: Service, stats: Shared[EngineStats]) -> None:
        """Ask the engine of this service; its statistics by `stats`."""
        self._service, self._stats = service, stats
        self._lock = asyncio.Lock()
        self._expiry = 0.0
        self._answer: dict[str, Any] = {}

    async def answer(self) -> dict[str, Any]:
        """Return the pages as they are held, at most `_FRESH` seconds old.

        Raises:
            ApiError: the engine does not answer.
        """
        async with self._lock:
            if asyncio.get_running_loop().time() > self._expiry:
                stats, groups = await self._stats.get(), await ask_engine(self._service, "pool")
                if self._service.config.has_several_keys:
                    for group in groups:
                        group["runs"] = _without_rows(group["runs"])
                self._answer = {
                    "groups": groups,
                    "running": stats.num_running,
                    "waiting": stats.num_waiting,
                    "accept_len": stats.accept_len,
                } | _figures(self._service, stats)
                self._expiry = asyncio.get_running_loop().time() + _FRESH
            return self._answer


def _without_rows(runs: list[list[int]]) -> list[list[int]]:
    """Return the runs without their rows: the pages of a row tell the length of a client's text."""
    joined = itertools.groupby(runs, key=lambda run: run[1])
    return [[sum(run[0] for run in neighbours), state, 0] for state, neighbours in joined]


def _figures(service: Service, stats: EngineStats) -> dict[str, Any]:
    return {
        "sessions": len(service.sessions),
        "generated_tokens": stats.generated_token_ct,
        "drafts": stats.draft_ct,
        "accepted_drafts": stats.correct_draft_ct,
    }


async def ask_engine(service: Service, verb: str) -> Any:
    """Return what the engine answers to a verb of `Runner`.

    Raises:
        ApiError: it does not answer in time.
        EngineGone: it is gone.
    """
    try:
        return await service.client.call(verb, timeout=_PATIENCE)
    except asyncio.TimeoutError:
        raise ApiError(
            503, f"the engine did not answer within {_PATIENCE:g} s", code="engine_busy"
        ) from None


async def stats_of(service: Service) -> EngineStats:
    """Return the engine's statistics; see `ask_engine`."""
    stats: EngineStats = await ask_engine(service, "stats")
    return stats
