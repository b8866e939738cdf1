"""Names asked of the host's own resolvers, from the daemon's network."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import dns.flags

from forkd.network.answers import MAX_ANSWER_BYTES, Message, Question, parse_answer, render_upstream

TRY_DEADLINE_S = 2.0
ASK_DEADLINE_S = 5.0
# Of all sandboxes at one time, and of one: what it asks beyond that waits for its own turn, not for that of others.
MAX_ASKING, MAX_SHARE = 256, 8
_TELL_EVERY_S = 60.0
_PORT = 53

_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """No resolver answered."""


class Resolver:
    def __init__(self, servers: Sequence[str], port: int = _PORT) -> None:
        self._servers, self._port = tuple(servers), port
        self._turn = asyncio.Semaphore(MAX_ASKING)
        self._down = False  # as the log has it
        self._quiet_until = 0.0

    def make_share(self) -> asyncio.Semaphore:
        """For one sandbox."""
        return asyncio.Semaphore(MAX_SHARE)

    async def ask(self, question: Question, share: asyncio.Semaphore) -> Message:
        """Raises NoAnswer."""
        try:
            async with asyncio.timeout(ASK_DEADLINE_S), share, self._turn:
                answer = await self._ask_each(question)
        except TimeoutError:
            answer = None
        self._tell(answer is None, time.monotonic())
        if answer is None:
            raise NoAnswer
        return answer

    async def _ask_each(self, question: Question) -> Message | None:
        for server in self._servers:
            with contextlib.suppress(OSError):  # TimeoutError is one
                async with asyncio.timeout(TRY_DEADLINE_S):
                    answer = await self._ask_by_udp(server, question)
                    if answer.flags & dns.flags.TC:
                        answer = await self._ask_by_tcp(server, question)
                    return answer
        return None

    async def _ask_by_udp(self, server: str, question: Question) -> Message:
        loop, number = asyncio.get_running_loop(), secrets.randbelow(1 << 16)
        with socket.socket(_family(server), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            # Connected: only that server's packets come in, and the kernel chooses the port at random.
            await loop.sock_connect(sock, (server, self._port))
            await loop.sock_sendall(sock, render_upstream(question, number))
            while True:
                answer = parse_answer(await loop.sock_recv(sock, MAX_ANSWER_BYTES), number, question.name or "")
                if answer is not None:
                    return answer

    async def _ask_by_tcp(self, server: str, question: Question) -> Message:
        number = secrets.randbelow(1 << 16)
        reader, writer = await asyncio.open_connection(server, self._port)
        try:
            asked = render_upstream(question, number)
            writer.write(len(asked).to_bytes(2) + asked)
            size = int.from_bytes(await reader.readexactly(2))
            answer = parse_answer(await reader.readexactly(size), number, question.name or "")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError from error
        finally:
            writer.close()
        if answer is None:
            raise ConnectionResetError
        return answer

    def _tell(self, down: bool, now: float) -> None:
        """Seldom: a guest can ask for names whose servers answer or not, as it likes."""
        if down != self._down and now >= self._quiet_until:
            self._down, self._quiet_until = down, now + _TELL_EVERY_S
            servers = ", ".join(self._servers) or "none"
            _log.warning("DNS %s: resolvers %s", "does not answer" if down else "answers again", servers)


def find_resolvers(path: Path = Path("/etc/resolv.conf")) -> tuple[str, ...]:
    try:
        return parse_resolvers(path.read_text(errors="replace"))
    except OSError:
        return ()


def parse_resolvers(text: str) -> tuple[str, ...]:
    words = (line.split() for line in text.splitlines())
    found = [line[1] for line in words if len(line) >= 2 and line[0] == "nameserver"]
    return tuple(dict.fromkeys(server for server in found if _is_address(server.partition("%")[0])))


def _is_address(text: str) -> bool:
    try:
        socket.inet_pton(_family(text), text)
    except OSError:
        return False
    return True


def _family(server: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in server else socket.AF_INET
