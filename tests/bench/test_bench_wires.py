"""The network that the bench measures in: a server that counts, clocks of packets, a name, a TLS greeting."""

import asyncio
import contextlib
import os
import select
import socket
import time

import dns.message
import pytest

from bench.wires import (
    NAME,
    NAMED,
    PACKET_PORT,
    SERVER,
    SINK_PORT,
    PacketClock,
    Sink,
    answer_name,
    made_lan,
    made_wires,
    parse_stamp,
    render_hello,
    why_no_wires,
)
from forkd.errors import NetworkFailed
from forkd.host import netns
from forkd.network.hello import parse_server_name

needs_wires = pytest.mark.skipif(why_no_wires() is not None, reason=why_no_wires() or "")


@needs_wires
def test_the_host_reaches_the_server_and_is_told_how_much_arrived() -> None:
    with made_wires() as wires, Sink(wires.beyond, SERVER, SINK_PORT) as sink:
        for size in (5, 3 << 20):
            with socket.create_connection((SERVER, SINK_PORT), 10) as sock:
                sock.sendall(bytes(size))
                sock.shutdown(socket.SHUT_WR)
                assert int.from_bytes(sock.recv(8), "big") == size
            received = sink.take()
            assert received.size_bytes == size and received.mib_per_s > 0


@needs_wires
def test_packets_have_the_time_at_which_the_kernel_received_them() -> None:
    with (
        made_wires() as wires,
        PacketClock.of_server(wires.beyond) as clock,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        # The kernel begins to stamp some time after it is told to; until then a packet has the time of its reading.
        for _ in range(100):
            before = time.time()
            sock.sendto(b"another", (SERVER, PACKET_PORT))
            sock.sendto(b"wanted", (SERVER, PACKET_PORT))
            assert select.select([clock], [], [], 10)[0]
            time.sleep(0.02)
            after = time.time()
            time.sleep(0.02)
            if before <= asyncio.run(clock.find(b"wanted")) <= after:
                return
    raise AssertionError("no packet has the time at which it came")


@needs_wires
def test_frames_are_seen_on_a_tap_before_anything_else_sees_them() -> None:
    frame = b"\xff" * 6 + b"\x02" * 6 + b"\x88\xb5" + b"a frame that nobody knows"
    with made_lan() as lan, PacketClock.of_tap(lan.nic.namespace, lan.nic.tap_name) as clock:
        before = time.time()
        os.write(lan.nic.tap, frame)
        assert before <= asyncio.run(clock.find(b"nobody knows")) <= time.time()


@needs_wires
def test_nothing_of_it_is_left_and_this_thread_is_back() -> None:
    before, descriptors = os.stat("/proc/thread-self/ns/net").st_ino, len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(KeyError), made_wires() as wires, made_lan() as lan:
        assert os.stat("/proc/thread-self/ns/net").st_ino == os.fstat(wires.host).st_ino
        with netns.inside(lan.namespace):
            assert os.stat("/proc/thread-self/ns/net").st_ino == os.fstat(lan.namespace).st_ino
        raise KeyError
    assert os.stat("/proc/thread-self/ns/net").st_ino == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_packet_without_a_stamp_is_not_measured() -> None:
    with pytest.raises(NetworkFailed, match="no time stamp"):
        parse_stamp([])


def test_the_name_stands_for_an_address_and_for_nothing_else() -> None:
    for kind, found in (("A", [NAMED]), ("AAAA", [])):
        answer = dns.message.from_wire(answer_name(dns.message.make_query(NAME, kind).to_wire()))
        assert [str(each) for rrset in answer.answer for each in rrset] == found


def test_the_greeting_says_the_name() -> None:
    assert parse_server_name(render_hello()) == NAME
