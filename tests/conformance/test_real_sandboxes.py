"""forkd's own Sandbox classes, unchanged: Python's, which needs our `forkd fork` and the agent's port; TypeScript's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clients import ClientError, Driver, driven
from real_daemon import TAG, Daemon
from support_limits import enforced

from bench.served import find_free_port

pytestmark = pytest.mark.usefixtures("nothing_running")


@pytest.fixture
def target() -> str:
    """One that nobody listens on."""
    return f"127.0.0.1:{find_free_port()}"


@pytest.fixture
def python(daemon: Daemon, clients: Path, our_cli: Path, target: str) -> Iterator[Driver]:
    """Python's SDK where `forkd` is ours and where it is told to look for its sandbox."""
    env = daemon.client_env | {"FORKD_TARGET": target, "FORKD_TAG": TAG}
    env["PATH"] = f"{our_cli}{os.pathsep}{env['PATH']}"
    with driven(clients, "python", env) as driver:
        yield driver


def test_a_python_sandbox_is_forked_by_our_cli_used_and_leaves_no_vm(
    daemon: Daemon, python: Driver, target: str
) -> None:
    python.make(path=["Sandbox", "create"], keep="sandbox")
    (info,) = daemon.live()
    assert (info["snapshot_tag"], info["guest_addr"]) == (TAG, target)
    pong = python.make(path=["sandbox", "ping"])
    assert pong.keys() == {"pong", "numpy_version", "pid", "agent_lang", "warmup_ready"}
    ran = python.make(path=["sandbox", "commands", "run"], args=["echo $((6*7)); echo no >&2; exit 7"])
    assert ran == {"stdout": "42\n", "stderr": "no\n", "exit_code": 7}
    listed = python.make(path=["sandbox", "commands", "run"], args=[["printf", "%s", "a b"]], kwargs={"timeout": 10})
    assert listed == {"stdout": "a b", "stderr": "", "exit_code": 0}
    assert python.make(path=["sandbox", "eval"], args=["past['answer']"]) == "42"
    python.make(path=["sandbox", "kill"])
    python.make(path=["sandbox", "kill"])
    assert daemon.live() == []
    assert not Path(f"/proc/{info['pid']}").exists()


def test_a_python_sandbox_as_a_context_manager_ends_with_its_block_and_can_be_had_again(
    daemon: Daemon, python: Driver
) -> None:
    for _ in range(2):
        python.make(path=["Sandbox"], keep="sandbox")
        python.make(path=["sandbox", "__enter__"], keep="entered")
        assert len(daemon.live()) == 1
        python.make(path=["entered", "__exit__"], args=[None, None, None])
        assert daemon.live() == []


def test_what_fails_in_a_python_sandbox_says_so(daemon: Daemon, python: Driver) -> None:
    python.make(path=["Sandbox"], keep="sandbox")
    run = ["sandbox", "commands", "run"]
    late = python.make(path=run, args=["echo early; sleep 100"], kwargs={"timeout": 1})
    assert late == {
        "stdout": "",
        "stderr": "GuestTimeout: The command did not end within 1 s and was killed",
        "exit_code": 1,
    }
    absent = python.make(path=run, args=[["/nonexistent"]])
    assert absent["stderr"].startswith("CommandNotStarted: ") and absent["exit_code"] == 1
    with pytest.raises(ClientError) as caught:
        python.make(path=["sandbox", "eval"], args=["1/0"])
    assert (caught.value.type, caught.value.message) == (
        "RuntimeError",
        "forkd eval: ZeroDivisionError: division by zero",
    )
    python.make(path=["sandbox", "kill"])


def test_a_python_sandbox_of_no_snapshot_raises_what_our_cli_said(daemon: Daemon, python: Driver) -> None:
    with pytest.raises(ClientError) as caught:
        python.make(path=["Sandbox"], args=["absent"])
    assert caught.value.type == "RuntimeError"
    assert "forkd fork --tag absent exited with code 3" in caught.value.message
    assert "absent" in caught.value.message.partition("\n")[2]


def test_python_sandboxes_attach_to_what_a_controller_spawned_each_at_its_own_port(
    daemon: Daemon, python: Driver
) -> None:
    python.make(path=["Controller"], keep="controller")
    spawned = python.make(path=["controller", "spawn_sandboxes"], args=[TAG], kwargs={"n": 2})
    for info in spawned:
        options = {"target": info["guest_addr"], "spawn": False}
        python.make(path=["Sandbox"], kwargs=options, keep=info["id"])
        python.make(path=[info["id"], "commands", "run"], args=[f"echo {info['id']} > /tmp/{info['id']}"])
    seen = [python.make(path=[info["id"], "eval"], args=["__import__('os').environ.get('HOME')"]) for info in spawned]
    assert len(seen) == 2
    hostnames = [python.make(path=[info["id"], "eval"], args=["__import__('forkd').identity()"]) for info in spawned]
    assert [info["id"] in hostname for info, hostname in zip(spawned, hostnames, strict=True)] == [True, True]
    for info in spawned:
        python.make(path=[info["id"], "commands", "run"], args=[f"rm /tmp/{info['id']}"])
        python.make(path=[info["id"], "kill"])  # not its own to kill
    assert len(daemon.live()) == 2
    for info in spawned:
        python.make(path=["controller", "kill_sandbox"], args=[info["id"]])
        with pytest.raises(ClientError) as caught:
            python.make(path=[info["id"], "ping"])
        assert caught.value.type == "ConnectionRefusedError"


def test_a_typescript_sandbox_is_created_used_and_killed(daemon: Daemon, typescript_driver: Driver) -> None:
    make = typescript_driver.make
    assert make(path=["Sandbox"], names=True) == ["branch", "eval", "exec", "kill", "ping"]
    options = {"snapshotTag": TAG, "perChildNetns": False, "memoryLimitMib": 4096, "prewarm": True}
    created = make(path=["Sandbox", "create"], args=[options], keep="sandbox")
    assert [info["id"] for info in daemon.live()] == [created["id"]]
    assert created["info"]["memory_limit_mib"] == enforced(4096)
    ran = make(path=["sandbox", "exec"], args=[["sh", "-c", "echo $((6*7)); exit 7"], {"timeoutSecs": 20}])
    assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("42\n", "", 7)
    assert make(path=["sandbox", "eval"], args=["past['answer']"]) == "42"
    with pytest.raises(ClientError) as caught:
        make(path=["sandbox", "eval"], args=["1/0"])
    assert caught.value.message == "eval error: ZeroDivisionError: division by zero"
    assert make(path=["sandbox", "ping"])["pong"] is True
    branch = make(path=["sandbox", "branch"], args=[{"tag": "next", "diff": True}])
    assert (branch["tag"], branch["status"], branch["branched_from"]) == ("next", "ready", created["id"])
    assert daemon.delete("/v1/snapshots/next").status == 204
    assert make(path=["sandbox", "kill"]) is None
    assert make(path=["sandbox", "kill"]) is None
    assert daemon.live() == []


def test_a_typescript_sandbox_for_a_block_ends_with_it(daemon: Daemon, typescript_driver: Driver) -> None:
    within = {"method": "exec", "args": [["hostname"]]}
    outcome = typescript_driver.make(path=["Sandbox", "with"], args=[{"snapshotTag": TAG}], within=within)
    assert outcome["result"]["exit_code"] == 0
    assert daemon.live() == []
    with pytest.raises(ClientError) as caught:
        typescript_driver.make(path=["Sandbox", "with"], args=[{"snapshotTag": "absent"}], within=within)
    assert caught.value.status == 404
