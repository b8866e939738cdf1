"""Takes the host's requests and passes each to the part that answers it; keeps sessions and streams."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import time

from forkd.agent import files
from forkd.agent.become import Becoming
from forkd.agent.command import Command
from forkd.agent.evaluator import FROZEN
from forkd.agent.files import Reading, Writing
from forkd.agent.interpreter import Interpreter, Job
from forkd.agent.loop import complain
from forkd.agent.stream import Refused
from forkd.wire.agent import (
    BECOME,
    CALL,
    CANCEL,
    CLOCK,
    CONTROL,
    DATA,
    END,
    EVAL,
    EXEC,
    FAIL,
    FREEZE,
    HELLO,
    MAX_STREAMS,
    MORE,
    PROTOCOL_VERSION,
    REPLY,
    WINDOW,
    WINDOW_BYTES,
    Joiner,
    WireError,
    decode_clock,
    decode_json,
    decode_window,
    encode_json,
    encode_message,
    unpack_timeout_ms,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    from forkd.agent.loop import Loop
    from forkd.agent.platform import Platform
    from forkd.agent.port import Port
    from forkd.agent.stream import Stream
    from forkd.wire.agent import Frames

AGENT_VERSION = "1"
_FREEZE_WAIT_S = 60.0
_GREETINGS = (HELLO, BECOME)

_CODES = {
    errno.ENOENT: "not_found",
    errno.EEXIST: "exists",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.EISDIR: "is_dir",
    errno.ENOTDIR: "not_dir",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.ENOTEMPTY: "not_empty",
    errno.EINVAL: "invalid",
    errno.ENAMETOOLONG: "invalid",
    errno.ELOOP: "invalid",
}


class Server:
    def __init__(self, loop: Loop, port: Port, platform: Platform, env: Dict[str, str]) -> None:
        self._loop = loop
        self._port = port
        self._platform = platform
        self._env = env
        self._session = ""
        self._left = False  # the client has, and the next one has not greeted us yet
        self._streams: Dict[int, Stream] = {}
        self._joiner = Joiner()
        self._started = time.monotonic()
        self._requests = {
            HELLO: self._on_hello,
            EVAL: self._on_eval,
            CALL: self._on_call,
            EXEC: self._on_exec,
            BECOME: self._on_become,
            DATA: self._on_data,
            WINDOW: self._on_window,
            END: self._on_end,
            CONTROL: self._on_control,
            CANCEL: self._on_cancel,
            CLOCK: self._on_clock,
        }
        self._calls: Dict[str, Callable[[int, Dict[str, Any]], None]] = {
            "ping": self._ping,
            "prepare_freeze": self._prepare_freeze,
            "set_clock": self._set_clock,
            "set_network": self._set_network,
            "read": self._read_file,
            "write": self._write_file,
        }
        self._interpreter = Interpreter(loop, port, env)
        port.on_frames = self._on_frames
        port.on_hangup = self._on_hangup

    def stop(self) -> None:
        self._end_session(detach=False)
        self._interpreter.stop()

    # Frames

    def _on_frames(self, frames: Frames) -> None:
        for kind, flags, stream, payload in frames:
            if self._left:
                if kind not in _GREETINGS:
                    continue  # of the client before: the next one must not get the answers
                self._left = False
            try:
                if flags & MORE or self._joiner.active:
                    whole = self._joiner.join(kind, flags, stream, payload)
                    if whole is None:
                        continue
                    payload = whole
                handler = self._requests.get(kind)
                if handler is not None:
                    handler(stream, payload)
            except Exception as error:
                self._give_up(stream, error)

    def _give_up(self, stream: int, error: Exception) -> None:
        self._on_cancel(stream, b"")
        if isinstance(error, OSError):
            error = refusal(error)
        elif isinstance(error, WireError):
            error = Refused("invalid", str(error))
        elif not isinstance(error, Refused):
            complain(error)
            error = Refused("invalid", "The request cannot be understood")
        self._fail(stream, error)

    def _on_hello(self, stream: int, payload: bytes) -> None:
        session = decode_json(payload).get("session")
        if not isinstance(session, str) or not session:
            raise WireError("A hello needs a session")
        if session != self._session:
            self._end_session(detach=False)
            self._session = session
        self._reply(stream, dict(self._describe(), session=session), HELLO)

    def _on_eval(self, stream: int, payload: bytes) -> None:
        timeout_ms = unpack_timeout_ms(payload)
        deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else 0.0

        def done(flags: int, answer: bytes) -> None:
            self._streams.pop(stream, None)
            self._port.send(encode_message(REPLY, stream, answer, flags))

        job = Job(self._interpreter, EVAL, stream, payload, deadline, done)
        self._open(stream, job)
        if not self._interpreter.submit(job):
            del self._streams[stream]
            raise Refused("busy", "Too many evaluations are waiting")

    def _on_call(self, stream: int, payload: bytes) -> None:
        request = decode_json(payload)
        name = request.get("op")
        if not isinstance(name, str):
            raise WireError("A call needs an operation")
        operation = files.OPERATIONS.get(name)
        if operation is not None:
            self._reply(stream, operation(request))
            return
        call = self._calls.get(name)
        if call is None:
            raise Refused("invalid", "Unknown operation")
        call(stream, request)

    def _on_exec(self, stream: int, payload: bytes) -> None:
        request = decode_json(payload)
        if request.get("archive") == "changes":
            request["facts"] = self._platform.describe()
        self._check_free(stream)
        self._streams[stream] = Command(stream, request, self._loop, self._port, self._env, self._close)

    def _on_become(self, stream: int, payload: bytes) -> None:
        becoming = Becoming(
            stream,
            payload,
            self._loop,
            self._port,
            self._platform,
            self._interpreter,
            self._env,
            self._close,
        )
        self._platform.begin()
        self._end_session(detach=True)
        self._session = becoming.session
        self._open(stream, becoming)
        becoming.start()

    # Inside streams. A stream we do not know has just ended: the host may not have noticed yet.

    def _on_data(self, stream: int, payload: bytes) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.on_data(payload)

    def _on_end(self, stream: int, _payload: bytes) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.on_end()

    def _on_window(self, stream: int, payload: bytes) -> None:
        found = self._streams.get(stream)
        grant = decode_window(payload)
        if found is not None:
            if found.credit + grant > WINDOW_BYTES:
                raise WireError("A window was opened too wide")
            found.on_window(grant)

    def _on_control(self, stream: int, payload: bytes) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.on_control(decode_json(payload))

    def _on_cancel(self, stream: int, _payload: bytes) -> None:
        found = self._streams.pop(stream, None)
        if found is not None:
            found.on_cancel()

    def _on_clock(self, stream: int, payload: bytes) -> None:
        found = self._streams.get(stream)
        if found is not None:
            found.on_clock(decode_clock(payload))

    # Sessions and streams

    def _on_hangup(self) -> None:
        self._session = ""
        self._left = True
        self._joiner.reset()
        self._end_session(detach=False)

    def _end_session(self, detach: bool) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            if detach:
                stream.on_detach()
            else:
                stream.on_cancel()

    def _open(self, number: int, stream: Stream) -> None:
        self._check_free(number)
        self._streams[number] = stream

    def _check_free(self, number: int) -> None:
        if number in self._streams:
            raise WireError("A stream was opened twice")
        if len(self._streams) >= MAX_STREAMS:
            raise Refused("too_many", "More than %d streams are open" % MAX_STREAMS)

    def _close(self, number: int) -> None:
        self._streams.pop(number, None)

    def _reply(self, stream: int, answer: Dict[str, Any], kind: int = REPLY) -> None:
        self._port.send(encode_json(kind, stream, answer))

    def _fail(self, stream: int, error: Refused) -> None:
        answer: Dict[str, Any] = {"code": error.code, "message": str(error)}
        if error.errno_name is not None:
            answer["errno"] = error.errno_name
        self._port.send(encode_message(FAIL, stream, json.dumps(answer).encode()))

    # Calls

    def _ping(self, stream: int, _request: Dict[str, Any]) -> None:
        self._reply(stream, self._describe())

    def _set_clock(self, stream: int, request: Dict[str, Any]) -> None:
        """After a pause, during which our clock stood still."""
        unix_ns = request.get("unix_ns")
        if type(unix_ns) is not int or not 0 < unix_ns < 1 << 63:
            raise Refused("invalid", "unix_ns must be between 1 and 2**63 - 1")
        self._reply(stream, {"realtime_ns": self._platform.set_clock(unix_ns)})

    def _set_network(self, stream: int, request: Dict[str, Any]) -> None:
        wanted = request.get("up")
        if type(wanted) is not bool:
            raise Refused("invalid", "up must be true or false")
        up, address, reset = self._platform.set_network(wanted)
        self._reply(stream, {"up": up, "address": address or None, "reset": reset})

    def _describe(self) -> Dict[str, Any]:
        return {
            "agent": AGENT_VERSION,
            "protocol": PROTOCOL_VERSION,
            "python": "%d.%d.%d" % sys.version_info[:3],
            "pid": os.getpid(),
            "interpreter_pid": self._interpreter.pid,
            "uptime_s": time.monotonic() - self._started,
            "realtime_ns": time.time_ns(),
            "streams": len(self._streams),
        }

    def _read_file(self, stream: int, request: Dict[str, Any]) -> None:
        self._check_free(stream)
        reading = Reading(stream, request, self._loop, self._port, self._close, self._give_up)
        self._streams[stream] = reading
        reading.start()

    def _write_file(self, stream: int, request: Dict[str, Any]) -> None:
        self._check_free(stream)
        self._streams[stream] = Writing(stream, request, self._port, self._close)

    def _prepare_freeze(self, stream: int, _request: Dict[str, Any]) -> None:
        """Answers when the interpreter is idle and what a fork needs first is prepared."""

        def done(_flags: int, answer: bytes) -> None:
            self._close(stream)
            if answer != FROZEN:
                self._fail(stream, Refused("busy", "The interpreter did not become quiet"))
                return
            self._platform.sync()
            self._platform.prepare()
            gc.collect()
            gc.freeze()
            self._reply(stream, {"ok": True, "streams": len(self._streams)})

        deadline = time.monotonic() + _FREEZE_WAIT_S
        job = Job(self._interpreter, FREEZE, stream, b"", deadline, done)
        self._open(stream, job)
        if not self._interpreter.submit(job):
            self._close(stream)
            raise Refused("busy", "Too many evaluations are waiting")


def refusal(error: OSError) -> Refused:
    number = error.errno or 0
    message = error.strerror or str(error)
    return Refused(_CODES.get(number, "io"), message, errno.errorcode.get(number))
