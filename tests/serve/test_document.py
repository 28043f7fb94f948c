"""The OpenAPI document, and random calls by it: no 5xx, no hang, errors in OpenAI's shape."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)


@pytest.fixture
def document(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_calls_are_answered_as_the_document_says(case):
    """Texts are cut to some tokens, so that no call takes long."""
    if isinstance(case.body, dict):
        for name in ("max_tokens", "max_completion_tokens", "n"):
            if isinstance(case.body.get(name), int) and case.body[name] > 4:
                case.body[name] = 4
    case.call_and_validate(checks=CHECKS, timeout=60)


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
