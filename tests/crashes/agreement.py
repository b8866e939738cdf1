"""The proof that registry, processes and files agree."""

import socket

from forkd.client.controller import Controller
from forkd.host.files import STAGING_PREFIX
from forkd.host.marked import find_marked
from forkd.host.paths import Home


def check_agreement(home: Home, controller: Controller) -> list[str]:
    """Rows, processes, directories and ports say the same; returns the ids of live sandboxes."""
    rows = controller.list_sandboxes()
    live = [row["id"] for row in rows if row["state"] in ("running", "paused")]
    assert {row["state"] for row in rows} <= {"running", "paused", "dead"}, rows
    assert {path.name for path in find_marked(home.vms)} == set(live)
    assert {path.name for path in home.vms.iterdir()} <= {row["id"] for row in rows}
    for row in rows:
        if row["state"] == "running":
            assert controller.eval_code(row["id"], "20 + 22")["result"] == "42"
            host, _, port = row["guest_addr"].partition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
    snapshots = {view["tag"]: view for view in controller.list_snapshots()}
    assert not [view for view in snapshots.values() if view["status"] == "writing"], snapshots
    on_disk = [path.name for path in home.snapshots.iterdir()] if home.snapshots.is_dir() else []
    assert not [name for name in on_disk if name.startswith(STAGING_PREFIX)], on_disk
    assert {tag for tag, view in snapshots.items() if view["bootable"]} == set(on_disk)
    return live


def end_all(home: Home, controller: Controller) -> None:
    for row in controller.list_sandboxes():
        controller.kill_sandbox(row["id"])
    assert find_marked(home.vms) == {}
    assert list(home.vms.iterdir()) == []
