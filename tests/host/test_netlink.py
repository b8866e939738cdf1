"""Links, addresses and routes by rtnetlink, in namespaces of their own; rules and logged packets there."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.host import conntrack, netlink, netns, nftables
from forkd.host.nflog import PacketLog
from forkd.host.tap import get_tap_name, has_tun, open_namespace, open_tap

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not has_tun(), reason="needs root and /dev/net/tun")


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The test is in a namespace of its own, and this is another one."""
    before, here, other = netns.open_current(), netns.new_namespace(), netns.new_namespace()
    netns.enter(here)
    try:
        yield other
    finally:
        netns.enter(before)
        for each in (before, here, other):
            os.close(each)


def test_messages_are_the_bytes_that_the_kernel_reads() -> None:
    assert netlink.attribute(3, b"eth0\0") == bytes.fromhex("09000300") + b"eth0\0" + bytes(3)
    route = netlink.render_route("10.0.0.0/8", 7, gateway="10.1.2.3")
    assert route.body[:2] == bytes([socket.AF_INET, 8])
    assert netlink.parse_attributes(route.body[12:]) == {
        1: socket.inet_aton("10.0.0.0"),
        4: (7).to_bytes(4, "little"),
        5: socket.inet_aton("10.1.2.3"),
    }


@pytest.mark.parametrize("data", [b"", b"\x00" * 3, b"\xff\xff\x01\x00ab", b"\x02\x00\x01\x00"])
def test_attributes_that_are_cut_off_are_left_out(data: bytes) -> None:
    assert netlink.parse_attributes(data) == {}


def test_a_link_has_its_other_end_in_another_namespace(elsewhere: int) -> None:
    with netlink.Netlink() as here:
        veth = netlink.render_add_veth("a0", "02:00:00:00:00:01", "b0", "02:00:00:00:00:02", peer_namespace=elsewhere)
        here.do(veth)
        link = here.find_link("a0")
        assert link is not None and not link.up and here.find_link("b0") is None
        here.do(netlink.render_add_address(link.index, "10.1.0.1", 24), netlink.render_set_link(link.index, up=True))
        here.do(netlink.render_route("10.3.0.0/16", link.index, gateway="10.1.0.2"))
        here.do(netlink.render_route("10.2.0.0/16", link.index))
        assert [(str(each.address), each.prefix) for each in here.addresses()] == [("10.1.0.1", 24)]
        assert {"10.2.0.0/16", "10.3.0.0/16"} <= {str(each.network) for each in here.routes()}
        here.do(netlink.render_remove_route("10.2.0.0/16", link.index))
        assert "10.2.0.0/16" not in {str(each.network) for each in here.routes()}
        here.do(netlink.render_neighbour(link.index, "10.1.0.2", "02:00:00:00:00:02"))
        with netns.inside(elsewhere), netlink.Netlink() as there:
            assert there.find_link("b0") is not None
        here.do(netlink.render_remove_link(link.index))
        assert here.find_link("a0") is None


def test_what_the_kernel_refuses_is_an_error_with_its_number(elsewhere: int) -> None:
    with netlink.Netlink() as here, pytest.raises(OSError) as caught:
        here.do(netlink.render_set_link(12345, up=True))
    assert caught.value.errno == errno.ENODEV


def test_a_socket_stays_in_the_namespace_it_was_made_in(elsewhere: int) -> None:
    ours = os.stat("/proc/thread-self/ns/net").st_ino
    with netns.inside(elsewhere):
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.fstat(elsewhere).st_ino
    assert os.stat("/proc/thread-self/ns/net").st_ino == ours
    with netns.socket_inside(elsewhere, socket.SOCK_DGRAM) as sock, pytest.raises(OSError):
        sock.connect(("192.0.2.1", 1))


def test_a_tap_says_its_name_and_its_namespace(elsewhere: int) -> None:
    with netns.inside(elsewhere):
        tap = open_tap("tap7")
    namespace = open_namespace(tap)
    try:
        assert get_tap_name(tap) == "tap7"
        assert netns.is_same(namespace, elsewhere)
    finally:
        os.close(tap)
        os.close(namespace)


def test_rules_are_all_in_force_or_none(elsewhere: int) -> None:
    nftables.run("add table ip one")
    with pytest.raises(nftables.NftRefused, match="syntax error"):
        nftables.run("add table ip two\nadd nonsense")
    with pytest.raises(nftables.NftRefused):
        nftables.run("add table ip two\ndelete table ip three")
    tables = [each["table"]["name"] for each in nftables.run_json("list tables") if "table" in each]
    assert tables == ["one"]
    with netns.inside(elsewhere):
        assert nftables.run("list tables") == ""


def test_rules_can_be_made_by_a_process_with_many_descriptors(elsewhere: int) -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        nftables.run("add table ip one")
        assert [each["table"]["name"] for each in nftables.run_json("list tables") if "table" in each] == ["one"]
        with pytest.raises(nftables.NftRefused, match="syntax error"):
            nftables.run("nonsense")
    finally:
        for each in held:
            os.close(each)


def test_logged_packets_are_read_with_their_reason(elsewhere: int) -> None:
    with netlink.Netlink() as links:
        loopback = links.find_link("lo")
        assert loopback is not None
        links.do(netlink.render_set_link(loopback.index, up=True))
    chain = 'type filter hook output priority 0; policy accept;\nudp dport 9 log prefix "why" group 5 snaplen 64'
    nftables.run(f"table ip one {{\nchain out {{\n{chain}\n}}\n}}")
    log = PacketLog(5, 64)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"hello", ("127.0.0.1", 9))
    (logged,) = log.read()
    log.close()
    assert logged.prefix == "why" and logged.payload.endswith(b"hello")
    count = Path("/proc/sys/net/netfilter/nf_conntrack_count")
    nftables.run("add rule ip one out ct state new accept")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"hello", ("127.0.0.1", 9))
    assert int(count.read_text()) > 0
    conntrack.flush()
    assert int(count.read_text()) == 0
