"""Workspaces: sandboxes with a name that can be put away and taken up again."""

from __future__ import annotations

from forkd.client.call import Again, Call, as_json, as_nothing, drop_unset
from forkd.wire.api import WorkspaceInfo

_SPAWN_S = 60.0


def list_workspaces() -> Call[list[WorkspaceInfo]]:
    return Call("GET", ("v1", "workspaces"), as_json, again=Again.SAFE)


def get_workspace(name: str) -> Call[WorkspaceInfo]:
    return Call("GET", ("v1", "workspaces", name), as_json, again=Again.SAFE)


def create_workspace(
    name: str,
    snapshot_tag: str,
    per_child_netns: bool,
    memory_limit_mib: int | None,
    cpu_limit: float | None = None,
    pids_limit: int | None = None,
    io_limit_mib_s: int | None = None,
) -> Call[WorkspaceInfo]:
    body = {
        "name": name,
        "snapshot_tag": snapshot_tag,
        "per_child_netns": per_child_netns,
        **drop_unset(
            memory_limit_mib=memory_limit_mib,
            cpu_limit=cpu_limit,
            pids_limit=pids_limit,
            io_limit_mib_s=io_limit_mib_s,
        ),
    }
    return Call("POST", ("v1", "workspaces"), as_json, body=body, takes_s=_SPAWN_S)


def suspend_workspace(name: str) -> Call[WorkspaceInfo]:
    return Call("POST", ("v1", "workspaces", name, "suspend"), as_json, body={}, takes_s=_SPAWN_S)


def resume_workspace(name: str) -> Call[WorkspaceInfo]:
    return Call("POST", ("v1", "workspaces", name, "resume"), as_json, takes_s=_SPAWN_S)


def delete_workspace(name: str) -> Call[None]:
    return Call("DELETE", ("v1", "workspaces", name), as_nothing, again=Again.SAFE, gone_is_done=True)
