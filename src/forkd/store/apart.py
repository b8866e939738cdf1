"""Layers written by a process of their own: the daemon's interpreter stays free for holding VMs still.

The writer gets a request as a line of JSON, answers with lines (progress, then the outcome), and ends when its input
does: so it does not outlive whoever asked. It inherits what it reads of the VM's process, as it may not open that
itself where only a parent may look into its children.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forkd import errors
from forkd.errors import EngineFailed, ForkdError, SnapshotDamaged
from forkd.host.faults import fault_point
from forkd.host.pages import Area, Handles, LiveMemory, opened_handles
from forkd.host.turns import Turns
from forkd.model.names import parse_tag
from forkd.store.chain import Snapshot
from forkd.store.content import OnProgress
from forkd.store.layers import LayerStats, write_layer
from forkd.store.snapshots import SnapshotStore

_PROGRESS_EVERY_S = 0.05
# Guests and their forks come first.
_NICENESS = 5


def write_layer_apart(
    memory: LiveMemory, parent: Snapshot, staging: Path, *, on_progress: OnProgress | None = None
) -> LayerStats:
    """As write_layer. What `on_progress` raises ends the writer."""
    with opened_handles(memory) as handles:
        writer = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[fd for fd in handles if fd is not None],
            # Faults are for us.
            env={name: value for name, value in os.environ.items() if name != "FORKD_FAULT"},
        )
    with writer:
        try:
            stats = _converse(writer, _render_request(memory, handles, parent, staging), on_progress)
        finally:
            writer.kill()
    fault_point("layer.pages")
    return stats


def _converse(writer: subprocess.Popen[bytes], request: bytes, on_progress: OnProgress | None) -> LayerStats:
    assert writer.stdin is not None and writer.stdout is not None
    try:
        writer.stdin.write(request)
        writer.stdin.flush()
    except BrokenPipeError:  # it ended: its answers, or their absence, say more
        with contextlib.suppress(BrokenPipeError):  # what was not written would be tried again at the end
            writer.stdin.close()
    for line in writer.stdout:
        answer = json.loads(line)
        if "stats" in answer:
            return LayerStats(**answer["stats"])
        if "error" in answer:
            raise _parse_error(answer["error"])
        if on_progress is not None:
            on_progress(*answer["progress"])
    raise EngineFailed(f"The process that wrote a layer ended with status {writer.wait()}", hint="Try again")


def _render_request(memory: LiveMemory, handles: Handles, parent: Snapshot, staging: Path) -> bytes:
    request = {
        "pid": memory.pid,
        "file": str(memory.file.absolute()),
        "areas": [asdict(area) for area in memory.areas],
        "handles": handles,
        "parent": str(parent.directory.absolute()),
        "hash": parent.hash,
        "staging": str(staging.absolute()),
    }
    return json.dumps(request).encode() + b"\n"


def _parse_error(raw: dict[str, Any]) -> ForkdError:
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForkdError))
    kind = next((kind for kind in kinds if kind.code == raw["code"]), ForkdError)
    return kind(raw["message"], hint=raw["hint"])


def main() -> None:
    """The writer."""
    os.nice(_NICENESS)
    Turns.wanted = False
    line = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        _answer(stats=asdict(_write(json.loads(line))))
    except ForkdError as error:
        _answer(error={"code": error.code, "message": error.message, "hint": error.hint})
    except Exception as error:
        _answer(error={"code": ForkdError.code, "message": f"Writing a layer failed: {error!r}", "hint": None})


def _write(request: dict[str, Any]) -> LayerStats:
    directory = Path(request["parent"])
    parent = SnapshotStore(directory.parent).get(parse_tag(directory.name))
    if parent.hash != request["hash"]:
        raise SnapshotDamaged(f"Snapshot {directory.name} was replaced while a layer over it was made")
    memory = LiveMemory(
        request["pid"],
        Path(request["file"]),
        tuple(Area(**area) for area in request["areas"]),
        Handles(*request["handles"]),
    )
    return write_layer(memory, parent, Path(request["staging"]), on_progress=_Progress())


class _Progress:
    def __init__(self) -> None:
        self._told_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        if done == total or time.monotonic() - self._told_at > _PROGRESS_EVERY_S:
            self._told_at = time.monotonic()
            _answer(progress=(done, total))


def _answer(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
