"""Guests that answer garbage, or never: an error within a bound, the daemon unharmed, the sandbox removable."""

import os
import signal
import time
from collections.abc import Callable

import pytest
from support_client import Client

# Takes the agent's own end of the channel from it, and speaks in its place.
GARBAGE = """
import ctypes, os, socket
libc, agent = ctypes.CDLL(None, use_errno=True), os.getppid()
pidfd = os.pidfd_open(agent)
for name in os.listdir(f"/proc/{agent}/fd"):
    if os.readlink(f"/proc/{agent}/fd/{name}").startswith("socket:"):
        taken = libc.syscall(438, pidfd, int(name), 0)  # pidfd_getfd
        with socket.socket(fileno=taken) as sock:
            try:
                sock.getpeername()
                sock.send(b"\\xff garbage" * 1000)
            except OSError:
                pass
import time
time.sleep(30)
"""


def pid_of(client: Client, path: str) -> int:
    pid: int = client.get(path).body["pid"]
    return pid


def test_a_guest_that_sends_garbage_costs_itself_its_channel_and_gets_another(
    client: Client, spawn: Callable[..., str]
) -> None:
    path = spawn()
    begun = time.monotonic()
    answer = client.post(f"{path}/eval", {"code": GARBAGE, "timeout_secs": 60})
    assert answer.error == (502, "protocol_error"), answer.content
    assert time.monotonic() - begun < 20
    # The evaluation was that channel's, and ends with it; the sandbox answers again.
    again = client.post(f"{path}/eval", {"code": "past + 1"})
    assert again.status == 200 and again.body["result"] == "42", again.content


@pytest.mark.parametrize(
    ("route", "body", "within_s"),
    [("ping", None, 15), ("eval", {"code": "1", "timeout_secs": 1}, 15)],
)
def test_a_guest_that_never_answers_is_given_up_in_time(
    client: Client, spawn: Callable[..., str], route: str, body: object, within_s: float
) -> None:
    path = spawn()
    os.kill(pid_of(client, path), signal.SIGSTOP)
    begun = time.monotonic()
    answer = client.post(f"{path}/{route}", body)
    assert answer.error == (504, "guest_timeout"), answer.content
    assert answer.body["error"] and time.monotonic() - begun < within_s
    assert client.get("/healthz").status == 200
    assert client.delete(path).status == 204


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("eval", {"code": "import os, time; os.kill(os.getppid(), 9); time.sleep(30)"}),
        ("exec", {"shell": "kill -9 $PPID; sleep 20"}),
    ],
)
def test_a_guest_that_dies_during_a_call_is_told_about_and_stays_dead(
    client: Client, spawn: Callable[..., str], route: str, body: object
) -> None:
    path = spawn()
    answer = client.post(f"{path}/{route}", body)
    assert answer.error == (502, "guest_died"), answer.content
    assert client.post(f"{path}/eval", {"code": "1"}).error == (409, "guest_died")
    info = client.get(path).body
    assert (info["state"], info["pid"]) == ("dead", None) and info["cause"]
    assert client.get(f"{path}/console").status == 200
    assert client.delete(path).status == 204
    assert client.delete(path).status == 404
