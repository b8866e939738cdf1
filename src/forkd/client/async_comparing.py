"""Reading what sandboxes have written, comparing two of them, and merging one into another."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from forkd.client.async_controller import AsyncController
from forkd.client.undo import async_undo
from forkd.client.written import Changes, ChangesParser, Compared, add_sums, compare
from forkd.errors import ForkdError, InvalidInput, NotFound

# When this process is killed, the daemon ends what it has forked for a look.
_LOOK_S = 900.0


async def async_read_changes(
    controller: AsyncController, sandbox_id: str, *, since_ns: int = 0, sha256: bool = False
) -> Changes:
    parser = ChangesParser()
    async with aclosing(controller.read_changes(sandbox_id, since_ns, sha256)) as pieces:
        async for piece in pieces:
            parser.feed(piece)
    return parser.finish()


@asynccontextmanager
async def async_forked(controller: AsyncController, tag: str) -> AsyncIterator[str]:
    """The id of a sandbox of this snapshot, which is gone after the block, however that ends."""
    key = f"look-{os.urandom(16).hex()}"
    try:
        [info] = await controller.spawn_sandboxes(tag, timeout_secs=_LOOK_S, idempotency_key=key)
        yield info["id"]
    except ForkdError:
        with suppress(ForkdError):
            await controller.cancel_spawn(key)
        raise
    except BaseException as error:
        await async_undo(controller, key, error)
        raise
    await controller.cancel_spawn(key)


@asynccontextmanager
async def async_found(controller: AsyncController, name: str) -> AsyncIterator[str]:
    """The id of a sandbox, by its id or its name; of a snapshot's tag, that of a fork for the time of the block."""
    try:
        sandbox_id = (await controller.get_sandbox(name))["id"]
    except NotFound as error:
        try:
            await controller.get_snapshot(name)
        except ForkdError:
            raise NotFound(
                f"There is no sandbox and no snapshot {name}", hint="List them with: forkd ls, forkd snapshot ls"
            ) from error
    else:
        yield sandbox_id
        return
    async with async_forked(controller, name) as sandbox_id:
        yield sandbox_id


async def async_compare_sandboxes(controller: AsyncController, before_id: str, after_id: str) -> Compared:
    """Contents are only read where sizes are the same and it is not clear otherwise."""
    before = await async_read_changes(controller, before_id)
    after = await async_read_changes(controller, after_id)
    if before.image != after.image:
        raise InvalidInput(
            f"{before_id} and {after_id} come from different images, and only what was written over one is compared",
            hint="Copy what you want to compare out of them with: forkd cp",
        )
    found = compare(before, after)
    if found.undecided:
        before = await _with_sums(controller, before_id, before, found.undecided)
        after = await _with_sums(controller, after_id, after, found.undecided)
        found = compare(before, after)
    return Compared(before, after, found)


async def _with_sums(
    controller: AsyncController, sandbox_id: str, changes: Changes, undecided: Sequence[str]
) -> Changes:
    """Only what was written since the oldest of them is read."""
    times = [changes.entries[path].ctime_ns for path in undecided if path in changes.entries]
    if not times:
        return changes
    return add_sums(changes, await async_read_changes(controller, sandbox_id, since_ns=min(times) - 1, sha256=True))
