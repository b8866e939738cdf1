"""Which keys each answer of the API has, with their types: forkd's, which clients decide by, then ours."""

NOTHING = type(None)
SANDBOX = {
    "id": str,
    "snapshot_tag": str,
    "netns": (str, NOTHING),
    "guest_addr": str,
    "created_at_unix": int,
    "pid": (int, NOTHING),
    "memory_limit_mib": (int, NOTHING),
    "has_branched": bool,
    "last_branch_memory_path": (str, NOTHING),
    "branch_count": int,
    # Ours.
    "name": (str, NOTHING),
    "cpu_limit": (int, float, NOTHING),
    "pids_limit": (int, NOTHING),
    "io_limit_mib_s": (int, NOTHING),
    "state": str,
    "cause": (str, NOTHING),
    "engine": str,
    "isolation": str,
    "deadline_unix": (int, float, NOTHING),
    "on_timeout": str,
    "labels": dict,
    "metadata": dict,
    "workspace": (str, NOTHING),
    "way": (str, NOTHING),
    "parent_id": (str, NOTHING),
    "lineage": str,
    "depth": int,
    "forked_at_unix": (int, float, NOTHING),
    "network": dict,
    "ports": list,
}
_SNAPSHOT = {"tag": str, "dir": str, "created_at_unix": int}
SNAPSHOT = {
    **_SNAPSHOT,
    "status": str,
    "bootable": bool,
    # Ours.
    "usable": bool,
    "image_id": str,
    "engine": str,
    "memory_mib": int,
    "vcpus": int,
    "warm": str,
    "network": dict,
}
# Of a snapshot that is a branch; where it holds all of its memory it has no parent.
WHOLE_BRANCH = {
    **SNAPSHOT,
    "branched_from": str,
    "pause_ms": int,
    "diff_ms": int,
    "diff_physical_bytes": int,
    "diff_logical_bytes": int,
    # Ours.
    "diff_dirty_bytes": int,
    "auto": bool,
}
BRANCH = {**WHOLE_BRANCH, "parent_tag": str}
# And while it is written.
WRITTEN = {
    **_SNAPSHOT,
    "status": str,
    "bootable": bool,
    "parent_tag": str,
    "branched_from": str,
    "pause_ms": int,
    # Ours.
    "usable": bool,
    "progress": str,
    "auto": bool,
}
CHECKPOINT = {"name": str, "tag": str, "created_at_unix": int, "status": str, "pause_ms": int, "bytes_dirty": int}
SNAPSHOT_DETAIL = {
    **_SNAPSHOT,
    "memory_logical_bytes": int,
    "memory_physical_bytes": int,
    "vmstate_bytes": int,
    "chain_depth": int,
    "dependents": list,
    "ancestors": list,
    # Ours.
    "unique_bytes": int,
}
LAYER_DETAIL = {**SNAPSHOT_DETAIL, "parent_tag": str, "parent_content_hash": str}
WORKSPACE = {
    "id": str,
    "name": str,
    "source_snapshot_tag": str,
    "status": str,
    "created_at_unix": int,
    "last_active_unix": int,
    "live_sandbox_id": str,
}
SUSPENDED_WORKSPACE = {key: kind for key, kind in WORKSPACE.items() if key != "live_sandbox_id"} | {
    "current_state_tag": str
}
EXEC = {"stdout": str, "stderr": str, "exit_code": int, "truncated": bool}
EVAL = {
    "result": (str, NOTHING),
    "error": (str, NOTHING),
    "exit_code": int,
    # Ours.
    "value": object,
    "has_value": bool,
    "stdout": str,
    "stderr": str,
    "traceback": (str, NOTHING),
    "truncated": bool,
}
TEMPLATE = {
    "tag": str,
    "pid": int,
    "memory_bytes": int,
    "made_in_seconds": float,
    "created_at_unix": int,
    "forks": int,
}
PING = {"pong": bool, "numpy_version": str, "pid": int, "agent_lang": str, "warmup_ready": bool}
VERSION = {
    "version": str,
    "api": str,
    "engine": str,
    "isolation": str,
    "pid": int,
    "home": str,
    "listeners": list,
    "tcp_access": str,
    "idle_exit_secs": float,
}
ERROR = {"error": str, "code": str, "hint": (str, NOTHING)}
