"""The daemon's API, route by route: plain dicts in and out, one connection pool, for any number of threads."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from forkd.client import probes
from forkd.client.calls import commands, files, sandboxes, service, snapshots, workspaces
from forkd.client.calls.commands import Command
from forkd.client.calls.sandboxes import Spawn
from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.client.stream import StreamEvent
from forkd.client.transport import Transport
from forkd.client.values import FileWritten
from forkd.wire import api

DEFAULT_TIMEOUT_S = 60.0


class Controller:
    """`base_url`: else FORKD_URL, else the daemon's unix socket, else http://127.0.0.1:8889. `token`: else FORKD_TOKEN.

    `timeout` is how long an answer may take, in seconds; a command's own timeout comes on top.
    """

    def __init__(
        self, base_url: str | None = None, token: str | None = None, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.transport = Transport(find_endpoint(base_url, token), timeout)

    @classmethod
    def at(cls, endpoint: Endpoint, timeout: float = DEFAULT_TIMEOUT_S) -> Self:
        made = cls.__new__(cls)
        made.transport = Transport(endpoint, timeout)
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transport.endpoint.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.transport.close()

    @property
    def url(self) -> str:
        return self.transport.endpoint.name

    def version(self) -> api.VersionResponse:
        return self.transport.send(service.version())

    def healthy(self) -> bool:
        """Whether a daemon answers. One attempt, no error."""
        return self.transport.perform(probes.is_healthy())

    def ready(self) -> bool:
        """Whether it takes work. One attempt, no error."""
        return self.transport.perform(probes.is_ready())

    def metrics(self) -> str:
        return self.transport.send(service.metrics())

    def lineage(self) -> api.Lineage:
        return self.transport.send(service.lineage())

    def events(
        self, *, since: int | None = None, type: str | None = None, sandbox_id: str | None = None
    ) -> Generator[api.Event, None, None]:
        """What happens, as it happens; without end. `since`: first those after that id."""
        return self.transport.events(service.follow_events(since, type, sandbox_id))

    def list_events(
        self, *, since: int = 0, type: str | None = None, sandbox_id: str | None = None, limit: int = 1000
    ) -> list[api.Event]:
        return self.transport.send(service.list_events(since, type, sandbox_id, limit))

    def list_snapshots(self) -> list[api.SnapshotInfo]:
        return self.transport.send(snapshots.list_snapshots())

    def get_snapshot(self, tag: str) -> api.SnapshotInfo:
        return self.transport.send(snapshots.get_snapshot(tag))

    def snapshot_info(self, tag: str) -> api.SnapshotInfoDetail:
        return self.transport.send(snapshots.snapshot_info(tag))

    def create_snapshot(
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
        return self.transport.send(
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

    def warm_snapshot(self, tag: str) -> api.TemplateInfo:
        """Have a template of it now, ahead of its first fork: forks of a template are quicker."""
        return self.transport.send(snapshots.warm_snapshot(tag))

    def list_templates(self) -> list[api.TemplateInfo]:
        return self.transport.send(snapshots.list_templates())

    def delete_snapshot(self, tag: str) -> None:
        return self.transport.send(snapshots.delete_snapshot(tag))

    def compact_snapshot(self, tag: str, to: str) -> api.SnapshotInfo:
        return self.transport.send(snapshots.compact_snapshot(tag, to))

    def spawn_sandboxes(
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
        return self.transport.send(sandboxes.spawn_sandboxes(spawn))

    def list_sandboxes(
        self,
        *,
        state: str | None = None,
        snapshot_tag: str | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[api.SandboxInfo]:
        """All that match all of it, oldest first, however many pages that takes."""
        return self.transport.perform(
            sandboxes.list_sandboxes(state=state, snapshot_tag=snapshot_tag, labels=labels, metadata=metadata)
        )

    def get_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return self.transport.send(sandboxes.get_sandbox(sandbox_id))

    def kill_sandbox(self, sandbox_id: str) -> None:
        return self.transport.send(sandboxes.kill_sandbox(sandbox_id))

    def ping_sandbox(self, sandbox_id: str) -> api.PingResponse:
        return self.transport.send(sandboxes.ping_sandbox(sandbox_id))

    def pause_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return self.transport.send(sandboxes.pause_sandbox(sandbox_id))

    def resume_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return self.transport.send(sandboxes.resume_sandbox(sandbox_id))

    def set_sandbox_timeout(
        self, sandbox_id: str, timeout_secs: float | None, on_timeout: str | None = None
    ) -> api.SandboxInfo:
        """A deadline, counted from now; None takes it away."""
        return self.transport.send(sandboxes.set_sandbox_timeout(sandbox_id, timeout_secs, on_timeout))

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: str | None = None,
        wait: bool = True,
    ) -> api.SnapshotInfo:
        return self.transport.send(sandboxes.branch_sandbox(sandbox_id, tag, diff, measure_diff, mode, wait))

    def sandbox_console(self, sandbox_id: str) -> str:
        return self.transport.send(sandboxes.sandbox_console(sandbox_id))

    def exec_command(
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
        return self.transport.send(commands.exec_command(sandbox_id, command))

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
    ) -> Generator[StreamEvent, None, None]:
        """Output as it comes. Starts with the first event asked for; closing the iterator ends the command."""
        command = Command(args, shell, timeout_secs, cwd, env, user, stdin)
        return self.transport.output(commands.exec_stream(sandbox_id, command))

    def eval_code(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> api.EvalResponse:
        return self.transport.send(commands.eval_code(sandbox_id, code, timeout_secs))

    def eval_stream(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> Generator[StreamEvent, None, None]:
        return self.transport.output(commands.eval_stream(sandbox_id, code, timeout_secs))

    def start_process(
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
        return self.transport.send(commands.start_process(sandbox_id, command))

    def list_processes(self, sandbox_id: str) -> list[api.ProcessInfo]:
        return self.transport.send(commands.list_processes(sandbox_id))

    def get_process(self, sandbox_id: str, pid: int) -> api.ProcessInfo:
        return self.transport.send(commands.get_process(sandbox_id, pid))

    def process_output(self, sandbox_id: str, pid: int) -> Generator[StreamEvent, None, None]:
        """What is kept of its output, then what comes, then its exit."""
        return self.transport.output(commands.process_output(sandbox_id, pid))

    def write_stdin(self, sandbox_id: str, pid: int, data: bytes, eof: bool = False) -> None:
        return self.transport.send(commands.write_stdin(sandbox_id, pid, data, eof))

    def signal_process(self, sandbox_id: str, pid: int, signal: int = 15) -> None:
        return self.transport.send(commands.signal_process(sandbox_id, pid, signal))

    def resize_process(self, sandbox_id: str, pid: int, rows: int, cols: int) -> None:
        return self.transport.send(commands.resize_process(sandbox_id, pid, rows, cols))

    def read_file(self, sandbox_id: str, path: str) -> bytes:
        return self.transport.send(files.read_file(sandbox_id, path))

    def read_file_stream(self, sandbox_id: str, path: str) -> Generator[bytes, None, None]:
        return self.transport.download(files.read_file(sandbox_id, path))

    def write_file(
        self,
        sandbox_id: str,
        path: str,
        content: bytes | Iterable[bytes],
        mode: int | str | None = None,
        append: bool = False,
    ) -> FileWritten:
        """`mode` as a number (0o644) or octal digits ("644"). The file appears when complete."""
        return self.transport.send(files.write_file(sandbox_id, path, content, mode, append))

    def remove_file(self, sandbox_id: str, path: str, recursive: bool = False) -> None:
        return self.transport.send(files.remove_file(sandbox_id, path, recursive))

    def stat_file(self, sandbox_id: str, path: str) -> api.FileInfo:
        return self.transport.send(files.stat_file(sandbox_id, path))

    def list_files(self, sandbox_id: str, path: str) -> api.FileListing:
        return self.transport.send(files.list_files(sandbox_id, path))

    def make_dir(self, sandbox_id: str, path: str, parents: bool = True) -> None:
        return self.transport.send(files.make_dir(sandbox_id, path, parents))

    def rename_file(self, sandbox_id: str, path: str, to: str) -> None:
        return self.transport.send(files.rename_file(sandbox_id, path, to))

    def list_workspaces(self) -> list[api.WorkspaceInfo]:
        return self.transport.send(workspaces.list_workspaces())

    def get_workspace(self, name: str) -> api.WorkspaceInfo:
        return self.transport.send(workspaces.get_workspace(name))

    def create_workspace(
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
        return self.transport.send(
            workspaces.create_workspace(
                name, snapshot_tag, per_child_netns, memory_limit_mib, cpu_limit, pids_limit, io_limit_mib_s
            )
        )

    def suspend_workspace(self, name: str) -> api.WorkspaceInfo:
        return self.transport.send(workspaces.suspend_workspace(name))

    def resume_workspace(self, name: str) -> api.WorkspaceInfo:
        return self.transport.send(workspaces.resume_workspace(name))

    def delete_workspace(self, name: str) -> None:
        return self.transport.send(workspaces.delete_workspace(name))
