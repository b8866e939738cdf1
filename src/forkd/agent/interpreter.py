"""The agent's side of the warmed interpreter: a forked process that runs user code, one job at a time.

User code may crash, hang or exit there; the agent tells what happened and forks a fresh one from itself.
"""

from __future__ import annotations

import json
import os
import signal
import time

from forkd.agent import evaluator
from forkd.agent.loop import READ
from forkd.agent.pipes import Outbox, Source
from forkd.agent.stream import Stream
from forkd.wire.agent import (
    EVAL,
    FAILED,
    MORE,
    REPLY,
    STDERR,
    STDOUT,
    TIMED_OUT,
    Joiner,
    Parser,
    WireError,
    encode_message,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Tuple

    from forkd.agent.loop import Loop, Timer
    from forkd.agent.port import Port

MAX_QUEUED_JOBS = 32
_INTERRUPT_GRACE_S = 1.0  # from SIGINT to SIGKILL
_READ_BYTES = 128 * 1024


class Job(Stream):
    """One request to the interpreter. `done(flags, payload)` is called once, with a JSON document of a result."""

    def __init__(
        self,
        interpreter: Interpreter,
        kind: int,
        number: int,
        payload: bytes,
        deadline: float,
        done: Callable[[int, bytes], None],
    ) -> None:
        super().__init__(number)
        self.kind = kind
        self.payload = payload
        self.deadline = deadline
        self.done = done
        self.timed_out = False
        self.timer: Timer | None = None
        self._interpreter = interpreter

    def on_window(self, grant: int) -> None:
        self.credit += grant
        self._interpreter.resume_output(self)

    def on_cancel(self) -> None:
        self._interpreter.abandon(self, interrupt=True)

    def on_detach(self) -> None:
        self._interpreter.abandon(self, interrupt=False)


class Interpreter:
    def __init__(self, loop: Loop, port: Port, env: Dict[str, str]) -> None:
        self._loop = loop
        self._port = port
        self._env = env
        self._queue: List[Job] = []
        self._job: Job | None = None
        self._pid = 0
        self._sources: Tuple[Source, ...] = ()
        self._answer: bytes | None = None
        self._answer_flags = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def idle(self) -> bool:
        return self._job is None and not self._queue

    def submit(self, job: Job) -> bool:
        """False when too many wait already."""
        if self._job is not None:
            if len(self._queue) >= MAX_QUEUED_JOBS:
                return False
            self._queue.append(job)
        else:
            self._run(job)
        if job.deadline:
            job.timer = self._loop.call_at(job.deadline, lambda: self._on_deadline(job))
        return True

    def resume_output(self, job: Job) -> None:
        if job is self._job:
            for source in self._sources:
                source.resume()

    def abandon(self, job: Job, interrupt: bool) -> None:
        """Nobody waits for the answer any more; `interrupt` ends it as its deadline would."""
        job.done = _nobody
        if job is self._job:
            for source in self._sources:
                source.owner = None
                source.resume()
        if interrupt:
            self._loop.cancel(job.timer)
            self._on_deadline(job)

    def stop(self) -> None:
        if self._pid:
            self._loop.children.pop(self._pid, None)
            _kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    # One life of the process

    def _start(self) -> None:
        _close_all(self._sources)
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                evaluator.run(request_read, answer_write, out_write, err_write, self._env)
        except OSError:
            for fd in (request_write, answer_read, out_read, err_read):
                os.close(fd)
            raise
        finally:
            for fd in (request_read, answer_write, out_write, err_write):
                os.close(fd)
        os.set_blocking(request_write, False)
        os.set_blocking(answer_read, False)
        self._pid = pid
        self._spoiled = False
        self._parser = Parser()
        self._joiner = Joiner()
        self._answers = answer_read
        self._requests = Outbox(self._loop, request_write)
        self._sources = (
            Source(self._loop, self._port, out_read, STDOUT),
            Source(self._loop, self._port, err_read, STDERR),
        )
        self._loop.watch(answer_read, READ, self._on_answer)
        self._loop.children[pid] = self._on_death

    def _on_death(self, status: int) -> None:
        self._pid = 0
        self._on_answer(0)  # it may have answered first
        self._loop.unwatch(self._answers)
        os.close(self._answers)
        self._requests.close()
        job = self._job
        if job is None:
            self._start_next()
        elif self._answer is None:
            out, err = self._sources
            out.drain_counted(lambda: err.drain_counted(lambda: self._finish_dead(job, status)))

    def _finish_dead(self, job: Job, status: int) -> None:
        self._complete(job, TIMED_OUT if job.timed_out else 0, render_death(status))

    # One job

    def _run(self, job: Job) -> None:
        if not self._pid:
            self._start()  # an earlier attempt failed: out of memory or processes
        self._job = job
        for source in self._sources:
            source.owner = job if job.kind == EVAL else None
        self._requests.send(encode_message(job.kind, job.number, job.payload))

    def _on_answer(self, _events: int) -> None:
        if self._spoiled:
            return
        try:
            data = os.read(self._answers, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            # The process has ended or closed our pipe; we cannot use it any more, and SIGCHLD will follow.
            self._spoiled = True
            self._loop.unwatch(self._answers)
            _kill(self._pid, signal.SIGKILL)
            return
        try:
            frames = self._parser.feed(data)
            if self._parser.take_skipped():
                raise WireError("Not a frame")
            for kind, flags, _stream, payload in frames:
                whole: bytes | None = payload
                if flags & MORE or self._joiner.active:
                    whole = self._joiner.join(kind, flags, _stream, payload)
                if whole is not None:
                    self._on_message(kind, flags & FAILED, whole)
        except WireError:
            # User code wrote into our pipe: we can no longer tell its bytes from the evaluator's.
            self._spoiled = True
            self._loop.unwatch(self._answers)
            _kill(self._pid, signal.SIGKILL)

    def _on_message(self, kind: int, flags: int, payload: bytes) -> None:
        job = self._job
        if job is None or kind != REPLY or self._answer is not None:
            raise WireError("An answer without a request")
        self._answer = payload
        self._answer_flags = flags
        # After this turn, when every pipe with data has been read.
        self._loop.later.append(self._drain)

    def _drain(self) -> None:
        out, err = self._sources
        out.drain(lambda: err.drain(self._finish))

    def _finish(self) -> None:
        job, answer = self._job, self._answer
        if job is not None and answer is not None:
            self._complete(job, self._answer_flags | (TIMED_OUT if job.timed_out else 0), answer)

    def _complete(self, job: Job, flags: int, payload: bytes) -> None:
        self._answer = None
        self._job = None
        for source in self._sources:
            source.owner = None
        if job.timer is not None:
            self._loop.cancel(job.timer)
        job.done(flags, payload)
        self._start_next()

    def _start_next(self) -> None:
        if not self._pid:
            self._start()
        if self._queue and self._job is None:
            self._run(self._queue.pop(0))

    # Deadlines

    def _on_deadline(self, job: Job) -> None:
        if job is not self._job:
            if job in self._queue:
                self._queue.remove(job)
                job.done(TIMED_OUT, render_never_ran())
            return
        if self._answer is None:
            job.timed_out = True
            _kill(self._pid, signal.SIGINT)
            job.timer = self._loop.call_at(time.monotonic() + _INTERRUPT_GRACE_S, lambda: self._on_grace_over(job))

    def _on_grace_over(self, job: Job) -> None:
        if job is self._job and self._answer is None:
            _kill(self._pid, signal.SIGKILL)


def render_death(status: int) -> bytes:
    """The result of code that ended its interpreter."""
    died: Dict[str, Any] = {"signal": None, "exit_code": None}
    if os.WIFSIGNALED(status):
        died["signal"] = os.WTERMSIG(status)
        what = "killed by signal %d" % died["signal"]
    else:
        died["exit_code"] = os.WEXITSTATUS(status)
        what = "exited with status %d" % died["exit_code"]
    error = {"type": "InterpreterDied", "message": "The interpreter was " + what, "traceback": ""}
    if died["signal"] is None:
        error["message"] = "The interpreter " + what
    return json.dumps({"ok": False, "error": error, "died": died}).encode()


def render_never_ran() -> bytes:
    error = {"type": "TimeoutError", "message": "The deadline passed before the code could start", "traceback": ""}
    return json.dumps({"ok": False, "error": error}).encode()


def _close_all(sources: Tuple[Source, ...]) -> None:
    for source in sources:
        source.close()


def _kill(pid: int, signal_number: int) -> None:
    if pid:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            pass


def _nobody(_flags: int, _payload: bytes) -> None:
    pass
