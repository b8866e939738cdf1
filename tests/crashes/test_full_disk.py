"""The disk of the home is full: new work is refused, all else goes on, and nothing is lost when there is room again."""

import functools
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from agreement import check_agreement, end_all
from support_client import Client
from support_daemon import Served, served
from support_images import made_home, make_image
from support_mounts import as_root, small_disk
from support_processes import has_ended, wait_until

from forkd.client.controller import Controller
from forkd.host.marked import is_stopped
from forkd.host.paths import Home

_ATTEMPTS = 5

pytestmark = [pytest.mark.usefixtures("nothing_left"), as_root]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """With a disk of its own, just large enough for a snapshot of a small VM."""
    with small_disk(tmp_path / "home", "144m") as root:
        # Of the test, which could not read it else.
        (root / "served.log").symlink_to(tmp_path / "served.log")
        with made_home(root) as made:
            make_image(made)
            yield made


@contextmanager
def full(home: Home) -> Iterator[None]:
    filling = home.root / "filling"
    try:
        with filling.open("wb") as file:
            for _ in range(_ATTEMPTS):
                free = shutil.disk_usage(home.root).free
                # The daemon may write meanwhile, and there is less than there was.
                with suppress(OSError):
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free or 1)
        yield
    finally:
        filling.unlink()


def spawn(controller: Controller, n: int) -> list[str]:
    controller.create_snapshot("warm", "small", memory_mib=64, warm="x = 41", wait=True)
    return [info["id"] for info in controller.spawn_sandboxes("warm", n=n)]


def wait_gone(client: Client, sandbox_id: str) -> str:
    """What is said of it then."""
    answer = wait_until(lambda: (got := client.get(f"/v1/sandboxes/{sandbox_id}")).status == 404 and got)
    assert answer
    return str(answer.body["error"])


def refuse_new_work(daemon: Served) -> None:
    client = Client(daemon.url)
    for path, body in (
        ("/v1/sandboxes", {"snapshot_tag": "warm"}),
        ("/v1/workspaces", {"name": "w", "snapshot_tag": "warm"}),
        ("/v1/snapshots", {"tag": "more", "image": "small", "memory_mib": 64}),
    ):
        answer = client.post(path, body)
        assert answer.error == (503, "no_capacity"), answer.body
        assert answer.body["hint"], answer.body
    assert client.get("/readyz").status == 200


def test_everything_but_new_work_goes_on_and_is_right_afterwards(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        client = Client(daemon.url)
        dies, paused, woken, removed, timed, pausing, kept = spawn(controller, 7)
        pids = {info["id"]: info["pid"] or 0 for info in controller.list_sandboxes()}
        with full(home):
            os.kill(pids[dies], signal.SIGKILL)
            wait_until(lambda: controller.get_sandbox(dies)["state"] == "dead")
            for sandbox_id in (paused, woken):
                assert controller.pause_sandbox(sandbox_id)["state"] == "paused"
                wait_until(functools.partial(is_stopped, pids[sandbox_id]))
            assert controller.resume_sandbox(woken)["state"] == "running"
            assert controller.eval_code(woken, "x")["result"] == "41"
            assert client.delete(f"/v1/sandboxes/{removed}").status == 204
            assert has_ended(pids[removed])
            assert "was removed" in wait_gone(client, removed)
            controller.set_sandbox_timeout(timed, 0.1)
            assert "ended at its timeout" in wait_gone(client, timed)
            assert has_ended(pids[timed])
            controller.set_sandbox_timeout(pausing, 0.1, on_timeout="pause")
            wait_until(lambda: controller.get_sandbox(pausing)["state"] == "paused")
            assert controller.rename_sandbox(kept, "web")["name"] == "web"
            controller.set_sandbox_timeout(kept, 3600)
            refuse_new_work(daemon)
            seen = {info["id"]: info["state"] for info in controller.list_sandboxes()}
            assert seen == {dies: "dead", paused: "paused", woken: "running", pausing: "paused", kept: "running"}
        # There is room again: new work at once.
        [more] = [info["id"] for info in controller.spawn_sandboxes("warm")]
        live = check_agreement(home, controller)
        assert set(live) == {paused, woken, pausing, kept, more}
        kinds = {(event["type"], event["sandbox_id"]) for event in controller.list_events()}
        daemon.kill()
    assert {
        *{("sandbox.dead", dies), ("sandbox.paused", paused), ("sandbox.resumed", woken), ("sandbox.removed", removed)},
        *{("sandbox.timeout", timed), ("sandbox.removed", timed), ("sandbox.timeout", pausing)},
    } <= kinds
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        assert set(check_agreement(home, controller)) == set(live)
        rows = {info["id"]: info for info in controller.list_sandboxes()}
        assert {each: rows[each]["state"] for each in seen} == seen
        assert rows[kept]["name"] == "web" and rows[kept]["deadline_unix"] is not None
        assert rows[pausing]["deadline_unix"] is None
        assert Client(daemon.url).delete(f"/v1/sandboxes/{dies}").status == 204
        end_all(home, controller)


def test_a_vm_that_died_meanwhile_can_be_removed_meanwhile(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        client = Client(daemon.url)
        [dies] = spawn(controller, 1)
        with full(home):
            os.kill(controller.get_sandbox(dies)["pid"] or 0, signal.SIGKILL)
            wait_until(lambda: controller.get_sandbox(dies)["state"] == "dead")
            assert client.delete(f"/v1/sandboxes/{dies}").status == 204
            assert client.delete(f"/v1/sandboxes/{dies}").status == 404
        assert check_agreement(home, controller) == []
        assert controller.list_sandboxes() == []


def test_a_daemon_killed_while_it_is_full_leaves_what_the_next_one_can_settle(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        removed, paused, kept = spawn(controller, 3)
        with full(home):
            controller.kill_sandbox(removed)
            controller.pause_sandbox(paused)
            daemon.kill()
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        assert set(check_agreement(home, controller)) == {paused, kept}
        end_all(home, controller)


def test_a_daemon_that_starts_while_it_is_full_can_end_what_is_there(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        removed, timed, kept = spawn(controller, 3)
    with full(home):
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            client = Client(daemon.url)
            assert controller.eval_code(kept, "x")["result"] == "41"
            assert client.delete(f"/v1/sandboxes/{removed}").status == 204
            controller.set_sandbox_timeout(timed, 0.1)
            wait_gone(client, timed)
            refuse_new_work(daemon)
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        assert check_agreement(home, controller) == [kept]
        end_all(home, controller)


def test_a_snapshot_can_be_removed_to_make_room(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        [kept] = spawn(controller, 1)
        with full(home):
            controller.delete_snapshot("warm")
            assert controller.list_snapshots() == []
        assert check_agreement(home, controller) == [kept]
        end_all(home, controller)
