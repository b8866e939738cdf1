"""The files of one sandbox onto another, and what `Sandbox` has for comparing and merging."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from forkd.client.async_comparing import async_compare_sandboxes, async_forked, async_found, async_read_changes
from forkd.client.async_controller import AsyncController
from forkd.client.merge_errors import MergeConflicts, MergeIncomplete
from forkd.client.merge_plan import (
    MergePlan,
    SinceBase,
    SinceTime,
    find_first_removals,
    find_instants,
    plan_merge,
)
from forkd.client.written import Changes, Compared, Difference
from forkd.errors import Conflict, ForkdError, InvalidInput, NotFound
from forkd.wire.api import SandboxInfo
from forkd.wire.tar import END, Entry, padding, render_entry


class AsyncMerging:
    """A part of AsyncSandbox."""

    _controller: AsyncController
    _id: str

    async def changes(self, *, since_ns: int = 0, sha256: bool = False) -> Changes:
        """What it has written over its image, and in /tmp; with a ctime later than `since_ns`."""
        return await async_read_changes(self._controller, self._id, since_ns=since_ns, sha256=sha256)

    async def diff(self, other: AsyncMerging | str) -> list[Difference]:
        """What is different in another sandbox, or in a snapshot, by its tag: added there, removed or changed."""
        if not isinstance(other, str):
            return [*(await async_compare_sandboxes(self._controller, self._id, other._id)).differences]
        async with async_found(self._controller, other) as other_id:
            return [*(await async_compare_sandboxes(self._controller, self._id, other_id)).differences]

    async def merge(self, child: AsyncMerging, *, force: bool = False, dry_run: bool = False) -> MergePlan:
        """Bring what a fork of this one has written since the fork here: files, links, modes, deletions.

        It may also be another sandbox of the same snapshot. MergeConflicts when both have changed the same; nothing is
        written then, unless by `force`, with which the child wins. `dry_run` writes nothing in any case.
        """
        return await async_merge(self._controller, child._id, self._id, force=force, dry_run=dry_run)


async def async_merge(
    controller: AsyncController,
    child_id: str,
    parent_id: str | None = None,
    *,
    force: bool = False,
    dry_run: bool = False,
) -> MergePlan:
    """What was done, or would be. MergeConflicts when both have changed, unless the child wins by `force`."""
    child, parent = await _find_both(controller, child_id, parent_id)
    base = await _read_base(controller, child, parent)
    compared = await async_compare_sandboxes(controller, parent["id"], child["id"])
    plan = _plan(child, parent, base, compared, force=force)
    if dry_run:
        return plan
    if plan.conflicts and not force:
        raise MergeConflicts(plan)
    if not plan.empty:
        await _apply(controller, child, parent, plan)
    return plan


async def _find_both(
    controller: AsyncController, child_id: str, parent_id: str | None
) -> tuple[SandboxInfo, SandboxInfo]:
    child = await controller.get_sandbox(child_id)
    found = parent_id or child.get("parent_id")
    if found is None:
        raise InvalidInput(
            f"{child['id']} was not forked from another sandbox, so there is nothing to merge it into",
            hint="Name another sandbox of the same snapshot: forkd merge CHILD --into SANDBOX",
        )
    parent = await controller.get_sandbox(found)
    if parent["id"] == child["id"]:
        raise InvalidInput("A sandbox cannot be merged into itself", hint="Name its parent")
    return child, parent


async def _read_base(controller: AsyncController, child: SandboxInfo, parent: SandboxInfo) -> Changes | None:
    """The moment in which both were one, when its snapshot is still there. None: clocks have to do."""
    is_child = child.get("parent_id") == parent["id"]
    if not is_child and not _are_siblings(child, parent):
        raise InvalidInput(
            f"{child['id']} is neither a fork of {parent['id']} nor of the same snapshot",
            hint="Copy what you want of it with: forkd cp",
        )
    try:
        snapshot = await controller.get_snapshot(child["snapshot_tag"])
        made_later = snapshot["created_at_unix"] > min(child["created_at_unix"], parent["created_at_unix"])
        if snapshot.get("branched_from") == child.get("parent_id") and (is_child or not made_later):
            async with async_forked(controller, snapshot["tag"]) as sandbox_id:
                return await async_read_changes(controller, sandbox_id)
    except NotFound:
        pass
    if not is_child:
        raise InvalidInput(
            f"The snapshot that {child['id']} and {parent['id']} come from is not there any more",
            hint="Fork with a tag to keep it. Copy what you want with: forkd cp",
        )
    return None


def _are_siblings(one: SandboxInfo, other: SandboxInfo) -> bool:
    """Forked from the same snapshot, or in the same moment from the same sandbox."""
    return all(one.get(key) == other.get(key) for key in ("snapshot_tag", "parent_id", "forked_at_unix"))


def _plan(
    child: SandboxInfo, parent: SandboxInfo, base: Changes | None, compared: Compared, *, force: bool
) -> MergePlan:
    if base is not None:
        since = SinceBase(base)
        return plan_merge(compared.after, compared.before, since, since, force=force)
    forked_at_unix = child.get("forked_at_unix")
    if forked_at_unix is None or not compared.after.clocks.born_ns:
        raise InvalidInput(
            f"It is not known when {child['id']} was forked from {parent['id']}",
            hint="Copy what you want of it with: forkd cp",
        )
    forked_at_ns = int(forked_at_unix * 1e9)
    of_parent, of_child = find_instants(compared.before.clocks, compared.after.clocks, forked_at_ns)
    return plan_merge(compared.after, compared.before, SinceTime(of_child), SinceTime(of_parent), force=force)


async def _apply(controller: AsyncController, child: SandboxInfo, parent: SandboxInfo, plan: MergePlan) -> None:
    try:
        for path in find_first_removals(plan):
            with suppress(NotFound):
                await controller.remove_file(parent["id"], path, True)
        if plan.write:
            await controller.write_archive(parent["id"], "/", _pack(controller, child["id"], plan.write), keep=True)
    except ForkdError as error:
        raise await _look_again(controller, child, parent, plan, error) from error


async def _look_again(
    controller: AsyncController, child: SandboxInfo, parent: SandboxInfo, plan: MergePlan, error: ForkdError
) -> MergeIncomplete:
    """What of the plan is still different."""
    wanted = [each.path for each in (*plan.remove, *plan.write)]
    try:
        now = await async_compare_sandboxes(controller, parent["id"], child["id"])
    except ForkdError:
        return MergeIncomplete(error, None, wanted)
    different = {each.path for each in now.differences}
    applied = [path for path in wanted if path not in different]
    return MergeIncomplete(error, applied, [path for path in wanted if path in different])


async def _pack(
    controller: AsyncController, sandbox_id: str, write: Sequence[Difference]
) -> AsyncGenerator[bytes, None]:
    """An archive of these files, read one after the other."""
    for each in write:
        facts = each.after
        assert facts is not None
        name, size = each.path.lstrip("/"), facts.size if facts.type == "file" else 0
        owner = (facts.uid, facts.gid)
        yield render_entry(Entry(name, facts.type, facts.mode, facts.mtime_ns, size, facts.target or "", owner))
        if not size:
            continue
        left = size
        async with aclosing(controller.read_file_stream(sandbox_id, each.path, size)) as pieces:
            async for piece in pieces:
                left -= len(piece)
                yield piece
        if left:
            raise Conflict(f"{each.path} changed while it was merged", hint="Merge again")
        yield padding(size)
    yield END
