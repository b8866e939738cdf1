"""A snapshot that takes its time: its stages are shown meanwhile, and Ctrl-C gives it up."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from forkd.cli.connect import connect
from forkd.cli.interrupts import Interrupts
from forkd.errors import Conflict, ForkdError, NotFound
from forkd.model.names import SnapshotTag

if TYPE_CHECKING:
    from forkd.cli.progress import Shown
    from forkd.client import Controller

_POLL_S = 0.1
# A request that was just sent is refused within this time, or is being worked on.
_REFUSAL_S = 2.0
_DERIVES = (
    "forkd/derives"  # the label of the sandbox in which something runs for a derived snapshot; its value is the tag
)


def make_snapshot(
    args: argparse.Namespace, controller: Controller, tag: SnapshotTag, ask: Callable[[], object]
) -> None:
    """`ask` is the call that makes `tag`, and returns when it is ready."""
    from forkd.cli.progress import Shown

    with Shown(quiet=args.json) as shown:
        _refuse_second(controller, tag)
        making = _Making(ask)
        with Interrupts() as interrupts:
            try:
                making.start()
                while not making.wait(_POLL_S):
                    _show_stage(controller, tag, shown)
                interrupts.settle()
            except BaseException:
                _cancel(args, tag, making)
                raise
        making.check()


class _Making:
    """The request is answered when the snapshot is ready, or has failed. It runs in a thread, so that its stages can
    be asked for meanwhile."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._error: BaseException | None = None
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="snapshot", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def is_refused(self) -> bool:
        return self.wait(_REFUSAL_S) and self._error is not None

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


def _refuse_second(controller: Controller, tag: SnapshotTag) -> None:
    """So that a command that is interrupted does not cancel what another one is making."""
    try:
        info = controller.get_snapshot(tag)
    except NotFound:
        return
    if info["status"] == "writing":
        raise Conflict(f"Snapshot {tag} is being made already", hint=f"Cancel it with: forkd snapshot rm {tag}")


def _show_stage(controller: Controller, tag: SnapshotTag, shown: Shown) -> None:
    try:
        info = controller.get_snapshot(tag)
    except NotFound:  # not started yet, or refused
        return
    if progress := info.get("progress"):
        shown.stage(progress)


def _cancel(args: argparse.Namespace, tag: SnapshotTag, making: _Making) -> None:
    if making.is_refused():
        return
    with connect(args) as controller:
        try:
            for info in controller.list_sandboxes(labels={_DERIVES: tag}):
                controller.kill_sandbox(info["id"])
            if controller.get_snapshot(tag)["status"] == "writing":
                controller.delete_snapshot(tag)
        except NotFound:
            return
        except ForkdError as error:
            error.hint = f"It may still be in progress; cancel it with: forkd snapshot rm {tag}"
            raise
