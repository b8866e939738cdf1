"""The host's view of one guest's agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from forkd.errors import GuestTimeout, InvalidInput, ProtocolError
from forkd.guest.archive import ArchiveCalls
from forkd.guest.changes import ChangeCalls
from forkd.guest.channel import Channel
from forkd.guest.exchange import CALL_S, Exchange, get_int, get_text, parse_object
from forkd.guest.files import FileCalls
from forkd.guest.process import Process, render_exec
from forkd.guest.results import (
    AgentInfo,
    Collected,
    CommandResult,
    EvalResult,
    output_kind,
    parse_eval,
    parse_info,
)
from forkd.wire.agent import (
    EVAL,
    HELLO,
    PROTOCOL_VERSION,
    STDOUT,
    encode_json,
    pack_eval,
    padding,
)
from forkd.wire.forkd_agent import NOT_INSTALLED

MAX_CODE_BYTES = 1024 * 1024
DEFAULT_EVAL_S = 60.0
DEFAULT_RUN_S = 300.0
DEFAULT_OUTPUT_BYTES = 8 * 1024 * 1024
CONNECT_S = 30.0
FREEZE_S = 90.0
CLOCK_TOLERANCE_NS = 1_000_000_000
_HELLO_RETRY_S = 1.0
_MAX_TIMEOUT_S = 7 * 24 * 3600.0
# Beyond a deadline the agent keeps itself: SIGINT, its grace, SIGKILL, draining, and a busy host.
_GUEST_GRACE_S = 10.0

UNKNOWN = "unknown"
ASK_NUMPY_S = 2.0
# Without importing it: that can take seconds, and would be ours, not the user's.
_NUMPY_CODE = f"""\
__import__('sys').modules['numpy'].__version__ if 'numpy' in __import__('sys').modules else next(
    (name[6:].rpartition('.')[0]
     for entry in __import__('sys').path if __import__('os').path.isdir(entry)
     for name in __import__('os').listdir(entry)
     if name.startswith('numpy-') and name.endswith(('.dist-info', '.egg-info'))),
    {NOT_INSTALLED!r})"""

OnOutput = Callable[[str, bytes], None]


class Agent(FileCalls, ArchiveCalls, ChangeCalls):
    """Calls to the agent over one channel. Any number of them at a time; all fail when the channel is lost."""

    def __init__(self, channel: Channel, session: str) -> None:
        super().__init__(channel)
        self.session = session
        self._numpy_version: str | None = None

    @classmethod
    def attach(cls, sock: socket.socket) -> Agent:
        """Without a word on the wire: what a fork needs, whose first exchange is `become`."""
        return cls(Channel(sock), secrets.token_hex(16))

    @classmethod
    async def connect(cls, sock: socket.socket, *, deadline_s: float = CONNECT_S) -> Agent:
        """Say hello, and wait for the agent to be there."""
        agent = cls.attach(sock)
        try:
            await agent.hello(deadline_s=deadline_s)
        except BaseException:
            agent.close()
            raise
        return agent

    async def hello(self, *, deadline_s: float = CONNECT_S) -> AgentInfo:
        """Take over from the client before: its commands are ended."""
        exchange = _Hello(self.channel, self.session, deadline_s)
        retry = asyncio.get_running_loop().call_later(min(_HELLO_RETRY_S, deadline_s / 2), exchange.again)
        try:
            answer = await exchange.answer_json()
        finally:
            retry.cancel()
        if get_text(answer, "session", 100) != self.session:
            raise ProtocolError("The guest answered the greeting of another session")
        info = parse_info(answer)
        if info.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"The guest's agent speaks version {info.protocol}, not {PROTOCOL_VERSION}")
        return info

    async def ping(self, *, deadline_s: float = CALL_S) -> AgentInfo:
        return parse_info(await self.call({"op": "ping"}, "answer a ping", deadline_s))

    async def set_clock(self, *, deadline_s: float = CALL_S) -> None:
        """Step the guest's wall clock to the host's: a paused guest's stands still."""
        answer = await self.call({"op": "set_clock", "unix_ns": time.time_ns()}, "set its clock", deadline_s)
        if abs(get_int(answer, "realtime_ns") - time.time_ns()) > CLOCK_TOLERANCE_NS:
            raise ProtocolError("The guest did not set its clock")

    async def set_network(self, up: bool, *, deadline_s: float = CALL_S) -> int:
        """Have the guest use its network, or not any more. How many connections that ended."""
        answer = await self.call({"op": "set_network", "up": up}, "change its network", deadline_s)
        if answer.get("up") is not up:
            raise ProtocolError("The guest did not change its network")
        return get_int(answer, "reset")

    async def prepare_freeze(self, *, deadline_s: float = FREEZE_S) -> None:
        """Returns when nothing of the agent's is under way and the VM may be frozen."""
        await self.call({"op": "prepare_freeze"}, "prepare for the freeze", deadline_s)

    async def eval(
        self,
        code: str,
        *,
        timeout_s: float = DEFAULT_EVAL_S,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: OnOutput | None = None,
    ) -> EvalResult:
        """Run `code` in the warmed interpreter. Its exceptions and its deadline are results, not errors."""
        source = code.encode("utf-8", "surrogatepass")
        if len(source) > MAX_CODE_BYTES:
            raise InvalidInput(
                f"The code is larger than {MAX_CODE_BYTES} bytes", hint="Write it to a file and import it"
            )
        payload = pack_eval(source, timeout_ms(timeout_s))
        exchange = _Eval(self.channel, payload, timeout_s + _GUEST_GRACE_S, max_output_bytes, on_output)
        flags, answer = await exchange.answer()
        return parse_eval(flags, answer, exchange.output)

    async def numpy_version(self) -> str:
        """As forkd's ping tells it. Asked for once; again when the guest's interpreter was too busy to say."""
        if self._numpy_version is None:
            with contextlib.suppress(GuestTimeout):
                version = (await self.eval(_NUMPY_CODE, timeout_s=ASK_NUMPY_S, max_output_bytes=0)).value
                if isinstance(version, str) and len(version) < 100:
                    self._numpy_version = version
        return self._numpy_version or UNKNOWN

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        pty: tuple[int, int] | None = None,
        stdin: bool = True,
        timeout_s: float | None = None,
    ) -> Process:
        """Start a command and return when it runs. A text is for the shell, a list is executed as it is."""
        limit_ms = None if timeout_s is None else timeout_ms(timeout_s)
        request = render_exec(command, cwd=cwd, env=env, user=user, pty=pty, stdin=stdin, timeout_ms=limit_ms)
        process = Process(self.channel, request, None if timeout_s is None else timeout_s + _GUEST_GRACE_S)
        await process.started()
        return process

    async def run(
        self,
        command: str | Sequence[str],
        *,
        input: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float = DEFAULT_RUN_S,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a command to its end. Its exit code and its deadline are results, not errors."""
        process = await self.start(command, cwd=cwd, env=env, user=user, stdin=input is not None, timeout_s=timeout_s)
        async with process, process.fed(input):
            return await process.wait(max_output_bytes=max_output_bytes)

    def close(self) -> None:
        self.channel.close()


class _Hello(Exchange):
    def __init__(self, channel: Channel, session: str, deadline_s: float) -> None:
        self._payload = {"session": session}
        payload = json.dumps(self._payload).encode()
        super().__init__(channel, "say hello", HELLO, payload, deadline_s)

    def again(self) -> None:
        """Perhaps the agent waits for the rest of a frame whose sender is gone: complete it. Once is enough."""
        if not self._answer.done() and not self._channel.closed:
            self._channel.send(padding() + encode_json(HELLO, self.number, self._payload))

    def on_other(self, kind: int, payload: bytes) -> None:
        if kind != HELLO:
            super().on_other(kind, payload)
        parse_object(payload)
        self._finish()
        self._settle((0, payload))


class _Eval(Exchange):
    def __init__(
        self, channel: Channel, payload: bytes, deadline_s: float, limit_bytes: int, on_output: OnOutput | None
    ) -> None:
        self.output = Collected(limit_bytes, channel.budget)
        self._on_output = on_output
        super().__init__(channel, "finish an evaluation", EVAL, payload, deadline_s)

    def on_data(self, flags: int, payload: bytes) -> None:
        self.output.add(flags, payload)
        self.acknowledge(len(payload))
        if self._on_output is not None:
            self._on_output("stdout" if output_kind(flags) == STDOUT else "stderr", payload)


def timeout_ms(timeout_s: float) -> int:
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout must be above 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, got {timeout_s:g}")
    return max(1, round(timeout_s * 1000))
