"""A client of a daemon that is measured: sandboxes and branches by plain HTTP, and what their guests write."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.figures import render_failure
from bench.served import TAG, Rest, Served, StampReader, warm_template
from forkd.errors import ContractBroken, EngineFailed, ForkdError
from forkd.runtime import demo

PAGE = 4096
_READY_S = 120.0
_LOOK_S = 0.02

# In the guest: an area of which one number in each page is written. No two pages are the same, none has only zeros:
# those a branch does not store.
_AREA = """
import numpy, threading
area = numpy.zeros({size} // 4, dtype=numpy.uint32)
cells = area[::1024]
numbers = numpy.arange(len(cells), dtype=numpy.uint32) * 256
writer, going, passes = None, False, 0
def write(mark):
    cells[:] = numbers + mark
def is_written(mark):
    return bool((cells == numbers + mark).all())
def scribble():
    global passes
    while going:
        numpy.add(cells, 1, out=cells)
        passes += 1
def begin():
    global writer, going
    going, writer = True, threading.Thread(target=scribble, daemon=True)
    writer.start()
def end():
    global going
    going = False
    writer.join()
"""


class Client:
    def __init__(self, daemon: Served, rest: Rest) -> None:
        self.rest = rest
        self._stamps = StampReader(daemon.stamps)
        self._way: str | None = None

    def spawn(self, tag: str) -> str:
        """Its id. All have to come to be in the way of the first, for which there was a template where there can be."""
        (made,) = self.rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": tag})
        way = str(made["way"])
        if way != (self._way or way):
            raise ContractBroken(f"A sandbox of {tag} came to be by {way}, and not by {self._way}")
        self._way = way
        return str(made["id"])

    def kill(self, sandbox_id: str) -> None:
        self.rest.ask("DELETE", f"/v1/sandboxes/{sandbox_id}")

    def expect(self, sandbox_id: str, code: str, wanted: object) -> None:
        check(self.rest.ask("POST", f"/v1/sandboxes/{sandbox_id}/eval", {"code": code}), wanted)

    def evaluate(self, sandbox_id: str) -> None:
        """The demo's expression."""
        self.expect(sandbox_id, demo.CODE, demo.EXPECTED)

    def branch(self, sandbox_id: str, tag: str, mode: str = "live", *, wait: bool = True) -> Any:
        return self.rest.ask("POST", f"/v1/sandboxes/{sandbox_id}/branch", {"tag": tag, "mode": mode, "wait": wait})

    def ready(self, tag: str) -> Any:
        """What a branch says of itself once it is on disk. Looked at seldom: each look costs the daemon something."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            info = self.rest.ask("GET", f"/v1/snapshots/{tag}")
            if info["status"] == "ready":
                return info
            if info["status"] == "failed":
                raise EngineFailed(f"{tag} was not written: {info.get('warning')}")
            time.sleep(_LOOK_S)
        raise EngineFailed(f"{tag} was not written within {_READY_S:g} s")

    def remove(self, tag: str) -> None:
        self.rest.ask("DELETE", f"/v1/snapshots/{tag}")

    def forget_stamps(self) -> None:
        self._stamps.take()

    def take_pause_ms(self) -> float:
        """Of the one branch since."""
        pauses = [value for kind, value in self._stamps.take() if kind == "pause"]
        if len(pauses) != 1:
            raise EngineFailed(f"Expected the pause of one branch, found {pauses}")
        return pauses[0]


@contextlib.contextmanager
def connected_client(daemon: Served) -> Iterator[Client]:
    with daemon.rest() as rest:
        yield Client(daemon, rest)


@contextlib.contextmanager
def source_of(client: Client, mib: int) -> Iterator[str]:
    """A sandbox of the snapshot, with an area of that much to write to."""
    warm_template(client.rest, TAG)  # it may have ended to make room for those of branches
    sandbox_id = client.spawn(TAG)
    try:
        client.expect(sandbox_id, f"{_AREA.format(size=mib * 2**20)}\nlen(cells)", mib * 2**20 // PAGE)
        client.evaluate(sandbox_id)
        yield sandbox_id
    finally:
        client.kill(sandbox_id)


def check(answer: Any, wanted: object) -> None:
    """A wrong answer is an error, not a measurement."""
    if not answer["has_value"] or answer["value"] != wanted:
        told = answer["result"] or answer["error"]
        raise ContractBroken(f"The guest answered {told} instead of {wanted!r}", details=answer["traceback"])


@dataclass
class Tries:
    """What was tried one after the other. What fails is a finding; what came of it does not count."""

    title: str
    right: int = 0
    failures: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def one(self, what: str) -> Iterator[None]:
        try:
            yield
        except ForkdError as error:
            self.failures.append(render_failure(f"{self.title}: {what}", error))
        else:
            self.right += 1
