# Generated from async_branch_routes.py by tools/unasync.py: do not edit.
"""The routes for branches, checkpoints and chains of snapshots: the part of the controller that is about lineage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar, Unpack

from forkd.client.arguments import (
    ForkOptions,
    NetworkLike,
    check_key,
    drop_unset,
    render_network,
    render_options,
)
from forkd.client.call import Again, Call, delete, get, post, query_of
from forkd.errors import InvalidInput
from forkd.wire import api

DERIVE_S = 600.0
# How long the daemon may need, beyond an ordinary answer.
SPAWN_S = 60.0
SPAWN_EACH_S = 1.0
FREEZE_S = 600.0  # without KVM a boot alone takes a minute

T = TypeVar("T")


class BranchRoutes:
    def _send(self, call: Call[T]) -> T:
        raise NotImplementedError

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: str | None = None,
        wait: bool = True,
    ) -> api.SnapshotInfo:
        """Freeze it where it is, under `tag`. `mode` wins over `diff`, as in the forkd SDK."""
        body = drop_unset(
            tag=tag,
            mode=None if mode is None else str(getattr(mode, "value", mode)),
            diff=True if diff and mode is None else None,
            measure_diff=measure_diff or None,
            wait=None if wait else False,
        )
        return self._send(post(api.SnapshotInfo, "sandboxes", sandbox_id, "branch", body=body, takes_s=FREEZE_S))

    def fork_sandbox(
        self,
        sandbox_id: str,
        count: int = 1,
        *,
        tag: str | None = None,
        memory_limit_mib: int | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[ForkOptions],
    ) -> list[api.SandboxInfo]:
        """Branch it and fork the branch `count` times, all or none. `tag` keeps the branch under that name.

        After a lost connection the call is made again; its key keeps that harmless.
        """
        body = drop_unset(count=count, tag=tag, memory_limit_mib=memory_limit_mib)
        body |= render_options(ForkOptions, options)
        key = f"sdk-{os.urandom(16).hex()}" if idempotency_key is None else check_key(idempotency_key)
        takes_s = SPAWN_S + SPAWN_EACH_S * count
        path = ("sandboxes", sandbox_id, "fork")
        call = post(list[api.SandboxInfo], *path, body=body, key=key, again=Again.SAFE, takes_s=takes_s)
        return self._send(call)

    def create_checkpoint(self, sandbox_id: str, name: str | None = None) -> api.CheckpointInfo:
        """Where it is now, to rewind it to. Without `name` the daemon finds one."""
        path = ("sandboxes", sandbox_id, "checkpoints")
        return self._send(post(api.CheckpointInfo, *path, body=drop_unset(name=name), takes_s=FREEZE_S))

    def list_checkpoints(self, sandbox_id: str) -> list[api.CheckpointInfo]:
        """Oldest first."""
        return self._send(get(list[api.CheckpointInfo], "sandboxes", sandbox_id, "checkpoints"))

    def delete_checkpoint(self, sandbox_id: str, name: str) -> None:
        self._send(delete("sandboxes", sandbox_id, "checkpoints", name))

    def rewind_sandbox(self, sandbox_id: str, to: str | None = None, *, discard: bool = False) -> api.SandboxInfo:
        """Back to a checkpoint, else to the newest; it keeps its id, address and limits. `discard` deletes it then."""
        body = drop_unset(to=to, discard=discard or None)
        return self._send(post(api.SandboxInfo, "sandboxes", sandbox_id, "rewind", body=body, takes_s=SPAWN_S))

    def promote_sandbox(self, sandbox_id: str, child: str) -> api.SandboxInfo:
        """It goes on from where its child is. The child and its siblings are gone then."""
        body = {"child": child}
        return self._send(post(api.SandboxInfo, "sandboxes", sandbox_id, "promote", body=body, takes_s=SPAWN_S))

    def derive_snapshot(
        self,
        tag: str,
        new_tag: str,
        args: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        code: str | None = None,
        network: NetworkLike | None = None,
        timeout_secs: float = DERIVE_S,
    ) -> api.SnapshotInfo:
        """Fork `tag`, run a command or Python there or both, and save what that changed as `new_tag`.

        The result is a layer over `tag`. A command that fails makes nothing.
        """
        if isinstance(args, str):
            raise InvalidInput("args must be a list of texts", hint='Use shell="…" for a line of shell')
        words = None if args is None else list(args)
        body = drop_unset(tag=new_tag, args=words, shell=shell, code=code, timeout_secs=timeout_secs)
        body |= drop_unset(network=render_network(network))
        takes_s = timeout_secs + FREEZE_S
        return self._send(post(api.SnapshotInfo, "snapshots", tag, "derive", body=body, takes_s=takes_s))

    def compact_snapshot(self, tag: str, to: str) -> api.SnapshotInfo:
        """The whole chain of `tag` as one snapshot without a parent, under `to`."""
        return self._send(post(api.SnapshotInfo, "snapshots", tag, "compact", body={"to": to}, takes_s=FREEZE_S))

    def verify_snapshot(self, tag: str) -> api.VerifyResult:
        """Read all of its chain; SnapshotDamaged names the chunk that is not what was written."""
        return self._send(post(api.VerifyResult, "snapshots", tag, "verify", again=Again.SAFE, takes_s=FREEZE_S))

    def prune_snapshots(
        self,
        *,
        keep_last: int | None = None,
        keep_tagged: bool = False,
        max_age_secs: float | None = None,
        max_bytes: int | None = None,
        dry_run: bool = False,
    ) -> api.PruneResult:
        """Remove old ones; never what a sandbox or another snapshot needs. `dry_run` only says which."""
        body = drop_unset(
            keep_last=keep_last,
            keep_tagged=keep_tagged or None,
            max_age_secs=max_age_secs,
            max_bytes=max_bytes,
            dry_run=dry_run or None,
        )
        again = Again.SAFE if dry_run else Again.UNSENT
        return self._send(post(api.PruneResult, "snapshots", "prune", body=body, again=again, takes_s=FREEZE_S))

    def delete_snapshot(self, tag: str, *, cascade: bool = False, force: bool = False) -> None:
        """One that others are layers of only with `cascade`, which deletes them too, or `force`, which breaks them."""
        query = query_of(cascade="true" if cascade else None, force="true" if force else None)
        self._send(delete("snapshots", tag, query=query))
