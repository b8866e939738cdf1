# Generated from async_branching.py by tools/unasync.py: do not edit.
"""Going back, and going on from somewhere else: branches, checkpoints, attempts and promotion of one sandbox."""

from __future__ import annotations

import builtins
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Self

from forkd.client.controller import Controller
from forkd.errors import ForkdError, NotFound
from forkd.wire.api import CheckpointInfo, SandboxInfo, SnapshotInfo


class Trial:
    """What `attempt` gives: the sandbox, and the checkpoint it goes back to."""

    def __init__(self, sandbox: Branching, checkpoint: str) -> None:
        self.sandbox = sandbox
        self.checkpoint = checkpoint

    def rewind(self) -> SandboxInfo:
        """Back to where the attempt began. The block goes on from there, and may try something else."""
        return self.sandbox.rewind(self.checkpoint)


class Branching:
    """What Sandbox has of it."""

    _controller: Controller
    _id: str
    _tag: str

    def branch(self, tag: str | None = None, mode: str = "live", *, wait: bool = True) -> SnapshotInfo:
        """Freeze it where it is as the snapshot `tag`, else under a generated one. It runs on.

        `wait=False` returns while the snapshot is written; it can be forked from at once if it is `usable`.
        """
        return self._controller.branch_sandbox(self._id, tag, mode=mode, wait=wait)

    def checkpoint(self, name: str | None = None) -> CheckpointInfo:
        """Remember where it is. Without `name` it gets a generated one. Checkpoints end with the sandbox."""
        return self._controller.create_checkpoint(self._id, name)

    def checkpoints(self) -> builtins.list[CheckpointInfo]:
        """Oldest first."""
        return self._controller.list_checkpoints(self._id)

    def delete_checkpoint(self, name: str) -> None:
        self._controller.delete_checkpoint(self._id, name)

    def rewind(self, to: str | None = None, *, discard: bool = False) -> SandboxInfo:
        """Back to the checkpoint `to`, else the newest, with the same id, address and limits.

        What it did since then is gone, in memory and on disk, and so are commands that were started since. `discard`
        deletes the checkpoint. When this fails the sandbox is as it was.
        """
        return self._moved(self._controller.rewind_sandbox(self._id, to, discard=discard))

    def promote(self, child: Self | str) -> SandboxInfo:
        """Go on from where `child` is, one of its forks or the id of one. All forks of this sandbox are gone then."""
        child_id = child if isinstance(child, str) else child._id
        info = self._moved(self._controller.promote_sandbox(self._id, child_id))
        if not isinstance(child, str):
            child._lost()
        return info

    @contextmanager
    def attempt(self) -> Generator[Trial, None, None]:
        """What happens to it in the block stays when the block ends, and is undone when it raises.

        The exception goes on. To give up without one, or to try again, call `rewind` of what this gives. The
        checkpoint that is taken for it is deleted either way.
        """
        name = f"attempt-{os.urandom(6).hex()}"
        self.checkpoint(name)
        try:
            yield Trial(self, name)
        except BaseException as error:
            try:
                self.rewind(name, discard=True)
            except ForkdError as failure:
                error.add_note(f"{self._id} could not be rewound to its checkpoint {name}: {failure.message}")
            raise
        with suppress(NotFound):  # it was killed in the block, which is no failure
            self.delete_checkpoint(name)

    def _moved(self, info: SandboxInfo) -> SandboxInfo:
        self._tag = info["snapshot_tag"]
        return info

    def _lost(self) -> None:
        """The daemon has ended it."""
        raise NotImplementedError
