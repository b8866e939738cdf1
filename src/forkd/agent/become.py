"""The fork contract, guest side: this fork takes a new identity, in one exchange, and shows what it did.

Every step leaves evidence under its name. The first that fails ends the exchange, and the host kills the fork.
"""

from __future__ import annotations

import json
import os
import signal
import time

from forkd.agent.fingerprint import fingerprint
from forkd.agent.interpreter import Job
from forkd.agent.spawn import NotStarted, Plan, spawn
from forkd.agent.stream import Stream
from forkd.wire.agent import (
    BECOME,
    CLOCK,
    FAILED,
    REPLY,
    TIMED_OUT,
    encode,
    encode_message,
    unpack_become,
    unpack_timeout_ms,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List

    from forkd.agent.interpreter import Interpreter
    from forkd.agent.loop import Loop, Timer
    from forkd.agent.platform import Platform
    from forkd.agent.port import Port
    from forkd.agent.stream import Done

_CLOCK_WAIT_S = 10.0
# An answer that took longer says too little about the time: half of that may be wrong. The host answers four times.
_SLOW_NS = 500_000_000
_MOST_QUESTIONS = 3
_MAX_SCRIPTS = 64


class Becoming(Stream):
    def __init__(
        self,
        number: int,
        payload: bytes,
        loop: Loop,
        port: Port,
        platform: Platform,
        interpreter: Interpreter,
        env: Dict[str, str],
        on_done: Done,
    ) -> None:
        super().__init__(number)
        self._fields, self._new_env, self._network = unpack_become(payload)
        self._payload = payload
        self._loop = loop
        self._port = port
        self._platform = platform
        self._interpreter = interpreter
        self._env = env
        self._on_done = on_done
        self._steps: List[str] = []
        self._step = "entropy"
        self._deadline = time.monotonic() + unpack_timeout_ms(payload) * 0.001
        self._scripts: List[str] = []
        self._script_pid = 0
        self._timer: Timer | None = None
        self._asked_ns = 0
        self._questions = 0
        self._hostname = ""  # as read back
        self._machine_id = ""

    @property
    def session(self) -> str:
        return self._fields[0]

    def start(self) -> None:
        platform = self._platform
        _, _, hostname, machine_id, entropy, _ = self._fields
        try:
            platform.add_entropy(bytes.fromhex(entropy))
            self._passed('"bits":%d' % (len(entropy) * 4))
            self._step = "hostname"
            self._hostname = platform.set_hostname(hostname)
            self._passed('"value":"%s"' % self._hostname)
            self._step = "machine_id"
            self._machine_id = platform.set_machine_id(machine_id)
            self._passed('"value":"%s"' % self._machine_id)
        except (OSError, ValueError) as error:
            self._failed(str(error))
            return
        self._step = "environment"
        for item in self._new_env:
            name, _, value = item.partition("=")
            self._env[name] = value
        self._passed('"count":%d' % len(self._new_env))
        self._step = "network"
        try:
            self._passed(render_network(*platform.set_network(self._network, forked=True)))
        except OSError as error:
            self._failed(str(error))
            return
        self._step = "interpreter"
        job = Job(self._interpreter, BECOME, self.number, self._payload, self._deadline, self._on_interpreter)
        if not self._interpreter.submit(job):
            self._failed("too many jobs are queued")

    def on_clock(self, unix_ns: int) -> None:
        if self._step != "clock":
            return
        now = time.monotonic_ns()
        rtt_ns = now - self._asked_ns
        if rtt_ns > _SLOW_NS and self._questions < _MOST_QUESTIONS:
            self._ask()
            return
        try:
            after = self._platform.set_clock(unix_ns + rtt_ns // 2)
        except OSError as error:
            self._failed(str(error))
            return
        self._platform.finish(after)
        self._passed('"realtime_ns":%d,"rtt_ns":%d' % (after, rtt_ns))
        self._finish()

    def on_cancel(self) -> None:
        self._step = ""
        self._kill_script()
        self._end()

    def _on_interpreter(self, flags: int, payload: bytes) -> None:
        if self._step != "interpreter":
            return
        # Taken over unread: the host checks it as strictly as the rest.
        self._steps.append('"interpreter":%s' % payload.decode("utf-8", "replace"))
        if flags & (FAILED | TIMED_OUT):
            self._finish()
            return
        self._step = "scripts"
        self._scripts = self._platform.list_scripts()
        if len(self._scripts) > _MAX_SCRIPTS:
            self._failed("more than %d scripts" % _MAX_SCRIPTS)
        elif self._scripts:
            self._timer = self._loop.call_at(self._deadline, self._on_scripts_late)
            self._next_script(0)
        else:
            self._passed('"ran":0')
            self._ask_clock()

    def _next_script(self, index: int) -> None:
        if index == len(self._scripts):
            self._loop.cancel(self._timer)
            self._passed('"ran":%d' % index)
            self._ask_clock()
            return
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._script_pid, _ = spawn(Plan([self._scripts[index]], self._env, (null, null, null)))
        except NotStarted as error:
            self._failed(str(error))
            return
        finally:
            os.close(null)
        self._loop.children[self._script_pid] = lambda status: self._on_script(index, status)

    def _on_script(self, index: int, status: int) -> None:
        self._script_pid = 0
        if self._step != "scripts":
            return
        if status == 0:
            self._next_script(index + 1)
        else:
            self._failed("%s ended with status %d" % (self._scripts[index], status))

    def _on_scripts_late(self) -> None:
        self._kill_script()
        if self._step == "scripts":
            self._failed("the deadline passed")

    def _kill_script(self) -> None:
        if self._script_pid:
            os.killpg(self._script_pid, signal.SIGKILL)

    def _ask_clock(self) -> None:
        """The last step, so that nothing delays us between the host's answer and setting the clock."""
        self._step = "clock"
        self._timer = self._loop.call_at(time.monotonic() + _CLOCK_WAIT_S, self._on_clock_late)
        self._ask()

    def _ask(self) -> None:
        self._questions += 1
        self._asked_ns = time.monotonic_ns()
        self._port.send(encode(CLOCK, self.number))

    def _on_clock_late(self) -> None:
        if self._step == "clock":
            self._failed("the host did not answer")

    def _passed(self, evidence: str) -> None:
        # By hand, because the JSON encoder is cold code here. A name that breaks the JSON breaks the contract.
        self._steps.append('"%s":{"ok":true,%s}' % (self._step, evidence))

    def _failed(self, why: str) -> None:
        self._steps.append('"%s":%s' % (self._step, json.dumps({"ok": False, "error": why})))
        self._finish()

    def _finish(self) -> None:
        self._step = ""
        nonce = self._fields[5]
        digest = fingerprint((nonce + self._hostname + self._machine_id).encode())
        answer = '{"steps":{%s},"proof":{"nonce":"%s","digest":"%s"}}' % (",".join(self._steps), nonce, digest)
        self._end()
        self._port.send(encode_message(REPLY, self.number, answer.encode()))

    def _end(self) -> None:
        if self._timer is not None:
            self._loop.cancel(self._timer)
            self._timer = None
        self._on_done(self.number)


def render_network(up: bool, address: str, reset: int) -> str:
    return '"up":%s,"address":%s,"reset":%d' % (
        "true" if up else "false",
        '"%s"' % address if address else "null",
        reset,
    )
