"""Sandboxes of the SDK end by themselves: 300 s after their last use, unless whoever makes them says otherwise."""

import time
from collections.abc import Iterator

import pytest
from sdk_daemon import TAG
from support_recording import Pieces, Reply, Seen, answering, recording

from forkd import AsyncSandbox, Controller, NotFound, Sandbox, Unreachable
from forkd.client.lifetime import DEFAULT_LIFETIME_S, Lifetime, SinceUse
from forkd.client.renewal import Renewal


def test_half_of_a_lifetime_is_used_before_more_is_asked_for() -> None:
    lifetime = Lifetime(SinceUse(300), 1000.0)
    assert lifetime.missing(1149.0) is None
    assert lifetime.missing(1151.0) == 300
    lifetime.extend(1151.0, 300)
    assert lifetime.missing(1300.0) is None and lifetime.missing(1302.0) == 300


def test_a_call_that_takes_long_gets_its_time_on_top() -> None:
    lifetime = Lifetime(SinceUse(300), 1000.0)
    assert lifetime.missing(1000.0, 60) is None
    assert lifetime.missing(1000.0, 3600) == 3900


@pytest.mark.parametrize("seconds", [None, 300.0])
def test_a_lifetime_that_was_chosen_is_not_extended_by_use(seconds: float | None) -> None:
    lifetime = Lifetime(seconds, 1000.0)
    assert lifetime.missing(1299.0) is None and lifetime.missing(9999.0, 60) is None


def test_use_asks_for_more_time_once_and_for_all_that_were_made_together() -> None:
    made = Reply(200, {})
    with recording(made, made, made, made, made, made) as server, Controller(server.url) as plain:
        renewal = Renewal(plain, {"sb-1", "sb-2"}, Lifetime(SinceUse(300), time.monotonic() - 200))
        controller = Controller.over(plain.transport.renewing(renewal))
        for _ in range(3):
            controller.ping_sandbox("sb-1")
        renewal.release("sb-1")
    asked, pings = server.seen[:2], server.seen[2:]
    assert {seen.target for seen in asked} == {"/v1/sandboxes/sb-1/timeout", "/v1/sandboxes/sb-2/timeout"}
    assert asked[0].json == {"timeout_secs": 300, "extend": True}
    assert [seen.target for seen in pings] == ["/v1/sandboxes/sb-1/ping"] * 3


def test_an_upload_and_a_stream_are_use_as_long_as_they_last() -> None:
    lifetime = Lifetime(SinceUse(300), time.monotonic())

    def pieces() -> Iterator[bytes]:
        yield b"a"
        lifetime.extend(time.monotonic(), 0)
        yield b"b"

    stream = Pieces((b'event: start\ndata: {"pid": 7}\n\n', b'event: exit\ndata: {"exit_code": 0}\n\n'))

    def answer(seen: Seen) -> Reply | Pieces:
        return stream if seen.target.endswith("/output") else Reply(200, {})

    with answering(answer) as server, Controller(server.url) as plain:
        renewal = Renewal(plain, {"sb-1"}, lifetime)
        controller = Controller.over(plain.transport.renewing(renewal))
        controller.write_file("sb-1", "/f", pieces())
        events = controller.process_output("sb-1", 7)
        assert next(events).kind == "start"
        lifetime.extend(time.monotonic(), 0)
        assert next(events).kind == "exit"
        events.close()
    targets = [seen.target.rpartition("/")[2] for seen in server.seen]
    assert sorted(targets) == ["files?path=%2Ff", "output", "timeout", "timeout"]
    assert {seen.body for seen in server.seen if seen.method == "PUT"} == {b"ab"}


def test_a_sandbox_that_has_ended_is_not_asked_for_again() -> None:
    gone = Reply(404, {"error": "Gone", "code": "not_found", "hint": None})
    with recording(gone, gone, gone) as server, Controller(server.url) as plain:
        renewal = Renewal(plain, {"sb-1"}, Lifetime(SinceUse(300), time.monotonic() - 9999))
        controller = Controller.over(plain.transport.renewing(renewal))
        for _ in range(2):
            with pytest.raises(NotFound):
                controller.get_sandbox("sb-1")
    assert [seen.method for seen in server.seen] == ["POST", "GET", "GET"]


def test_a_daemon_that_does_not_answer_is_the_error_of_the_call_itself() -> None:
    with Controller("unix:///nonexistent/forkd.sock") as plain:
        renewal = Renewal(plain, {"sb-1"}, Lifetime(SinceUse(300), time.monotonic() - 9999))
        with pytest.raises(Unreachable, match="nothing was sent"):
            Controller.over(plain.transport.renewing(renewal)).get_sandbox("sb-1")


def test_a_sandbox_has_300_seconds_unless_something_else_is_said(daemon: Controller) -> None:
    before = time.time()
    with Sandbox.create(TAG) as sandbox, Sandbox.create(TAG, timeout=None) as immortal, Sandbox(TAG) as bare:
        deadline = sandbox.info()["deadline_unix"]
        assert deadline is not None and deadline - before >= DEFAULT_LIFETIME_S == 300
        assert immortal.info()["deadline_unix"] is None and bare.info()["deadline_unix"] is None
        assert sandbox.set_timeout(3600)["deadline_unix"] is not None
    (info,) = daemon.spawn_sandboxes(TAG)
    assert info["deadline_unix"] is None
    daemon.kill_sandbox(info["id"])


def test_a_long_command_finds_its_sandbox_alive_at_its_end(daemon: Controller) -> None:
    with Sandbox.create(TAG) as sandbox, Sandbox.create(TAG, timeout=500) as fixed:
        first, chosen = sandbox.info()["deadline_unix"], fixed.info()["deadline_unix"]
        sandbox.commands.run("true", timeout=4000)
        fixed.commands.run("true", timeout=4000)
        later = sandbox.info()["deadline_unix"]
        assert first is not None and later is not None and later >= first + 3900
        assert fixed.info()["deadline_unix"] == chosen


def test_set_timeout_ends_the_extending(daemon: Controller) -> None:
    with Sandbox.create(TAG) as sandbox:
        chosen = sandbox.set_timeout(100)["deadline_unix"]
        sandbox.commands.run("true", timeout=4000)
        assert sandbox.info()["deadline_unix"] == chosen


@pytest.mark.parametrize("timeout", [None, 50, DEFAULT_LIFETIME_S])
def test_connecting_makes_no_life_shorter(daemon: Controller, timeout: float | None) -> None:
    with Sandbox.create(TAG, timeout=900) as sandbox, Sandbox.create(TAG, timeout=None) as immortal:
        deadline = sandbox.info()["deadline_unix"]
        assert Sandbox.connect(sandbox.id, timeout).info()["deadline_unix"] == deadline
        assert Sandbox.connect(immortal.id, timeout).info()["deadline_unix"] is None
        later = Sandbox.connect(sandbox.id, 5000).info()["deadline_unix"]
        assert deadline is not None and later is not None and later > deadline


async def test_an_asynchronous_sandbox_lives_as_long(daemon: Controller) -> None:
    async with await AsyncSandbox.create(TAG) as sandbox:
        first = (await sandbox.info())["deadline_unix"]
        await sandbox.commands.run("true", timeout=4000)
        later = (await sandbox.info())["deadline_unix"]
        assert first is not None and later is not None and later >= first + 3900
