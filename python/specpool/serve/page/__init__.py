"""The page to talk to, at `/`: one self-contained file."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

#: Scripts and styles come from the page itself, data from this server, and nothing from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def page() -> str:
    """Return the page."""
    folder = resources.files(__name__)
    html, style, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.html", "page.css", "markdown.js", "page.js")
    )
    return html.replace("STYLE", style, 1).replace("SCRIPT", "".join(scripts), 1)


def routes() -> APIRouter:
    """Return the route of the page."""
    router, text = APIRouter(), page()

    @router.get("/", include_in_schema=False)
    async def root() -> Response:
        headers = {
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(text, media_type="text/html", headers=headers)

    return router
