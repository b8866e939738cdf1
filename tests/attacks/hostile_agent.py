"""Runs as a command in a guest of the fake engine: stops the agent, takes its channel, and answers in its place.

hostile_agent.py ATTACK READY     one of ATTACKS: what it sends to whoever starts a command; READY is made first
"""

import ctypes
import itertools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

from forkd.wire.agent import (
    DATA,
    EXEC,
    MORE,
    REPLY,
    STARTED,
    STDERR,
    STDOUT,
    WINDOW_BYTES,
    Parser,
    encode,
    encode_json,
    encode_window,
)

BATCH = 2000
LIFE_S = 300.0
PIDFD_GETFD = 438
STARTED_AS = {"pid": 4242}

# What is sent to the stream of a command, over and over: one batch of it.
ATTACKS: dict[str, Callable[[int], bytes]] = {
    "empty data": lambda stream: encode(DATA, stream, b"", STDOUT) * BATCH,
    "empty grants": lambda stream: encode_window(stream, 0) * BATCH,
    "single bytes": lambda stream: (encode(DATA, stream, b"x", STDOUT) + encode(DATA, stream, b"y", STDERR)) * BATCH,
    "split forever": lambda stream: encode(REPLY, stream, b"", MORE) * BATCH,
    "for nobody": lambda stream: encode(DATA, stream ^ (1 << 31), b"", STDOUT) * BATCH,
    "looks like frames": lambda stream: b"\xf0\x6b" * 10 * BATCH,
}
ALLOWED = "single bytes"  # as many as fit the window
WINDOW_BATCHES = WINDOW_BYTES // (2 * BATCH)


def main() -> None:
    name, ready = sys.argv[1:]
    agent = os.getppid()
    os.kill(agent, signal.SIGSTOP)
    with take_channel(agent) as channel:
        open(ready, "x").close()
        serve(channel, ATTACKS[name], WINDOW_BATCHES if name == ALLOWED else None)


def take_channel(agent: int) -> socket.socket:
    """The one socket of the agent that has a peer."""
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(agent)
    for name in os.listdir(f"/proc/{agent}/fd"):
        if os.readlink(f"/proc/{agent}/fd/{name}").startswith("socket:"):
            taken = socket.socket(fileno=libc.syscall(PIDFD_GETFD, pidfd, int(name), 0))
            try:
                taken.getpeername()
                return taken
            except OSError:
                taken.close()
    raise SystemExit("the agent has no channel")


def serve(channel: socket.socket, attack: Callable[[int], bytes], batches: int | None) -> None:
    """Each command is started, and gets so many batches; None: without end."""
    channel.setblocking(True)  # the agent, which shares it, had it otherwise
    parser = Parser()
    attacks: list[Iterator[bytes]] = []
    ends_at = time.monotonic() + LIFE_S
    while time.monotonic() < ends_at:
        if select.select([channel], [], [], 0 if attacks else 1.0)[0]:
            data = channel.recv(65536)
            if not data:
                return
            for kind, _, stream, _ in parser.feed(data):
                if kind == EXEC:
                    channel.sendall(encode_json(STARTED, stream, STARTED_AS))
                    attacks.append(itertools.repeat(attack(stream), *[] if batches is None else [batches]))
        for each in list(attacks):
            if batch := next(each, None):
                channel.sendall(batch)
            else:
                attacks.remove(each)


if __name__ == "__main__":
    main()
