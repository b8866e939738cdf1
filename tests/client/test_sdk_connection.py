"""Both controllers against a server on a real socket: what they send, when they send it again, what they raise."""

import asyncio
import inspect
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from support_recording import Drop, Pieces, Reply, recording

from bench.served import find_free_port
from forkd import errors
from forkd.client import AsyncController, Controller, retry

Caller = Callable[..., Any]


def call_sync(url: str, method: str, *args: Any, timeout: float = 20.0, **named: Any) -> Any:
    with Controller(url, timeout=timeout) as controller:
        answer = getattr(controller, method)(*args, **named)
        return list(answer) if inspect.isgenerator(answer) else answer


def call_async(url: str, method: str, *args: Any, timeout: float = 20.0, **named: Any) -> Any:
    async def inside() -> Any:
        async with AsyncController(url, timeout=timeout) as controller:
            answer = getattr(controller, method)(*args, **named)
            return [item async for item in answer] if inspect.isasyncgen(answer) else await answer

    return asyncio.run(inside())


pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.parametrize("call", [call_sync, call_async])]

NOT_FOUND = Reply(404, {"error": "No such sandbox", "code": "not_found", "hint": None})


def busy(retry_after_s: int, code: str = "recovering") -> Reply:
    return Reply(503, {"error": "Busy", "code": code, "hint": None}, {"Retry-After": str(retry_after_s)})


