"""The network interface of a VM that is forked while it runs, or changed: its own tap, and nobody else's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import Case, rehearsed, value_of
from network_cases import PORT, REACH, SERVE, Lan, forked, forked_live, made_lans, networked

from forkd.engines.base import Machine, Nic
from forkd.errors import EngineFailed
from forkd.model.network import GATEWAY_ADDRESS

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def lans() -> Iterator[list[Lan]]:
    with made_lans(2) as made:
        yield made


async def test_a_fork_is_reached_by_its_tap_and_a_live_fork_by_its_own(
    tcg: Case, run_directory: Path, lans: list[Lan]
) -> None:
    async with forked(tcg, run_directory, "one", lans[0].nic) as one:
        assert one.proof.network
        await one.agent.eval(SERVE)
        assert await lans[0].ask(PORT) == b"one"
        async with forked_live(tcg, one.machine, run_directory, "two", lans[1].nic) as two:
            before = lans[0].received_packets()
            assert await lans[1].ask(PORT) == b"two"
            assert lans[0].received_packets() == before
            assert await lans[0].ask(PORT) == b"one"
            await two.machine.pause()
            await two.machine.resume()
            assert await lans[1].ask(PORT) == b"two"
        async with forked_live(tcg, one.machine, run_directory, "off", None) as off:
            assert not off.proof.network
            before = lans[0].received_packets()
            await off.agent.eval(REACH)
            assert await value_of(off, "reach()") == "OSError 101"
            assert lans[0].received_packets() == before


async def test_forks_of_a_template_have_a_tap_or_none(tcg: Case, run_directory: Path, lans: list[Lan]) -> None:
    async with rehearsed(tcg, run_directory) as template:
        assert template.find_tap() is None
        for lan, name in zip(lans, ("one", "two"), strict=True):
            machine = await tcg.engine.fork_live(template, run_directory / name, nic=lan.nic, settled=True)
            child = await networked(machine, name, True, settled=True)
            try:
                await child.agent.eval(SERVE)
                assert await lan.ask(PORT) == name.encode()
            finally:
                await child.kill()


async def test_an_old_connection_ends_in_the_fork_and_goes_on_in_its_source(
    tcg: Case, run_directory: Path, lans: list[Lan]
) -> None:
    async with forked(tcg, run_directory, "one", lans[0].nic) as one:
        with lans[0].listen() as listener:
            port = listener.getsockname()[1]
            await one.agent.eval(f"import socket\nc = socket.create_connection(('{GATEWAY_ADDRESS}', {port}))")
            await one.agent.eval("a, b = socket.socketpair()\nl = socket.create_server(('127.0.0.1', 0))")
            await one.agent.eval("inner = socket.create_connection(l.getsockname())\nother = l.accept()[0]")
            await one.agent.eval(f"u = socket.socket(type=socket.SOCK_DGRAM)\nu.connect(('{GATEWAY_ADDRESS}', 9))")
            server = listener.accept()[0]
            with server:
                server.settimeout(30)
                for network, lan in ((True, lans[1]), (False, None)):
                    nic = None if lan is None else lan.nic
                    async with forked_live(tcg, one.machine, run_directory, f"two-{network}", nic) as two:
                        assert two.proof.connections_reset == 2
                        said = await two.agent.eval("c.recv(10)", timeout_s=20)
                        assert said.error is not None and said.error.type == "ConnectionAbortedError"
                        said = await two.agent.eval("u.recv(10)", timeout_s=20)
                        assert said.error is not None and said.error.type == "ConnectionAbortedError"
                        assert await value_of(two, "other.send(b'hi') and inner.recv(10).decode()") == "hi"
                        if lan is not None:
                            assert lan.received_packets() == 0
                await one.agent.eval("c.sendall(b'on')")
                assert server.recv(10) == b"on"
                server.sendall(b"and on")
                assert await value_of(one, "c.recv(10).decode()") == "and on"


async def test_an_interface_comes_and_goes_while_the_vm_runs(tcg: Case, run_directory: Path, lans: list[Lan]) -> None:
    async with forked(tcg, run_directory, "one", None) as one:
        await one.agent.eval(SERVE + REACH)
        assert one.machine.find_tap() is None
        assert await value_of(one, "reach()") == "OSError 101"
        for lan in (lans[0], lans[1], lans[0]):
            await one.machine.plug(lan.nic)
            await one.agent.set_network(True)
            assert await lan.ask(PORT) == b"one"
            assert await value_of(one, "reach()") == "ConnectionRefusedError 111"
            tap = one.machine.find_tap()
            assert tap is not None
            os.close(tap)
            await one.agent.set_network(False)
            await one.machine.plug(None)
            assert one.machine.find_tap() is None
            assert await value_of(one, "reach()") == "OSError 101"


async def test_a_vm_that_was_adopted_still_has_its_tap(tcg: Case, run_directory: Path, lans: list[Lan]) -> None:
    machine = await tcg.engine.fork(tcg.frozen, run_directory / "one", nic=lans[0].nic)
    one = await networked(machine, "one", True, settled=True)
    adopted: Machine | None = None
    try:
        await one.agent.eval(SERVE)
        one.agent.close()
        await machine.release()
        adopted = await tcg.engine.adopt(run_directory / "one")
        tap = adopted.find_tap()
        assert tap is not None and os.readlink(f"/proc/self/fd/{tap}") == "/dev/net/tun"
        os.close(tap)
        assert await lans[0].ask(PORT) == b"one"
        await adopted.plug(lans[1].nic)
        assert await lans[1].ask(PORT) == b"one"
    finally:
        await (await tcg.engine.adopt(run_directory / "one") if adopted is None else adopted).kill()


async def test_something_else_than_a_tap_is_refused(tcg: Case, run_directory: Path) -> None:
    with open(os.devnull) as null, pytest.raises(EngineFailed, match="not a tap"):
        await tcg.engine.fork(tcg.frozen, run_directory / "x", nic=Nic(null.fileno(), "null", ""))
