"""The daemon is killed at each step of a network: the next one leaves nothing, and gives none that nobody wanted."""

import signal

import pytest
from agreement import check_agreement, end_all
from support_daemon import served

from forkd.errors import ForkdError
from forkd.host.faults import POINTS
from forkd.host.paths import Home
from forkd.model.network import Network

pytestmark = pytest.mark.usefixtures("nothing_left")

WEB = Network(allow=["pypi"])
# The first lease is that of `web`, which lives through all of it.
AT = [point for point in POINTS if point.startswith(("network.", "port."))]


@pytest.mark.parametrize("asked", ["spawn", "change", "expose"])
@pytest.mark.parametrize("point", AT)
def test_a_daemon_killed_at(point: str, asked: str, fake_home: Home):
    if (asked == "spawn" and point != "network.leased") or (asked == "change" and point == "port.recorded"):
        pytest.skip("it does not take this step")
    if asked == "expose" and point == "network.recorded":
        pytest.skip("it does not take this step")
    fault = f"{point}@2" if point == "network.leased" else point
    with served(fake_home, "--bind", "none", env={"FORKD_FAULT": fault}) as daemon, daemon.controller() as controller:
        controller.create_snapshot("warm", "python", memory_mib=128, wait=True)
        [web] = controller.spawn_sandboxes("warm", network=WEB)
        [plain] = controller.spawn_sandboxes("warm")
        with pytest.raises(ForkdError):
            if asked == "spawn":
                controller.spawn_sandboxes("warm", n=3, network=WEB)
            elif asked == "change":
                controller.set_sandbox_network(plain["id"], WEB)
            else:
                controller.expose_port(plain["id"], 8000)
        assert daemon.process.wait(10) == -signal.SIGKILL
    with served(fake_home, "--bind", "none") as daemon, daemon.controller() as controller:
        assert sorted(check_agreement(fake_home, controller)) == sorted([web["id"], plain["id"]])
        assert controller.get_sandbox(web["id"])["network"]["usage"]["refused"] == 0
        found = controller.get_sandbox(plain["id"])["network"]
        # It has its network in full, or none at all.
        given = asked == "change" and point == "network.plugged"
        assert found["mode"] == ("egress" if given else "none")
        # After each fault, the same request works now.
        controller.spawn_sandboxes("warm", n=3, network=WEB)
        assert controller.set_sandbox_network(plain["id"], "open")["network"]["mode"] == "open"
        if not controller.list_ports(plain["id"]):
            controller.expose_port(plain["id"], 8000)
        end_all(fake_home, controller)
        daemon.stop()
