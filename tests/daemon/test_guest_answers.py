"""What the routes of a guest answer: keys, output of any size, and errors that name what they are about."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support_client import JSON, Client
from support_mounts import as_root, small_disk

from forkd.client.controller import Controller
from forkd.daemon.render import render_eval, render_exec
from forkd.errors import GuestFull
from forkd.guest.results import CommandResult, EvalResult
from forkd.wire.agent import MAX_STREAMS
from forkd.wire.api import EvalResponse, ExecResponse, required_keys


def test_what_is_rendered_in_pieces_has_the_keys_of_its_answer() -> None:
    command = CommandResult(1, 0, None, False, b"", b"", False)
    assert list(render_exec(command)) == list(required_keys(ExecResponse))
    evaluation = EvalResult("1", False, True, 1, None, b"", b"", False, False, False, None, None)
    assert list(render_eval(evaluation)) == list(required_keys(EvalResponse))


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
def test_output_of_any_size_comes_whole(client: Client, sandbox: str, size: int) -> None:
    answer = client.post(f"{sandbox}/exec", {"shell": f"head -c {size} /dev/zero; echo why >&2"})
    assert answer.body == {"stdout": "\0" * size, "stderr": "why\n", "exit_code": 0, "truncated": False}
    # Few clients know an answer without a length, so a small one has it.
    assert ("Content-Length" in answer.headers) is (size < 10_000)
    code = f"import sys; sys.stdout.write('é' * {size}); {size}"
    answer = client.post(f"{sandbox}/eval", {"code": code})
    assert (answer.body["stdout"], answer.body["value"]) == ("é" * size, size)
    events = list(client.stream("POST", f"{sandbox}/eval/stream", {"code": code}))
    assert events[-1].kind == "result" and events[-1].data["stdout"] == "é" * size


def test_a_client_that_closed_its_writing_side_gets_all_of_a_large_answer(client: Client, sandbox: str) -> None:
    body = json.dumps({"shell": "head -c 3000000 /dev/zero"}).encode()
    head = f"POST {sandbox}/exec HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = client.exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, half_close=True)
    assert answer.status == 200 and answer.content.count(b"\\u0000") > 2_990_000
    assert answer.content.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("size", [5, 200_000])
def test_a_command_that_ran_out_of_time_leaves_its_output_so_far(client: Client, sandbox: str, size: int) -> None:
    command = f"head -c {size} /dev/zero; echo why >&2; sleep 60"
    answer = client.post(f"{sandbox}/exec", {"shell": command, "timeout_secs": 1})
    assert answer.error == (504, "guest_timeout")
    assert answer.body["error"] and answer.body["hint"]
    assert (answer.body["stdout"], answer.body["stderr"]) == ("\0" * size, "why\n")
    assert (answer.body["timed_out"], answer.body["truncated"]) == (True, False)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("exec", {"shell": "\U0001f600" * 200_000}),
        ("exec/stream", {"args": ["echo", "\U0001f600" * 200_000]}),
        ("processes", {"shell": "\U0001f600" * 200_000}),
    ],
)
def test_commands_too_large_for_the_guest_say_so_and_take_no_place_in_it(
    client: Client, spawn: Callable[..., str], route: str, body: object
) -> None:
    path = spawn()
    # As it is sent to the guest, a character takes up to 12 bytes.
    data = json.dumps(body, ensure_ascii=False).encode()
    for _ in range(MAX_STREAMS + 1):
        answer = client.post(f"{path}/{route}", data=data, headers=JSON)
        assert answer.error == (400, "invalid_input"), answer.content
        assert "may have 2097152" in answer.body["error"] and "file" in answer.body["hint"]
    assert client.post(f"{path}/exec", {"args": ["true"]}).status == 200


def test_a_command_with_too_many_arguments_is_told_how_many_there_may_be(client: Client, sandbox: str) -> None:
    answer = client.post(f"{sandbox}/exec", {"args": ["echo"] * 5000})
    assert answer.error == (400, "invalid_input")
    assert answer.body["error"] == "The command has 5000 arguments, and may have 4096"


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("GET", "files?path={}/x", None, 404),
        ("DELETE", "files?path={}/x", None, 404),
        ("GET", "files/stat?path={}/x", None, 404),
        ("GET", "files/list?path={}/x", None, 404),
        ("POST", "files/mkdir", {"path": "{}/x/y", "parents": False}, 404),
        ("POST", "files/rename", {"path": "{}/x", "to": "{}/y"}, 404),
        ("GET", "files?path={}", None, 400),
        ("PUT", "files?path={}", None, 400),
    ],
)
def test_an_error_about_a_file_names_it(
    client: Client, sandbox: str, tmp_path: Path, method: str, route: str, body: dict[str, object] | None, status: int
) -> None:
    sent = None if body is None else {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in body.items()}
    answer = client.ask(method, f"{sandbox}/{route.format(tmp_path)}", sent)
    assert answer.status == status, answer.content
    expected = "No such file or directory: " if status == 404 else "Is a directory: "
    assert answer.body["error"].startswith(f"{expected}{tmp_path}")


def test_a_name_that_a_terminal_would_act_on_is_shown_and_not_sent_to_it(client: Client, sandbox: str) -> None:
    answer = client.get(f"{sandbox}/files/stat?path=/%1b%5b2J/{'long' * 200}")
    assert answer.body["error"].startswith("No such file or directory: /\\x1b[2J/long")
    assert answer.body["error"].endswith("...")


@as_root
def test_a_full_guest_refuses_a_file_before_all_of_it_is_sent(client: Client, sandbox: str, tmp_path: Path) -> None:
    size, sent = 64 << 30, 0  # more than a daemon takes in the second it lets a client finish
    with small_disk(tmp_path / "guest", "2m") as guest, closing(client.connection()) as connection:
        connection.putrequest("PUT", f"{sandbox}/files?path={guest}/large")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < size:
                connection.send(bytes(1024 * 1024))
                sent += 1024 * 1024
        answer = connection.getresponse()
        body = json.loads(answer.read())
        assert list(guest.iterdir()) == [], "nothing is left of it"
    assert sent < size
    assert (answer.status, body["code"]) == (409, "no_space")
    assert body["error"] == f"The guest's disk is full: {guest}/large" and "memory" in body["hint"]


@as_root
def test_a_client_that_writes_into_a_full_guest_is_told_so(places: list[str], sandbox: str, tmp_path: Path) -> None:
    def content() -> Iterator[bytes]:
        for _ in range(200):
            yield bytes(1024 * 1024)

    with small_disk(tmp_path / "guest", "2m") as guest, Controller(places[0]) as controller:
        with pytest.raises(GuestFull, match="disk is full"):
            controller.write_file(sandbox.rpartition("/")[2], f"{guest}/large", content())
