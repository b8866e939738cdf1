"""forkd's guest protocol, by value: what its clients send, and which keys each answer has."""

import json
from typing import Any

import pytest

from forkd.errors import InvalidInput
from forkd.wire.forkd_agent import (
    Eval,
    Exec,
    Ping,
    parse_request,
    render_eval,
    render_exec,
    render_failure,
    render_pong,
)


def read(reply: bytes) -> dict[str, Any]:
    assert reply.endswith(b"\n")
    assert reply.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(reply)
    return answer


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b'{"action": "ping"}', Ping()),
        (b'{"action": "ping", "later": [1]}', Ping()),
        (b'{"action": "exec", "args": ["ls", "-l"], "timeout": 5}', Exec(["ls", "-l"], 5.0)),
        (b'{"action": "exec", "args": ["ls"], "timeout": 0.5}', Exec(["ls"], 0.5)),
        (b'{"action": "exec", "args": ["ls"]}', Exec(["ls"], 30.0)),
        (b'{"action": "exec", "args": ["ls"], "timeout": null}', Exec(["ls"], 30.0)),
        (b'{"action": "eval", "code": "1 +\\n 1"}\r', Eval("1 +\n 1")),
    ],
)
def test_what_the_sdk_sends_is_understood(line: bytes, wanted: object) -> None:
    assert parse_request(line) == wanted


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b"\xff\xfe",
        b"[]",
        b'"ping"',
        b"[" * 100_000,
        b"{}",
        b'{"action": 7}',
        b'{"action": "stream", "args": ["ls"]}',
        b'{"action": "exec"}',
        b'{"action": "exec", "args": []}',
        b'{"action": "exec", "args": "ls"}',
        b'{"action": "exec", "args": [1]}',
        b'{"action": "exec", "args": ["ls"], "timeout": 0}',
        b'{"action": "exec", "args": ["ls"], "timeout": -1}',
        b'{"action": "exec", "args": ["ls"], "timeout": true}',
        b'{"action": "exec", "args": ["ls"], "timeout": "5"}',
        b'{"action": "exec", "args": ["ls"], "timeout": NaN}',
        b'{"action": "exec", "args": ["ls"], "timeout": Infinity}',
        b'{"action": "exec", "args": ["ls"], "timeout": 1e99}',
        b'{"action": "eval"}',
        b'{"action": "eval", "code": ["1"]}',
    ],
)
def test_anything_else_is_refused_with_a_reason(line: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_request(line)


def test_a_pong_has_the_five_keys_clients_read() -> None:
    assert read(render_pong("2.1.0", 1)) == {
        "pong": True,
        "numpy_version": "2.1.0",
        "pid": 1,
        "agent_lang": "python",
        "warmup_ready": True,
    }


def test_an_exec_that_ran_has_no_error_key_whatever_its_exit_code() -> None:
    assert read(b"".join(render_exec(b"a\xff\n", b"", -9))) == {"stdout": "a\ufffd\n", "stderr": "", "exit_code": -9}
    assert read(b"".join(render_exec(b"", b"", 0, truncated=True)))["truncated"] is True


def test_an_eval_that_worked_has_no_error_key() -> None:
    assert read(render_eval("'\udc80\n'")) == {"result": "'\udc80\n'", "exit_code": 0}


def test_a_failure_has_no_stdout_key() -> None:
    reply = read(render_failure("ZeroDivisionError", "division by zero", "Traceback …"))
    assert reply == {"error": "ZeroDivisionError: division by zero", "traceback": "Traceback …", "exit_code": 1}
