"""A hub or a daemon that is killed: what it left goes, and the next one takes its networks over."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_world import HOST, RESOLVER, THIRD, WEB, Guest, World, host_network, made_world, needs_world

from forkd.errors import NetworkFailed, NotFound
from forkd.host import nftables
from forkd.host.faults import POINTS
from forkd.host.process import children_of
from forkd.model.network import parse_network
from forkd.network.networks import NetworkOptions, Networks

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

RULES = {"allow": ["allowed.test", THIRD]}
_GONE_S = 10.0


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


def options(uplink: str = "auto") -> NetworkOptions:
    return NetworkOptions(uplink=uplink, pool=1, resolvers=(RESOLVER,))  # type: ignore[arg-type]


async def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + _GONE_S
    while Path(f"/proc/{pid}/status").exists():
        assert time.monotonic() < deadline, "it still runs"
        await asyncio.sleep(0.01)


async def wait_until_cut_off(guest: Guest) -> None:
    """Its rules stay in force; the way out goes with the hub's network, which the kernel takes down in a while."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        try:
            await asyncio.to_thread(guest.fetch, THIRD)
        except OSError:
            return
    raise AssertionError("It still has a way out")


@pytest.mark.parametrize("uplink", ["veth", "pasta"])
async def test_the_networks_of_a_killed_hub_are_closed_until_the_next_takes_them_over(
    world: World, tmp_path: Path, uplink: str
) -> None:
    async with Networks.opened(tmp_path, options(uplink), lambda _: None) as networks:
        lease = await networks.lease("a", parse_network(RULES))
        with Guest(lease.tap) as guest:
            assert await asyncio.to_thread(guest.fetch, THIRD) == 5
            pid = networks.hub_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await wait_until_gone(pid)
            await wait_until_cut_off(guest)
            await networks.adopt("a", lease.tap, parse_network(RULES))
            assert networks.hub_pid not in (None, pid)
            assert await asyncio.to_thread(guest.fetch, THIRD) == 5
            assert await asyncio.to_thread(guest.ask, "allowed.test") == ("NOERROR", [WEB])
            assert await asyncio.to_thread(guest.fetch_tls, WEB, "allowed.test") == 5
            await networks.release("a")
        os.close(lease.tap)


