"""The network interface of a VM, on every engine: its own tap, and nobody else's, or none."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, greet_again, value_of
from network_cases import PORT, REACH, SERVE, Lan, forked, made_lans
from support_freeze import freeze

from forkd.engines.base import Frozen
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import Unsupported
from forkd.host.tap import get_tap_name
from forkd.model.names import new_identity
from forkd.model.network import GATEWAY_ADDRESS
from forkd.runtime.freeze import booted

pytestmark = pytest.mark.usefixtures("nothing_left")

_QEMU = pytest.param("qemu", marks=pytest.mark.vm)  # emulated, or with KVM where that is
_LAB = [pytest.param(name, marks=pytest.mark.lab, id=f"{name}-kvm") for name in ("qemu", "firecracker")]


@pytest.fixture(params=[_QEMU, *_LAB])
def vm(request: pytest.FixtureRequest, frozen_by: Callable[[str], Case]) -> Case:
    """Each engine that runs VMs."""
    return frozen_by(request.param)


@pytest.fixture(params=["fake", _QEMU, *_LAB])
def any_case(request: pytest.FixtureRequest, frozen_by: Callable[[str], Case]) -> Case:
    return frozen_by(request.param)


@pytest.fixture
def lans(request: pytest.FixtureRequest) -> Iterator[list[Lan]]:
    """As the engine of the test's case takes them."""
    name = next((name for name in ("vm", "any_case") if name in request.fixturenames), None)
    case = request.getfixturevalue(name) if name else None
    with made_lans(2, by_name=case is not None and case.engine.opens_taps) as made:
        yield made


async def test_forks_are_reached_by_their_own_taps(vm: Case, run_directory: Path, lans: list[Lan]) -> None:
    async with (
        forked(vm, run_directory, "one", lans[0].nic) as one,
        forked(vm, run_directory, "two", lans[1].nic) as two,
    ):
        assert one.proof.network and two.proof.network
        for fork in (one, two):
            await fork.agent.eval(SERVE + REACH)
        assert await lans[0].ask(PORT) == b"one"
        await one.machine.pause()
        before = lans[0].received_packets()
        assert await lans[1].ask(PORT) == b"two"
        assert await value_of(two, "reach()") == "ConnectionRefusedError 111"
        assert lans[0].received_packets() == before
        await one.machine.resume()
        assert await lans[0].ask(PORT) == b"one"


async def test_a_fork_without_a_network_reaches_nothing(vm: Case, run_directory: Path) -> None:
    async with forked(vm, run_directory, "off", None) as off:
        assert not off.proof.network
        assert off.machine.find_tap() is None
        await off.agent.eval("import socket" + REACH)
        assert await value_of(off, "reach()") == "OSError 101"


async def test_a_guest_finds_its_resolver_and_no_ipv6_but_its_own(
    vm: Case, run_directory: Path, lans: list[Lan]
) -> None:
    async with forked(vm, run_directory, "one", lans[0].nic) as one:
        await one.agent.eval("import socket\nfrom pathlib import Path")
        said = await value_of(one, "Path('/etc/resolv.conf').read_text()")
        assert said == f"nameserver {GATEWAY_ADDRESS}\n"
        assert await value_of(one, "Path('/proc/sys/net/ipv6/conf/eth0/disable_ipv6').read_text()") == "1\n"
        await one.agent.eval("l = socket.create_server(('::1', 0), family=socket.AF_INET6)")
        await one.agent.eval("c = socket.create_connection(l.getsockname()[:2], 20)\nother = l.accept()[0]")
        assert await value_of(one, "c.send(b'hi') and other.recv(10).decode()") == "hi"
        outside = await one.agent.eval("socket.create_connection(('2001:db8::1', 80), 20)", timeout_s=30)
        assert outside.error is not None and "unreachable" in outside.error.message


