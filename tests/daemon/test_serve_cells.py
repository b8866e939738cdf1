"""The settings of cells reach the VMs, and what is in force is shown."""

import os
from collections.abc import Callable

import pytest
from support_client import Client
from support_daemon import served

from forkd.cli.inspect import render_cell
from forkd.engines import table
from forkd.engines.base import Opening
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import InvalidInput
from forkd.host.id_maps import UserRange
from forkd.host.paths import Home
from forkd.runtime.doctor import open_engine

FIRST, COUNT = 1_900_000_000, 512


@pytest.mark.vm
@pytest.mark.skipif(os.geteuid() != 0, reason="users of their own are root's to give")
@pytest.mark.usefixtures("nothing_left")
def test_vms_run_as_users_of_the_range_that_was_set(vm_home: Home) -> None:
    flags = ("--bind", "none", "--on-stop", "kill", "--vm-ids", f"{FIRST}:{COUNT}")
    with served(vm_home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
        [made] = controller.spawn_sandboxes("warm")
        cell = controller.get_sandbox(made["id"], cell=True)["cell"]
        assert "cell" not in made
        assert FIRST <= cell["user"] < FIRST + COUNT
        assert (cell["lacks"], cell["capabilities"], cell["no_new_privileges"]) == ([], 0, True)
        daemon.kill()
    # The next one knows them for VMs, by their users too.
    with served(vm_home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
        assert controller.get_sandbox(made["id"])["state"] == "running"
        assert controller.eval_code(made["id"], "1 + 1")["result"] == "2"


def test_an_engine_gets_the_wish_and_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(QemuEngine, "__init__", lambda _, *args, **given: seen.update(given))
    opening = Opening(outlive=True, cell="best-effort", users=UserRange(FIRST, COUNT))
    table.get_entry("qemu").open("tcg", opening)
    assert seen == {"outlive": True, "cell": "best-effort", "users": UserRange(FIRST, COUNT)}
    assert open_engine("fake", opening).name == "fake"


def test_what_a_process_lacks_of_a_cell_is_shown(client: Client, spawn: Callable[..., str]) -> None:
    cell = client.get(f"{spawn()}?cell=true").body["cell"]
    assert "seccomp allow-list" in cell["lacks"] and cell["user"] == os.geteuid()
    assert render_cell(cell).startswith("lacks ") and f"user {os.geteuid()}" in render_cell(cell)
    whole = render_cell({**cell, "lacks": [], "namespaces": ["user", "mnt", "ipc", "uts", "net"]})
    assert whole.startswith("whole; ") and "own user mnt ipc uts net, shared pid," in whole
    assert all("cell" not in info for info in client.get("/v1/sandboxes").body)


def test_a_range_that_is_too_small_is_refused(vm_ids: Callable[[str], object]) -> None:
    for text in ("1900000000:255", "999:256", "1900000000", "x:256", "4294967200:256"):
        with pytest.raises(InvalidInput, match="vm-ids"):
            vm_ids(text)
    assert vm_ids("1900000000:256") == (1_900_000_000, 256)


@pytest.fixture
def vm_ids(fake_home: Home) -> Callable[[str], object]:
    from forkd.daemon.settings import merge_settings

    return lambda text: merge_settings({"vm_ids": text}, {}, {}, fake_home).vm_ids
