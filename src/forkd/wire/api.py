"""The bodies of the REST API, as clients see them. docs/reference/rest.md says when each key is there."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, get_origin, get_type_hints


class ErrorBody(TypedDict):
    error: str
    code: str
    hint: str | None
    details: NotRequired[str]


class Health(TypedDict):
    ok: bool


class Readiness(TypedDict):
    ready: bool


class NetworkUsage(TypedDict):
    bytes_in: int  # to the sandbox
    bytes_out: int
    connections: int  # open now
    refused: int


class NetworkInfo(TypedDict):
    mode: Literal["none", "egress", "open"]
    allow: list[str]
    deny: list[str]
    max_bytes: int | None
    max_connections: int | None
    group: str | None
    usage: NotRequired[NetworkUsage]
    address: NotRequired[str | None]  # in its group


class PortInfo(TypedDict):
    port: int  # in the guest
    address: str
    host_port: int
    anyone: bool  # every user of the host may connect


class CellInfo(TypedDict):
    user: int  # its process runs as
    own_user: bool  # not the daemon's
    namespaces: list[str]  # those of its own
    filters: int  # of seccomp
    capabilities: int  # all its sets together
    no_new_privileges: bool
    cgroup: str | None
    memory_file: Literal["read-only", "writable", "none"]
    lacks: list[str]  # of a whole cell; empty: nothing


class SandboxInfo(TypedDict):
    id: str
    name: str | None
    snapshot_tag: str
    netns: str | None
    guest_addr: str
    created_at_unix: int
    pid: int | None
    memory_limit_mib: int | None
    cpu_limit: float | None
    pids_limit: int | None
    io_limit_mib_s: int | None
    has_branched: bool
    last_branch_memory_path: str | None
    branch_count: int
    state: Literal["starting", "running", "paused", "stopping", "dead"]
    cause: str | None
    engine: str
    isolation: str
    deadline_unix: float | None
    on_timeout: Literal["kill", "pause"]
    labels: dict[str, str]
    metadata: dict[str, str]
    workspace: str | None
    way: Literal["start", "fork"] | None
    parent_id: str | None  # the sandbox it was forked from
    lineage: str  # the same for all that came from one sandbox
    depth: int  # forks between it and the first of its lineage
    forked_at_unix: float | None
    network: NetworkInfo
    ports: list[PortInfo]
    cell: NotRequired[CellInfo]
    phases_ms: NotRequired[dict[str, float]]


class SpawnCancelled(TypedDict):
    removed: list[str]  # ids


class PackUpload(TypedDict):
    id: str
    offset: int
    done: bool
    unpacked_bytes: int
    total_bytes: int | None  # unpacked; known once the head of the pack is there
    expires_in_secs: float


class PackImported(TypedDict):
    tag: str
    made: list[str]
    reused: list[str]
    image_id: str
    image_reused: bool
    key: str | None
    warning: str | None
    network_dropped: list[str]  # snapshots that had a network for their sandboxes, and have none here


class SnapshotInfo(TypedDict):
    tag: str
    dir: str
    created_at_unix: int
    status: Literal["writing", "ready", "failed"]
    bootable: bool
    usable: bool  # can be forked now, also while it is written
    parent_tag: NotRequired[str]
    branched_from: NotRequired[str]
    pause_ms: NotRequired[int]
    diff_ms: NotRequired[int]
    diff_physical_bytes: NotRequired[int]
    diff_logical_bytes: NotRequired[int]
    diff_dirty_bytes: NotRequired[int]  # of pages that were looked at
    checkpoint: NotRequired[str]  # its name, of a checkpoint of `branched_from`
    auto: NotRequired[bool]  # nobody chose its tag
    warning: NotRequired[str]
    code: NotRequired[str]
    image_id: NotRequired[str]
    engine: NotRequired[str]
    memory_mib: NotRequired[int]
    vcpus: NotRequired[int]
    cpu_template: NotRequired[str]
    warm: NotRequired[str]
    rehearsal: NotRequired[str]
    network: NotRequired[NetworkInfo]  # of sandboxes that ask for no other
    progress: NotRequired[str]


class SnapshotInfoDetail(TypedDict):
    tag: str
    dir: str
    created_at_unix: NotRequired[int]
    memory_logical_bytes: int
    memory_physical_bytes: int
    vmstate_bytes: int
    parent_tag: NotRequired[str]
    parent_content_hash: NotRequired[str]
    chain_depth: int
    dependents: list[str]
    ancestors: list[str]
    unique_bytes: int  # on disk, gone when it is removed


class CheckpointInfo(TypedDict):
    name: str
    tag: str
    created_at_unix: int
    status: Literal["writing", "ready", "failed"]
    pause_ms: int
    bytes_dirty: NotRequired[int]


class Pruned(TypedDict):
    tag: str
    bytes: int
    why: str


class PruneResult(TypedDict):
    removed: list[Pruned]
    kept: int
    dry_run: bool


class VerifyResult(TypedDict):
    tag: str
    files: int
    bytes: int
    chain: list[str]  # root first, with the tag itself


class TemplateInfo(TypedDict):
    tag: str
    pid: int
    memory_bytes: int
    made_in_seconds: float
    created_at_unix: int
    forks: int


class WorkspaceInfo(TypedDict):
    id: str
    name: str
    source_snapshot_tag: str
    current_state_tag: NotRequired[str]
    status: Literal["running", "suspended", "stale"]
    live_sandbox_id: NotRequired[str]
    created_at_unix: int
    last_active_unix: int
    last_branch_memory_path: NotRequired[str]


class ExecResponse(TypedDict):
    stdout: str
    stderr: str
    exit_code: int
    truncated: bool


class EvalResponse(TypedDict):
    result: str | None
    error: str | None
    exit_code: int
    value: Any
    has_value: bool
    stdout: str
    stderr: str
    traceback: str | None
    truncated: bool


class PingResponse(TypedDict):
    pong: bool
    numpy_version: str
    pid: int
    agent_lang: str
    warmup_ready: bool


# Who is let in over TCP: there is none; everyone on this machine; holders of a token; nobody, as no token is left.
TcpState = Literal["off", "open", "token", "locked"]


class VersionResponse(TypedDict):
    version: str
    api: str
    engine: str
    isolation: str
    pid: int
    home: str
    listeners: list[str]
    tcp_access: TcpState
    idle_exit_secs: float  # 0: it stays


class ProcessInfo(TypedDict):
    pid: int
    args: list[str] | None
    shell: str | None
    pty: bool
    running: bool
    exit_code: int | None
    signal: int | None
    timed_out: bool
    started_at_unix: float


class FileInfo(TypedDict):
    name: str
    path: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block", "unknown"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None


class FileListing(TypedDict):
    entries: list[FileInfo]
    truncated: bool


class FileWritten(TypedDict):
    path: str
    size: int


class LeftOut(TypedDict):
    path: str  # below the directory
    why: str


class ArchiveWritten(TypedDict):
    path: str
    files: int
    bytes: int
    skipped: list[LeftOut]


class FileFacts(TypedDict):
    type: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block", "unknown"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None
    sha256: str | None


class ChangeInfo(TypedDict):
    path: str
    ctime_ns: int
    ino: int
    file: FileFacts | None  # None: it was removed
    base: FileFacts | None  # as the image has it


class ChangesHead(TypedDict):
    image: str
    now_ns: int
    host_before_ns: int
    host_after_ns: int
    began_ns: int
    born_ns: int
    steps: list[list[int]]


class Event(TypedDict):
    id: int
    ts_unix: float
    type: str
    sandbox_id: str | None
    snapshot_tag: str | None
    data: dict[str, Any]


class LineageSandbox(SandboxInfo):
    unique_bytes: NotRequired[int]  # memory that only this VM holds, where the host can tell


class LineageSnapshot(TypedDict):
    tag: str
    parent_tag: str | None  # whose layer it is
    branched_from: str | None  # a sandbox, also one that is gone
    checkpoint: str | None  # its name, when it is a checkpoint of that sandbox
    auto: bool  # nobody chose its tag
    status: Literal["writing", "ready", "failed"]
    created_at_unix: int
    depth: int  # layers below it
    unique_bytes: int  # on disk, gone when it is removed
    sandboxes: list[LineageSandbox]  # whose snapshot_tag it is


class Lineage(TypedDict):
    snapshots: list[LineageSnapshot]
    orphans: list[LineageSandbox]  # whose snapshot is gone, or never had a tag


def required_keys(body: Any) -> list[str]:
    """Of one of the classes above, in their order. Not `__required_keys__`: it knows no annotation that is a string."""
    hints = get_type_hints(body, include_extras=True)
    return [key for key, hint in hints.items() if get_origin(hint) is not NotRequired]