async def test_a_vm_that_boots_with_an_interface_can_use_it_and_its_forks_have_others(
    vm: Case, run_directory: Path, tmp_path: Path, lans: list[Lan]
) -> None:
    spec = vm.frozen.boot
    async with booted(vm.engine, spec, run_directory / "parent", tmp_path, lans[0].nic) as (machine, agent):
        await agent.set_network(True)
        await agent.eval(SERVE + REACH)
        said = await agent.eval("reach()")
        assert said.value == "ConnectionRefusedError 111", said.error
        assert await lans[0].ask(PORT) != b""
        await agent.set_network(False)
        await agent.prepare_freeze()
        platform = await vm.engine.freeze(machine, tmp_path)
    before = lans[0].received_packets()
    made = Case(vm.engine, Frozen(tmp_path, spec, platform))
    async with forked(made, run_directory, "one", lans[1].nic):
        assert await lans[1].ask(PORT) == b"one"
    assert lans[0].received_packets() == before


async def test_a_tap_is_found_with_whom_it_was_given_to(any_case: Case, run_directory: Path, lans: list[Lan]) -> None:
    case = any_case
    machine = await case.engine.fork(case.frozen, run_directory / "one", nic=lans[0].nic)
    try:
        await machine.running()
        for _ in range(2):
            tap = machine.find_tap()
            assert tap is not None
            try:
                assert get_tap_name(tap) == lans[0].name
            finally:
                os.close(tap)
            await machine.release()
            machine = await case.engine.adopt(run_directory / "one")
    finally:
        await machine.kill()


@pytest.mark.lab
async def test_firecracker_cannot_change_an_interface_and_says_so(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    case = frozen_firecracker
    with made_lans(2, by_name=True) as lans:
        async with (
            forked(case, run_directory, "one", lans[0].nic) as one,
            forked(case, run_directory, "off", None) as off,
        ):
            await one.agent.eval(SERVE)
            for fork, nic in ((one, None), (one, lans[1].nic), (off, lans[1].nic)):
                with pytest.raises(Unsupported, match="cannot change the network interface") as caught:
                    await fork.machine.plug(nic)
                assert caught.value.hint is not None
            await off.machine.plug(None)
            assert await lans[0].ask(PORT) == b"one"


async def test_a_snapshot_that_does_not_name_its_interface_is_refused_a_network(
    vm: Case, run_directory: Path, lans: list[Lan]
) -> None:
    with pytest.raises(Unsupported, match="without a network interface") as caught:
        await vm.engine.fork(without_nic(vm.frozen), run_directory / "x", nic=lans[0].nic)
    assert caught.value.hint == "Make it again: forkd snapshot create"


@pytest.mark.lab
async def test_an_older_snapshot_of_firecracker_runs_and_so_do_those_of_its_forks(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path
) -> None:
    """They have an interface, and a guest that was never told of it."""
    engine, frozen = frozen_firecracker.engine, without_nic(frozen_firecracker.frozen)
    engine.check(frozen)
    machine = await engine.fork(frozen, run_directory / "one")
    child = await greet_again(machine, new_identity("one"), settled=True)
    try:
        assert await value_of(child, "past + 1") == 42
        await child.machine.pause()
        saved = await engine.save(child.machine, tmp_path)
        assert "nic" not in saved.platform
    finally:
        await child.kill()


@pytest.mark.vm
async def test_an_older_snapshot_of_qemu_runs_without_an_interface(
    frozen_tcg: Case, run_directory: Path, tmp_path: Path
) -> None:
    engine = QemuEngine("tcg")
    engine._platform = dict(without_nic(frozen_tcg.frozen).platform)  # as older ones were
    frozen = await freeze(engine, frozen_tcg.frozen.boot, tmp_path, "import os\npast = 41\n")
    assert "nic" not in frozen.platform
    engine = QemuEngine("tcg")
    engine.check(frozen)
    machine = await engine.fork(frozen, run_directory / "one")
    child = await greet_again(machine, new_identity("one"), settled=True)
    try:
        assert await value_of(child, "past + 1") == 42
        assert await value_of(child, "sorted(os.listdir('/sys/class/net'))") == ["lo"]
        assert child.machine.find_tap() is None
    finally:
        await child.kill()


def without_nic(frozen: Frozen) -> Frozen:
    return replace(frozen, platform={key: value for key, value in frozen.platform.items() if key != "nic"})
