"""`build_app`: the application of the server: its paths, and the guards in front of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from specpool._core import __version__
from specpool.errors import ConfigError
from specpool.serve.api.errors import ApiError, bad, engine_gone, internal
from specpool.serve.api.reading import misfit
from specpool.serve.api.sampling import refused
from specpool.serve.bridge.client import EngineFault, EngineGone
from specpool.serve.guard.access import AccessGuard
from specpool.serve.guard.access_log import AccessLog
from specpool.serve.guard.body import BodyGuard
from specpool.serve.page import routes as page_routes
from specpool.serve.routes import chat, completions, figures, sessions, state, tokens
from specpool.serve.service import Service

log = logging.getLogger("specpool.serve")

_ERROR = {
    "description": "An error in OpenAI's shape",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def routers(service: Service) -> list[APIRouter]:
    """Return the routes of a server, a router for each concern."""
    modules = (chat, completions, tokens, sessions, state, figures)
    return [*(module.routes(service) for module in modules), page_routes()]


def paths(routers: Sequence[APIRouter]) -> FastAPI:
    """Return the application of these routes, without guards."""
    app = FastAPI(
        title="specpool",
        version=__version__,
        docs_url=None,  # these pages fetch code from elsewhere
        redoc_url=None,
        responses={"4XX": _ERROR, "5XX": _ERROR},
    )
    for router in routers:
        app.include_router(router)
    for kind in (ApiError, ConfigError, EngineFault, EngineGone):
        app.add_exception_handler(kind, _own_error)
    app.add_exception_handler(RequestValidationError, _wrong_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)  # raised again behind its answer, for the log
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return app


def build_app(service: Service) -> ASGIApp:
    """Return the application of a server."""
    all_routers = routers(service)
    app = paths(all_routers)
    guarded: ASGIApp = AccessGuard(BodyGuard(app, service), service)
    if service.config.origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=service.config.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-specpool-ignored", "x-should-retry", "retry-after"],
        )
    routes = [*app.routes, *(route for router in all_routers for route in router.routes)]
    patterns = [route for route in routes if isinstance(route, Route)]
    logged: Any = AccessLog(guarded, service, patterns)  # uvicorn's types differ from Starlette's
    if service.config.proxies:
        logged = ProxyHeadersMiddleware(logged, [*service.config.proxies])
    answer: ASGIApp = logged
    return answer


async def _own_error(request: Request, error: Exception) -> Response:
    """Answer one of the server's own errors; the reason of a fault goes only to the log."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, ConfigError):
        return refused(error).response()
    log.error("request %s: %s", request.scope.get("specpool.id"), error)
    return (engine_gone() if isinstance(error, EngineGone) else internal()).response()


async def _fault(request: Request, error: Exception) -> Response:
    """Answer an error that has no handler of its own."""
    return internal().response()


async def _wrong_body(request: Request, error: Exception) -> Response:
    """Answer a body that does not fit its model: the first mistakes, without the values."""
    assert isinstance(error, RequestValidationError)
    mistakes = error.errors()
    if mistakes[0]["type"] == "json_invalid":
        return bad("the body is no JSON", code="invalid_request").response()
    # Each location begins with "body", which is no field, but for a body that is wrong as a whole.
    mistakes = [mistake | {"loc": mistake["loc"][1:] or ("body",)} for mistake in mistakes]
    value = error.body if isinstance(error.body, dict) else {}
    return misfit(mistakes, {"body": error.body} | value).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request that no route takes."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, "there is no such path", code="not_found").response()
    if error.status_code == 405:
        headers = error.headers or {}
        message = "this path does not take this method"
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    if error.status_code == 400:
        return bad("the body cannot be read as JSON", code="invalid_request").response()
    return ApiError(error.status_code, str(error.detail)).response()


def _document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document; a wrong body gets 400 here, not FastAPI's 422."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = document
    return app.openapi_schema
