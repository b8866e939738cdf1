"""The agent's words with the kernel about routes and connections, by value; and a route in a namespace of the test."""

import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from forkd.agent.network import Network, leads_out, list_sockets, parse_messages, render_message, render_route
from forkd.host import netlink, netns
from forkd.host.tap import has_tun, open_tap
from forkd.model.network import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX

NEW_ROUTE, DELETE_ROUTE, ERROR, DONE, FOUND = 24, 25, 2, 3, 20
CREATE_OR_REPLACE = 0x500
TCP, ALL_STATES = 6, 0xFFF
DEFAULT = f"default via {GATEWAY_ADDRESS} dev eth0 onlink"

needs_tap = pytest.mark.skipif(os.geteuid() != 0 or not has_tun(), reason="needs root and /dev/net/tun")


def message(kind: int, body: bytes) -> bytes:
    """As the kernel sends it, padded."""
    data = struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body
    return data + bytes(-len(data) % 4)


def found(source: str, destination: str, cookie: int = 7) -> bytes:
    """A socket as the kernel names it in an answer: ports, addresses, interface, cookie."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    addresses = (socket.inet_pton(family, each).ljust(16, b"\0") for each in (source, destination))
    return struct.pack("!HH", 40000, 80) + b"".join(addresses) + struct.pack("=IQ", 0, cookie)


def test_a_default_route_is_added_by_the_gateway_on_its_interface() -> None:
    assert render_route(NEW_ROUTE, CREATE_OR_REPLACE, 2) == bytes.fromhex(
        "2c000000 1800 0505 01000000 00000000"  # 44 bytes, RTM_NEWROUTE, request|ack|create|replace
        "02 00 00 00 fe 03 00 01 04000000"  # IPv4, to all, main table, by boot, universe, unicast, onlink
        "0800 0500 c0000001"  # by 192.0.0.1
        "0800 0400 02000000"  # through the interface 2
    )


def test_a_route_is_removed_whatever_its_scope() -> None:
    removed = render_route(DELETE_ROUTE, 0, 300)
    assert struct.unpack_from("=IHH", removed) == (44, DELETE_ROUTE, 0x5)
    assert removed[16 + 6] == 255
    assert removed[-4:] == struct.pack("=i", 300)


def test_a_message_says_how_long_it_is() -> None:
    assert render_message(20, 0x300, b"abcd") == bytes.fromhex("14000000 1400 0103 01000000 00000000") + b"abcd"


def test_messages_are_taken_apart_by_their_lengths() -> None:
    data = message(FOUND, b"12345") + message(FOUND, b"") + message(DONE, b"none")
    assert list(parse_messages(data)) == [(FOUND, b"12345"), (FOUND, b""), (DONE, b"none")]
    assert list(parse_messages(b"")) == []
    assert list(parse_messages(data[:10])) == [], "not even a header"


def test_a_length_that_cannot_be_ends_the_answer() -> None:
    short = struct.pack("=IHHII", 3, FOUND, 0, 1, 0)
    assert list(parse_messages(message(FOUND, b"1234") + short + message(FOUND, b"5678"))) == [(FOUND, b"1234")]


@pytest.mark.parametrize(
    ("source", "destination", "out"),
    [
        (GUEST_ADDRESS, GATEWAY_ADDRESS, True),
        (GUEST_ADDRESS, "203.0.113.10", True),
        (GUEST_ADDRESS, GUEST_ADDRESS, False),
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.9.9.9", False),
        ("::1", "::1", False),
        ("fe80::1", "::1", False),
        ("fe80::1", "fe80::2", True),
        (f"::ffff:{GUEST_ADDRESS}", "::ffff:203.0.113.10", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.2", False),
    ],
)
def test_only_what_leaves_the_machine_leads_out(source: str, destination: str, out: bool) -> None:
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    assert leads_out(family, found(source, destination)) is out


class Kernel:
    """Answers in pieces, as netlink sockets do."""

    def __init__(self, *answers: bytes) -> None:
        self._answers, self.asked = iter(answers), b""

    def send(self, data: bytes) -> None:
        self.asked = data

    def recv(self, _: int) -> bytes:
        return next(self._answers)


def test_sockets_are_listed_from_several_answers_until_the_kernel_is_done() -> None:
    one, two = found(GUEST_ADDRESS, "203.0.113.10", 1), found(GUEST_ADDRESS, "203.0.113.20", 2)
    told = [struct.pack("=BBBB", socket.AF_INET, 1, 0, 0) + each + bytes(20) for each in (one, two)]
    kernel = Kernel(message(FOUND, told[0]), message(FOUND, told[1]) + message(DONE, bytes(4)))
    assert list_sockets(kernel, socket.AF_INET, TCP, ALL_STATES) == [one, two]
    assert struct.unpack_from("=IHH", kernel.asked) == (72, FOUND, 0x301)
    assert struct.unpack_from("=BBBBI", kernel.asked, 16) == (socket.AF_INET, TCP, 0, 0, ALL_STATES)


def test_a_list_that_the_kernel_refuses_is_an_error() -> None:
    refusal = message(ERROR, struct.pack("=i", -errno.EPERM) + bytes(16))
    with pytest.raises(OSError, match="could not be listed") as caught:
        list_sockets(Kernel(refusal), socket.AF_INET, TCP, ALL_STATES)
    assert caught.value.errno == errno.EPERM


@contextmanager
def guest_thread(*, interface: bool) -> Iterator[ThreadPoolExecutor]:
    """A thread in a namespace that a guest's initramfs might have left so."""

    def furnish() -> int | None:
        netns.enter_new()
        if not interface:
            return None
        tap = open_tap("eth0")
        with netlink.Netlink() as links:
            link = links.find_link("eth0")
            assert link is not None
            address = netlink.render_add_address(link.index, GUEST_ADDRESS, GUEST_PREFIX)
            links.do(address, netlink.render_set_link(link.index, up=True))
        return tap

    with ThreadPoolExecutor(max_workers=1) as thread:
        tap = thread.submit(furnish).result()
        try:
            yield thread
        finally:
            if tap is not None:
                os.close(tap)


def default_route() -> str:
    return subprocess.check_output(["ip", "route", "show", "default"], text=True).strip()


@needs_tap
def test_a_route_is_there_while_the_network_is_up() -> None:
    def check() -> None:
        with closing(Network()) as network:
            network.prepare()
            assert default_route() == ""
            for _ in range(2):
                assert network.switch(True) == (True, GUEST_ADDRESS, 0)
                assert default_route() == DEFAULT
            assert network.switch(False)[:2] == (False, GUEST_ADDRESS)
            assert default_route() == ""

    with guest_thread(interface=True) as thread:
        thread.submit(check).result()


@needs_tap
def test_without_an_interface_no_network_comes_up_and_none_goes_down() -> None:
    def check() -> None:
        with closing(Network()) as network:
            network.prepare()
            assert network.switch(False, forked=True) == (False, "", 0)
            with pytest.raises(OSError, match="no interface eth0") as caught:
                network.switch(True)
            assert caught.value.errno == errno.ENODEV

    with guest_thread(interface=False) as thread:
        thread.submit(check).result()
