"""A real agent in a process of its own, laid out as in a guest, rehearsing over a socket pair."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support_processes import find_processes

from forkd.guest.agent import Agent

_EXIT_S = 10.0


class Guest:
    """One agent process and our end of its stream."""

    def __init__(self, lib: Path, root: Path, python: str = sys.executable) -> None:
        self.root = root
        self._mark = f"FORKD_TEST_MARK={uuid.uuid4().hex}"
        self.sock, theirs = socket.socketpair()
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [python, "-m", "forkd.agent.main", "--fd", str(theirs.fileno()), "--root", str(root)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(lib), name: value, "HOME": str(root)},
            stderr=subprocess.PIPE,
        )
        theirs.close()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Agent]:
        agent = await Agent.connect(self.sock.dup())
        try:
            yield agent
        finally:
            agent.close()

    def end(self) -> str:
        """Hang up; the agent's complaints. Nothing of it may be left."""
        self.sock.close()
        try:
            _, stderr = self.process.communicate(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, stderr = self.process.communicate()
            pytest.fail(f"The agent did not end with its stream:\n{stderr.decode()}")
        leftovers = self._wait_for_leftovers()
        for pid in leftovers:
            os.kill(pid, signal.SIGKILL)
        assert leftovers == []
        return stderr.decode()

    def _wait_for_leftovers(self) -> list[int]:
        deadline = time.monotonic() + 2
        while (found := find_processes(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found
