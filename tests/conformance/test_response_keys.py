"""Which keys each answer has, compared with a table: forkd's, which clients decide by, and ours beside them."""

from collections.abc import Iterator
from typing import Any

import pytest
from real_daemon import IMAGE, TAG, Daemon
from support_client import Answer
from support_keys import (
    BRANCH,
    ERROR,
    EVAL,
    EXEC,
    LAYER_DETAIL,
    PING,
    SANDBOX,
    SNAPSHOT,
    SNAPSHOT_DETAIL,
    TEMPLATE,
    VERSION,
    WHOLE_BRANCH,
    WORKSPACE,
    WRITTEN,
)
from support_processes import wait_until

pytestmark = pytest.mark.usefixtures("nothing_running")


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[str]:
    answer = daemon.post("/v1/sandboxes", {"snapshot_tag": TAG})
    check_list(answer, 201, SANDBOX)
    (info,) = answer.body
    yield info["id"]
    check_empty(daemon.delete(f"/v1/sandboxes/{info['id']}"))


@pytest.fixture
def workspace(daemon: Daemon) -> Iterator[str]:
    made = daemon.post("/v1/workspaces", {"name": "desk", "snapshot_tag": TAG, "per_child_netns": False})
    check(made, 201, WORKSPACE)
    yield "desk"
    check_empty(daemon.delete("/v1/workspaces/desk"))


