"""A spawn that is interrupted or cancelled, at any moment, leaves no sandbox."""

import asyncio
import json
import subprocess
import sys

import pytest
from sdk_daemon import TAG
from support_recording import Drop, Reply, recording

from forkd import AsyncController, AsyncSandbox, Controller, Sandbox, Unreachable

# Signals itself, so that many interruptions cost one interpreter. The sandbox that came in time is killed.
INTERRUPTED = """
import json, os, signal, sys, threading
from forkd import Sandbox

number, tag, step_s, rounds = getattr(signal, sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
inside, outcomes = False, []

def on_signal(caught, frame):
    if inside:
        raise KeyboardInterrupt if caught == signal.SIGINT else SystemExit(3)

signal.signal(number, on_signal)
Sandbox.create(tag).kill()
for at in range(rounds):
    timer = threading.Timer(at * step_s, os.kill, (os.getpid(), number))
    made = None
    inside = True
    try:
        timer.start()
        made = Sandbox.create_many(tag, 2)
    except (KeyboardInterrupt, SystemExit):
        pass
    inside = False
    timer.join()
    outcomes.append(made is None)
    if made is not None:
        made.kill()
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_of_a_spawn_leaves_no_sandbox(daemon: Controller, number: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, number, TAG, "0.002", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert any(json.loads(done.stdout))
    assert daemon.list_sandboxes() == []


@pytest.mark.parametrize(
    "spawn",
    [
        "Sandbox.create_many('python', 8); time.sleep(60)",
        "asyncio.run(AsyncSandbox.create_many('python', 8)); time.sleep(60)",
    ],
)
def test_a_program_that_ends_by_a_signal_leaves_no_sandbox(daemon: Controller, spawn: str) -> None:
    """The handler is Python's own, and a second signal comes while the first is cleaned up after."""
    code = (
        "import asyncio, os, signal, threading, time\nfrom forkd import AsyncSandbox, Sandbox\n"
        "Sandbox.create('python').kill()\n"
        "for after in (0.02, 0.03): threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()\n" + spawn
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    assert daemon.list_sandboxes() == []


@pytest.mark.parametrize("twice", [False, True])
async def test_a_task_that_is_cancelled_at_any_moment_of_a_spawn_leaves_no_sandbox(
    daemon: Controller, twice: bool
) -> None:
    cancelled = 0
    for at in range(30):
        task = asyncio.create_task(AsyncSandbox.create_many(TAG, 2))
        for _ in range(at):
            await asyncio.sleep(0.002 if at % 2 else 0)
        task.cancel()
        if twice:
            await asyncio.sleep(0.002)
            task.cancel()
        try:
            await (await task).kill()
        except asyncio.CancelledError:
            cancelled += 1
    assert cancelled and daemon.list_sandboxes() == []


async def test_a_deadline_of_asyncio_leaves_no_sandbox(daemon: Controller) -> None:
    for at in range(10):
        try:
            async with asyncio.timeout(at * 0.004):
                sandbox = await AsyncSandbox(TAG)
        except TimeoutError:
            continue
        await sandbox.kill()
    assert daemon.list_sandboxes() == []


def test_cleaning_up_spawns_nothing() -> None:
    with recording(*[Drop()] * 4, Reply(200, {"removed": []})) as server, Controller(server.url) as controller:
        with pytest.raises(Unreachable):
            Sandbox.create("t", controller=controller)
    *spawns, undo = server.seen
    assert {(seen.method, seen.target) for seen in spawns} == {("POST", "/v1/sandboxes")}
    assert (undo.method, undo.target) == ("DELETE", "/v1/spawns")
    assert {seen.headers["Idempotency-Key"] for seen in server.seen} == {undo.headers["Idempotency-Key"]}


async def test_cleaning_up_after_a_cancelled_task_spawns_nothing() -> None:
    with recording(Reply(503, {"error": "Busy"}, {"Retry-After": "15"}), Reply(200, {"removed": []})) as server:
        async with AsyncController(server.url) as controller:
            task = asyncio.create_task(AsyncSandbox.create("t", controller=controller))
            while not server.seen:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert [(seen.method, seen.target) for seen in server.seen] == [
        ("POST", "/v1/sandboxes"),
        ("DELETE", "/v1/spawns"),
    ]


def test_a_refusal_is_not_cleaned_up_after() -> None:
    refused = Reply(404, {"error": "No such snapshot", "code": "not_found", "hint": None})
    with recording(refused) as server, Controller(server.url) as controller:
        with pytest.raises(Exception, match="No such snapshot"):
            Sandbox.create("t", controller=controller)
        with pytest.raises(TypeError, match="Unknown option"):
            Sandbox.create("t", controller=controller, color="red")  # type: ignore[call-arg]
    assert len(server.seen) == 1


def test_a_clean_up_that_fails_says_so() -> None:
    with recording(*[Drop()] * 8) as server, Controller(server.url) as controller:
        with pytest.raises(Unreachable) as caught:
            Sandbox.create("t", controller=controller)
    assert "Sandboxes may still run" in caught.value.__notes__[-1]
