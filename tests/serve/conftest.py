"""A server that the tests of this folder share: what they do to it must leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_kit import SMALL, Server


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    with Server(
        *SMALL, "--max-queue", "64", "--max-body", "256KiB", "--read-timeout", "3"
    ) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server; after the test it still works, and has leaked no page."""
    yield shared
    assert shared.ask("GET", "/health")[0] == 200
    for session in shared.ask("GET", "/v1/sessions")[1]["data"]:
        shared.ask("DELETE", f"/v1/sessions/{session['id']}")
    shared.check_no_leak()
