"""Branches and chains over REST, with the fake engine: every route, forkd's order of checks, the keys of answers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support_client import Answer, Client
from support_keys import BRANCH, CHECKPOINT, LAYER_DETAIL, SANDBOX, SNAPSHOT, WHOLE_BRANCH

Spawn = Callable[..., str]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def source(client: Client, spawn: Spawn) -> str:
    path = spawn()
    set_value(client, path, "source")
    return path


@pytest.fixture
def tag(client: Client, new_tag: str) -> Iterator[str]:
    """One that is gone afterwards, with all layers over it."""
    yield new_tag
    assert client.delete(f"/v1/snapshots/{new_tag}?cascade=true").status in (204, 404)


def set_value(client: Client, path: str, value: object) -> None:
    assert client.post(f"{path}/eval", {"code": f"y = {value!r}"}).body["error"] is None


def get_value(client: Client, path: str) -> Any:
    return client.post(f"{path}/eval", {"code": "y"}).body["value"]


def branched(client: Client, path: str, tag: str, **more: object) -> Answer:
    answer = client.post(f"{path}/branch", {"tag": tag, **more})
    assert answer.status == 201, answer.content
    return answer


@pytest.mark.parametrize(
    ("body", "keys", "mode"),
    [
        ({}, WHOLE_BRANCH, "full"),
        ({"measure_diff": True}, WHOLE_BRANCH, "full"),
        ({"mode": "full"}, WHOLE_BRANCH, "full"),
        ({"diff": True}, BRANCH, "diff"),
        ({"diff": True, "parent_tag": "base"}, BRANCH, "diff"),
        ({"live": True}, BRANCH, "live"),
        ({"mode": "live"}, BRANCH, "live"),
    ],
)
def test_each_way_to_ask_for_a_branch(
    client: Client, source: str, spawn: Spawn, tag: str, body: dict[str, Any], keys: dict[str, Any], mode: str
) -> None:
    made = branched(client, source, tag, **body).body
    assert set(made) == set(keys), mode
    assert (made["status"], made["bootable"], made["usable"], made["auto"]) == ("ready", True, True, False)
    assert made["branched_from"] == source.rpartition("/")[2]
    set_value(client, source, "later")
    assert get_value(client, spawn(snapshot_tag=tag)) == "source"
    assert client.get(f"/v1/snapshots/{tag}").body == made
    found = client.get(source).body
    assert (found["has_branched"], found["branch_count"]) == (True, 1)


def test_a_live_branch_that_is_not_waited_for_is_accepted(client: Client, source: str, spawn: Spawn, tag: str) -> None:
    made = client.post(f"{source}/branch", {"tag": tag, "mode": "live", "wait": False})
    assert (made.status, made.body["usable"]) == (202, True)
    assert get_value(client, spawn(snapshot_tag=tag)) == "source"


def test_a_branch_without_a_tag_gets_one(client: Client, source: str) -> None:
    made = client.post(f"{source}/branch", {})
    assert (made.status, made.body["auto"]) == (201, True)
    assert made.body["tag"].startswith(f"branch-{source.rpartition('/')[2]}-")
    assert client.delete(f"/v1/snapshots/{made.body['tag']}").status == 204


NOBODY = "/v1/sandboxes/sb-0000000000"


def test_branches_are_refused_in_the_order_of_forkd(client: Client, source: str) -> None:
    """Each is wrong in all ways that come later, too."""
    wrong = {"mode": "full", "diff": True, "wait": False, "parent_tag": "other"}
    for path, body, error in (
        (NOBODY, {**wrong, "tag": "no tag"}, (400, "invalid_input")),
        (NOBODY, {**wrong, "tag": "base"}, (400, "invalid_input")),
        (NOBODY, {"tag": "base", "diff": True, "live": True}, (400, "invalid_input")),
        (NOBODY, {"tag": "base", "measure_diff": True, "mode": "diff"}, (400, "invalid_input")),
        (NOBODY, {"tag": "base", "wait": False}, (400, "invalid_input")),
        (NOBODY, {"tag": "base", "diff": True, "parent_tag": "other"}, (409, "conflict")),
        (NOBODY, {"tag": "next", "diff": True, "parent_tag": "other"}, (404, "not_found")),
        (source, {"tag": "next", "diff": True, "parent_tag": "other"}, (400, "invalid_input")),
        (source, {"tag": "next", "parent_tag": "base"}, (400, "invalid_input")),
        (source, {"tag": "next", "mode": "sideways"}, (422, "invalid_input")),
    ):
        assert client.post(f"{path}/branch", body).error == error, body
    assert client.get("/v1/snapshots/next").status == 404
    assert get_value(client, source) == "source"


def test_forks_of_a_sandbox_start_where_it_is(client: Client, source: str, tag: str) -> None:
    made = client.post(f"{source}/fork", {"count": 2, "labels": {"try": "1"}})
    assert made.status == 201 and float(made.headers["X-Forkd-Pause-Ms"]) >= 0
    kept = client.post(f"{source}/fork", {"tag": tag})
    for info in [*made.body, *kept.body]:
        assert set(info) == SANDBOX.keys()
        assert (info["parent_id"], info["depth"]) == (source.rpartition("/")[2], 1)
        assert get_value(client, f"/v1/sandboxes/{info['id']}") == "source"
        assert client.delete(f"/v1/sandboxes/{info['id']}").status == 204
    assert client.get(f"/v1/snapshots/{tag}").status == 200
    assert client.post(f"{source}/fork", {"count": 0}).status in (400, 422)
    assert client.post(f"{NOBODY}/fork", {}).status == 404


def test_a_sandbox_goes_back_to_a_checkpoint(client: Client, source: str) -> None:
    made = client.post(f"{source}/checkpoints", {})
    assert (made.status, made.body["name"]) == (201, "c1")
    assert client.post(f"{source}/checkpoints", {"name": "c1"}).status == 409
    (listed,) = client.get(f"{source}/checkpoints").body
    assert set(listed) == set(CHECKPOINT)
    before = client.get(source).body
    set_value(client, source, "wrong")
    after = client.post(f"{source}/rewind", {"to": "c1"})
    assert after.status == 200 and get_value(client, source) == "source"
    assert (after.body["id"], after.body["guest_addr"]) == (before["id"], before["guest_addr"])
    set_value(client, source, "wrong again")
    assert client.post(f"{source}/rewind", {"discard": True}).status == 200
    assert get_value(client, source) == "source"
    assert client.get(f"{source}/checkpoints").body == []
    assert client.post(f"{source}/rewind", {}).error == (404, "not_found")
    assert client.delete(f"{source}/checkpoints/c1").error == (404, "not_found")


def test_a_promoted_fork_takes_its_parents_place(client: Client, source: str) -> None:
    first, second = (f"/v1/sandboxes/{info['id']}" for info in client.post(f"{source}/fork", {"count": 2}).body)
    set_value(client, second, "better")
    answer = client.post(f"{source}/promote", {"child": source.rpartition("/")[2]})
    assert answer.error == (400, "invalid_input")
    promoted = client.post(f"{source}/promote", {"child": second.rpartition("/")[2]})
    assert promoted.status == 200 and get_value(client, source) == "better"
    assert [client.get(path).status for path in (first, second)] == [404, 404]


def test_a_chain_is_described_compacted_and_removed(client: Client, source: str, spawn: Spawn, tag: str) -> None:
    over, flat = f"{tag}-over", f"{tag}-flat"
    branched(client, source, tag, diff=True)
    child = spawn(snapshot_tag=tag)
    set_value(client, child, "over")
    branched(client, child, over, diff=True)
    below, above = (client.get(f"/v1/snapshots/{each}/info").body for each in (tag, over))
    assert set(below) == set(above) == set(LAYER_DETAIL)
    assert (below["ancestors"], below["dependents"], below["chain_depth"]) == (["base"], [over], 1)
    assert (above["ancestors"], above["dependents"], above["chain_depth"]) == (["base", tag], [], 2)
    assert (above["parent_tag"], len(above["parent_content_hash"])) == (tag, 64)
    assert tag in client.get("/v1/snapshots/base/info").body["dependents"]

    assert client.post(f"/v1/snapshots/{over}/compact", {"to": over}).error == (400, "invalid_input")
    assert client.post(f"/v1/snapshots/{over}/compact", {"to": "no tag"}).error == (400, "invalid_input")
    assert client.post(f"/v1/snapshots/{over}/compact", {"to": tag}).error == (409, "conflict")
    assert client.post(f"/v1/snapshots/{over}/compact", {}).error == (422, "invalid_input")
    assert client.post("/v1/snapshots/nope/compact", {"to": flat}).error == (404, "not_found")
    compacted = client.post(f"/v1/snapshots/{over}/compact", {"to": flat})
    assert (compacted.status, compacted.body["branched_from"]) == (200, f"compact:{over}")
    assert client.get(f"/v1/snapshots/{flat}/info").body["ancestors"] == []
    verified = client.post(f"/v1/snapshots/{over}/verify").body
    assert verified["chain"] == ["base", tag, over]

    refused = client.delete(f"/v1/snapshots/{tag}")
    assert refused.error == (409, "conflict") and over in refused.body["error"]
    said = refused.body["error"] + refused.body["hint"]
    assert "cascade" in said and "force" in said
    assert client.delete(f"/v1/snapshots/{tag}?force=true").status == 204
    broken = client.get(f"/v1/snapshots/{over}").body
    assert (broken["status"], broken["bootable"], tag in broken["warning"]) == ("failed", False, True)
    refused = client.post("/v1/sandboxes", {"snapshot_tag": over})
    assert refused.status == 409 and tag in refused.body["error"]
    assert client.delete(f"/v1/snapshots/{over}").status == 204
    assert get_value(client, spawn(snapshot_tag=flat)) == "over"
    assert client.delete(f"/v1/snapshots/{flat}").status == 204


def test_a_cascade_takes_all_layers(client: Client, source: str, spawn: Spawn, tag: str) -> None:
    branched(client, source, tag, diff=True)
    branched(client, spawn(snapshot_tag=tag), f"{tag}-over", diff=True)
    assert client.delete(f"/v1/snapshots/{tag}?cascade=true").status == 204
    assert [client.get(f"/v1/snapshots/{each}").status for each in (tag, f"{tag}-over")] == [404, 404]


def test_a_derived_snapshot_has_what_was_run(client: Client, spawn: Spawn, tag: str) -> None:
    made = client.post("/v1/snapshots/base/derive", {"tag": tag, "code": "y = past + 1", "args": ["true"]})
    assert made.status == 201 and set(made.body) == BRANCH.keys()
    assert get_value(client, spawn(snapshot_tag=tag)) == 42
    assert client.post("/v1/snapshots/base/derive", {"tag": tag, "code": "1"}).error == (409, "conflict")
    assert client.post("/v1/snapshots/base/derive", {"tag": "other"}).error == (400, "invalid_input")
    failed = client.post("/v1/snapshots/base/derive", {"tag": "other", "shell": "exit 3"})
    assert failed.error == (422, "warmup_failed")
    assert client.post("/v1/snapshots/nope/derive", {"tag": "other", "code": "1"}).error == (404, "not_found")
    assert client.get("/v1/snapshots/other").status == 404


def test_pruning_tells_first_and_takes_only_branches(client: Client, source: str, tag: str) -> None:
    made = branched(client, source, tag).body
    assert set(made) >= set(SNAPSHOT)
    told = client.post("/v1/snapshots/prune", {"max_age_secs": 0, "dry_run": True}).body
    assert tag in [each["tag"] for each in told["removed"]] and told["dry_run"] is True
    assert client.get(f"/v1/snapshots/{tag}").status == 200
    done = client.post("/v1/snapshots/prune", {"max_age_secs": 0}).body
    assert tag in [each["tag"] for each in done["removed"]]
    assert client.get(f"/v1/snapshots/{tag}").status == 404
    assert client.get("/v1/snapshots/base").status == 200
