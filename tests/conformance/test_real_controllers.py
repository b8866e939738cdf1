"""forkd's own SDKs, Python and TypeScript, unchanged, against a real daemon: every method of their Controller."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_clients import CONTROLLERS, METHODS, ClientError, Controller, driven
from real_daemon import TAG, Daemon
from support_limits import enforced
from support_processes import wait_until

pytestmark = pytest.mark.usefixtures("nothing_running")


@pytest.fixture
def sandbox(daemon: Daemon) -> Iterator[str]:
    """Spawned without a client, to tell what each of them does."""
    (info,) = daemon.post("/v1/sandboxes", {"snapshot_tag": TAG}).body
    yield info["id"]
    assert daemon.delete(f"/v1/sandboxes/{info['id']}").status in (204, 404)


def test_these_tests_know_every_method_of_the_client(controller: Controller) -> None:
    assert controller.names() == sorted([*METHODS, "delete_snapshot"])


def test_snapshots_are_listed_and_deleted(controller: Controller, daemon: Daemon) -> None:
    if daemon.engine == "fake":
        daemon.make_snapshot("spare")
        assert [found["tag"] for found in controller.call("list_snapshots")] == ["spare", TAG]
        assert controller.call("delete_snapshot", "spare") is None
    (found,) = controller.call("list_snapshots")
    assert (found["tag"], found["status"], found["bootable"]) == (TAG, "ready", True)
    assert found["dir"] == str(daemon.home.snapshots / TAG)
    check_fails(controller, daemon, 404, "not_found", "/v1/snapshots/spare", "delete_snapshot", "spare")


def test_sandboxes_are_spawned_found_and_killed(controller: Controller, daemon: Daemon) -> None:
    spawned = controller.call("spawn_sandboxes", TAG, n=3)
    assert len({info["id"] for info in spawned}) == len({info["guest_addr"] for info in spawned}) == 3
    assert all(Path(f"/proc/{info['pid']}").exists() for info in spawned)
    assert controller.call("list_sandboxes") == spawned
    for info in spawned:
        assert controller.call("get_sandbox", info["id"]) == info
        assert controller.call("kill_sandbox", info["id"]) is None
        check_fails(controller, daemon, 404, "not_found", f"/v1/sandboxes/{info['id']}", "kill_sandbox", info["id"])
    assert controller.call("list_sandboxes") == []
    assert not any(Path(f"/proc/{info['pid']}").exists() for info in spawned)


def test_every_option_of_spawn_is_taken_or_refused_as_not_built(controller: Controller, daemon: Daemon) -> None:
    options = {"per_child_netns": True, "memory_limit_mib": 4096, "prewarm": True, "live_fork": True}
    (info,) = controller.call("spawn_sandboxes", TAG, **options)
    assert (info["memory_limit_mib"], info["netns"], info["branch_count"]) == (enforced(4096), None, 0)
    controller.call("kill_sandbox", info["id"])
    check_fails(controller, daemon, 400, "unsupported", "/v1/sandboxes", "spawn_sandboxes", TAG, hugepages=True)


@pytest.mark.parametrize(
    ("tag", "n", "status", "code"),
    [
        ("absent", 1, 404, "not_found"),
        ("no/tag", 1, 400, "invalid_input"),
        (TAG, 0, 400, "invalid_input"),
        (TAG, 1001, 400, "invalid_input"),
    ],
)
def test_a_spawn_that_cannot_be_is_refused(
    controller: Controller, daemon: Daemon, tag: str, n: int, status: int, code: str
) -> None:
    check_fails(controller, daemon, status, code, "/v1/sandboxes", "spawn_sandboxes", tag, n=n)


def test_a_ping_tells_of_the_guest(controller: Controller, daemon: Daemon, sandbox: str) -> None:
    pong = controller.call("ping_sandbox", sandbox)
    assert (pong["pong"], pong["agent_lang"], pong["warmup_ready"]) == (True, "python", True)
    assert pong["pid"] > 0
    if daemon.engine != "fake":
        assert pong["numpy_version"] == controller.call("eval_code", sandbox, "numpy.__version__")["result"].strip("'")


def test_a_command_runs_in_the_guest(controller: Controller, daemon: Daemon, sandbox: str) -> None:
    ran = controller.call("exec_command", sandbox, ["sh", "-c", "echo $((6*7)); echo no >&2; exit 7"])
    assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("42\n", "no\n", 7)
    killed = controller.call("exec_command", sandbox, ["sh", "-c", "kill -9 $$"])
    assert killed["exit_code"] == -9


def test_a_command_that_cannot_start_or_end_is_an_error(controller: Controller, daemon: Daemon, sandbox: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/exec"
    for args, options, status, code in (
        (["/nonexistent"], {}, 422, "command_not_started"),
        (["sh", "-c", "echo early; sleep 100"], {"timeout_secs": 1}, 504, "guest_timeout"),
        ([], {}, 400, "invalid_input"),
    ):
        check_fails(controller, daemon, status, code, path, "exec_command", sandbox, args, **options)


def test_code_is_evaluated_in_the_warmed_interpreter(controller: Controller, daemon: Daemon, sandbox: str) -> None:
    found = controller.call("eval_code", sandbox, "past['answer']")
    assert (found["result"], found["error"], found["exit_code"]) == ("42", None, 0)
    failed = controller.call("eval_code", sandbox, "1/0")
    assert (failed["result"], failed["error"], failed["exit_code"]) == (None, "ZeroDivisionError: division by zero", 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tag": "next"},
        {"tag": "next", "diff": True},
        {"tag": "next", "measure_diff": True},
        {"tag": "next", "mode": "full"},
        {"tag": "next", "mode": "diff"},
        {"tag": "next", "mode": "live"},
        {"tag": "next", "mode": "live", "wait": False},
    ],
)
def test_a_sandbox_is_branched_and_the_tag_spawned_from(
    controller: Controller, daemon: Daemon, sandbox: str, options: dict[str, Any]
) -> None:
    controller.call("eval_code", sandbox, "here = ['before']")
    made = controller.call("branch_sandbox", sandbox, **options)
    tag = made["tag"]
    try:
        assert made["branched_from"] == sandbox and made["pause_ms"] >= 0 and made["dir"].endswith(tag)
        waited = options.get("wait", True)
        assert made["status"] in (("ready",) if waited else ("writing", "ready"))
        if waited:
            assert made["bootable"] and made["diff_physical_bytes"] >= 0 and made["diff_ms"] >= 0
        controller.call("eval_code", sandbox, "here.append('after')")
        (child,) = controller.call("spawn_sandboxes", tag)
        assert controller.call("eval_code", child["id"], "here + [past['answer']]")["result"] == "['before', 42]"
        assert controller.call("eval_code", sandbox, "here")["result"] == "['before', 'after']"
        assert controller.call("get_sandbox", sandbox)["has_branched"] is True
        controller.call("kill_sandbox", child["id"])
        wait_until(lambda: daemon.get(f"/v1/snapshots/{tag}").body["status"] == "ready", "it is written")
        path = f"/v1/sandboxes/{sandbox}/branch"
        check_fails(controller, daemon, 409, "conflict", path, "branch_sandbox", sandbox, tag=tag)
    finally:
        assert controller.call("delete_snapshot", tag) is None


@pytest.mark.parametrize(
    "options", [{"tag": "no tag"}, {"mode": "diff", "measure_diff": True}, {"wait": False}, {"mode": "sideways"}]
)
def test_branches_that_cannot_be_are_refused(
    controller: Controller, daemon: Daemon, sandbox: str, options: dict[str, Any]
) -> None:
    status = 422 if options.get("mode") == "sideways" else 400
    path = f"/v1/sandboxes/{sandbox}/branch"
    check_fails(controller, daemon, status, "invalid_input", path, "branch_sandbox", sandbox, **options)


@pytest.mark.parametrize(
    ("method", "args", "rest"),
    [
        ("get_sandbox", [], ""),
        ("kill_sandbox", [], ""),
        ("ping_sandbox", [], "/ping"),
        ("exec_command", [["true"]], "/exec"),
        ("eval_code", ["1"], "/eval"),
        ("branch_sandbox", [], "/branch"),
    ],
)
def test_a_sandbox_that_is_not_there_is_not_found(
    controller: Controller, daemon: Daemon, method: str, args: list[Any], rest: str
) -> None:
    check_fails(
        controller, daemon, 404, "not_found", f"/v1/sandboxes/sb-0123456789{rest}", method, "sb-0123456789", *args
    )


@pytest.mark.parametrize("client", ["python", "typescript"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_wrong_or_missing_token_is_401_where_there_is_one_and_reveals_nothing(
    daemon: Daemon, clients: Path, client: str, token: str
) -> None:
    with driven(clients, client, daemon.client_env | {"FORKD_TOKEN": token}) as driver:
        controller = CONTROLLERS[client](driver)
        if daemon.token is None:
            assert controller.call("list_sandboxes") == []
            return
        for method, args in (("list_snapshots", []), ("get_sandbox", ["sb-0123456789"]), ("get_sandbox", ["../.."])):
            with pytest.raises(ClientError) as caught:
                controller.call(method, *args)
            assert caught.value.status == 401
            assert caught.value.body["code"] == "unauthorized"
            assert TAG not in caught.value.message


def check_fails(
    controller: Controller, daemon: Daemon, status: int, code: str, path: str, method: str, *args: Any, **options: Any
) -> None:
    with pytest.raises(ClientError) as caught:
        controller.call(method, *args, **options)
    error = caught.value
    assert error.type == "ControllerError"
    assert (error.status, error.body["code"]) == (status, code), error.body
    assert isinstance(error.body["error"], str) and error.body["error"]
    assert error.body.keys() >= {"error", "code", "hint"}
    assert error.url == daemon.place + path