def test_the_daemon_itself(daemon: Daemon) -> None:
    health = daemon.get("/healthz")
    assert (health.status, health.body) == (200, {"ok": True})
    check(daemon.get("/version"), 200, VERSION)
    assert daemon.get("/version").body["api"] == "v1"
    metrics = daemon.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_sandboxes(daemon: Daemon, sandbox: str) -> None:
    check_list(daemon.get("/v1/sandboxes"), 200, SANDBOX)
    one = daemon.get(f"/v1/sandboxes/{sandbox}")
    check(one, 200, SANDBOX)
    host, _, port = one.body["guest_addr"].partition(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536
    assert (one.body["netns"], one.body["memory_limit_mib"], one.body["cause"]) == (None, None, None)


def test_snapshots(daemon: Daemon) -> None:
    check_list(daemon.get("/v1/snapshots"), 200, SNAPSHOT)
    check(daemon.get(f"/v1/snapshots/{TAG}"), 200, SNAPSHOT)
    check(daemon.get(f"/v1/snapshots/{TAG}/info"), 200, SNAPSHOT_DETAIL)


def test_templates(daemon: Daemon) -> None:
    check_error(daemon.post("/v1/snapshots/absent/warm"), 404, "not_found")
    check_error(daemon.post("/v1/snapshots/no%20tag/warm"), 400, "invalid_input")
    warmed = daemon.post(f"/v1/snapshots/{TAG}/warm")
    if daemon.engine == "fake":
        check_error(warmed, 501, "unsupported")
        assert daemon.get("/v1/templates").body == []
    elif warmed.status != 501:
        check(warmed, 200, TEMPLATE)
        check_list(daemon.get("/v1/templates"), 200, TEMPLATE)


def test_a_snapshot_made_the_way_of_forkd_answers_when_it_is_there(daemon: Daemon) -> None:
    request = {"tag": "theirs", "kernel": IMAGE, "rootfs": IMAGE, "boot_wait_secs": 0}
    made = daemon.post("/v1/snapshots", request)
    check(made, 201, SNAPSHOT)
    assert (made.body["status"], made.body["bootable"]) == ("ready", True)
    flat = daemon.post("/v1/snapshots/theirs/compact", {"to": "flat"})
    assert (flat.status, flat.body["branched_from"]) == (200, "compact:theirs")
    check_empty(daemon.delete("/v1/snapshots/flat"))
    check_error(daemon.delete("/v1/snapshots/theirs?cascade=true&force=true"), 400, "invalid_input")
    check_empty(daemon.delete("/v1/snapshots/theirs"))
    check_error(daemon.delete("/v1/snapshots/theirs"), 404, "not_found")


def test_the_guest(daemon: Daemon, sandbox: str) -> None:
    base = f"/v1/sandboxes/{sandbox}"
    check(daemon.post(f"{base}/ping"), 200, PING)
    check(daemon.post(f"{base}/exec", {"args": ["true"]}), 200, EXEC)
    check(daemon.post(f"{base}/eval", {"code": "1"}), 200, EVAL)
    check(daemon.post(f"{base}/eval", {"code": "1/0"}), 200, EVAL)


def test_branches(daemon: Daemon, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/branch"
    for body, keys in (({}, WHOLE_BRANCH), ({"diff": True}, BRANCH), ({"mode": "live"}, BRANCH)):
        check(daemon.post(path, {"tag": "next", **body}), 201, keys)
        check(daemon.get("/v1/snapshots/next/info"), 200, LAYER_DETAIL if body else SNAPSHOT_DETAIL)
        check_empty(daemon.delete("/v1/snapshots/next"))
    soon = daemon.post(path, {"tag": "next", "mode": "live", "wait": False})
    check(soon, 202, BRANCH if soon.body["status"] == "ready" else WRITTEN)
    wait_until(lambda: daemon.get("/v1/snapshots/next").body["status"] == "ready", "it is written")
    refused = daemon.delete(f"/v1/snapshots/{TAG}")
    check_error(refused, 409, "conflict")
    said = refused.body["error"] + refused.body["hint"]
    assert all(word in said for word in ("next", "cascade", "force"))
    check_empty(daemon.delete("/v1/snapshots/next"))


def test_a_ping_takes_any_content_type_and_no_body(daemon: Daemon, sandbox: str) -> None:
    for headers in ({}, {"Content-Type": "application/json"}, {"Content-Length": "0"}, {"Content-Type": "text/plain"}):
        check(daemon.post(f"/v1/sandboxes/{sandbox}/ping", headers=headers), 200, PING)


def test_workspaces(daemon: Daemon, workspace: str) -> None:
    check_list(daemon.get("/v1/workspaces"), 200, WORKSPACE)
    check(daemon.get(f"/v1/workspaces/{workspace}"), 200, WORKSPACE)
    check_error(daemon.post("/v1/workspaces", {"name": workspace, "snapshot_tag": TAG}), 409, "conflict")
    suspended = daemon.post(f"/v1/workspaces/{workspace}/suspend", {})
    check(suspended, 200, WORKSPACE)
    assert suspended.body["status"] == "suspended"
    resumed = daemon.post(f"/v1/workspaces/{workspace}/resume")
    check(resumed, 200, WORKSPACE)
    assert resumed.body["status"] == "running"


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
    check_error(daemon.post("/v1/sandboxes", headers={"Content-Type": "text/plain"}), 415, "invalid_input")
    body = {"snapshot_tag": TAG}
    check_error(daemon.post("/v1/sandboxes", body, headers={"Content-Type": "text/plain"}), 415, "invalid_input")


def check(answer: Answer, status: int, keys: dict[str, Any]) -> None:
    assert answer.status == status, answer.content
    assert answer.headers["content-type"] == "application/json"
    check_keys(answer.body, keys)


def check_list(answer: Answer, status: int, keys: dict[str, Any]) -> None:
    assert answer.status == status, answer.content
    assert isinstance(answer.body, list) and len(answer.body) == 1
    check_keys(answer.body[0], keys)


def check_keys(found: dict[str, Any], keys: dict[str, Any]) -> None:
    assert sorted(found) == sorted(keys)
    wrong = {key: found[key] for key, kind in keys.items() if not isinstance(found[key], kind)}
    assert wrong == {}
    assert not any(isinstance(found[key], bool) for key, kind in keys.items() if kind is int)


def check_empty(answer: Answer) -> None:
    assert (answer.status, answer.content) == (204, b"")


def check_error(answer: Answer, status: int, code: str) -> None:
    assert answer.error == (status, code), answer.content
    check_keys({key: value for key, value in answer.body.items() if key != "details"}, ERROR)
