"""`reading`: routes whose bodies may be large: a thread parses and checks them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from email.message import Message
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute

from specpool.checks import shown
from specpool.serve.api.errors import bad
from specpool.serve.api.reading import read

if TYPE_CHECKING:
    from starlette.responses import Response

#: Bodies of at most this many bytes are read without a thread, which costs more.
_SHORT = 1 << 14


class _Read(Request):
    """A request whose body was read."""

    def __init__(self, request: Request, raw: bytes, content: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw, self._content = raw, content

    async def body(self) -> bytes:
        """Return the bytes."""
        return self._raw

    async def json(self) -> Any:
        """Return the body's model; FastAPI finds that it fits, and passes it on."""
        return self._content


def reading(aside: Callable[..., Awaitable[Any]]) -> APIRouter:
    """Return a router whose routes take a model as their body, and read it in a thread.

    Args:
        aside: runs work in a thread, such as `Service.read_aside`.
    """

    class ReadingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            assert self.body_field is not None
            model: Any = self.body_field.field_info.annotation

            async def answer(request: Request) -> Response:
                raw = await request.body()
                _check_kind(request.headers.get("content-type", ""), raw)
                if len(raw) <= _SHORT:
                    content = read(model, raw)
                else:
                    content = await aside(read, model, raw)
                return await handle(_Read(request, raw, content))

            return answer

    return APIRouter(route_class=ReadingRoute)


def _check_kind(content_type: str, raw: bytes) -> None:
    """Refuse a body that does not say that it is JSON.

    Raises:
        ApiError: it has another type, or is missing.
    """
    message = Message()
    message["content-type"] = content_type or "application/json"
    kind = message.get_content_subtype()
    is_json = content_type and message.get_content_maintype() == "application"
    if not raw or not is_json or not (kind == "json" or kind.endswith("+json")):
        mistake = "is missing" if not raw else f"has the type {shown(content_type)}"
        raise bad(
            f"the body {mistake}: send JSON with content-type application/json",
            code="invalid_request",
        )
