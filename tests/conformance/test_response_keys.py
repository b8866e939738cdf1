"""Which keys each answer has, compared with a table: forkd's, which clients decide by, and ours beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_daemon import TAG, Answer, Daemon

pytestmark = pytest.mark.usefixtures("nothing_running")

# Keys that are always there, then those of ours that are always there too.
SANDBOX = {
    "id": str,
    "snapshot_tag": str,
    "netns": (str, type(None)),
    "guest_addr": str,
    "created_at_unix": int,
    "pid": (int, type(None)),
    "memory_limit_mib": (int, type(None)),
    "has_branched": bool,
    "last_branch_memory_path": (str, type(None)),
    "branch_count": int,
}
SANDBOX_OURS = {
    "cpu_limit": (int, float, type(None)),
    "pids_limit": (int, type(None)),
    "io_limit_mib_s": (int, type(None)),
    "state": str,
    "cause": (str, type(None)),
    "engine": str,
    "isolation": str,
    "deadline_unix": (int, float, type(None)),
    "on_timeout": str,
    "labels": dict,
    "metadata": dict,
    "workspace": (str, type(None)),
    "way": (str, type(None)),
}
SNAPSHOT = {"tag": str, "dir": str, "created_at_unix": int, "status": str, "bootable": bool}
SNAPSHOT_OURS = {"image_id": str, "engine": str, "memory_mib": int, "vcpus": int, "warm": str}
SNAPSHOT_DETAIL = {
    "tag": str,
    "dir": str,
    "created_at_unix": int,
    "memory_logical_bytes": int,
    "memory_physical_bytes": int,
    "vmstate_bytes": int,
    "chain_depth": int,
    "dependents": list,
    "ancestors": list,
}
WORKSPACE = {
    "id": str,
    "name": str,
    "source_snapshot_tag": str,
    "status": str,
    "created_at_unix": int,
    "last_active_unix": int,
}
LIVE_WORKSPACE = {**WORKSPACE, "live_sandbox_id": str}
EXEC = {"stdout": str, "stderr": str, "exit_code": int}
EXEC_OURS = {"truncated": bool}
EVAL = {"result": (str, type(None)), "error": (str, type(None)), "exit_code": int}
EVAL_OURS = {
    "value": object,
    "has_value": bool,
    "stdout": str,
    "stderr": str,
    "traceback": (str, type(None)),
    "truncated": bool,
}
TEMPLATE = {
    "tag": str,
    "pid": int,
    "memory_bytes": int,
    "made_in_seconds": float,
    "created_at_unix": int,
    "forks": int,
}
PING = {"pong": bool, "numpy_version": str, "pid": int, "agent_lang": str, "warmup_ready": bool}
VERSION = {"version": str, "api": str}
VERSION_OURS = {"engine": str, "isolation": str, "pid": int, "listeners": list}
ERROR = {"error": str}
ERROR_OURS = {"code": str, "hint": (str, type(None))}


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[str]:
    answer = daemon.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG})
    check_list(answer, 201, SANDBOX | SANDBOX_OURS)
    (info,) = answer.json
    yield info["id"]
    check_empty(daemon.ask("DELETE", f"/v1/sandboxes/{info['id']}"))


@pytest.fixture
def workspace(daemon: Daemon) -> Iterator[str]:
    made = daemon.ask("POST", "/v1/workspaces", {"name": "desk", "snapshot_tag": TAG, "per_child_netns": False})
    check(made, 201, LIVE_WORKSPACE)
    yield "desk"
    check_empty(daemon.ask("DELETE", "/v1/workspaces/desk"))


def test_the_daemon_itself(daemon: Daemon) -> None:
    health = daemon.ask("GET", "/healthz")
    assert (health.status, health.json) == (200, {"ok": True})
    check(daemon.ask("GET", "/version"), 200, VERSION | VERSION_OURS)
    assert daemon.ask("GET", "/version").json["api"] == "v1"
    metrics = daemon.ask("GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_sandboxes(daemon: Daemon, sandbox: str) -> None:
    check_list(daemon.ask("GET", "/v1/sandboxes"), 200, SANDBOX | SANDBOX_OURS)
    one = daemon.ask("GET", f"/v1/sandboxes/{sandbox}")
    check(one, 200, SANDBOX | SANDBOX_OURS)
    host, _, port = one.json["guest_addr"].partition(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536
    assert (one.json["netns"], one.json["memory_limit_mib"], one.json["cause"]) == (None, None, None)


def test_snapshots(daemon: Daemon) -> None:
    check_list(daemon.ask("GET", "/v1/snapshots"), 200, SNAPSHOT | SNAPSHOT_OURS)
    check(daemon.ask("GET", f"/v1/snapshots/{TAG}"), 200, SNAPSHOT | SNAPSHOT_OURS)
    check(daemon.ask("GET", f"/v1/snapshots/{TAG}/info"), 200, SNAPSHOT_DETAIL)


def test_templates(daemon: Daemon) -> None:
    check_error(daemon.ask("POST", "/v1/snapshots/absent/warm"), 404, "not_found")
    check_error(daemon.ask("POST", "/v1/snapshots/no%20tag/warm"), 400, "invalid_input")
    warmed = daemon.ask("POST", f"/v1/snapshots/{TAG}/warm")
    if daemon.engine == "fake":
        check_error(warmed, 501, "unsupported")
        assert daemon.ask("GET", "/v1/templates").json == []
    elif warmed.status != 501:
        check(warmed, 200, TEMPLATE)
        check_list(daemon.ask("GET", "/v1/templates"), 200, TEMPLATE)


def test_a_snapshot_made_the_way_of_forkd_answers_when_it_is_there(daemon: Daemon) -> None:
    request = {"tag": "theirs", "kernel": daemon.image, "rootfs": daemon.image, "boot_wait_secs": 0}
    made = daemon.ask("POST", "/v1/snapshots", request)
    check(made, 201, SNAPSHOT | SNAPSHOT_OURS)
    assert (made.json["status"], made.json["bootable"]) == ("ready", True)
    check_error(daemon.ask("POST", "/v1/snapshots/theirs/compact", {"to": "flat"}), 501, "unsupported")
    check_error(daemon.ask("DELETE", "/v1/snapshots/theirs?cascade=true&force=true"), 400, "invalid_input")
    check_empty(daemon.ask("DELETE", "/v1/snapshots/theirs"))
    check_error(daemon.ask("DELETE", "/v1/snapshots/theirs"), 404, "not_found")


def test_the_guest(daemon: Daemon, sandbox: str) -> None:
    base = f"/v1/sandboxes/{sandbox}"
    check(daemon.ask("POST", f"{base}/ping"), 200, PING)
    check(daemon.ask("POST", f"{base}/exec", {"args": ["true"]}), 200, EXEC | EXEC_OURS)
    check(daemon.ask("POST", f"{base}/eval", {"code": "1"}), 200, EVAL | EVAL_OURS)
    check(daemon.ask("POST", f"{base}/eval", {"code": "1/0"}), 200, EVAL | EVAL_OURS)
    check_error(daemon.ask("POST", f"{base}/branch", {}), 501, "unsupported")


def test_a_ping_takes_any_content_type_and_no_body(daemon: Daemon, sandbox: str) -> None:
    for headers in ({}, {"Content-Type": "application/json"}, {"Content-Length": "0"}, {"Content-Type": "text/plain"}):
        check(daemon.ask("POST", f"/v1/sandboxes/{sandbox}/ping", **headers), 200, PING)


def test_workspaces(daemon: Daemon, workspace: str) -> None:
    check_list(daemon.ask("GET", "/v1/workspaces"), 200, LIVE_WORKSPACE)
    check(daemon.ask("GET", f"/v1/workspaces/{workspace}"), 200, LIVE_WORKSPACE)
    check_error(daemon.ask("POST", "/v1/workspaces", {"name": workspace, "snapshot_tag": TAG}), 409, "conflict")
    suspended = daemon.ask("POST", f"/v1/workspaces/{workspace}/suspend", {})
    check(suspended, 200, LIVE_WORKSPACE)
    assert suspended.json["status"] == "suspended"
    resumed = daemon.ask("POST", f"/v1/workspaces/{workspace}/resume")
    check(resumed, 200, LIVE_WORKSPACE)
    assert resumed.json["status"] == "running"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/v1/sandboxes/sb-0123456789", None, 404, "not_found"),
        ("GET", "/v1/workspaces/absent", None, 404, "not_found"),
        ("GET", "/v1/snapshots/absent/info", None, 404, "not_found"),
        ("GET", "/v1/snapshots/no%20tag/info", None, 400, "invalid_input"),
        ("GET", "/nowhere", None, 404, "not_found"),
        ("PATCH", "/v1/sandboxes", None, 405, "method_not_allowed"),
        ("POST", "/v1/sandboxes", {}, 422, "invalid_input"),
        ("POST", "/v1/sandboxes", {"snapshot_tag": 7}, 422, "invalid_input"),
        ("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": "1"}, 422, "invalid_input"),
        ("POST", "/v1/sandboxes", {"snapshot_tag": "a" * 65}, 400, "invalid_input"),
        ("DELETE", f"/v1/snapshots/{TAG}?cascade=perhaps", None, 400, "invalid_input"),
    ],
)
def test_errors(daemon: Daemon, method: str, path: str, body: object, status: int, code: str) -> None:
    check_error(daemon.ask(method, path, body), status, code)


def test_a_json_route_wants_json(daemon: Daemon) -> None:
    check_error(daemon.ask("POST", "/v1/sandboxes", **{"Content-Type": "text/plain"}), 415, "invalid_input")
    body = {"snapshot_tag": TAG}
    check_error(daemon.ask("POST", "/v1/sandboxes", body, **{"Content-Type": "text/plain"}), 415, "invalid_input")


def check(answer: Answer, status: int, keys: dict[str, Any]) -> None:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    check_keys(answer.json, keys)


def check_list(answer: Answer, status: int, keys: dict[str, Any]) -> None:
    assert answer.status == status, answer.body
    assert isinstance(answer.json, list) and len(answer.json) == 1
    check_keys(answer.json[0], keys)


def check_keys(found: dict[str, Any], keys: dict[str, Any]) -> None:
    assert sorted(found) == sorted(keys)
    wrong = {key: found[key] for key, kind in keys.items() if not isinstance(found[key], kind)}
    assert wrong == {}
    assert not any(isinstance(found[key], bool) for key, kind in keys.items() if kind is int)


def check_empty(answer: Answer) -> None:
    assert (answer.status, answer.body) == (204, b"")


def check_error(answer: Answer, status: int, code: str) -> None:
    assert (answer.status, answer.json["code"]) == (status, code), answer.body
    check_keys({key: value for key, value in answer.json.items() if key != "details"}, ERROR | ERROR_OURS)
