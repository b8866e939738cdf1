"""schemathesis over the whole OpenAPI document: no server error, no hang, nothing the document does not say."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from support_daemon import environment, served
from support_sizes import sized

from forkd.client.controller import Controller
from forkd.host.paths import Home

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method"
)
REQUEST_S = 20
LEAST_S = 5
_LIMITS = ("memory_limit_mib", "cpu_limit", "pids_limit", "io_limit_mib_s")

# Answers that are right and are 5xx, or never end.
_COMMON = """
request-timeout = {request_s}
[[operations]]
include-path = "/v1/sandboxes/{{id}}/branch"
enabled = false
[[operations]]
include-name = "POST /v1/sandboxes/{{id}}/checkpoints"
enabled = false
[[operations]]
include-path = "/v1/events"
parameters = {{ "query.follow" = "false" }}
"""
# What would end the sandbox, or the guest in it, before the others had their turn; and an archive of all its files.
_SPARED = """
[parameters]
id = "{sandbox_id}"
[[operations]]
include-path = "/v1/sandboxes/{{id}}"
include-method = "DELETE"
enabled = false
[[operations]]
include-path = "/v1/sandboxes/{{id}}/pause"
enabled = false
[[operations]]
include-path = "/v1/sandboxes/{{id}}/timeout"
enabled = false
[[operations]]
include-path = "/v1/sandboxes/{{id}}/archive"
include-method = "GET"
enabled = false
[[operations]]
include-path = "/v1/sandboxes/{{id}}/files"
include-method = "DELETE"
enabled = false
[[operations]]
include-path = "/v1/sandboxes/{{id}}/files/rename"
enabled = false
"""


def make_token(home: Home) -> str:
    command = [sys.executable, "-m", "forkd.cli.main", "token", "create", "fuzz", "--json"]
    made = subprocess.run(command, env=environment(home, "fake"), capture_output=True, text=True, check=True)
    found = re.search(r'"token": "([^"]+)"', made.stdout)
    assert found is not None
    return found.group(1)


def fuzz(url: str, schema: Path, token: str | None, examples: int, more: str = "") -> int:
    """How many cases were tried; fails with schemathesis' own report."""
    config = schema.with_suffix(".toml")
    config.write_text(more + _COMMON.format(request_s=REQUEST_S))
    authorization = [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    command = [str(Path(sys.executable).parent / "st"), "--config-file", str(config), "run", str(schema), "--url", url]
    options = ["--checks", CHECKS, "--max-examples", str(examples), "--phases", "examples,coverage,fuzzing"]
    ran = subprocess.run(
        [*command, *options, *authorization, "--no-color"], capture_output=True, text=True, cwd=schema.parent
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    counted = re.search(r"(\d+) generated", ran.stdout)
    assert counted is not None, ran.stdout[-2000:]
    return int(counted.group(1))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return tmp_path / "openapi.json"


@pytest.mark.timeout(600)
def test_strangers_and_token_holders_find_no_fault(fake_home: Home, document: Path) -> None:
    """No sandbox is there: with the fake engine its guest would be this machine."""
    token = make_token(fake_home)
    with served(fake_home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as daemon:
        _, url = daemon.places
        fetch(url, token, document)
        assert fuzz(url, document, None, sized(1, full=10)) > sized(200, full=500)
        assert fuzz(url, document, token, sized(2, full=25)) > sized(200, full=1500)


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_a_running_sandbox_brings_no_fault_to_light(vm_home: Home, document: Path) -> None:
    token = make_token(vm_home)
    with served(vm_home, "--bind", "127.0.0.1:0", "--on-stop", "kill", engine="qemu") as daemon:
        _, url = daemon.places
        fetch(url, token, document)
        with Controller(url, token) as controller:
            (sandbox,) = controller.spawn_sandboxes("warm")
            spared = _SPARED.format(sandbox_id=sandbox["id"])
            assert fuzz(url, document, token, sized(2, full=20), spared) > sized(200, full=1000)
            assert controller.eval_code(sandbox["id"], "20 + 22")["result"] == "42"


def fetch(url: str, token: str, into: Path) -> None:
    answer = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {token}"})
    into.write_text(json.dumps(_at_leisure(answer.raise_for_status().json())))


def _at_leisure(value: Any) -> Any:
    """Without what is legal and rightly gets a 5xx, which is not what is looked for here.

    Deadlines of almost no time get 504; limits get 501 where they cannot be enforced, or leave a guest no room to live.
    """
    if isinstance(value, list):
        return [_at_leisure(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _at_leisure(item) for key, item in value.items() if key not in _LIMITS}
    if made.pop("exclusiveMinimum", None) == 0:
        made["minimum"] = LEAST_S
    return made
