"""Hosts that lack something, and daemons that are not root."""

import asyncio
import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_daemon import served
from support_world import RESOLVER, THIRD, Guest, World, host_network, made_world, needs_world

from forkd.errors import HostLacks, NetworkFailed
from forkd.host import netlink, network_probe, nftables
from forkd.host.finding import Status
from forkd.host.paths import Home
from forkd.host.tools import find_program
from forkd.model.network import Network, parse_network
from forkd.network.networks import NetworkOptions, Networks

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

USER = 54321
OPEN = parse_network("open")
DROPPING = "table inet foreign {\nchain forward {\ntype filter hook forward priority 0; policy drop;\n}\n}"
REJECTING = """table inet foreign {
 chain forward {
  type filter hook forward priority 10; policy accept;
  ct state { established, related } accept
  iifname "lo" accept
  ct state invalid drop
  log counter reject with icmpx admin-prohibited
 }
}"""


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


def test_a_host_without_tun_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostLacks, match="There is no"):
        network_probe.check_network("auto", tmp_path / "tun")


def test_doctor_tries_networks_and_leaves_nothing(world: World) -> None:
    before = nftables.run("list ruleset")
    finding = network_probe.probe_network()
    assert finding.status is Status.OK and "veth" in finding.found
    assert nftables.run("list ruleset") == before


@pytest.mark.parametrize("firewall", [DROPPING, REJECTING])
async def test_a_firewall_that_drops_forwarded_packets_is_named(world: World, tmp_path: Path, firewall: str) -> None:
    nftables.run(firewall)
    options = NetworkOptions(uplink="veth", resolvers=(RESOLVER,))
    async with Networks.opened(tmp_path, options, lambda _: None) as networks:
        assert "table inet foreign" in (networks.why_none() or "")
        with pytest.raises(HostLacks, match="table inet foreign"):
            await networks.lease("a", OPEN)
        nftables.run("delete table inet foreign")
        os.close((await networks.lease("a", OPEN)).tap)


@pytest.mark.parametrize("firewall", [DROPPING, REJECTING])
async def test_a_firewall_that_accepts_what_is_ours_is_not_in_the_way(
    world: World, tmp_path: Path, firewall: str
) -> None:
    nftables.run(firewall)
    for direction in ("iifname", "oifname"):
        assert network_probe.find_firewall() is not None
        nftables.run(f'insert rule inet foreign forward {direction} "fkd*" counter accept')
    async with Networks.opened(tmp_path, NetworkOptions("veth", resolvers=(RESOLVER,)), lambda _: None) as networks:
        lease = await networks.lease("a", OPEN)
        with Guest(lease.tap) as guest:
            assert await asyncio.to_thread(guest.fetch, THIRD) == 5
        os.close(lease.tap)


async def test_with_a_firewall_in_the_way_pasta_is_used(world: World, tmp_path: Path) -> None:
    nftables.run(DROPPING)
    before = nftables.run("list ruleset")
    async with Networks.opened(tmp_path, NetworkOptions(resolvers=(RESOLVER,)), lambda _: None) as networks:
        assert networks.why_none() is None
        os.close((await networks.lease("a", OPEN)).tap)
        assert nftables.run("list ruleset") == before, "nothing of ours is in the host's network"