def test_a_call_goes_out_with_token_and_name_and_comes_back_as_plain_values(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_TOKEN", " secret\n")
    with recording(Reply(200, [{"tag": "a"}])) as server:
        assert call(server.url, "list_snapshots") == [{"tag": "a"}]
        (seen,) = server.seen
    assert (seen.method, seen.target) == ("GET", "/v1/snapshots")
    assert seen.headers["Authorization"] == "Bearer secret"
    assert seen.headers["User-Agent"].startswith("forkd-python/")


def test_an_empty_body_is_none_and_a_ping_has_no_content_type(call: Caller) -> None:
    with recording(Reply(204), Reply(200, {"pong": True})) as server:
        assert call(server.url, "kill_sandbox", "sb-1") is None
        assert call(server.url, "ping_sandbox", "sb-1") == {"pong": True}
        assert "Content-Type" not in server.seen[1].headers and server.seen[1].body == b""


def test_proxies_of_the_environment_are_not_asked_for_this_machine(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{find_free_port()}")
    with recording(Reply(200, {"version": "1"})) as server:
        assert call(server.url, "version") == {"version": "1"}


def test_a_lost_answer_to_a_read_is_asked_for_again(call: Caller) -> None:
    with recording(Drop(), Drop(), Reply(200, {"id": "sb-1"})) as server:
        assert call(server.url, "get_sandbox", "sb-1") == {"id": "sb-1"}
        assert len(server.seen) == 3


def test_attempts_end(call: Caller) -> None:
    with recording(*[Drop()] * 10) as server:
        with pytest.raises(errors.Unreachable, match="unknown"):
            call(server.url, "get_sandbox", "sb-1")
        assert len(server.seen) == retry.MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("method", "args"),
    [("exec_command", ["sb-1", ["true"]]), ("eval_code", ["sb-1", "1"]), ("rename_file", ["sb-1", "/a", "/b"])],
)
def test_what_may_have_been_done_is_not_done_again(call: Caller, method: str, args: list[object]) -> None:
    with recording(Drop(), Reply(200, {})) as server:
        with pytest.raises(errors.Unreachable, match="unknown") as caught:
            call(server.url, method, *args)
        assert len(server.seen) == 1
    assert caught.value.url == server.url + server.seen[0].target


def test_a_spawn_is_made_again_under_the_same_key(call: Caller) -> None:
    with recording(Drop(), Reply(201, [{"id": "sb-1"}])) as server:
        assert call(server.url, "spawn_sandboxes", "warm", 2) == [{"id": "sb-1"}]
        first, second = server.seen
        assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
        assert first.json == second.json == {"snapshot_tag": "warm", "n": 2, "per_child_netns": False}


def test_two_spawns_have_two_keys(call: Caller) -> None:
    with recording(Reply(201, []), Reply(201, []), Reply(201, [])) as server:
        call(server.url, "spawn_sandboxes", "warm")
        call(server.url, "spawn_sandboxes", "warm")
        call(server.url, "spawn_sandboxes", "warm", idempotency_key="mine")
        keys = [seen.headers["Idempotency-Key"] for seen in server.seen]
    assert len(set(keys)) == 3 and keys[2] == "mine"


def test_a_delete_that_finds_nothing_after_a_lost_answer_has_deleted(call: Caller) -> None:
    with recording(Drop(), NOT_FOUND) as server:
        assert call(server.url, "kill_sandbox", "sb-1") is None
        assert len(server.seen) == 2


def test_a_delete_that_finds_nothing_at_first_says_so(call: Caller) -> None:
    with recording(NOT_FOUND) as server, pytest.raises(errors.NotFound, match="No such sandbox"):
        call(server.url, "kill_sandbox", "sb-1")


def test_a_delete_that_was_never_sent_before_says_so_too(call: Caller) -> None:
    """Refused at first: nothing of that attempt arrived, so the 404 is the truth about the past."""
    port = find_free_port()
    served, asked = [], threading.Event()

    def serve_late() -> None:
        time.sleep(0.03)
        with recording(NOT_FOUND, port=port) as server:
            asked.wait(20)
            served.extend(server.seen)

    thread = threading.Thread(target=serve_late)
    thread.start()
    try:
        with pytest.raises(errors.NotFound):
            call(f"http://127.0.0.1:{port}", "kill_sandbox", "sb-1")
    finally:
        asked.set()
        thread.join()
    assert len(served) == 1


def test_refused_for_now_is_asked_again_after_the_time_named(call: Caller) -> None:
    with recording(busy(1), Reply(201, [])) as server:
        begun = time.monotonic()
        assert call(server.url, "spawn_sandboxes", "warm") == []
        assert time.monotonic() - begun >= 1
        assert len(server.seen) == 2


def test_refused_for_too_long_is_an_error_at_once(call: Caller) -> None:
    with recording(busy(3600)) as server, pytest.raises(errors.ForkdError, match="Busy"):
        call(server.url, "spawn_sandboxes", "warm")


def test_what_does_not_fit_is_an_error_at_once(call: Caller) -> None:
    with recording(busy(0, "no_capacity"), Reply(201, [])) as server:
        with pytest.raises(errors.NoCapacity, match="Busy"):
            call(server.url, "spawn_sandboxes", "warm")
        assert len(server.seen) == 1


def test_a_command_that_was_refused_for_now_is_not_sent_again(call: Caller) -> None:
    with recording(busy(0)) as server:
        with pytest.raises(errors.ForkdError, match="Busy"):
            call(server.url, "exec_command", "sb-1", ["true"])
        assert len(server.seen) == 1


def test_where_nobody_listens_nothing_was_sent(call: Caller) -> None:
    with pytest.raises(errors.Unreachable, match="nothing was sent") as caught:
        call(f"http://127.0.0.1:{find_free_port()}", "exec_command", "sb-1", ["true"])
    assert "forkd up" in (caught.value.hint or "")


def test_a_socket_that_is_not_there_is_unreachable(call: Caller) -> None:
    with pytest.raises(errors.Unreachable, match=r"unix:///nonexistent/forkd\.sock"):
        call("unix:///nonexistent/forkd.sock", "version")
    assert call("unix:///nonexistent/forkd.sock", "healthy") is False


def test_health_is_one_question(call: Caller) -> None:
    with recording(
        Drop(), Reply(503, {"error": "Recovering"}, {"Retry-After": "0"}), Reply(200, {"ok": True})
    ) as server:
        assert call(server.url, "healthy") is False
        assert call(server.url, "ready") is False
        assert call(server.url, "healthy") is True
        assert len(server.seen) == 3


def test_an_answer_that_never_comes_is_not_waited_for(call: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(errors.Unreachable, match="did not answer in time"):
            call(url, "get_sandbox", "sb-1", timeout=0.2)


def test_what_is_no_daemon_is_said_to_be_none(call: Caller) -> None:
    with recording(Reply(200, b"<html>hello</html>"), Reply(502, b"<html>bad gateway</html>")) as server:
        with pytest.raises(errors.Unreachable, match="not a forkd daemon"):
            call(server.url, "version")
        with pytest.raises(errors.ForkdError, match="502") as caught:
            call(server.url, "version")
    assert caught.value.status == 502 and caught.value.body == "<html>bad gateway</html>"


def test_pages_are_followed_to_the_last(call: Caller) -> None:
    with recording(Reply(200, [1, 2], {"X-Next-Token": "2"}), Reply(200, [3])) as server:
        assert call(server.url, "list_sandboxes", labels={"a": "b=c"}, state="running") == [1, 2, 3]
        assert server.seen[0].target == "/v1/sandboxes?state=running&label=a%3Db%3Dc&limit=1000"
        assert server.seen[1].target.endswith("&limit=1000&page_token=2")


def test_a_server_that_turns_in_circles_is_left(call: Caller) -> None:
    with recording(*[Reply(200, [], {"X-Next-Token": "2"})] * 5) as server:
        with pytest.raises(errors.Unreachable, match="same page"):
            call(server.url, "list_sandboxes")


def test_output_comes_as_events_however_it_is_cut(call: Caller) -> None:
    data = b64encode("grüße".encode()).decode()
    text = (
        f'event: start\ndata: {{"pid": 7}}\n\n: still here\n\nevent: stdout\ndata: {{"data": "{data}"}}\n\n'
        'event: novelty\ndata: {}\n\nevent: exit\ndata: {"exit_code": 0, "signal": null, "timed_out": false}\n\n'
    ).encode()
    with recording(Pieces(tuple(text[at : at + 3] for at in range(0, len(text), 3)))) as server:
        events = call(server.url, "exec_stream", "sb-1", ["x"])
    assert [(event.kind, event.data) for event in events] == [
        ("start", b""),
        ("stdout", "grüße".encode()),
        ("exit", b""),
    ]
    assert events[0].body == {"pid": 7} and events[2].body["exit_code"] == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_stream_without_its_end_is_an_error(call: Caller, whole: bool) -> None:
    with recording(Pieces((b'event: start\ndata: {"pid": 7}\n\n',), whole)) as server:
        with pytest.raises(errors.Unreachable, match="unknown"):
            call(server.url, "exec_stream", "sb-1", ["x"])


def test_an_error_in_a_stream_is_raised(call: Caller) -> None:
    body = b'{"error": "Gone", "code": "guest_died", "hint": "h"}'
    with recording(Pieces((b"event: error\ndata: " + body + b"\n\n",))) as server:
        with pytest.raises(errors.GuestDied, match="Gone") as caught:
            call(server.url, "process_output", "sb-1", 7)
    assert caught.value.hint == "h"


def test_an_error_instead_of_a_stream_is_raised(call: Caller) -> None:
    with recording(NOT_FOUND) as server, pytest.raises(errors.NotFound):
        call(server.url, "exec_stream", "sb-1", ["x"])


@pytest.mark.parametrize("bad", [b"data: nonsense\n\n", b'event: stdout\ndata: {"data": "?"}\n\n', b"data: []\n\n"])
def test_nonsense_in_a_stream_is_an_error(call: Caller, bad: bytes) -> None:
    with recording(Pieces((bad,))) as server, pytest.raises(errors.Unreachable):
        call(server.url, "exec_stream", "sb-1", ["x"])


def test_events_follow_until_the_daemon_ends_them(call: Caller) -> None:
    line = b'id: 4\nevent: sandbox.created\ndata: {"id": 4, "type": "sandbox.created"}\n\n'
    with recording(Pieces((line,))) as server:
        with pytest.raises(errors.Unreachable):
            call(server.url, "events", since=3)
        assert server.seen[0].target == "/v1/events?follow=true&since=3"


def test_a_download_that_breaks_off_is_an_error_and_a_whole_read_is_made_again(call: Caller) -> None:
    with recording(Pieces((b"abc",), False), Pieces((b"abc",), False), Pieces((b"abc", b"def"))) as server:
        with pytest.raises(errors.Unreachable):
            call(server.url, "read_file_stream", "sb-1", "/f")
        assert call(server.url, "read_file", "sb-1", "/f") == b"abcdef"
        assert len(server.seen) == 3


def test_bytes_are_sent_again_and_an_iterator_is_not(call: Caller) -> None:
    done = Reply(200, {"path": "/f", "size": 6})
    with recording(Drop(), done, Drop()) as server:
        assert call(server.url, "write_file", "sb-1", "/f", b"abcdef", 0o600) == {"path": "/f", "size": 6}
        with pytest.raises(errors.Unreachable):
            call(server.url, "write_file", "sb-1", "/f", iter([b"abc", b"def"]), "644", True)
        assert [seen.body for seen in server.seen] == [b"abcdef"] * 3
        assert server.seen[1].target.endswith("/files?path=%2Ff&mode=600")
        assert server.seen[2].target.endswith("/files?path=%2Ff&mode=644&append=true")
