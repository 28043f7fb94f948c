"""The OpenAPI document, and random calls by it: no 5xx, no hang, errors in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from specpool.serve.app import paths, routers
from specpool.serve.config import ServeConfig
from specpool.serve.service import Service

if TYPE_CHECKING:
    from typing import Any

    from specpool.serve.bridge.client import EngineClient

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)


def operations():
    """The operations of the document, each with a strategy for its calls."""
    service = Service(ServeConfig(), cast("EngineClient", None), cast("Any", None))
    schema = schemathesis.openapi.from_dict(paths(routers(service)).openapi())
    all_operations = [result.ok() for result in schema.get_all_operations()]
    return [pytest.param(operation, id=operation.label) for operation in all_operations]


@pytest.mark.sample(8)
@pytest.mark.parametrize("operation", operations())
def test_random_calls_are_answered_as_the_document_says(server, operation):
    """Texts are cut to some tokens, so that no call takes long."""

    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def call(case):
        if isinstance(case.body, dict):
            for name in ("max_tokens", "max_completion_tokens", "n"):
                if isinstance(case.body.get(name), int) and case.body[name] > 4:
                    case.body[name] = 4
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=60)

    call()


def test_the_document_names_every_path_and_no_422(server):
    paths = server.ask("GET", "/openapi.json")[1]["paths"]
    assert set(paths) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/sessions",
        "/v1/sessions/{ident}",
        "/v1/sessions/{ident}/rewind",
        "/v1/sessions/{ident}/fork",
        "/health",
        "/v1/models",
        "/v1/models/{name}",
        "/server_info",
        "/metrics",
        "/pool",
    }
    for operations in paths.values():
        for operation in operations.values():
            assert {"4XX", "5XX"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
