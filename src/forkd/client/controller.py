# Generated from async_controller.py by tools/unasync.py: do not edit.
"""The daemon's API, one method per route. docs/reference/rest.md is the contract."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from types import NoneType
from typing import Self, TypeVar, Unpack

from forkd.client.arguments import (
    CommandOptions,
    Data,
    GuestPath,
    Limits,
    NetworkLike,
    SpawnOptions,
    check_key,
    content_of,
    drop_unset,
    path_text,
    render_command,
    render_network,
    render_options,
)
from forkd.client.branch_routes import FREEZE_S, SPAWN_EACH_S, SPAWN_S, BranchRoutes
from forkd.client.call import API, Again, Call, delete, get, post, query_of, read_answer
from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.client.network_routes import NetworkRoutes
from forkd.client.packs import PackCalls
from forkd.client.stream import StreamEvent
from forkd.client.transport import Transport
from forkd.errors import ForkdError, Unreachable
from forkd.wire import api

DEFAULT_TIMEOUT_S = 60.0
_PAGE = 1000
# How long the daemon may need, beyond an ordinary answer.
_REHEARSE_S = 300.0  # with the turn of others before it
_READ_INPUT_S = 90.0  # what a program is given to read what is written to it

T = TypeVar("T")


class Controller(BranchRoutes, NetworkRoutes, PackCalls):
    """`base_url`: else FORKD_URL, else the daemon's unix socket. `token`: else FORKD_TOKEN.

    `timeout` is how long an answer may take, in seconds; a command's own timeout comes on top. Plain dicts go in and
    come out. The asynchronous one is for one event loop, and is closed before that ends.
    """

    def __init__(
        self, base_url: str | None = None, token: str | None = None, timeout: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.transport = Transport.to(find_endpoint(base_url, token), timeout)

    @classmethod
    def at(cls, endpoint: Endpoint, timeout: float = DEFAULT_TIMEOUT_S) -> Self:
        return cls.over(Transport.to(endpoint, timeout))

    @classmethod
    def over(cls, transport: Transport) -> Self:
        made = cls.__new__(cls)
        made.transport = transport
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self.transport.close()

    @property
    def url(self) -> str:
        return self.transport.place.name

    def _send(self, call: Call[T]) -> T:
        return self.transport.send(call)

    def version(self) -> api.VersionResponse:
        return self._send(Call(api.VersionResponse, "GET", ("version",), again=Again.SAFE))

    def stay(self) -> None:
        """The daemon does not end when it is idle any more, until it is started again."""
        self._send(post(NoneType, "stay", again=Again.SAFE))

    def healthy(self) -> bool:
        """Whether a daemon answers. One attempt, no error."""
        return self._probe("healthz")

    def ready(self) -> bool:
        """Whether it takes work. One attempt, no error."""
        return self._probe("readyz")

    def _probe(self, path: str) -> bool:
        try:
            answer = self.transport.exchange(Call(NoneType, "GET", (path,), probe=True))
        except ForkdError:
            return False
        return answer.status_code == 200

    def metrics(self) -> str:
        return self._send(Call(str, "GET", ("metrics",), again=Again.SAFE))

    def lineage(self) -> api.Lineage:
        return self._send(get(api.Lineage, "lineage"))

    def events(
        self, *, since: int | None = None, type: str | None = None, sandbox_id: str | None = None
    ) -> Generator[api.Event, None, None]:
        """What happens, as it happens; without end. `since`: first those after that id."""
        query = query_of(follow="true", since=since, type=type, sandbox_id=sandbox_id)
        return self.transport.events(get(api.Event, "events", query=query))

    def list_events(
        self, *, since: int = 0, type: str | None = None, sandbox_id: str | None = None, limit: int = 1000
    ) -> list[api.Event]:
        query = query_of(since=since, type=type, sandbox_id=sandbox_id, limit=limit)
        return self._send(get(list[api.Event], "events", query=query))

    def list_snapshots(self) -> list[api.SnapshotInfo]:
        return self._send(get(list[api.SnapshotInfo], "snapshots"))

    def get_snapshot(self, tag: str) -> api.SnapshotInfo:
        return self._send(get(api.SnapshotInfo, "snapshots", tag))

    def snapshot_info(self, tag: str) -> api.SnapshotInfoDetail:
        return self._send(get(api.SnapshotInfoDetail, "snapshots", tag, "info"))

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
        network: NetworkLike | None = None,
        replace: bool = False,
        wait: bool = False,
    ) -> api.SnapshotInfo:
        """Boot `image`, warm it up with Python (`warm`) or shell (`warm_command`), freeze it under `tag`.

        `rehearse` is Python that templates of it evaluate before they are forked, so that forks find that code warm.
        `network` is for the warm-up, and for forks that ask for no other.
        """
        body = drop_unset(
            tag=tag,
            image=image,
            memory_mib=memory_mib,
            vcpus=vcpus,
            cpu_template=cpu_template,
            warm=warm,
            warm_command=warm_command,
            warm_timeout_secs=warm_timeout_secs,
            rehearse=rehearse,
            network=render_network(network),
            replace=replace,
            wait=wait,
        )
        takes_s = warm_timeout_secs + FREEZE_S if wait else 0.0
        return self._send(post(api.SnapshotInfo, "snapshots", body=body, takes_s=takes_s))

    def warm_snapshot(self, tag: str) -> api.TemplateInfo:
        """Have a template of it now, ahead of its first fork: forks of a template are quicker."""
        return self._send(post(api.TemplateInfo, "snapshots", tag, "warm", again=Again.SAFE, takes_s=_REHEARSE_S))

    def list_templates(self) -> list[api.TemplateInfo]:
        return self._send(get(list[api.TemplateInfo], "templates"))

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
        idempotency_key: str | None = None,
        **options: Unpack[SpawnOptions],
    ) -> list[api.SandboxInfo]:
        """Fork `n`, all or none. After a lost connection the call is made again; its key keeps that harmless."""
        body = drop_unset(
            snapshot_tag=snapshot_tag, n=n, per_child_netns=per_child_netns, memory_limit_mib=memory_limit_mib
        )
        body |= drop_unset(prewarm=prewarm or None, live_fork=live_fork or None, hugepages=hugepages or None)
        body |= render_options(SpawnOptions, options)
        key = f"sdk-{os.urandom(16).hex()}" if idempotency_key is None else check_key(idempotency_key)
        takes_s = SPAWN_S + SPAWN_EACH_S * n
        call = post(list[api.SandboxInfo], "sandboxes", body=body, key=key, again=Again.SAFE, takes_s=takes_s)
        return self._send(call)

    def cancel_spawn(self, idempotency_key: str) -> api.SpawnCancelled:
        """Remove what the spawn with this key made; one that is still on its way is refused. Never spawns."""
        headers = {"Idempotency-Key": check_key(idempotency_key)}
        return self._send(Call(api.SpawnCancelled, "DELETE", (API, "spawns"), headers=headers, again=Again.SAFE))

    def list_sandboxes(
        self,
        *,
        state: str | None = None,
        snapshot_tag: str | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[api.SandboxInfo]:
        """All that match all of it, oldest first, however many pages that takes."""
        pairs = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        pairs += [("metadata", f"{name}={value}") for name, value in (metadata or {}).items()]
        query = (*query_of(state=state, snapshot_tag=snapshot_tag), *pairs)
        found: list[api.SandboxInfo] = []
        token: str | None = None
        while True:
            page = (*query, *query_of(limit=_PAGE, page_token=token))
            call = get(list[api.SandboxInfo], "sandboxes", query=page)
            answer = self.transport.exchange(call)
            sandboxes = read_answer(call, answer)
            found += sandboxes
            last, token = token, answer.headers.get("x-next-token") or None
            if token is None:
                return found
            if token == last:
                raise Unreachable("The daemon sends the same page again and again", hint="Check FORKD_URL")

    def get_sandbox(self, sandbox_id: str, *, cell: bool = False) -> api.SandboxInfo:
        """With `cell` also what keeps its VM in."""
        query = (("cell", "true"),) if cell else ()
        return self._send(get(api.SandboxInfo, "sandboxes", sandbox_id, query=query))

    def kill_sandbox(self, sandbox_id: str) -> None:
        self._send(delete("sandboxes", sandbox_id))

    def ping_sandbox(self, sandbox_id: str) -> api.PingResponse:
        return self._send(post(api.PingResponse, "sandboxes", sandbox_id, "ping", again=Again.SAFE))

    def pause_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return self._send(post(api.SandboxInfo, "sandboxes", sandbox_id, "pause", again=Again.SAFE))

    def resume_sandbox(self, sandbox_id: str) -> api.SandboxInfo:
        return self._send(post(api.SandboxInfo, "sandboxes", sandbox_id, "resume", again=Again.SAFE))

    def set_sandbox_timeout(
        self, sandbox_id: str, timeout_secs: float | None, on_timeout: str | None = None, *, extend: bool = False
    ) -> api.SandboxInfo:
        """A deadline, counted from now; None takes it away. `extend`: a later one stays, and so does having none."""
        body = {"timeout_secs": timeout_secs, **drop_unset(on_timeout=on_timeout, extend=extend or None)}
        return self._send(post(api.SandboxInfo, "sandboxes", sandbox_id, "timeout", body=body, again=Again.SAFE))

    def rename_sandbox(self, sandbox_id: str, name: str | None) -> api.SandboxInfo:
        """A name can be used wherever an id can; None takes it away."""
        call = post(api.SandboxInfo, "sandboxes", sandbox_id, "rename", body={"name": name}, again=Again.SAFE)
        return self._send(call)

    def sandbox_console(self, sandbox_id: str) -> str:
        return self._send(get(str, "sandboxes", sandbox_id, "console"))

    def exec_command(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        timeout_secs: float = 30,
        *,
        stdin: str | None = None,
        **options: Unpack[CommandOptions],
    ) -> api.ExecResponse:
        body = render_command(args, timeout_secs, stdin, **options)
        takes_s = timeout_secs or 0.0
        return self._send(post(api.ExecResponse, "sandboxes", sandbox_id, "exec", body=body, takes_s=takes_s))

    def exec_stream(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        timeout_secs: float = 30,
        *,
        stdin: str | None = None,
        **options: Unpack[CommandOptions],
    ) -> Generator[StreamEvent, None, None]:
        """Output as it comes. Starts with the first event asked for; closing the iterator ends the command."""
        body = render_command(args, timeout_secs, stdin, **options)
        return self.transport.output(post(StreamEvent, "sandboxes", sandbox_id, "exec", "stream", body=body))

    def eval_code(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> api.EvalResponse:
        path = ("sandboxes", sandbox_id, "eval")
        body = {"code": code, "timeout_secs": timeout_secs}
        return self._send(post(api.EvalResponse, *path, body=body, takes_s=timeout_secs))

    def eval_stream(self, sandbox_id: str, code: str, timeout_secs: float = 60) -> Generator[StreamEvent, None, None]:
        path = ("sandboxes", sandbox_id, "eval", "stream")
        return self.transport.output(post(StreamEvent, *path, body={"code": code, "timeout_secs": timeout_secs}))

    def start_process(
        self,
        sandbox_id: str,
        args: Sequence[str] | None = None,
        *,
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_secs: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> api.ProcessInfo:
        """In the background; `pty` is (rows, columns)."""
        body = render_command(args, timeout_secs, stdin, pty, **options)
        return self._send(post(api.ProcessInfo, "sandboxes", sandbox_id, "processes", body=body))

    def list_processes(self, sandbox_id: str) -> list[api.ProcessInfo]:
        return self._send(get(list[api.ProcessInfo], "sandboxes", sandbox_id, "processes"))

    def get_process(self, sandbox_id: str, pid: int) -> api.ProcessInfo:
        return self._send(get(api.ProcessInfo, "sandboxes", sandbox_id, "processes", str(pid)))

    def process_output(self, sandbox_id: str, pid: int) -> Generator[StreamEvent, None, None]:
        """What is kept of its output, then what comes, then its exit."""
        return self.transport.output(get(StreamEvent, "sandboxes", sandbox_id, "processes", str(pid), "output"))

    def write_stdin(self, sandbox_id: str, pid: int, data: bytes, eof: bool = False) -> None:
        path = ("sandboxes", sandbox_id, "processes", str(pid), "stdin")
        query = query_of(eof="true" if eof else None)
        self._send(post(NoneType, *path, query=query, content=data, takes_s=_READ_INPUT_S))

    def signal_process(self, sandbox_id: str, pid: int, signal: int = 15) -> None:
        path = ("sandboxes", sandbox_id, "processes", str(pid), "signal")
        self._send(post(NoneType, *path, body={"signal": int(signal)}))

    def resize_process(self, sandbox_id: str, pid: int, rows: int, cols: int) -> None:
        path = ("sandboxes", sandbox_id, "processes", str(pid), "resize")
        self._send(post(NoneType, *path, body={"rows": rows, "cols": cols}, again=Again.SAFE))

    def read_file(self, sandbox_id: str, path: GuestPath) -> bytes:
        return self._send(_read_file(sandbox_id, path))

    def read_file_stream(
        self, sandbox_id: str, path: GuestPath, length: int | None = None
    ) -> Generator[bytes, None, None]:
        """All of it, or its first `length` bytes."""
        return self.transport.download(_read_file(sandbox_id, path, length))

    def write_file(
        self,
        sandbox_id: str,
        path: GuestPath,
        content: Data,
        mode: int | str | None = None,
        append: bool = False,
        mtime_ns: int | None = None,
    ) -> api.FileWritten:
        """`mode` as a number (0o644) or octal digits ("644"). The file appears when complete."""
        digits = f"{mode:o}" if isinstance(mode, int) else mode
        sent = content_of(content)
        call = Call(
            api.FileWritten,
            "PUT",
            (API, "sandboxes", sandbox_id, "files"),
            query_of(path=path_text(path), mode=digits, append="true" if append else None, mtime_ns=mtime_ns),
            content=sent,
            # An iterator is empty the second time, and an append would be done twice.
            again=Again.SAFE if isinstance(sent, bytes) and not append else Again.UNSENT,
        )
        return self._send(call)

    def read_archive(self, sandbox_id: str, path: GuestPath) -> Generator[bytes, None, None]:
        """A tar archive of what is in a directory."""
        query = query_of(path=path_text(path))
        return self.transport.download(get(bytes, "sandboxes", sandbox_id, "archive", query=query))

    def write_archive(self, sandbox_id: str, path: GuestPath, content: Data, keep: bool = False) -> api.ArchiveWritten:
        """Unpack a tar archive into a directory, which is made. `keep`: owners and set-id bits too."""
        route = (API, "sandboxes", sandbox_id, "archive")
        query = query_of(path=path_text(path), keep="true" if keep else None)
        return self._send(Call(api.ArchiveWritten, "PUT", route, query, content=content_of(content)))

    def read_changes(self, sandbox_id: str, since_ns: int = 0, sha256: bool = False) -> Generator[bytes, None, None]:
        """What was written over the image, as JSON lines. `Sandbox.changes` reads them."""
        query = query_of(since=since_ns or None, sha256="true" if sha256 else None)
        return self.transport.download(get(bytes, "sandboxes", sandbox_id, "changes", query=query))

    def remove_file(self, sandbox_id: str, path: GuestPath, recursive: bool = False) -> None:
        query = query_of(path=path_text(path), recursive="true" if recursive else None)
        self._send(delete("sandboxes", sandbox_id, "files", query=query))

    def stat_file(self, sandbox_id: str, path: GuestPath) -> api.FileInfo:
        route = ("sandboxes", sandbox_id, "files", "stat")
        return self._send(get(api.FileInfo, *route, query=query_of(path=path_text(path))))

    def list_files(self, sandbox_id: str, path: GuestPath) -> api.FileListing:
        route = ("sandboxes", sandbox_id, "files", "list")
        return self._send(get(api.FileListing, *route, query=query_of(path=path_text(path))))

    def make_dir(self, sandbox_id: str, path: GuestPath, parents: bool = True) -> None:
        route = ("sandboxes", sandbox_id, "files", "mkdir")
        again = Again.SAFE if parents else Again.UNSENT
        self._send(post(NoneType, *route, body={"path": path_text(path), "parents": parents}, again=again))

    def rename_file(self, sandbox_id: str, path: GuestPath, to: GuestPath) -> None:
        body = {"path": path_text(path), "to": path_text(to)}
        self._send(post(NoneType, "sandboxes", sandbox_id, "files", "rename", body=body))

    def list_workspaces(self) -> list[api.WorkspaceInfo]:
        return self._send(get(list[api.WorkspaceInfo], "workspaces"))

    def get_workspace(self, name: str) -> api.WorkspaceInfo:
        return self._send(get(api.WorkspaceInfo, "workspaces", name))

    def create_workspace(
        self,
        name: str,
        snapshot_tag: str,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        *,
        network: NetworkLike | None = None,
        **limits: Unpack[Limits],
    ) -> api.WorkspaceInfo:
        body = drop_unset(name=name, snapshot_tag=snapshot_tag, per_child_netns=per_child_netns)
        body |= drop_unset(memory_limit_mib=memory_limit_mib, **render_options(Limits, limits))
        body |= drop_unset(network=render_network(network))
        return self._send(post(api.WorkspaceInfo, "workspaces", body=body, takes_s=SPAWN_S))

    def suspend_workspace(self, name: str) -> api.WorkspaceInfo:
        return self._send(post(api.WorkspaceInfo, "workspaces", name, "suspend", body={}, takes_s=SPAWN_S))

    def resume_workspace(self, name: str) -> api.WorkspaceInfo:
        return self._send(post(api.WorkspaceInfo, "workspaces", name, "resume", takes_s=SPAWN_S))

    def delete_workspace(self, name: str) -> None:
        self._send(delete("workspaces", name))


def _read_file(sandbox_id: str, path: GuestPath, length: int | None = None) -> Call[bytes]:
    return get(bytes, "sandboxes", sandbox_id, "files", query=query_of(path=path_text(path), length=length))
