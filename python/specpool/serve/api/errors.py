"""Errors in OpenAI's shape. A client never sees a path of the machine or a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from specpool.errors import SpecpoolError

#: The type of an error, by its status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ApiError(SpecpoolError):
    """An error that a client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        """Make an error.

        Args:
            status: the HTTP status.
            message: what was wrong, and what to do.
            code: a word for programs.
            param: the field of the request.
            retry: whether the `openai` client shall try again; None leaves it to the status.
            headers: further headers.
            **more: further fields of the error.
        """
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        if retry is not None:
            self.headers["x-should-retry"] = "true" if retry else "false"
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": error | more}

    def response(self) -> Response:
        """Return the error as an answer."""
        return json_response(self.body, self.status, self.headers)

    def event(self) -> bytes:
        """Return the error as the last event of a stream."""
        return event(self.body)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that cannot work."""
    return ApiError(400, message, code=code, param=param)


def too_long(why: str, param: str | None) -> ApiError:
    """Return the error for a prompt that does not fit.

    LangChain and LiteLLM know it by the words "prompt is too long", not by its code. Their agents
    then shorten the chat, or ask a model with more room.
    """
    return bad(f"the prompt is too long: {why}", param, "context_length_exceeded")


def internal() -> ApiError:
    """Return the error for a fault of our own, whose reason is in the log alone."""
    return ApiError(
        500,
        "the server failed; the reason is in its log, under the request's x-request-id",
        code="internal_error",
        retry=False,
    )


def shutting_down() -> ApiError:
    """Return the error for work that the server will not do because it stops."""
    return ApiError(503, "the server is shutting down", code="server_shutting_down")


def engine_gone() -> ApiError:
    """Return the error for work that was lost with the engine."""
    return ApiError(503, "the engine has ended", code="engine_gone", retry=False)


def session_moving() -> ApiError:
    """Return the error for a session that is, or may be, on its way to this server or another."""
    return ApiError(
        503,
        "the session moves to another replica: send the request again",
        code="session_moving",
        retry=True,
        headers={"retry-after": "1"},
    )


def to_json(content: Any) -> bytes:
    """Return JSON in ASCII, so that any text can be sent, also one with a lone surrogate."""
    return json.dumps(content, separators=(",", ":")).encode()


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer in JSON."""
    return Response(to_json(content), status, dict(headers or {}), media_type="application/json")


def event(content: Any) -> bytes:
    """Return one event of a stream (server-sent events)."""
    return b"data: " + to_json(content) + b"\n\n"
