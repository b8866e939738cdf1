"""The OpenAPI document says what is there."""

import typing
from pathlib import Path
from typing import Any

import pytest
from support_client import Client

from forkd.daemon.app import ROUTES
from forkd.daemon.openapi import render_openapi, render_table
from forkd.wire import api

DOCS = Path(__file__).parents[2] / "docs/reference/rest.md"
BODIES = [each for each in vars(api).values() if typing.is_typeddict(each)]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return render_openapi(ROUTES)


def test_the_table_in_the_docs_is_rendered_from_the_routes() -> None:
    """After a change put the output of this between the two comments, as it is:

    python -c 'from forkd.daemon import app, openapi; print(openapi.render_table(app.ROUTES), end="")'
    """
    written = DOCS.read_text().partition("<!-- routes -->\n")[2].partition("<!-- end of routes -->")[0]
    assert written == render_table(ROUTES)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_schemas_have_the_keys_of_the_wire_and_the_same_may_be_absent(body: Any, document: dict[str, Any]) -> None:
    hints = typing.get_type_hints(body, include_extras=True)
    schema = document["components"]["schemas"][body.__name__]
    assert set(schema["properties"]) == set(hints)
    required = {key for key, hint in hints.items() if typing.get_origin(hint) is not typing.NotRequired}
    assert set(schema["required"]) == required


def test_every_error_is_declared_with_the_one_body(document: dict[str, Any]) -> None:
    error = {"$ref": "#/components/schemas/ErrorBody"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            failures = {status: each for status, each in responses.items() if int(status) >= 400}
            if path not in ("/healthz", "/readyz"):
                assert {"400", "401", "403", "500", "503"} <= set(failures), (method, path)
            for status, response in failures.items():
                assert response["content"]["application/json"]["schema"] == error, (method, path, status)
            if "{id}" in path or "{tag}" in path or "{name}" in path:
                assert "404" in failures, (method, path)
            if "application/json" in operation.get("requestBody", {}).get("content", {}):
                assert {"413", "415", "422"} <= set(failures), (method, path)


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    references: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                references.add(value["$ref"])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(document)
    assert len(references) > 20
    assert {reference.rpartition("/")[2] for reference in references} <= set(document["components"]["schemas"])


def test_streams_and_raw_bodies_have_their_types(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in ("exec/stream", "eval/stream"):
        assert "text/event-stream" in paths[f"/v1/sandboxes/{{id}}/{path}"]["post"]["responses"]["200"]["content"]
    assert set(paths["/v1/events"]["get"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    files = paths["/v1/sandboxes/{id}/files"]
    assert "application/octet-stream" in files["get"]["responses"]["200"]["content"]
    assert "application/octet-stream" in files["put"]["requestBody"]["content"]
    assert {"201", "202", "409", "503"} <= set(paths["/v1/sandboxes/{id}/branch"]["post"]["responses"])


def test_the_daemon_serves_the_document(client: Client, document: dict[str, Any]) -> None:
    assert client.get("/openapi.json").body == document
