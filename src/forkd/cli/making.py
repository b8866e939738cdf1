"""Making a snapshot through the daemon, its stages shown, given up when this command is interrupted."""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.cli.interrupts import Interrupts
from forkd.cli.reach import connect
from forkd.errors import Conflict, ForkdError, NotFound
from forkd.model.names import SnapshotTag

if TYPE_CHECKING:
    from forkd.cli.progress import Shown
    from forkd.client.controller import Controller

_POLL_S = 0.1
# How long a request that was just sent may take to be refused, before it counts as being worked on.
_REFUSAL_S = 2.0


@dataclass(frozen=True)
class Order:
    tag: SnapshotTag
    image: str
    memory_mib: int
    vcpus: int
    cpu_template: str | None
    warm: str | None
    warm_command: str | None
    warm_timeout_s: float
    rehearse: str | None
    replace: bool


def make_snapshot(args: argparse.Namespace, order: Order) -> dict[str, Any]:
    """What is known of it once it is ready."""
    from forkd.cli.progress import Shown

    with connect(args) as controller, Shown(quiet=args.json) as shown:
        _refuse_second(controller, order.tag)
        request = _Request(controller, order)
        with Interrupts() as interrupts:
            try:
                request.start()
                while not request.wait(_POLL_S):
                    _show_stage(controller, order.tag, shown)
                interrupts.settle()
            except BaseException:
                _give_up(args, order.tag, request)
                raise
        request.check()
        return {**controller.get_snapshot(order.tag), **controller.snapshot_info(order.tag)}


class _Request:
    """The request is answered when the snapshot is ready, or with all that is known of why it is not: in a thread,
    so that its stages can be asked for meanwhile."""

    def __init__(self, controller: Controller, order: Order) -> None:
        self._controller = controller
        self._order = order
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
        order = self._order
        try:
            self._controller.create_snapshot(
                order.tag,
                order.image,
                memory_mib=order.memory_mib,
                vcpus=order.vcpus,
                cpu_template=order.cpu_template,
                warm=order.warm,
                warm_command=order.warm_command,
                warm_timeout_secs=order.warm_timeout_s,
                rehearse=order.rehearse,
                replace=order.replace,
                wait=True,
            )
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


def _refuse_second(controller: Controller, tag: SnapshotTag) -> None:
    """So that nobody who is interrupted gives up what somebody else is making."""
    try:
        info = controller.get_snapshot(tag)
    except NotFound:
        return
    if info["status"] == "writing":
        raise Conflict(f"Snapshot {tag} is being made already", hint=f"Give it up with: forkd snapshot rm {tag}")


def _show_stage(controller: Controller, tag: SnapshotTag, shown: Shown) -> None:
    try:
        info = controller.get_snapshot(tag)
    except NotFound:  # not begun, or refused just now
        return
    if progress := info.get("progress"):
        shown.stage(progress)


def _give_up(args: argparse.Namespace, tag: SnapshotTag, request: _Request) -> None:
    if request.is_refused():
        return
    with connect(args) as controller:
        try:
            if controller.get_snapshot(tag)["status"] == "writing":
                controller.delete_snapshot(tag)
        except NotFound:
            return
        except ForkdError as error:
            error.hint = f"It may still be in the making; give it up with: forkd snapshot rm {tag}"
            raise
