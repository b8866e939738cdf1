"""A sandbox as an object: the forkd SDK's class of this name, and E2B's everyday surface, through the daemon."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from forkd.client import plans
from forkd.client.call import Plan
from forkd.client.calls import commands, sandboxes
from forkd.client.calls.sandboxes import Spawn
from forkd.client.controller import Controller
from forkd.client.execution import Execution, execution_of, repr_of, value_of
from forkd.client.handles import follow
from forkd.client.output import Callback
from forkd.client.sandbox_commands import Commands, Pty
from forkd.client.sandbox_files import Files
from forkd.client.shared import shared_controller
from forkd.client.transport import Transport
from forkd.wire.api import PingResponse, SandboxInfo

EVAL_TIMEOUT_S = 30.0


class Sandbox:
    """Fork one from `tag` (else FORKD_TAG, else "pyagent"). As a context manager it is killed at the end.

    With `spawn=False` the one whose guest_addr is `target` (else FORKD_TARGET) is found instead. `timeout` is for
    `eval`, in seconds. `controller`: else the one all sandboxes share.
    """

    commands: Commands
    files: Files
    pty: Pty

    def __init__(
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: float = EVAL_TIMEOUT_S,
        *,
        spawn: bool = True,
        controller: Controller | None = None,
    ) -> None:
        self._open(controller, plans.open_sandbox(tag, target, spawn), timeout)

    @classmethod
    def create(
        cls,
        tag: str | None = None,
        timeout: float | None = None,
        *,
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        on_timeout: str | None = None,
        memory_limit_mib: int | None = None,
        cpu_limit: float | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        controller: Controller | None = None,
    ) -> Self:
        """Fork one. `timeout` is how long it may live, in seconds, as with E2B; None: until it is killed.

        `on_timeout` is what happens then: "kill" or "pause". `envs` is for its commands and code. A limit that the
        daemon's host cannot enforce is refused with Unsupported.
        """
        spawn = Spawn(
            plans.choose_tag(tag),
            memory_limit_mib=memory_limit_mib,
            cpu_limit=cpu_limit,
            pids_limit=pids_limit,
            io_limit_mib_s=io_limit_mib_s,
            timeout_secs=timeout,
            on_timeout=on_timeout,
            env=envs,
            labels=labels,
            metadata=metadata,
        )
        return cls.__new__(cls)._open(controller, plans.create(spawn))

    @classmethod
    def connect(cls, sandbox_id: str, timeout: float | None = None, *, controller: Controller | None = None) -> Self:
        """One that exists; a paused one is resumed. `timeout` sets how long it may live from now."""
        return cls.__new__(cls)._open(controller, plans.connect(sandbox_id, timeout))

    @classmethod
    def list(
        cls,
        *,
        state: str | None = None,
        snapshot_tag: str | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        controller: Controller | None = None,
    ) -> list[SandboxInfo]:
        """All that match all of it."""
        return (controller or shared_controller()).list_sandboxes(
            state=state, snapshot_tag=snapshot_tag, labels=labels, metadata=metadata
        )

    def _open(self, controller: Controller | None, plan: Plan[SandboxInfo], timeout: float = EVAL_TIMEOUT_S) -> Self:
        transport = (controller or shared_controller()).transport
        return self._attach(transport, transport.perform(plan), timeout)

    def _attach(self, transport: Transport, info: SandboxInfo, timeout: float) -> Self:
        self._transport, self._timeout, self._id, self._tag = transport, timeout, info["id"], info["snapshot_tag"]
        self.commands = Commands(transport, self._id)
        self.files = Files(transport, self._id)
        self.pty = Pty(transport, self._id)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self._id!r}, tag={self._tag!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def id(self) -> str:
        return self._id

    @property
    def sandbox_id(self) -> str:
        return self._id

    @property
    def tag(self) -> str:
        return self._tag

    def info(self) -> SandboxInfo:
        return self._transport.send(sandboxes.get_sandbox(self._id))

    def get_info(self) -> SandboxInfo:
        return self.info()

    def is_running(self) -> bool:
        """False when it is paused, dead or gone."""
        return self._transport.perform(plans.is_running(self._id))

    def ping(self) -> PingResponse:
        return self._transport.send(sandboxes.ping_sandbox(self._id))

    def set_timeout(self, timeout: float | None, on_timeout: str | None = None) -> SandboxInfo:
        """How long it may live, in seconds from now; None: until it is killed."""
        return self._transport.send(sandboxes.set_sandbox_timeout(self._id, timeout, on_timeout))

    def pause(self) -> SandboxInfo:
        return self._transport.send(sandboxes.pause_sandbox(self._id))

    def resume(self) -> SandboxInfo:
        return self._transport.send(sandboxes.resume_sandbox(self._id))

    def kill(self) -> bool:
        """False when it was gone already."""
        return self._transport.perform(plans.kill(self._id))

    def close(self) -> None:
        """Let go of it without killing it."""

    def console(self) -> str:
        return self._transport.send(sandboxes.sandbox_console(self._id))

    def fork(self, count: int = 1) -> builtins.list[Self]:
        """`count` new ones that go on from where this one is. Unsupported until the daemon can branch."""
        made = self._transport.perform(plans.fork(self._id, count))
        return [type(self).__new__(type(self))._attach(self._transport, info, self._timeout) for info in made]

    def eval(self, code: str, timeout: float | None = None) -> str:
        """The repr of the last expression, "None" when there is none; what the code raised becomes EvalFailed."""
        return repr_of(self._transport.send(commands.eval_code(self._id, code, timeout or self._timeout)))

    def eval_value(self, code: str, timeout: float | None = None) -> Any:
        """The value of the last expression itself, when JSON has such values."""
        return value_of(self._transport.send(commands.eval_code(self._id, code, timeout or self._timeout)))

    def run_code(
        self,
        code: str,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        timeout: float | None = None,
    ) -> Execution:
        """Results, output and the error if any, none of which is raised. Names stay defined for the next call."""
        limit_s = timeout or plans.COMMAND_TIMEOUT_S
        if on_stdout is None and on_stderr is None:
            return execution_of(self._transport.send(commands.eval_code(self._id, code, limit_s)))
        events = self._transport.output(commands.eval_stream(self._id, code, limit_s))
        return follow(events, on_stdout, on_stderr).execution()
