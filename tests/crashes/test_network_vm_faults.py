"""The daemon is killed while real VMs get, change and lose a network: those that live keep theirs, the rest is gone."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agreement import check_agreement
from support_daemon import served
from support_images import link_snapshot, made_home
from support_world import OTHER, RESOLVER, THIRD, host_network, made_world, needs_world

from forkd.client.controller import Controller
from forkd.errors import ForkdError
from forkd.host.paths import Home
from forkd.model.network import Network

pytestmark = [pytest.mark.vm, needs_world]

FLAGS = ("--bind", "none", "--network-resolvers", RESOLVER)
WEB = Network(allow=[THIRD])
REACH = """
import socket
def reach(address):
    try:
        socket.create_connection((address, 80), 5).close()
    except OSError:
        return False
    return True
"""


@dataclass(frozen=True)
class Place:
    """A home with two sandboxes that outlive its daemons, and what the host's network held before the first of them."""

    home: Home
    held: object


@pytest.fixture(scope="module")
def place(warm_vm: Path, built_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with made_world(), made_home(tmp_path_factory.mktemp("faults") / "home", built_home.images) as home:
        link_snapshot(warm_vm, home)
        held = host_network()
        with served(home, *FLAGS, engine="qemu") as daemon, daemon.controller() as controller:
            make_missing(controller)
        yield Place(home, held)
        with served(home, *FLAGS, "--on-stop", "kill", engine="qemu"):
            pass
        assert host_network() == held


def make_missing(controller: Controller) -> None:
    """`web` with a network, `plain` without one."""
    names = [row["name"] for row in controller.list_sandboxes()]
    for name, network in (("web", WEB), ("plain", None)):
        if name not in names:
            [made] = controller.spawn_sandboxes("warm", network=network)
            controller.rename_sandbox(made["id"], name)
            assert controller.eval_code(made["id"], REACH)["error"] is None


def reached(controller: Controller, sandbox_id: str) -> list[str]:
    asked = controller.eval_code(sandbox_id, f"[each for each in {[THIRD, OTHER]!r} if reach(each)]")
    assert asked["error"] is None, asked
    found = asked["value"]
    assert isinstance(found, list)
    return found


Act = Callable[[Controller, str, str], object]
ACTS: dict[str, Act] = {
    "spawn": lambda controller, web, plain: controller.spawn_sandboxes("warm", n=3, network=WEB),
    "fork": lambda controller, web, plain: controller.fork_sandbox(web, 2),
    "give": lambda controller, web, plain: controller.set_sandbox_network(plain, WEB),
    "change": lambda controller, web, plain: controller.set_sandbox_network(web, Network(allow=[OTHER])),
    "kill": lambda controller, web, plain: controller.kill_sandbox(web),
}
# What is done, where the daemon is killed, how many more sandboxes there are then, and what `web` and `plain` reach.
CASES = (
    ("spawn", "hub.leased@2", 0, [THIRD], []),
    ("spawn", "network.leased", 0, [THIRD], []),
    ("spawn", "spawn.started@2", 0, [THIRD], []),
    ("spawn", "spawn.forked", 0, [THIRD], []),
    ("spawn", "spawn.committed", 3, [THIRD], []),
    ("fork", "hub.leased", 0, [THIRD], []),
    ("fork", "spawn.forked", 0, [THIRD], []),
    ("give", "network.recorded", 0, [THIRD], []),
    ("give", "network.plugged", 0, [THIRD], [THIRD]),
    ("change", "network.recorded", 0, [OTHER], []),
    ("change", "hub.changed", 0, [OTHER], []),
    ("kill", "delete.killed", -1, None, []),
    ("kill", "hub.released", -1, None, []),
)


@pytest.mark.parametrize(("act", "point", "more", "web_reaches", "plain_reaches"), CASES)
def test_a_daemon_killed_while(
    act: str, point: str, more: int, web_reaches: list[str] | None, plain_reaches: list[str], place: Place
) -> None:
    with (
        served(place.home, *FLAGS, engine="qemu", env={"FORKD_FAULT": point}) as daemon,
        daemon.controller() as controller,
    ):
        ids = {row["name"]: row["id"] for row in controller.list_sandboxes()}
        with pytest.raises(ForkdError):
            ACTS[act](controller, ids["web"], ids["plain"])
        assert daemon.process.wait(60) == -signal.SIGKILL
    with served(place.home, *FLAGS, engine="qemu") as daemon, daemon.controller() as controller:
        live = check_agreement(place.home, controller)
        assert len(live) == 2 + more
        assert reached(controller, ids["plain"]) == plain_reaches
        if web_reaches is not None:
            assert reached(controller, ids["web"]) == web_reaches
        for sandbox_id in set(live) - set(ids.values()):
            assert controller.eval_code(sandbox_id, REACH)["error"] is None
            assert reached(controller, sandbox_id) == [THIRD]
            controller.kill_sandbox(sandbox_id)
        # After each fault, the same request works now.
        make_missing(controller)
        ids = {row["name"]: row["id"] for row in controller.list_sandboxes()}
        ACTS[act](controller, ids["web"], ids["plain"])
        # As it was before, for the next.
        for row in controller.list_sandboxes():
            if row["name"] not in ids:
                controller.kill_sandbox(row["id"])
        if act == "kill":
            make_missing(controller)
        elif act == "give":
            controller.set_sandbox_network(ids["plain"], "none")
        elif act == "change":
            controller.set_sandbox_network(ids["web"], WEB)