async def test_a_call_that_the_hub_died_of_is_an_error_and_the_next_one_works(world: World, tmp_path: Path) -> None:
    async with Networks.opened(tmp_path, options(), lambda _: None) as networks:
        os.close((await networks.lease("a", parse_network(RULES))).tap)
        assert networks.hub_pid is not None
        os.kill(networks.hub_pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(networks.usage("a"))
        await asyncio.sleep(0.1)
        os.kill(networks.hub_pid, signal.SIGKILL)
        with pytest.raises(NetworkFailed):
            await waiting
        os.close((await networks.lease("b", parse_network(RULES))).tap)


def hubs() -> list[int]:
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"forkd.network.hub" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def test_who_stops_waiting_for_a_hub_leaves_it_to_the_others(world: World, tmp_path: Path) -> None:
    async with Networks.opened(tmp_path, options("veth"), lambda _: None) as networks:
        waiting = [asyncio.ensure_future(networks.lease(f"s{number}", parse_network(RULES))) for number in range(3)]
        async with asyncio.timeout(_GONE_S):
            while not hubs():
                await asyncio.sleep(0.001)
        for each in waiting[:2]:
            each.cancel()
        lease = await waiting[2]
        with Guest(lease.tap) as guest:
            assert await asyncio.to_thread(guest.fetch, THIRD) == 5
        assert hubs() == [networks.hub_pid]
        os.close(lease.tap)


@pytest.mark.parametrize("uplink", ["veth", "pasta"])
async def test_a_daemon_that_stops_while_its_hub_starts_leaves_none(world: World, tmp_path: Path, uplink: str) -> None:
    before = host_network()
    for wait_s in (0.0, 0.1, 0.3, 0.5):
        async with Networks.opened(tmp_path, options(uplink), lambda _: None) as networks:
            waiting = asyncio.ensure_future(networks.lease("a", parse_network(RULES)))
            await asyncio.sleep(wait_s)
            waiting.cancel()
            for done in await asyncio.gather(waiting, return_exceptions=True):
                if not isinstance(done, BaseException):
                    os.close(done.tap)
        assert hubs() == [] and host_network() == before


async def test_questions_and_releases_start_no_hub(world: World, tmp_path: Path) -> None:
    async with Networks.opened(tmp_path, options(), lambda _: None) as networks:
        await networks.release("a")
        for asked in (networks.usage("a"), networks.connect("a", 80), networks.change("a", parse_network(RULES))):
            with pytest.raises(NotFound):
                await asked
        assert hubs() == []


async def test_a_hub_that_died_unnoticed_leaves_nothing_on_the_host(world: World, tmp_path: Path) -> None:
    before = host_network()
    async with Networks.opened(tmp_path, options("veth"), lambda _: None) as networks:
        os.close((await networks.lease("a", parse_network(RULES))).tap)
        await networks.release("a")
        assert networks.hub_pid is not None
        os.kill(networks.hub_pid, signal.SIGKILL)
        async with asyncio.timeout(_GONE_S):
            while networks.hub_pid is not None:
                await asyncio.sleep(0.01)
    # Its link goes with the hub's network, which the kernel takes down in a while.
    async with asyncio.timeout(_GONE_S):
        while host_network() != before:
            await asyncio.sleep(0.01)


async def test_who_watches_is_told_of_a_killed_hub_and_what_waits_fails(world: World, tmp_path: Path) -> None:
    async with Networks.opened(tmp_path, options("veth"), lambda _: None) as networks:
        lost = asyncio.Event()
        networks.watch(lost.set)
        lease = await networks.lease("a", parse_network({"allow": [f"{HOST}:9", THIRD]}))
        assert networks.hub_pid is not None
        os.kill(networks.hub_pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(networks.lease("b", parse_network(RULES)))
        await asyncio.sleep(0.1)
        os.kill(networks.hub_pid, signal.SIGKILL)
        with pytest.raises(NetworkFailed):
            await waiting
        async with asyncio.timeout(_GONE_S):
            await lost.wait()
        with Guest(lease.tap) as guest:
            assert await networks.adopt("a", lease.tap, parse_network(RULES))
            assert await asyncio.to_thread(guest.fetch, THIRD) == 5
        # What the first hub had the host let in is not let in any more.
        assert f"ip daddr {HOST}" not in nftables.run("list ruleset")
        os.close(lease.tap)


async def test_a_killed_hub_gives_nobody_a_new_quota(world: World, tmp_path: Path) -> None:
    quota = parse_network({"allow": [THIRD], "max_bytes": 300_000})
    async with Networks.opened(tmp_path, options(), lambda _: None) as networks:
        lease = await networks.lease("a", quota)
        with Guest(lease.tap) as guest:
            assert await asyncio.to_thread(guest.fetch, THIRD, size=200_000) == 200_000
            used = await networks.usage("a")
            pid = networks.hub_pid
            assert pid is not None and used.bytes_in > 200_000
            os.kill(pid, signal.SIGKILL)
            await wait_until_gone(pid)
            await networks.adopt("a", lease.tap, quota)
            assert (await networks.usage("a")).bytes_in >= used.bytes_in
            with pytest.raises(OSError):
                await asyncio.to_thread(guest.fetch, THIRD, size=200_000)
        os.close(lease.tap)


# Leases, changes and releases a network, and says so; the tap goes to whoever started it.
DAEMON = """
import asyncio, os, socket, sys
from pathlib import Path
from forkd.model.network import parse_network
from forkd.network.networks import NetworkOptions, Networks
async def main():
    options = NetworkOptions(uplink=sys.argv[2], pool=1, resolvers=(sys.argv[3],))
    async with Networks.opened(Path(sys.argv[1]), options, lambda _: None) as networks:
        lease = await networks.lease("a", parse_network({"allow": ["allowed.test", "203.0.113.30"]}))
        socket.send_fds(socket.socket(fileno=int(sys.argv[4])), [str(networks.hub_pid).encode()], [lease.tap])
        await networks.change("a", parse_network({"allow": ["203.0.113.30"]}))
        await networks.lease("b", parse_network({"mode": "open"}))
        await networks.release("b")
        print("all done", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def start_daemon(directory: Path, uplink: str, fault: str) -> tuple[subprocess.Popen[bytes], int | None]:
    """Until it is killed, at the fault or once it is done; and the tap that it gave us."""
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-c", DAEMON, str(directory), uplink, RESOLVER, str(theirs.fileno())]
        process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], env={**os.environ, "FORKD_FAULT": fault}, stdout=subprocess.PIPE
        )
        theirs.close()
        assert process.stdout is not None
        with process.stdout as output:
            line = output.readline()
        assert line in (b"", b"all done\n")
        process.kill()
        process.wait(_GONE_S)
        ours.setblocking(False)
        data, descriptors, _, _ = socket.recv_fds(ours, 100, 1)
    return process, descriptors[0] if data and descriptors else None


@pytest.mark.parametrize("uplink", ["veth", "pasta"])
@pytest.mark.parametrize("fault", ["", *(point for point in POINTS if point.startswith("hub."))])
async def test_what_a_killed_daemon_left_goes_and_its_vms_are_taken_over(
    world: World, tmp_path: Path, uplink: str, fault: str
) -> None:
    before = host_network()
    process, tap = await asyncio.to_thread(start_daemon, tmp_path, uplink, fault)
    assert process.returncode == -signal.SIGKILL
    assert (tap is None) == (fault in ("hub.uplink", "hub.leased"))
    async with Networks.opened(tmp_path, options(uplink), lambda _: None) as networks:
        assert host_network() == before, "what the other daemon left is gone"
        if tap is not None:
            with Guest(tap) as guest:
                await wait_until_cut_off(guest)
                await networks.adopt("a", tap, parse_network(RULES))
                assert await asyncio.to_thread(guest.fetch, THIRD) == 5
                with pytest.raises(OSError):
                    await asyncio.to_thread(guest.fetch, HOST)
            os.close(tap)
        os.close((await networks.lease("b", parse_network(RULES))).tap)
    assert host_network() == before
