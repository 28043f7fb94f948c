"""Whether the server takes work, and its model: `/health`, `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from specpool.serve.api.errors import engine_gone, json_response, shutting_down
from specpool.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes of health and models."""
    router, client = APIRouter(), service.client

    @router.get("/health", summary="Whether the server takes work")
    async def health() -> Response:
        if client.ended.is_set():
            raise engine_gone()
        if service.is_draining:
            raise shutting_down()
        return json_response({"status": "ok"})

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", summary="The model's names")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [_model(service, n) for n in service.config.names]}
        )

    @router.get("/v1/models/{name:path}", summary="One name of the model")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_model(service, name))

    return router


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specpool",
        "max_model_len": service.client.ready.max_context_len,
    }
