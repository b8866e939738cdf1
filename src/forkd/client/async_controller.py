"""The daemon's API, route by route, from an event loop: Controller with `await`, and `async for` over streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from forkd.client import probes
from forkd.client.async_transport import AsyncTransport
from forkd.client.calls import commands, files, sandboxes, service, snapshots, workspaces
from forkd.client.calls.commands import Command
from forkd.client.calls.sandboxes import Spawn
from forkd.client.content import async_raw
from forkd.client.controller import DEFAULT_TIMEOUT_S
from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.client.stream import StreamEvent
from forkd.client.values import FileWritten
from forkd.wire import api


class AsyncController:
    """Arguments and methods are those of Controller. For one event loop; close it before the loop ends."""

    def __init__(
        self, base_url: str | None = None, token: str | None = None, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.transport = AsyncTransport(find_endpoint(base_url, token), timeout)

    @classmethod
    def at(cls, endpoint: Endpoint, timeout: float = DEFAULT_TIMEOUT_S) -> Self:
        made = cls.__new__(cls)
        made.transport = AsyncTransport(endpoint, timeout)
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transport.endpoint.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.transport.close()

    @property
    def url(self) -> str:
        return self.transport.endpoint.name

    async def version(self) -> api.VersionResponse:
        return await self.transport.send(service.version())

    async def healthy(self) -> bool:
        """Whether a daemon answers. One attempt, no error."""
        return await self.transport.perform(probes.is_healthy())

    async def ready(self) -> bool:
        """Whether it takes work. One attempt, no error."""
        return await self.transport.perform(probes.is_ready())

    async def metrics(self) -> str:
        return await self.transport.send(service.metrics())

    async def lineage(self) -> api.Lineage:
        return await self.transport.send(service.lineage())

    def events(
        self, *, since: int | None = None, type: str | None = None, sandbox_id: str | None = None
    ) -> AsyncGenerator[api.Event, None]:
        """What happens, as it happens; without end. `since`: first those after that id."""
        return self.transport.events(service.follow_events(since, type, sandbox_id))

    async def list_events(
        self, *, since: int = 0, type: str | None = None, sandbox_id: str | None = None, limit: int = 1000
    ) -> list[api.Event]:
        return await self.transport.send(service.list_events(since, type, sandbox_id, limit))

    async def list_snapshots(self) -> list[api.SnapshotInfo]:
        return await self.transport.send(snapshots.list_snapshots())

    async def get_snapshot(self, tag: str) -> api.SnapshotInfo:
        return await self.transport.send(snapshots.get_snapshot(tag))

    async def snapshot_info(self, tag: str) -> api.SnapshotInfoDetail:
        return await self.transport.send(snapshots.snapshot_info(tag))

    async def create_snapshot(
        self,
        tag: str,
        image: str,
        *,
        memory_mib: int = 512,
        vcpus: int = 1,
        cpu_template: str | None = None,
        warm: str | None = None,
        warm_command: str | None = None,
        warm_timeout_secs: float = 300,
        rehearse: str | None = None,
        replace: bool = False,
        wait: bool = False,
    ) -> api.SnapshotInfo:
        """Boot `image`, warm it up with Python (`warm`) or shell (`warm_command`), freeze it under `tag`.

        `rehearse` is Python that templates of it evaluate before they are forked, so that forks find that code warm.
        """
        return await self.transport.send(
            snapshots.create_snapshot(
                tag,
                image,
                memory_mib=memory_mib,
                vcpus=vcpus,
                cpu_template=cpu_template,
                warm=warm,
                warm_command=warm_command,
                warm_timeout_secs=warm_timeout_secs,
                rehearse=rehearse,
                replace=replace,
                wait=wait,
            )
        )

    async def warm_snapshot(self, tag: str) -> api.TemplateInfo:
        """Have a template of it now, ahead of its first fork: forks of a template are quicker."""
        return await self.transport.send(snapshots.warm_snapshot(tag))

    async def list_templates(self) -> list[api.TemplateInfo]:
        return await self.transport.send(snapshots.list_templates())

    async def delete_snapshot(self, tag: str) -> None:
        return await self.transport.send(snapshots.delete_snapshot(tag))

    async def compact_snapshot(self, tag: str, to: str) -> api.SnapshotInfo:
        return await self.transport.send(snapshots.compact_snapshot(tag, to))

    async def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
        *,
        cpu_limit: float | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        timeout_secs: float | None = None,
        on_timeout: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        allow_partial: bool = False,
        agent_port: int | None = None,
        idempotency_key: str | None = None,
    ) -> list[api.SandboxInfo]:
        """Fork `n`, all or none. A lost connection is no danger: the call has a key, and is made again."""
        spawn = Spawn(
            snapshot_tag,
            n,
            per_child_netns,
            memory_limit_mib,
            prewarm,
            live_fork,
            hugepages,
            cpu_limit,
            pids_limit,
            io_limit_mib_s,
            timeout_secs,
            on_timeout,
            env,
            labels,
            metadata,
            allow_partial,
            agent_port,
            idempotency_key,
        )
        return await self.transport.send(sandboxes.spawn_sandboxes(spawn))

    async def list_sandboxes(
        self,
        *,
        state: str | None = None,
        snapshot_tag: str | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[api.SandboxInfo]:
        """All that match all of it, oldest first, however many pages that takes."""
        return await self.transport.perform(
            sandboxes.list_sandboxes(state=state, snapshot_tag=snapshot_tag, labels=labels, metadata=metadata)
        )

    async def get_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return await self.transport.send(sandboxes.get_sandbox(sandbox_id))

    async def kill_sandbox(self, sandbox_id: str) -> None:
        return await self.transport.send(sandboxes.kill_sandbox(sandbox_id))

    async def ping_sandbox(self, sandbox_id: str) -> api.PingResponse:
        return await self.transport.send(sandboxes.ping_sandbox(sandbox_id))

    async def pause_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return await self.transport.send(sandboxes.pause_sandbox(sandbox_id))

    async def resume_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return await self.transport.send(sandboxes.resume_sandbox(sandbox_id))

    async def set_sandbox_timeout(
        self, sandbox_id: str, timeout_secs: float | None, on_timeout: str | None = None
    ) -> api.SandboxInfo:
        """A deadline, counted from now; None takes it away."""
        return await self.transport.send(sandboxes.set_sandbox_timeout(sandbox_id, timeout_secs, on_timeout))

    async def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: str | None = None,
        wait: bool = True,
    ) -> api.SnapshotInfo:
        return await self.transport.send(sandboxes.branch_sandbox(sandbox_id, tag, diff, measure_diff, mode, wait))

    async def sandbox_console(self, sandbox_id: str) -> str:
        return await self.transport.send(sandboxes.sandbox_console(sandbox_id))

    async def exec_command(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        timeout_secs: float = 30,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: str | None = None,
    ) -> api.ExecResponse:
        command = Command(args, shell, timeout_secs, cwd, env, user, stdin)
        return await self.transport.send(commands.exec_command(sandbox_id, command))

    def exec_stream(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        timeout_secs: float = 30,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: str | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Output as it comes. Starts with the first event asked for; closing the iterator ends the command."""
        command = Command(args, shell, timeout_secs, cwd, env, user, stdin)
        return self.transport.output(commands.exec_stream(sandbox_id, command))

    async def eval_code(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> api.EvalResponse:
        return await self.transport.send(commands.eval_code(sandbox_id, code, timeout_secs))

    def eval_stream(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> AsyncGenerator[StreamEvent, None]:
        return self.transport.output(commands.eval_stream(sandbox_id, code, timeout_secs))

    async def start_process(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_secs: float | None = None,
    ) -> api.ProcessInfo:
        """In the background; `pty` is (rows, columns)."""
        command = Command(args, shell, timeout_secs, cwd, env, user, stdin, pty)
        return await self.transport.send(commands.start_process(sandbox_id, command))

    async def list_processes(self, sandbox_id: str) -> list[api.ProcessInfo]:
        return await self.transport.send(commands.list_processes(sandbox_id))

    async def get_process(self, sandbox_id: str, pid: int) -> api.ProcessInfo:
        return await self.transport.send(commands.get_process(sandbox_id, pid))

    def process_output(self, sandbox_id: str, pid: int) -> AsyncGenerator[StreamEvent, None]:
        """What is kept of its output, then what comes, then its exit."""
        return self.transport.output(commands.process_output(sandbox_id, pid))

    async def write_stdin(self, sandbox_id: str, pid: int, data: bytes, eof: bool = False) -> None:
        return await self.transport.send(commands.write_stdin(sandbox_id, pid, data, eof))

    async def signal_process(self, sandbox_id: str, pid: int, signal: int = 15) -> None:
        return await self.transport.send(commands.signal_process(sandbox_id, pid, signal))

    async def resize_process(self, sandbox_id: str, pid: int, rows: int, cols: int) -> None:
        return await self.transport.send(commands.resize_process(sandbox_id, pid, rows, cols))

    async def read_file(self, sandbox_id: str, path: str) -> bytes:
        return await self.transport.send(files.read_file(sandbox_id, path))

    def read_file_stream(self, sandbox_id: str, path: str) -> AsyncGenerator[bytes, None]:
        return self.transport.download(files.read_file(sandbox_id, path))

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        content: bytes | Iterable[bytes] | AsyncIterable[bytes],
        mode: int | str | None = None,
        append: bool = False,
    ) -> FileWritten:
        """`mode` as a number (0o644) or octal digits ("644"). The file appears when complete."""
        return await self.transport.send(files.write_file(sandbox_id, path, async_raw(content), mode, append))

    async def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        return await self.transport.send(files.remove_file(sandbox_id, path, recursive))

    async def stat_file(self, sandbox_id: str, path: str) -> api.FileInfo:
        return await self.transport.send(files.stat_file(sandbox_id, path))

    async def list_files(self, sandbox_id: str, path: str) -> api.FileListing:
        return await self.transport.send(files.list_files(sandbox_id, path))

    async def make_dir(self, sandbox_id: str, path: str, parents: bool = True) -> None:
        return await self.transport.send(files.make_dir(sandbox_id, path, parents))

    async def rename_file(self, sandbox_id: str, path: str, to: str) -> None:
        return await self.transport.send(files.rename_file(sandbox_id, path, to))

    async def list_workspaces(self) -> list[api.WorkspaceInfo]:
        return await self.transport.send(workspaces.list_workspaces())

    async def get_workspace(self, name: str) -> api.WorkspaceInfo:
        return await self.transport.send(workspaces.get_workspace(name))

    async def create_workspace(
        self,
        name: str,
        snapshot_tag: str,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        *,
        cpu_limit: float | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
    ) -> api.WorkspaceInfo:
        return await self.transport.send(
            workspaces.create_workspace(
                name, snapshot_tag, per_child_netns, memory_limit_mib, cpu_limit, pids_limit, io_limit_mib_s
            )
        )

    async def suspend_workspace(self, name: str) -> api.WorkspaceInfo:
        return await self.transport.send(workspaces.suspend_workspace(name))

    async def resume_workspace(self, name: str) -> api.WorkspaceInfo:
        return await self.transport.send(workspaces.resume_workspace(name))

    async def delete_workspace(self, name: str) -> None:
        return await self.transport.send(workspaces.delete_workspace(name))