async def test_a_host_that_uses_every_range_gets_an_error_that_says_so(world: World, tmp_path: Path) -> None:
    with netlink.Netlink() as links:
        link = links.find_link("eth0")
        assert link is not None
        for text in ("100.64.0.0/10", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"):
            assert ipaddress.ip_network(text)
            links.do(netlink.render_route(text, link.index))
    async with Networks.opened(tmp_path, NetworkOptions(resolvers=(RESOLVER,)), lambda _: None) as networks:
        with pytest.raises(NetworkFailed, match="every address range"):
            await networks.lease("a", OPEN)


async def test_forwarding_stays_on_where_it_was_on(world: World, tmp_path: Path) -> None:
    switch = Path("/proc/sys/net/ipv4/ip_forward")
    switch.write_text("1")
    async with Networks.opened(tmp_path, NetworkOptions(resolvers=(RESOLVER,)), lambda _: None) as networks:
        os.close((await networks.lease("a", OPEN)).tap)
        assert "forkd_forwarding" not in nftables.run("list tables")
    assert switch.read_text().strip() == "1"


# As an ordinary user, with a node of tun that it may open, in the namespace that the test is in.
AS_USER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support_world import Guest, RESOLVER, THIRD, WEB, HOST
from forkd.host.paths import Home
from forkd.model.network import Network, parse_network
from forkd.network.networks import NetworkOptions, Networks
async def main():
    options = NetworkOptions(pool=1, resolvers=(RESOLVER,))
    async with Networks.opened(Path(sys.argv[2]), options, lambda _: None) as networks:
        lease = await networks.lease("a", parse_network({"allow": ["allowed.test", THIRD + ":80"]}))
        print(lease.tap >= 0, networks.why_none(), flush=True)
        os.set_blocking(lease.tap, True)
        usage = await networks.usage("a")
        assert usage.connections == 0
        await networks.change("a", parse_network("open"))
        await networks.release("a")
        print("done", flush=True)
asyncio.run(main())
"""


def make_interpreter(home: Path) -> Path:
    """One that another user can run, as ours may be in root's home; with all that ours can import."""
    home.mkdir()
    os.chown(home, USER, USER)
    system = Path("/usr/bin/python3")
    subprocess.run(
        [system, "-m", "venv", "--without-pip", "--symlinks", home / "venv"], capture_output=True, check=False
    )
    for packages in (home / "venv/lib").glob("python*/site-packages"):
        packages.joinpath("ours.pth").write_text("\n".join(path for path in sys.path if path))
    return home / "venv/bin/python"


def test_an_ordinary_user_has_networks_by_pasta(world: World, tmp_path: Path) -> None:
    unshare, setpriv = find_program("unshare"), find_program("setpriv")
    if unshare is None or setpriv is None:
        pytest.skip("needs unshare and setpriv")
    place = tmp_path / "node"
    place.mkdir()
    home = Path(f"/tmp/fkd-user-{os.getpid()}")
    as_user = [str(setpriv), f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    python = make_interpreter(home)
    hub = [*as_user, str(python), "-I", "-c", "import forkd.network.hub"]
    if subprocess.run(hub, capture_output=True, check=False).returncode:
        shutil.rmtree(home)
        pytest.skip("another user cannot run this Python and forkd")
    script = (
        f"mount -t tmpfs tmpfs {place} && mknod -m 666 {place}/tun c 10 200 && chmod 666 {place}/tun && "
        f'mount --bind {place}/tun /dev/net/tun && exec "$@"'
    )
    try:
        argv = [str(unshare), "--mount", "sh", "-c", script, "sh", *as_user]
        support = str(Path(__file__).parents[1])
        done = subprocess.run(
            [*argv, str(python), "-c", AS_USER, support, str(home)],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            check=False,
        )
        log = home / "hub.log"
        assert done.stdout == "True None\ndone\n", done.stderr + (log.read_text() if log.exists() else "")
    finally:
        shutil.rmtree(home)


# Started before the daemon. The first two hide something from it, in a mount namespace of its own.
HIDING = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
def mount(source, target, flags):
    if libc.mount(source, target, None, flags, None):
        sys.exit("It cannot be hidden")
libc.unshare(0x00020000)
mount(b"none", b"/", 0x4000 | 0x40000)
"""
NO_TUN = HIDING + 'mount(b"/proc/sys/net", b"/dev/net", 0x1000)'
NO_NFT = (
    HIDING
    + """
nft = ctypes.CDLL("libnftables.so.1")
path = next(line.split()[-1] for line in open("/proc/self/maps") if "libnftables" in line)
mount(b"/dev/null", path.encode(), 0x1000)
"""
)
# The call unshare fails when it is to make one.
NO_USER_NAMESPACES = """
import ctypes, os, struct, sys
load_call, load_flags, fail, go_on = (0x20, 0, 0, 0), (0x20, 0, 0, 16), (6, 0, 0, 0x00050001), (6, 0, 0, 0x7FFF0000)
program = [load_call, (0x15, 0, 3, 272), load_flags, (0x45, 0, 1, 0x10000000), fail, go_on]
code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
if ctypes.CDLL(None).prctl(22, 2, ctypes.create_string_buffer(struct.pack("HP", 6, ctypes.addressof(code)))):
    sys.exit("There is no filter")
"""
START = "\nos.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.vm
@pytest.mark.parametrize(
    ("without", "named"),
    [(NO_TUN, "There is no /dev/net/tun"), (NO_NFT, "libnftables"), (NO_USER_NAMESPACES, "a user namespace")],
    ids=["tun", "nft", "user-namespaces"],
)
def test_a_host_that_lacks_something_says_what_and_sandboxes_without_a_network_work(
    world: World, without: str, named: str, vm_home: Home
) -> None:
    flags = ("--bind", "none", "--on-stop", "kill")
    prefix = (sys.executable, "-c", without + START)
    before = host_network()
    with (
        served(vm_home, *flags, engine="qemu", prefix=prefix) as daemon,
        daemon.controller() as controller,
    ):
        [plain] = controller.spawn_sandboxes("warm")
        for network in (Network(allow=["pypi"]), Network(group="crew"), "open"):
            with pytest.raises(HostLacks, match=named) as caught:
                controller.spawn_sandboxes("warm", network=network)
            assert caught.value.hint
            with pytest.raises(HostLacks, match=named):
                controller.set_sandbox_network(plain["id"], network)
        assert [row["id"] for row in controller.list_sandboxes()] == [plain["id"]]
        assert controller.get_sandbox(plain["id"])["network"]["mode"] == "none"
        reached = controller.eval_code(plain["id"], f"import socket; socket.create_connection(({THIRD!r}, 80), 5)")
        assert "Network is unreachable" in (reached["error"] or ""), reached
        assert host_network() == before
