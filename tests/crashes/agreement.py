"""The proof that registry, processes and files agree."""

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Mapping

from support_processes import wait_until

from forkd.client.controller import Controller
from forkd.host.files import STAGING_PREFIX
from forkd.host.marked import find_marked
from forkd.host.paths import Home

# What a value is asked with: in a child of a snapshot that has none it is None.
VALUE = "globals().get('y')"
LAND_S = 10.0


def check_agreement(home: Home, controller: Controller) -> list[str]:
    """Rows, processes, directories, ports and snapshots say the same; returns the ids of live sandboxes.

    Right after a start: no template, and no fork that never runs, is there.
    """
    rows = controller.list_sandboxes()
    live = [row["id"] for row in rows if row["state"] in ("running", "paused")]
    assert {row["state"] for row in rows} <= {"running", "paused", "dead"}, rows
    vms = find_vms(home)
    deadline = time.monotonic() + LAND_S
    while set(vms) != {row["id"] for row in rows} and time.monotonic() < deadline:
        time.sleep(0.1)  # after a full disk the rows are on their way there
        vms = find_vms(home)
    assert set(vms) == {row["id"] for row in rows}
    assert {path.name for path in find_marked(home.vms)} == {vms[sandbox_id] for sandbox_id in live}
    assert {path.name for path in home.vms.iterdir()} <= set(vms.values())
    for row in rows:
        if row["state"] == "running":
            assert controller.eval_code(row["id"], "20 + 22")["result"] == "42"
            host, _, port = row["guest_addr"].partition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
    snapshots = {view["tag"]: view for view in controller.list_snapshots()}
    assert not [view for view in snapshots.values() if view["status"] == "writing"], snapshots
    on_disk = [path.name for path in home.snapshots.iterdir()] if home.snapshots.is_dir() else []
    assert {tag for tag, view in snapshots.items() if view["bootable"]} == set(on_disk)
    assert find_staging(home) == []
    return live


def find_vms(home: Home) -> dict[str, str]:
    """By id of a sandbox, the directory of its VM: that is another one after a rewind."""
    with contextlib.closing(sqlite3.connect(f"file:{home.registry}?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT id, vm FROM sandboxes").fetchall())


def find_staging(home: Home) -> list[str]:
    """What is not complete: of snapshots, of VMs, and of images that are this home's own."""
    places = [home.snapshots, home.vms] + ([] if home.images.is_symlink() else [home.images])
    return [
        os.path.join(directory, name)
        for place in places
        for directory, below, _ in os.walk(place)
        for name in below
        if name.startswith(STAGING_PREFIX)
    ]


def check_values(controller: Controller, values: Mapping[str, str | None]) -> None:
    """Every snapshot that is listed as ready starts and has the right value, and there are no others than these."""
    ready = [view["tag"] for view in controller.list_snapshots() if view["status"] == "ready"]
    assert set(ready) <= set(values), ready
    for tag in ready:
        controller.verify_snapshot(tag)
        [child] = controller.spawn_sandboxes(tag)
        assert read_value(controller, child["id"]) == values[tag], tag
        assert controller.eval_code(child["id"], "x")["result"] == "41"
        controller.kill_sandbox(child["id"])


def read_value(controller: Controller, sandbox_id: str) -> str | None:
    evaluated = controller.eval_code(sandbox_id, VALUE)
    assert evaluated["error"] is None, evaluated
    value = evaluated["value"]
    assert value is None or isinstance(value, str)
    return value


def write_value(controller: Controller, sandbox_id: str, value: str) -> None:
    assert controller.eval_code(sandbox_id, f"y = {value!r}")["error"] is None


def end_all(home: Home, controller: Controller) -> None:
    for row in controller.list_sandboxes():
        controller.kill_sandbox(row["id"])
    # What recovery ended may be gone a moment later.
    wait_until(lambda: not _list_left(home), "a directory of a VM is left")
    assert not [path for path in find_marked(home.vms) if not path.name.startswith(("template-", "branch-"))]


def _list_left(home: Home) -> list[str]:
    """Of a daemon with templates, theirs stay."""
    names = os.listdir(home.vms) if home.vms.exists() else []
    return [name for name in names if not name.startswith(("template-", "branch-"))]
