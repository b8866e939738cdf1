"""Every route, over a real daemon with the fake engine: statuses, keys, and what really happens."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support_client import Answer, Client
from support_keys import PING, SANDBOX, SNAPSHOT, SNAPSHOT_DETAIL, VERSION, WORKSPACE
from support_limits import cannot_limit_memory
from support_processes import has_ended, wait_until

from forkd.host.paths import Home
from forkd.image import ImageStore
from forkd.wire.api import LineageSnapshot

Spawn = Callable[..., str]
# Bodies that are refused, by path and status; paths that begin with "." are those of a sandbox.
REFUSED: dict[str, dict[int, list[dict[str, Any]]]] = {
    "/v1/sandboxes": {
        400: [
            *({"snapshot_tag": "base", "n": n} for n in (0, 1001)),
            *({"snapshot_tag": "base", "env": {"A=B": "x"}}, {"snapshot_tag": "base", "labels": {"a b": "x"}}),
            *({"snapshot_tag": "base", "n": 2, "agent_port": 4000}, {"snapshot_tag": "base", "timeout_secs": 0}),
            {"snapshot_tag": "../base"},
        ],
        404: [{"snapshot_tag": "nope"}],
        422: [{"snapshot_tag": "base", "n": -1}, {"n": 1}],
    },
    "/v1/snapshots": {
        400: [
            *({"tag": "a/b", "image": "small"}, {"tag": "new", "image": "small", "memory_mib": 1}),
            *({"tag": "new", "image": "small", "cpu_template": name} for name in ("T9", "")),
        ],
        404: [{"tag": "new", "image": "nope"}],
        409: [{"tag": "base", "image": "small"}],
        422: [{"tag": "new"}, *({"tag": "new", "image": "small", key: 7} for key in ("cpu_template", "rehearse"))],
    },
    "/v1/snapshots/base/compact": {400: [{"to": "base"}], 422: [{}]},
    "/v1/snapshots/nope/compact": {404: [{"to": "flat"}]},
    "/v1/workspaces": {
        400: [{"name": "a/b", "snapshot_tag": "base"}],
        404: [{"name": "a", "snapshot_tag": "nope"}],
        422: [{"name": "a"}],
    },
    "./exec": {
        400: [
            *({"args": []}, {}, {"args": ["a"], "shell": "b"}, {"args": ["a\0b"]}, {"args": ["ls"], "cwd": "relative"}),
            *({"args": ["ls"], "timeout_secs": seconds} for seconds in (0, 86401)),
            {"args": ["ls"], "pty": {"rows": 1, "cols": 1}},
        ],
        422: [
            *({"args": "ls"}, {"args": ["ls", 3]}, {"args": ["ls"], "timeout_secs": "5"}),
            {"args": ["ls"], "stdin": True},
        ],
    },
    "./eval": {400: [{"code": "x" * (1024 * 1024 + 1)}], 422: [{}]},
    "./processes": {422: [{"args": ["a"], "stdin": "text"}]},
    "./rename": {
        400: [{"name": ""}, {"name": "a b"}, {"name": "x" * 65}, {"name": "sb-0123456789"}],
        422: [{}, {"name": 7}],
    },
    "./timeout": {400: [{"timeout_secs": 0}], 422: [{}, {"timeout_secs": "9"}]},
    "./branch": {
        400: [
            *({"tag": "a/b"}, {"mode": "full", "diff": True}, {"diff": True, "live": True}),
            *({"wait": False}, {"parent_tag": "base"}),
        ],
        422: [{"mode": "odd"}],
    },
    "./files/mkdir": {422: [{"path": 3}]},
}


@pytest.mark.parametrize("path", REFUSED)
def test_bodies_that_are_refused(client: Client, sandbox: str, path: str) -> None:
    for status, bodies in REFUSED[path].items():
        for body in bodies:
            answer = client.post(path.replace(".", sandbox, 1) if path.startswith(".") else path, body)
            assert answer.status == status, (str(body)[:200], answer.content)


def test_health_version_and_readiness(client: Client) -> None:
    assert client.get("/healthz").body == {"ok": True}
    assert client.get("/readyz").body == {"ready": True}
    version = client.get("/version").body
    assert version.keys() == VERSION.keys()
    assert (version["api"], version["engine"], version["isolation"]) == ("v1", "fake", "none")


def test_every_answer_has_a_request_id_and_a_legal_one_is_kept(client: Client) -> None:
    assert client.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    for illegal in ("a b", "x" * 200, "é".encode("latin-1").decode("latin-1"), ""):
        given = client.get("/nope", headers={"X-Request-Id": illegal}).headers["X-Request-Id"]
        assert given != illegal
        assert len(given) >= 8


def test_metrics_count_what_was_done(client: Client, sandbox: str) -> None:
    client.post(f"{sandbox}/exec", {"args": ["true"]})
    client.get(f"{sandbox}/nope")
    answer = client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = answer.content.decode()
    assert "forkd_snapshots_total 1.0" in text
    assert 'forkd_requests_total{method="POST",route="/v1/sandboxes/{id}/exec",status="200"}' in text
    assert 'route="unmatched",status="404"' in text
    assert 'forkd_errors_total{code="not_found"}' in text
    counted = next(line for line in text.splitlines() if line.startswith("forkd_identity_seconds_count"))
    assert float(counted.split()[1]) >= 1
    started = next(line for line in text.splitlines() if line.startswith('forkd_forks_total{way="start"}'))
    assert float(started.split()[1]) >= 1
    for none in (
        *('forkd_forks_total{way="fork"}', "forkd_templates", "forkd_template_memory_bytes"),
        *("forkd_templates_made_total", "forkd_templates_failed_total"),
    ):
        assert f"\n{none} 0.0\n" in text, none


# Snapshots


def test_a_snapshot_is_made_in_the_background_and_progress_is_told(client: Client, new_tag: str) -> None:
    answer = client.post("/v1/snapshots", {"tag": new_tag, "image": "small", "warm": "import json", "memory_mib": 256})
    assert answer.status == 202
    assert (answer.body["status"], answer.body["bootable"]) == ("writing", False)
    assert isinstance(answer.body["progress"], str)
    wait_until(lambda: client.get(f"/v1/snapshots/{new_tag}").body["status"] == "ready", "it is ready")
    body = client.get(f"/v1/snapshots/{new_tag}").body
    assert body.keys() == SNAPSHOT.keys()
    assert (body["memory_mib"], body["warm"], body["bootable"]) == (256, "import json", True)
    assert body in client.get("/v1/snapshots").body
    stages = [event["data"]["stage"] for event in client.get("/v1/events?type=snapshot.progress").body]
    assert stages
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 404
    assert client.get(f"/v1/snapshots/{new_tag}").status == 404


def test_the_form_of_forkd_names_an_image_of_the_store(client: Client, home: Home, new_tag: str) -> None:
    image = ImageStore(home).open("small")
    body = {"tag": new_tag, "kernel": str(image.kernel), "rootfs": str(image.root), "rw": False, "boot_wait_secs": 10}
    answer = client.post("/v1/snapshots", {**body, "tap": None})
    assert (answer.status, answer.body["status"]) == (201, "ready")
    assert client.post("/v1/snapshots", body).status == 409
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204
    for kernel, rootfs in (("/etc/passwd", "/etc/shadow"), ("small", "/etc/shadow"), ("small", "../small"), ("", "")):
        refused = client.post("/v1/snapshots", {"tag": new_tag, "kernel": kernel, "rootfs": rootfs})
        assert refused.error == (400, "invalid_input")
        assert "store" in refused.body["hint"]
    assert client.post("/v1/snapshots", {"tag": new_tag, "kernel": "small", "rootfs": "small"}).status == 201
    assert client.post("/v1/snapshots", {**body, "boot_wait_secs": 61}).status == 400
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204


def test_a_warm_up_that_fails_is_the_answer_to_who_waits_and_stays_to_be_seen(client: Client, new_tag: str) -> None:
    answer = client.post("/v1/snapshots", {"tag": new_tag, "image": "small", "warm": "1/0", "wait": True})
    assert answer.error == (422, "warmup_failed")
    assert "ZeroDivisionError" in answer.body["details"]
    body = client.get(f"/v1/snapshots/{new_tag}").body
    assert (body["status"], body["code"], body["bootable"]) == ("failed", "warmup_failed", False)
    assert "ZeroDivisionError" in body["warning"]
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204


def test_a_cpu_template_is_only_for_an_engine_that_has_them(client: Client, new_tag: str) -> None:
    body = {"tag": new_tag, "image": "small", "cpu_template": "T2", "wait": True}
    assert client.post("/v1/snapshots", body).error == (501, "unsupported")
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204


def test_details_of_a_snapshot(client: Client) -> None:
    body = client.get("/v1/snapshots/base/info").body
    assert body.keys() == SNAPSHOT_DETAIL.keys()
    assert (body["chain_depth"], body["dependents"], body["ancestors"]) == (0, [], [])
    assert client.get("/v1/snapshots/nope/info").status == 404


def test_a_rehearsal_is_kept_with_its_snapshot_and_bounded_as_the_warm_up_is(client: Client, new_tag: str) -> None:
    body = {"tag": new_tag, "image": "small", "rehearse": "sum(range(9))", "wait": True}
    assert client.post("/v1/snapshots", body).body["rehearsal"] == "sum(range(9))"
    assert client.get(f"/v1/snapshots/{new_tag}").body["rehearsal"] == "sum(range(9))"
    assert "rehearsal" not in client.get("/v1/snapshots/base").body
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204
    large = client.post("/v1/snapshots", {**body, "rehearse": "x" * (512 * 1024 + 1)})
    assert large.error == (400, "invalid_input")
    assert "The rehearsal is larger than" in large.body["error"]
    assert client.get(f"/v1/snapshots/{new_tag}").status == 404


def test_an_engine_without_templates_says_so_and_forks_without(client: Client, spawn: Spawn) -> None:
    refused = client.post("/v1/snapshots/base/warm")
    assert refused.error == (501, "unsupported")
    assert "the engine fake cannot do it yet" in refused.body["error"] and "forkd doctor" in refused.body["hint"]
    assert client.post("/v1/snapshots/nope/warm").status == 404
    assert client.post("/v1/snapshots/no%20tag/warm").status == 400
    assert client.get("/v1/templates").body == []
    assert client.get("/v1/templates?limit=0").status == 400
    assert client.get(spawn()).body["way"] == "start"


def test_the_flags_of_deleting_exclude_each_other(client: Client) -> None:
    assert client.delete("/v1/snapshots/base?cascade=true&force=true").status == 400
    assert client.delete("/v1/snapshots/nope?cascade=true").status == 404
    assert client.delete("/v1/snapshots/nope?cascade=maybe").status == 400


def test_lists_come_in_pages(client: Client, spawn: Spawn) -> None:
    paths = [spawn(labels={"page": "1"}) for _ in range(3)]
    ids = [path.rpartition("/")[2] for path in paths]
    first = client.get("/v1/sandboxes?label=page=1&limit=2")
    assert [each["id"] for each in first.body] == ids[:2]
    token = first.headers["X-Next-Token"]
    last = client.get(f"/v1/sandboxes?label=page=1&limit=2&page_token={token}")
    assert [each["id"] for each in last.body] == ids[2:]
    assert last.headers["X-Next-Token"] is None
    for query in ("limit=0", "limit=1001", "limit=x", "page_token=x", "page_token=-1", "limit=1.5", "limit="):
        assert client.get(f"/v1/sandboxes?{query}").status == 400, query
    page = client.get("/v1/snapshots?limit=1")
    assert [each["tag"] for each in page.body] == ["base"]


# Sandboxes


def test_a_life_of_a_sandbox(client: Client) -> None:
    answer = client.post(
        "/v1/sandboxes",
        {
            "snapshot_tag": "base",
            "n": 2,
            "per_child_netns": True,
            "memory_limit_mib": None,
            "prewarm": False,
            "live_fork": False,
            "timeout_secs": 3600,
            "labels": {"team": "a"},
            "metadata": {"note": "für dich"},
            "unknown": 1,
        },
    )
    assert answer.status == 201
    one, two = answer.body
    assert set(one) == SANDBOX.keys()
    assert one["guest_addr"] != two["guest_addr"]
    assert (one["state"], one["snapshot_tag"], one["memory_limit_mib"]) == ("running", "base", None)
    assert (one["labels"], one["metadata"]) == ({"team": "a"}, {"note": "für dich"})
    assert (one["netns"], one["has_branched"], one["last_branch_memory_path"], one["branch_count"]) == (
        *(None, False, None, 0),
    )
    assert one["deadline_unix"] > time.time() + 3000
    assert not has_ended(one["pid"])
    assert client.get(f"/v1/sandboxes/{one['id']}").body == one
    for each in (one, two):
        deleted = client.delete(f"/v1/sandboxes/{each['id']}")
        assert (deleted.status, deleted.content) == (204, b"")
        assert client.delete(f"/v1/sandboxes/{each['id']}").status == 404
        assert client.get(f"/v1/sandboxes/{each['id']}").status == 404
    assert has_ended(one["pid"])


def test_a_spawn_says_how_long_each_step_took_when_it_is_asked_to(client: Client) -> None:
    key = {"Idempotency-Key": "phases"}
    made = client.post("/v1/sandboxes?phases=true", {"snapshot_tag": "base", "n": 2}, headers=key)
    assert made.status == 201
    for info in made.body:
        assert set(info) == SANDBOX.keys() | {"phases_ms"}
        assert "contract" in info["phases_ms"] and all(took_ms >= 0 for took_ms in info["phases_ms"].values())
    again = client.post("/v1/sandboxes?phases=true", {"snapshot_tag": "base", "n": 2}, headers=key)
    assert [set(info) for info in again.body] == [SANDBOX.keys()] * 2  # it was not made now
    assert client.post("/v1/sandboxes?phases=yes", {"snapshot_tag": "base"}).status == 400
    for info in made.body:
        assert client.delete(f"/v1/sandboxes/{info['id']}").status == 204


def test_sandboxes_are_found_by_what_they_are(client: Client, spawn: Spawn) -> None:
    path = spawn(labels={"find": "me"}, metadata={"a": "x=y z"})
    found = client.get(path).body["id"]

    def ids(query: str) -> list[str]:
        return [each["id"] for each in client.get(f"/v1/sandboxes?{query}").body]

    assert ids("label=find=me") == [found]
    assert ids("label=find=me&metadata=a%3Dx%3Dy+z&state=running&snapshot_tag=base") == [found]
    assert ids("label=find=me&state=paused") == []
    assert ids("label=find=me&snapshot_tag=other") == []
    assert ids("label=find=you") == []
    for query in ("label=find", "label==x", "state=flying", "snapshot_tag=%2F", "metadata=a%00=b"):
        assert client.get(f"/v1/sandboxes?{query}").status == 400, query


def test_what_is_not_built_yet_is_unsupported(client: Client, spawn: Spawn) -> None:
    assert client.post("/v1/sandboxes", {"snapshot_tag": "base", "hugepages": True}).error == (400, "unsupported")
    assert client.get(spawn(live_fork=True)).body["state"] == "running"  # here it asks for nothing more


def test_the_same_idempotency_key_gives_the_same_sandboxes(client: Client, spawn: Spawn) -> None:
    body = {"snapshot_tag": "base", "labels": {"key": "1"}}
    key = {"Idempotency-Key": "k 1"}
    first = client.post("/v1/sandboxes", body, headers=key)
    again = client.post("/v1/sandboxes", {"labels": {"key": "1"}, "snapshot_tag": "base"}, headers=key)
    assert (first.status, again.status) == (201, 201)
    assert [each["id"] for each in first.body] == [each["id"] for each in again.body]
    assert client.post("/v1/sandboxes", {**body, "n": 2}, headers=key).error == (409, "conflict")
    assert client.post("/v1/sandboxes", body, headers={"Idempotency-Key": "x" * 201}).status == 400
    assert client.post("/v1/sandboxes", body, headers={"Idempotency-Key": "a\tb"}).status == 400
    assert client.delete(f"/v1/sandboxes/{first.body[0]['id']}").status == 204


def test_a_spawn_is_cancelled_by_its_idempotency_key(client: Client) -> None:
    key = {"Idempotency-Key": "k/2 ?"}
    made = client.post("/v1/sandboxes", {"snapshot_tag": "base", "n": 2}, headers=key).body
    cancelled = client.delete("/v1/spawns", headers=key)
    assert cancelled.status == 200 and sorted(cancelled.body["removed"]) == sorted(info["id"] for info in made)
    assert client.get(f"/v1/sandboxes/{made[0]['id']}").status == 404
    assert client.delete("/v1/spawns", headers=key).body == {"removed": []}
    late = {"Idempotency-Key": "on its way"}
    assert client.delete("/v1/spawns", headers=late).body == {"removed": []}
    for cancelled_key in (key, late):
        answer = client.post("/v1/sandboxes", {"snapshot_tag": "base", "n": 2}, headers=cancelled_key)
        assert answer.error == (409, "conflict") and "cancelled" in answer.body["error"]
    assert client.delete("/v1/spawns", headers={"Idempotency-Key": "x" * 201}).status == 400
    missing = client.delete("/v1/spawns")
    assert missing.status == 400 and "header" in missing.body["hint"]


def test_a_paused_sandbox_is_not_running_and_goes_on_afterwards(client: Client, spawn: Spawn) -> None:
    path = spawn()
    assert client.post(f"{path}/eval", {"code": "mark = 7"}).status == 200
    for _ in range(2):
        answer = client.post(f"{path}/pause")
        assert (answer.status, answer.body["state"]) == (200, "paused")
    for refused in (
        client.post(f"{path}/exec", {"args": ["true"]}),
        client.post(f"{path}/eval", {"code": "1"}),
        client.post(f"{path}/ping"),
        client.get(f"{path}/files?path=/etc/passwd"),
        client.post(f"{path}/exec/stream", {"args": ["true"]}),
        client.post(f"{path}/processes", {"args": ["true"]}),
    ):
        assert refused.error == (409, "not_running")
    for _ in range(2):
        answer = client.post(f"{path}/resume", data=b"", headers={"Content-Type": "application/json"})
        assert (answer.status, answer.body["state"]) == (200, "running")
    assert client.post(f"{path}/eval", {"code": "mark"}).body["value"] == 7


def test_a_name_is_as_good_as_an_id(client: Client, spawn: Callable[..., str]) -> None:
    path, other = spawn(), spawn()
    sandbox_id = path.rpartition("/")[2]
    assert client.get(path).body["name"] is None
    assert client.post(f"{path}/rename", {"name": "web"}).body["name"] == "web"
    named = "/v1/sandboxes/web"
    assert client.get(named).body == client.get(path).body
    assert client.post(f"{named}/eval", {"code": "past"}).body["value"] == 41
    assert client.post(f"{named}/pause").body["state"] == "paused"
    assert client.post(f"{named}/resume").body["id"] == sandbox_id
    assert client.post(f"{named}/timeout", {"timeout_secs": 900}).status == 200
    assert client.get(f"{named}/console").status == 200
    events = client.get("/v1/events?follow=false&sandbox_id=web").body
    assert events == client.get(f"/v1/events?follow=false&sandbox_id={sandbox_id}").body
    assert ("sandbox.renamed", {"name": "web"}) in [(event["type"], event["data"]) for event in events]
    assert client.post(f"{other}/rename", {"name": "web"}).error == (409, "conflict")
    assert client.post(f"{named}/rename", {"name": None}).body["name"] is None
    assert client.get(named).status == 404
    assert client.post(f"{other}/rename", {"name": "web"}).status == 200
    assert client.delete(named).status == 204
    assert client.get(other).status == 404


def test_a_deadline_can_be_moved_and_taken_away(client: Client, spawn: Spawn) -> None:
    path = spawn(timeout_secs=1000)
    body = client.post(f"{path}/timeout", {"timeout_secs": 50, "on_timeout": "pause"}).body
    assert (body["on_timeout"], 40 < body["deadline_unix"] - time.time() < 60) == ("pause", True)
    assert client.post(f"{path}/timeout", {"timeout_secs": None}).body["deadline_unix"] is None


def test_a_sandbox_that_died_says_so(client: Client, spawn: Spawn) -> None:
    path = spawn()
    os.kill(client.get(path).body["pid"], 9)
    wait_until(lambda: client.get(path).body["state"] == "dead", "it is seen to be dead")
    body = client.get(path).body
    assert body["pid"] is None
    assert body["cause"]
    assert client.post(f"{path}/exec", {"args": ["true"]}).error == (409, "guest_died")
    assert client.get(f"{path}/console").status == 200


def test_lineage_hangs_sandboxes_below_their_snapshot(client: Client, sandbox: str) -> None:
    body = client.get("/v1/lineage").body
    (base,) = [each for each in body["snapshots"] if each["tag"] == "base"]
    assert set(base) == LineageSnapshot.__required_keys__
    assert sandbox.rpartition("/")[2] in {each["id"] for each in base["sandboxes"]}
    assert body["orphans"] == []


# The guest


def test_ping_needs_no_body_and_minds_none(client: Client, sandbox: str) -> None:
    for more in ({}, {"headers": {"Content-Type": "application/json"}}, {"body": {"a": 1}}, {"data": b"x"}):
        answer = client.post(f"{sandbox}/ping", **more)  # type: ignore[arg-type]
        assert answer.status == 200
        assert answer.body.keys() == PING.keys()
    assert (answer.body["pong"], answer.body["agent_lang"], answer.body["warmup_ready"]) == (True, "python", True)


def test_exec_runs_what_it_is_told(client: Client, sandbox: str) -> None:
    answer = client.post(f"{sandbox}/exec", {"args": ["sh", "-c", "echo out; echo err >&2; exit 3"]})
    assert answer.body == {"stdout": "out\n", "stderr": "err\n", "exit_code": 3, "truncated": False}
    body = {"shell": 'cat; echo "$A"; pwd', "stdin": "in ", "env": {"A": "ä"}, "cwd": "/tmp"}
    assert client.post(f"{sandbox}/exec", body).body["stdout"] == "in ä\n/tmp\n"
    assert client.post(f"{sandbox}/exec", {"shell": "kill -9 $$"}).body["exit_code"] == -9
    assert client.post(f"{sandbox}/exec", {"args": ["printf", "\\377"]}).body["stdout"] == "�"


def test_exec_that_cannot_start_or_takes_too_long_is_an_error(client: Client, sandbox: str) -> None:
    assert client.post(f"{sandbox}/exec", {"args": ["/no/such/program"]}).error == (422, "command_not_started")
    late = client.post(f"{sandbox}/exec", {"shell": "echo before; sleep 30", "timeout_secs": 0.3})
    assert late.error == (504, "guest_timeout")
    assert (late.body["stdout"], late.body["stderr"]) == ("before\n", "")


def test_output_beyond_the_limit_is_cut_and_said(client: Client, sandbox: str) -> None:
    body = client.post(f"{sandbox}/exec", {"shell": "head -c 9000000 /dev/zero | tr '\\0' x"}).body
    assert (len(body["stdout"]), body["truncated"]) == (8 * 1024 * 1024, True)


def test_eval_keeps_state_and_gives_value_repr_and_output(client: Client, sandbox: str) -> None:
    assert client.post(f"{sandbox}/eval", {"code": "past += 1"}).body["exit_code"] == 0
    answer = client.post(f"{sandbox}/eval", {"code": "print('hi')\n[past]"})
    assert answer.body == {
        "result": "[42]",
        "error": None,
        "exit_code": 0,
        "value": [42],
        "has_value": True,
        "stdout": "hi\n",
        "stderr": "",
        "traceback": None,
        "truncated": False,
    }
    failed = client.post(f"{sandbox}/eval", {"code": "1/0"}).body
    assert (failed["result"], failed["error"], failed["exit_code"]) == (None, "ZeroDivisionError: division by zero", 1)
    assert "Traceback" in failed["traceback"]
    assert client.post(f"{sandbox}/eval", {"code": "float('nan')"}).body["has_value"] is False
    assert client.post(f"{sandbox}/eval", {"code": "'\\udc80'"}).status == 200


def test_eval_that_takes_too_long_is_interrupted(client: Client, sandbox: str) -> None:
    answer = client.post(f"{sandbox}/eval", {"code": "print(1)\nwhile True: pass", "timeout_secs": 0.3})
    assert (answer.status, answer.body["code"], answer.body["stdout"]) == (504, "guest_timeout", "1\n")
    assert answer.body["interpreter_restarted"] is False
    assert client.post(f"{sandbox}/eval", {"code": "past > 0"}).body["value"] is True


def test_exec_is_streamed_as_it_comes(client: Client, sandbox: str) -> None:
    body = {"shell": "read x; echo got $x; echo err >&2; exit 4", "stdin": "it\n"}
    events = list(client.stream("POST", f"{sandbox}/exec/stream", body))
    assert events[0].kind == "start"
    assert events[0].data["pid"] > 0
    assert b"".join(event.output for event in events if event.kind == "stdout") == b"got it\n"
    assert b"".join(event.output for event in events if event.kind == "stderr") == b"err\n"
    assert (events[-1].kind, events[-1].data) == ("exit", {"exit_code": 4, "signal": None, "timed_out": False})
    late = list(client.stream("POST", f"{sandbox}/exec/stream", {"args": ["sleep", "9"], "timeout_secs": 0.2}))
    assert late[-1].data["timed_out"] is True
    assert client.post(f"{sandbox}/exec/stream", {"args": ["/no/such"]}).status == 422
    assert client.post("/v1/sandboxes/sb-0000000000/exec/stream", {"args": ["a"]}).status == 404


def test_eval_is_streamed_as_it_comes(client: Client, sandbox: str) -> None:
    code = "import sys\nfor n in range(3): print(n, flush=True)\nprint('e', file=sys.stderr)\n'done'"
    events = list(client.stream("POST", f"{sandbox}/eval/stream", {"code": code}))
    assert b"".join(event.output for event in events if event.kind == "stdout") == b"0\n1\n2\n"
    assert (events[-1].kind, events[-1].data["value"]) == ("result", "done")
    late = list(client.stream("POST", f"{sandbox}/eval/stream", {"code": "while True: pass", "timeout_secs": 0.2}))
    assert (late[-1].kind, late[-1].data["code"]) == ("error", "guest_timeout")
    assert client.post("/v1/sandboxes/sb-0000000000/eval/stream", {"code": "1"}).status == 404


def test_a_client_that_goes_away_ends_its_command_and_its_evaluation(
    client: Client, spawn: Spawn, tmp_path: Path
) -> None:
    path = spawn()
    for route, body in (
        ("exec", '{"shell": "echo $$ > /tmp/%s; exec sleep 98"}'),
        ("exec/stream", '{"shell": "echo $$ > /tmp/%s; exec sleep 98"}'),
    ):
        name = f"forkd-test-{os.getpid()}-{route.replace('/', '-')}"
        sock = client.raw()
        data = (body % name).encode()
        sock.sendall(_request("POST", f"{path}/{route}", data))
        file = Path("/tmp", name)
        wait_until(lambda file=file: file.exists() and file.read_text().strip(), "the command runs")
        pid = int(file.read_text())
        assert not has_ended(pid)
        sock.close()
        wait_until(lambda pid=pid: has_ended(pid), "the command was ended")
        file.unlink()
    sock = client.raw()
    code = f"import time\nstuck = 1\nopen('{tmp_path}/stuck', 'w').close()\ntime.sleep(98)"
    sock.sendall(_request("POST", f"{path}/eval", json.dumps({"code": code}).encode()))
    wait_until((tmp_path / "stuck").exists, "the evaluation runs")
    sock.close()
    begun = time.monotonic()
    assert client.post(f"{path}/eval", {"code": "stuck"}).body["value"] == 1
    assert time.monotonic() - begun < 20


def _request(method: str, path: str, body: bytes, more: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_client_that_half_closes_gets_an_answer(client: Client, sandbox: str) -> None:
    def ask(body: bytes) -> Answer:
        return client.exchange(_request("POST", f"{sandbox}/exec", body), half_close=True)

    assert ask(b'{"args": ["true"]}').status == 200
    long = ask(b'{"args": ["sleep", "30"]}')
    assert long.status == 400
    assert b"Keep the connection open" in long.content


# Processes


def test_a_process_outlives_its_request(client: Client, sandbox: str) -> None:
    started = client.post(f"{sandbox}/processes", {"shell": "read x; echo got $x; exit 5", "stdin": True})
    assert started.status == 201
    assert set(started.body) == {
        *("pid", "args", "shell", "pty", "running", "exit_code", "signal", "timed_out", "started_at_unix")
    }
    path = f"{sandbox}/processes/{started.body['pid']}"
    assert client.get(path).body["running"] is True
    assert started.body["pid"] in [each["pid"] for each in client.get(f"{sandbox}/processes").body]
    assert client.post(f"{path}/stdin?eof=true", data=b"it\n").status == 204
    events = list(client.stream("GET", f"{path}/output"))
    assert [event.kind for event in events] == ["start", "stdout", "exit"]
    assert (events[1].output, events[2].data["exit_code"]) == (b"got it\n", 5)
    body = client.get(path).body
    assert (body["running"], body["exit_code"], body["signal"]) == (False, 5, None)
    assert client.post(f"{path}/stdin", data=b"more").status == 409
    assert client.post(f"{path}/signal", {"signal": 15}).status == 409


def test_a_process_has_a_terminal_and_takes_signals(client: Client, sandbox: str) -> None:
    body = {"shell": "stty size; read x; stty size; sleep 98", "pty": {"rows": 10, "cols": 20}}
    pid = client.post(f"{sandbox}/processes", body).body["pid"]
    path = f"{sandbox}/processes/{pid}"
    seen = b""
    events = client.stream("GET", f"{path}/output")
    for event in events:
        if event.kind == "stdout":
            seen += event.output
        if b"10 20" in seen and b"30 40" not in seen and b"\r\n" in seen:
            assert client.post(f"{path}/resize", {"rows": 30, "cols": 40}).status == 204
            assert client.post(f"{path}/stdin", data=b"\n").status == 204
            seen = b"10 20"
        if b"30 40" in seen:
            assert client.post(f"{path}/signal", {"signal": 9}).status == 204
            break
    assert [event.data["signal"] for event in events if event.kind == "exit"] == [9]


def test_what_processes_do_not_take(client: Client, sandbox: str) -> None:
    pid = client.post(f"{sandbox}/processes", {"args": ["sleep", "98"]}).body["pid"]
    path = f"{sandbox}/processes/{pid}"
    assert client.post(f"{path}/resize", {"rows": 1, "cols": 1}).status == 400
    assert client.post(f"{path}/resize", {"rows": 0, "cols": 1}).status == 400
    assert client.post(f"{path}/signal", {"signal": 65}).status == 400
    assert client.post(f"{path}/signal", {"signal": "KILL"}).status == 422
    assert client.post(f"{path}/stdin", data=b"x").status == 409
    assert client.post(f"{path}/stdin", data=b"x" * (1024 * 1024 + 1)).status == 413
    for bad in ("0", "-1", "x", "99999999999999999999", "%00", "1e3"):
        assert client.get(f"{sandbox}/processes/{bad}").status == 404, bad
    assert client.get(f"{sandbox}/processes/999999").status == 404
    assert client.post(f"{path}/signal", {}).status == 204


# Files


def test_files_go_in_and_out_whole(client: Client, sandbox: str, tmp_path: Any) -> None:
    content = os.urandom(3_000_000)
    path = quote(f"{tmp_path}/deep er/file")
    answer = client.ask("PUT", f"{sandbox}/files?path={path}&mode=640", data=content)
    assert (answer.status, answer.body) == (200, {"path": f"{tmp_path}/deep er/file", "size": len(content)})
    assert (tmp_path / "deep er/file").stat().st_mode & 0o777 == 0o640
    got = client.get(f"{sandbox}/files?path={path}")
    assert (got.status, got.headers["Content-Type"]) == (200, "application/octet-stream")
    assert got.content == content
    part = client.get(f"{sandbox}/files?path={path}&offset=10&length=20").content
    assert part == content[10:30]
    assert client.ask("PUT", f"{sandbox}/files?path={path}&append=true", data=b"more").status == 200
    assert client.get(f"{sandbox}/files?path={path}&offset={len(content)}").content == b"more"
    chunks = iter([b"a" * 70_000, b"b" * 10])
    assert client.ask("PUT", f"{sandbox}/files?path={path}", data=chunks).body["size"] == 70_010
    empty = client.ask("PUT", f"{sandbox}/files?path={path}")
    assert (empty.status, client.get(f"{sandbox}/files?path={path}").content) == (200, b"")


def test_files_are_listed_made_renamed_and_removed(client: Client, sandbox: str, tmp_path: Any) -> None:
    assert client.post(f"{sandbox}/files/mkdir", {"path": f"{tmp_path}/a/b", "mode": "700"}).status == 204
    assert client.post(f"{sandbox}/files/mkdir", {"path": f"{tmp_path}/x/y", "parents": False}).status == 404
    client.ask("PUT", f"{sandbox}/files?path={tmp_path}/a/f", data=b"12345")
    (tmp_path / "a/link").symlink_to("f")
    info = client.get(f"{sandbox}/files/stat?path={tmp_path}/a/f").body
    assert set(info) == {"name", "path", "type", "size", "mode", "uid", "gid", "mtime_ns", "target"}
    assert (info["name"], info["path"], info["type"], info["size"]) == ("f", f"{tmp_path}/a/f", "file", 5)
    listed = client.get(f"{sandbox}/files/list?path={tmp_path}/a").body
    assert (listed["truncated"], sorted(each["name"] for each in listed["entries"])) == (False, ["b", "f", "link"])
    (link,) = [each for each in listed["entries"] if each["name"] == "link"]
    assert (link["type"], link["path"]) == ("symlink", f"{tmp_path}/a/link")
    assert client.get(f"{sandbox}/files/stat?path={tmp_path}/a/link").body["target"] == "f"
    moved = client.post(f"{sandbox}/files/rename", {"path": f"{tmp_path}/a/f", "to": f"{tmp_path}/a/g"})
    assert moved.status == 204
    assert client.delete(f"{sandbox}/files?path={tmp_path}/a").status == 409
    assert client.delete(f"{sandbox}/files?path={tmp_path}/a&recursive=true").status == 204
    assert client.delete(f"{sandbox}/files?path={tmp_path}/a&recursive=true").status == 404


def test_names_that_are_no_utf8_come_through(client: Client, sandbox: str, tmp_path: Any) -> None:
    where = f"{sandbox}/files?path={quote(str(tmp_path))}/f%80"
    assert client.ask("PUT", where, data=b"x").body["path"] == f"{tmp_path}/f\udc80"
    assert os.listdir(os.fsencode(tmp_path)) == [b"f\x80"]
    renamed = client.post(f"{sandbox}/files/rename", {"path": f"{tmp_path}/f\udc80", "to": f"{tmp_path}/\udcff"})
    assert renamed.status == 204
    assert client.get(f"{sandbox}/files/list?path={tmp_path}").body["entries"][0]["name"] == "\udcff"


def test_errors_of_files_have_their_status(client: Client, sandbox: str) -> None:
    def get(query: str) -> tuple[int, str]:
        return client.get(f"{sandbox}/files{query}").error

    assert get("?path=/no/such") == (404, "not_found")
    assert get("?path=/etc") == (400, "is_dir")
    assert get("?path=/etc/passwd/x")[0] in (400, 404)
    assert get("?path=relative") == (400, "invalid_input")
    assert get("") == (400, "invalid_input")
    assert get("?path=/a%00b") == (400, "invalid_input")
    assert get(f"?path=/{'x' * 5000}") == (400, "invalid_input")
    assert get("?path=/etc/passwd&offset=-1") == (400, "invalid_input")
    assert get("?path=/etc/passwd&offset=99999999999999999999") == (400, "invalid_input")
    assert get("/list?path=/etc/passwd") == (400, "not_dir")
    assert get("/stat?path=/no/such") == (404, "not_found")
    for mode in ("9", "rwx", "77777", "-1", ""):
        answer = client.ask("PUT", f"{sandbox}/files?path=/tmp/x&mode={mode}", data=b"")
        assert answer.status == 400, mode


# Limits


@cannot_limit_memory
def test_a_limit_that_the_host_cannot_enforce_is_refused(client: Client) -> None:
    before = client.get("/v1/sandboxes").body
    for body in ({"memory_limit_mib": 256}, {"cpu_limit": 0.5}, {"pids_limit": 40}, {"io_limit_mib_s": 10}):
        spawned = client.post("/v1/sandboxes", {"snapshot_tag": "base", **body})
        made = client.post("/v1/workspaces", {"name": "desk", "snapshot_tag": "base", **body})
        for answer in (spawned, made):
            assert answer.error == (501, "unsupported"), body
            assert "cannot be enforced on this host" in answer.body["error"]
            assert answer.body["hint"]
    assert (client.get("/v1/sandboxes").body, client.get("/v1/workspaces").body) == (before, [])


# Workspaces and events


def test_a_workspace_is_suspended_and_resumed_where_it_was(client: Client) -> None:
    body = {"name": "desk", "snapshot_tag": "base", "per_child_netns": False, "memory_limit_mib": None}
    made = client.post("/v1/workspaces", body)
    assert made.status == 201
    assert made.body.keys() == WORKSPACE.keys()
    assert client.post("/v1/workspaces", body).status == 409
    sandbox = f"/v1/sandboxes/{made.body['live_sandbox_id']}"
    assert client.get(sandbox).body["workspace"] == "desk"
    client.post(f"{sandbox}/eval", {"code": "drawer = 'open'"})
    assert client.post("/v1/workspaces/desk/suspend", {}).body["status"] == "suspended"
    assert client.post("/v1/workspaces/desk/suspend", {}).status == 400
    assert client.post("/v1/workspaces/desk/suspend").status == 415
    assert client.post("/v1/workspaces/desk/resume").body["status"] == "running"
    assert client.post("/v1/workspaces/desk/resume").status == 400
    assert client.get(sandbox).status == 404  # its memory is free; the state is on disk
    sandbox = f"/v1/sandboxes/{client.get('/v1/workspaces/desk').body['live_sandbox_id']}"
    assert client.post(f"{sandbox}/eval", {"code": "drawer"}).body["value"] == "open"
    assert [each["name"] for each in client.get("/v1/workspaces").body] == ["desk"]
    assert client.get("/v1/workspaces/desk").body["status"] == "running"
    assert client.delete("/v1/workspaces/desk").status == 204
    assert client.delete("/v1/workspaces/desk").status == 404
    assert client.get(sandbox).status == 404
    assert client.get("/v1/workspaces").body == []
    assert client.get("/v1/workspaces/nope").status == 404
    assert client.get("/v1/workspaces/a%20b").status in (400, 404)


def test_events_are_listed_and_followed(client: Client, spawn: Spawn) -> None:
    path = spawn()
    ident = path.rpartition("/")[2]
    listed = client.get(f"/v1/events?sandbox_id={ident}").body
    assert [event["type"] for event in listed] == ["sandbox.created", "sandbox.running"]
    assert set(listed[0]) == {"id", "ts_unix", "type", "sandbox_id", "snapshot_tag", "data"}
    after = listed[0]["id"]
    assert [event["id"] for event in client.get(f"/v1/events?since={after}&sandbox_id={ident}&limit=1").body] == [
        listed[1]["id"]
    ]
    stream = client.stream("GET", f"/v1/events?follow=true&sandbox_id={ident}&since={after}")
    assert next(stream).data == listed[1]
    client.post(f"{path}/pause")
    event = next(stream)
    assert (event.kind, event.id) == ("sandbox.paused", str(event.data["id"]))
    stream.close()
    again = client.stream("GET", f"/v1/events?follow=true&sandbox_id={ident}", headers={"Last-Event-ID": str(after)})
    assert next(again).data == listed[1]
    again.close()
    client.post(f"{path}/resume")
    for query in ("since=-1", "since=x", "limit=0", "limit=1001", "follow=yes"):
        assert client.get(f"/v1/events?{query}").status == 400, query
    assert client.get("/v1/events?follow=true", headers={"Last-Event-ID": "x"}).status == 400


def test_the_audit_log_says_who_did_what_to_which_sandbox(client: Client, home: Home, spawn: Spawn) -> None:
    path = spawn()
    client.get(f"{path}/files?path=/secret", headers={"X-Request-Id": "audit-1", "User-Agent": "tests"})
    ident = path.rpartition("/")[2]

    def entries() -> list[Any]:
        return [json.loads(line) for line in (home.root / "audit.log").read_text().splitlines()]

    wait_until(lambda: any(entry["request_id"] == "audit-1" for entry in entries()), "it is audited")
    (entry,) = [entry for entry in entries() if entry["request_id"] == "audit-1"]
    assert entry["path"] == f"{path}/files"
    assert (entry["method"], entry["status"], entry["ua"]) == ("GET", 404, "tests")
    assert (entry["sandboxes"], entry["token"]) == ([ident], None)
    assert entry["peer"].startswith(f"unix uid={os.getuid()}")
    assert any(entry["method"] == "POST" and ident in entry["sandboxes"] for entry in entries())
    assert "/secret" not in (home.root / "audit.log").read_text()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_unknown_routes_and_methods_are_told_as_errors_of_ours(client: Client, method: str) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/sandboxes/", "/v2/sandboxes", "/docs", "/%00", "/v1//sandboxes"):
        answer = client.ask(method, path)
        assert answer.error == (404, "not_found"), path
    wrong = client.ask("PATCH", "/v1/sandboxes")
    assert wrong.error == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "GET, POST"
