"""A signal at any moment of a fork leaves no sandbox; while a snapshot is made, no snapshot."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import Cli, Running, handlers_kept
from support_processes import wait_until
from support_recording import Drop, Reply, Seen, answering

from bench.served import find_free_port
from forkd.cli.interrupts import Interrupts, run_async

pytestmark = pytest.mark.usefixtures("nothing_left")

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def is_mentioned(cli: Cli, since: int) -> bool:
    return bool(cli.json("events", "--since", str(since), "--type", "sandbox.created"))


def last_event(cli: Cli) -> int:
    return int(cli.json("events")[-1]["id"])


@pytest.mark.parametrize(
    ("number", "code", "delay_s"),
    [(signal.SIGINT, 130, 0.0), (signal.SIGINT, 130, 0.03), (signal.SIGTERM, 143, 0.01), (signal.SIGTERM, 143, 0.1)],
)
def test_a_signal_during_a_fork_leaves_nothing(warm: Cli, number: int, code: int, delay_s: float) -> None:
    before = last_event(warm)
    process = warm.start("fork", "warm", "-n", "8")
    wait_until(lambda: is_mentioned(warm, before) or process.poll() is not None)
    time.sleep(delay_s)
    process.finish(number, times=2)  # the impatient press it twice
    assert process.returncode in (code, 0)
    # Either it was too late and all are there, told to the user; or all are gone by the time the command is.
    assert len(warm.ids()) == (8 if process.returncode == 0 else 0)


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.4])
def test_a_signal_before_anything_was_asked_for_leaves_nothing(warm: Cli, delay_s: float) -> None:
    process = warm.start("fork", "warm")
    time.sleep(delay_s)
    process.finish(signal.SIGTERM)
    assert process.returncode in (143, -signal.SIGTERM, 0)
    assert len(warm.ids()) == (1 if process.returncode == 0 else 0)


@pytest.mark.parametrize("words", [["fork", "warm"], ["run", "warm", "--", "true"]], ids=["fork", "run"])
def test_undoing_a_fork_spawns_nothing(warm: Cli, words: list[str]) -> None:
    undone = threading.Event()

    def answer(seen: Seen) -> Reply | Drop:
        if seen.method == "POST":
            undone.wait(20)
            return Drop()
        undone.set()
        return Reply(200, {"removed": []})

    with answering(answer) as server:
        process = warm.start(*words, FORKD_URL=server.url)
        wait_until(lambda: bool(server.seen))
        process.finish(signal.SIGINT)
    assert process.returncode == 130
    asked, undo = server.seen
    assert (asked.method, undo.method, undo.target) == ("POST", "DELETE", "/v1/spawns")
    assert asked.headers["Idempotency-Key"] == undo.headers["Idempotency-Key"]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_children_that_are_only_held_end_with_the_command(warm: Cli, number: int, code: int) -> None:
    process = warm.start("fork", "--tag", "warm", "-n", "2", "--settle-secs", "3600")
    assert process.line().startswith("total wall-clock time: ")
    assert len(warm.ids()) == 2
    process.finish(number)
    assert process.returncode == code
    assert warm.ids() == []


def test_a_child_held_for_forkds_sdk_answers_where_it_looks(warm: Cli) -> None:
    port = find_free_port()
    target = f"127.0.0.1:{port}"
    process = warm.start("fork", "--tag", "warm", "-n", "1", "--settle-secs", "3600", FORKD_TARGET=target)
    assert process.line().startswith("total wall-clock")
    with socket.create_connection(("127.0.0.1", port), 10) as agent:
        agent.sendall(b'{"action": "ping"}\n')
        with agent.makefile() as answer:
            assert json.loads(answer.readline())["pong"] is True
    process.finish(signal.SIGTERM)
    assert warm.ids() == []


def test_a_daemon_that_dies_during_a_fork_is_replaced_and_the_children_end(alone: Cli) -> None:
    assert alone("snapshot", "create", "--image", "small", "--tag", "warm").returncode == 0
    process = alone.start("fork", "warm", "-n", "2", "--settle-secs", "3600")
    assert process.line().startswith("total wall-clock")
    daemon = alone.pid()
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    process.finish(signal.SIGINT)
    assert process.returncode == 130
    assert alone.ids() == []


def start_long_warm_up(cli: Cli, *words: str) -> Running:
    code = "import time; time.sleep(60)"
    process = cli.start("snapshot", "create", "--image", "small", "--tag", "never", "--warm", code, *words)
    process.until("warming up")
    return process


@pytest.mark.parametrize(
    ("number", "code", "times"), [(signal.SIGINT, 130, 5), (signal.SIGTERM, 143, 1), (signal.SIGHUP, 129, 5)]
)
def test_a_signal_while_a_snapshot_is_made_gives_it_up(warm: Cli, number: int, code: int, times: int) -> None:
    process = start_long_warm_up(warm)
    assert [info["status"] for info in warm.json("snapshot", "ls")] == ["writing", "ready"]
    process.finish(number, times, apart_s=0.02)
    assert process.returncode == code
    assert warm.tags() == ["warm"]
    assert [path.name for path in warm.snapshots.iterdir()] == ["warm"]
    assert list(warm.runtime.glob("vms/*")) == []


def test_what_somebody_else_makes_is_not_given_up(warm: Cli) -> None:
    process = start_long_warm_up(warm)
    second = warm("snapshot", "create", "--image", "small", "--tag", "never")
    assert second.returncode == 4
    assert "is being made already" in second.stderr
    assert process.poll() is None
    assert warm.ask("snapshot", "rm", "never").returncode == 0
    said = process.finish()
    assert process.returncode == 4, said
    assert "given up" in said


def test_a_hang_up_that_was_to_be_ignored_is(warm: Cli) -> None:
    words = ("snapshot", "create", "--image", "small", "--tag", "kept", "--warm", "import time; time.sleep(0.5)")
    process = warm.start(*words, prefix=["nohup"])
    process.until("warming up")
    process.finish(signal.SIGHUP)
    assert process.returncode == 0
    assert warm.tags() == ["kept", "warm"]


@pytest.fixture
def handlers() -> Iterator[None]:
    with handlers_kept():
        yield


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_interrupts_and_later_ones_do_not() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_is_held_back_comes_when_it_may() -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            interrupts.release()
        assert caught.value.code == 143
        interrupts.settle()
    with Interrupts() as interrupts:
        interrupts.settle()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_cancels_asynchronous_work_which_cleans_up_in_peace(number: int, raised: type[BaseException]) -> None:
    steps = []

    async def work() -> None:
        signal.raise_signal(number)
        try:
            await asyncio.sleep(10)
        finally:
            signal.raise_signal(number)
            await asyncio.sleep(0)
            steps.append("clean")

    with pytest.raises(raised):
        run_async(work())
    assert steps == ["clean"]


@pytest.mark.usefixtures("handlers")
def test_asynchronous_work_that_is_not_interrupted_returns_or_raises() -> None:
    async def work(number: int) -> int:
        return 6 // number

    before = signal.getsignal(signal.SIGINT)
    assert run_async(work(2)) == 3
    with pytest.raises(ZeroDivisionError):
        run_async(work(0))
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_signal_the_handlers_are_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_left_in_the_guests_directory(warm: Cli) -> None:
    assert list(Path(warm.runtime, "vms").iterdir()) == []


def test_a_replacement_that_is_given_up_leaves_what_was_there(warm: Cli) -> None:
    assert warm.create("never", "--warm", "old = 1").returncode == 0
    process = start_long_warm_up(warm, "--replace")
    process.finish(signal.SIGINT)
    assert process.returncode == 130
    assert warm.json("snapshot", "inspect", "never")["warm"] == "old = 1"
