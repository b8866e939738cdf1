"""Snapshots."""

from __future__ import annotations

from forkd.client.call import Again, Call, as_json, as_nothing, drop_unset
from forkd.wire.api import SnapshotInfo, SnapshotInfoDetail, TemplateInfo

_BOOT_AND_FREEZE_S = 600.0  # without KVM a boot alone takes a minute
_REHEARSE_S = 300.0  # and the turn of others before it


def list_snapshots() -> Call[list[SnapshotInfo]]:
    return Call("GET", ("v1", "snapshots"), as_json, again=Again.SAFE)


def get_snapshot(tag: str) -> Call[SnapshotInfo]:
    return Call("GET", ("v1", "snapshots", tag), as_json, again=Again.SAFE)


def snapshot_info(tag: str) -> Call[SnapshotInfoDetail]:
    return Call("GET", ("v1", "snapshots", tag, "info"), as_json, again=Again.SAFE)


def create_snapshot(
    tag: str,
    image: str,
    *,
    memory_mib: int,
    vcpus: int,
    cpu_template: str | None,
    warm: str | None,
    warm_command: str | None,
    warm_timeout_secs: float,
    rehearse: str | None,
    replace: bool,
    wait: bool,
) -> Call[SnapshotInfo]:
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
        replace=replace,
        wait=wait,
    )
    takes_s = warm_timeout_secs + _BOOT_AND_FREEZE_S if wait else 0.0
    return Call("POST", ("v1", "snapshots"), as_json, body=body, takes_s=takes_s)


def delete_snapshot(tag: str) -> Call[None]:
    return Call("DELETE", ("v1", "snapshots", tag), as_nothing, again=Again.SAFE, gone_is_done=True)


def warm_snapshot(tag: str) -> Call[TemplateInfo]:
    return Call("POST", ("v1", "snapshots", tag, "warm"), as_json, again=Again.SAFE, takes_s=_REHEARSE_S)


def list_templates() -> Call[list[TemplateInfo]]:
    return Call("GET", ("v1", "templates"), as_json, again=Again.SAFE)


def compact_snapshot(tag: str, to: str) -> Call[SnapshotInfo]:
    return Call("POST", ("v1", "snapshots", tag, "compact"), as_json, body={"to": to}, takes_s=_BOOT_AND_FREEZE_S)
