"""The published OpenAPI document: it says what the service does, and a fuzzer that reads it finds no difference."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from runtime.families.minimax_h3.request import FIELDS
from runtime.server import schema
from runtime.server.app import ROUTES
from tests.fakes.service import KEY, ROOT, ServiceProcess

UNPUBLISHED = re.compile(
    r"^/(server_info|v1/model_info|liveness|ping|health-check|readyz|openapi\.json)?$|/(edits|extensions|characters.*|remix)$"
)
TRANSPORT = {"model", "response_format", "stream"}


def test_every_route_is_published_with_its_methods() -> None:
    published = {
        (path, method.upper())
        for path, methods in schema.document("1")["paths"].items()
        for method in methods
    }
    served = {
        (route.path.replace(":video}", "}"), method) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}
    }  # fmt: skip
    assert {(path, method) for path, method in served if not UNPUBLISHED.search(path)} == published


def test_the_fields_of_a_request_are_those_of_the_family() -> None:
    names = {field.name for field in msgspec.structs.fields(schema.CreateVideo)}
    assert names - TRANSPORT <= set(FIELDS)
    assert names >= TRANSPORT


@pytest.mark.parametrize(
    ("method", "path", "struct"),
    [
        ("GET", "/v1/videos", schema.VideoList),
        ("GET", "/v1/videos/{id}", schema.Video),
        ("POST", "/v1/videos/{id}/cancel", schema.Video),
        ("GET", "/v1/models", schema.ModelList),
        ("GET", "/v1/startup", schema.StartList),
        ("GET", "/v1/status", schema.Status),
        ("GET", "/health", schema.Health),
        ("GET", "/ready", schema.Health),
        ("GET", "/livez", schema.Alive),
        ("GET", "/version", schema.Version),
        ("GET", "/v1/nothing", schema.Error),
    ],
)
def test_answers_fit_their_structs(service: ServiceProcess, method: str, path: str, struct: Any) -> None:
    video = service.finished(service.create()["id"])["id"]
    response = service.client.request(method, path.replace("{id}", video))
    forbidding = msgspec.json.decode(response.content, type=struct, strict=True)
    assert msgspec.to_builtins(forbidding) == response.json()  # nothing undeclared is sent


READS = ("--exclude-method", "POST", "--checks", "all")
CREATES = ("--include-method", "POST", "--checks", "all", "--exclude-checks", "positive_data_acceptance")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "examples", [pytest.param("4", id="few"), pytest.param("20", id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("arguments", [READS, CREATES], ids=["reads", "creates"])
def test_schemathesis_finds_nothing(
    service: ServiceProcess, arguments: tuple[str, ...], examples: str
) -> None:
    """Creations are run without the check that whatever fits the schema is taken: rules across fields and the bytes of
    pictures cannot be said in a schema."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}",
        "--max-examples", examples, "--generation-deterministic", "--request-timeout", "30", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " 5xx" not in done.stdout
    assert "0 generated" not in done.stdout
