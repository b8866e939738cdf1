"""What the routes of a guest answer: keys, output of any size, and errors that name what they are about."""

import json
from collections.abc import Callable

import pytest
from support_client import JSON, Client

from forkd.daemon.render import render_eval, render_exec
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
