"""forkd's own MCP server, unchanged, over stdio with the real MCP client: all its tools."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_clients import METHODS, ClientError, Driver, driven
from real_daemon import IMAGE, TAG, Daemon
from support_limits import enforced

pytestmark = pytest.mark.usefixtures("nothing_running")


@pytest.fixture
def sandbox(mcp_driver: Driver) -> Iterator[str]:
    (info,) = mcp_driver.make(tool="spawn_sandboxes", kwargs={"snapshot_tag": TAG})
    yield info["id"]
    mcp_driver.make(tool="kill_sandbox", kwargs={"sandbox_id": info["id"]})


def test_these_tests_know_every_tool_of_the_server(mcp_driver: Driver) -> None:
    assert mcp_driver.make(names=True) == sorted([*METHODS, "create_snapshot", "wait_for_text"])


def test_sandboxes_are_spawned_found_and_killed(mcp_driver: Driver) -> None:
    options = {"snapshot_tag": TAG, "n": 2, "per_child_netns": True, "memory_limit_mib": 2048, "prewarm": True}
    spawned = mcp_driver.make(tool="spawn_sandboxes", kwargs=options)
    assert [info["memory_limit_mib"] for info in spawned] == [enforced(2048)] * 2
    assert mcp_driver.make(tool="list_sandboxes") == spawned
    for info in spawned:
        shown = mcp_driver.make(tool="get_sandbox", kwargs={"sandbox_id": info["id"]})
        assert shown == info
        killed = mcp_driver.make(tool="kill_sandbox", kwargs={"sandbox_id": info["id"]})
        assert killed == {"id": info["id"], "killed": True}
        fails(mcp_driver, 404, "kill_sandbox", sandbox_id=info["id"])
    assert mcp_driver.make(tool="list_sandboxes") == []


def test_commands_code_and_pings_reach_the_guest(mcp_driver: Driver, sandbox: str) -> None:
    ran = mcp_driver.make(tool="exec_command", kwargs={"sandbox_id": sandbox, "args": ["sh", "-c", "echo $((6*7))"]})
    assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("42\n", "", 0)
    found = mcp_driver.make(tool="eval_code", kwargs={"sandbox_id": sandbox, "code": "past['answer']"})
    assert (found["result"], found["error"], found["exit_code"]) == ("42", None, 0)
    assert mcp_driver.make(tool="ping_sandbox", kwargs={"sandbox_id": sandbox})["pong"] is True
    fails(mcp_driver, 422, "exec_command", sandbox_id=sandbox, args=["/nonexistent"])
    fails(mcp_driver, 504, "exec_command", sandbox_id=sandbox, args=["sleep", "100"], timeout_secs=1)


def test_a_text_is_waited_for(mcp_driver: Driver, sandbox: str) -> None:
    # The fake engine's guests share our files; a VM has a /tmp of its own.
    path = f"/tmp/{sandbox}.log"
    script = f"(sleep 0.5; echo READY > {path}) > /dev/null 2>&1 &"
    mcp_driver.make(tool="exec_command", kwargs={"sandbox_id": sandbox, "args": ["sh", "-c", script]})
    wanted = {"sandbox_id": sandbox, "path": path, "marker": "READY", "timeout_secs": 20}
    waited = mcp_driver.make(tool="wait_for_text", kwargs=wanted)
    assert (waited["found"], waited["last_excerpt"]) == (True, "READY\n")
    absent = wanted | {"marker": "never", "timeout_secs": 0.5, "poll_interval_ms": 50}
    assert mcp_driver.make(tool="wait_for_text", kwargs=absent)["found"] is False
    mcp_driver.make(tool="exec_command", kwargs={"sandbox_id": sandbox, "args": ["rm", path]})


def test_snapshots_are_listed_and_made_of_images_of_the_store(mcp_driver: Driver, daemon: Daemon) -> None:
    image = {"kernel": IMAGE, "rootfs": IMAGE}
    made = mcp_driver.make(tool="create_snapshot", kwargs={"tag": "spare", "boot_wait_secs": 0, **image})
    assert (made["tag"], made["status"], made["bootable"]) == ("spare", "ready", True)
    assert [found["tag"] for found in mcp_driver.make(tool="list_snapshots")] == ["spare", TAG]
    fails(mcp_driver, 409, "create_snapshot", tag="spare", **image)
    fails(mcp_driver, 400, "create_snapshot", tag="other", boot_wait_secs=61, **image)
    fails(mcp_driver, 400, "create_snapshot", tag="other", kernel="/etc/hostname", rootfs="/etc/passwd")
    assert daemon.delete("/v1/snapshots/spare").status == 204


@pytest.mark.parametrize("options", [{}, {"diff": True}, {"measure_diff": True}])
def test_a_sandbox_is_branched(mcp_driver: Driver, daemon: Daemon, sandbox: str, options: dict[str, bool]) -> None:
    mcp_driver.make(tool="eval_code", kwargs={"sandbox_id": sandbox, "code": "here = 6 * 7"})
    made = mcp_driver.make(tool="branch_sandbox", kwargs={"sandbox_id": sandbox, "tag": "next", **options})
    assert (made["tag"], made["status"], made["branched_from"]) == ("next", "ready", sandbox)
    (child,) = mcp_driver.make(tool="spawn_sandboxes", kwargs={"snapshot_tag": "next"})
    assert mcp_driver.make(tool="eval_code", kwargs={"sandbox_id": child["id"], "code": "here"})["result"] == "42"
    mcp_driver.make(tool="kill_sandbox", kwargs={"sandbox_id": child["id"]})
    fails(mcp_driver, 409, "branch_sandbox", sandbox_id=sandbox, tag="next")
    assert daemon.delete("/v1/snapshots/next").status == 204


def test_a_branch_that_cannot_be_is_refused(mcp_driver: Driver, sandbox: str) -> None:
    fails(mcp_driver, 400, "branch_sandbox", sandbox_id=sandbox, diff=True, measure_diff=True)


def test_a_wrong_token_is_refused_where_there_is_one(daemon: Daemon, clients: Path) -> None:
    with driven(clients, "mcp", daemon.client_env | {"FORKD_TOKEN": "wrong"}) as driver:
        if daemon.token is None:
            assert driver.make(tool="list_sandboxes") == []
        else:
            fails(driver, 401, "list_snapshots")


def fails(driver: Driver, status: int, tool: str, **arguments: Any) -> None:
    with pytest.raises(ClientError) as caught:
        driver.make(tool=tool, kwargs=arguments)
    assert f"'{status} " in caught.value.message
