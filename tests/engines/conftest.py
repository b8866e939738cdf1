"""One frozen parent per engine, made once: what every contract test forks from."""

import asyncio
import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_cases import Case, forking_live
from support_freeze import NO_IMAGE, freeze

from forkd.engines.base import BootSpec, Engine, Opening
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.args import find_binary
from forkd.engines.qemu.engine import QemuEngine
from forkd.engines.table import ENGINES, get_entry
from forkd.errors import ForkdError
from forkd.host.files import locked
from forkd.host.kvm import probe_kvm
from forkd.image import Image
from forkd.image.spec import Silent
from forkd.model.machine import MachineSpec
from lab.emulator import find_emulator
from lab.host import find_workshop

PAST = "import random\npast = 41\nhooked = []\n"


@pytest.fixture(scope="session")
def frozen_by(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Case]:
    """A parent frozen by the engine of a name, made once."""

    @functools.cache
    def make(name: str) -> Case:
        entry = get_entry(name)
        engine = entry.open("kvm" if probe_kvm().usable else "tcg", Opening())
        if entry.runs_vms:
            return _frozen_vm(engine, request.getfixturevalue("python_image"), shared / name)
        return Case(engine, asyncio.run(freeze(engine, NO_IMAGE, tmp_path_factory.mktemp(name), PAST)))

    return make


@pytest.fixture(scope="session")
def frozen_qemu(frozen_by: Callable[[str], Case]) -> Case:
    return frozen_by("qemu")


@pytest.fixture(scope="session")
def frozen_fake(frozen_by: Callable[[str], Case]) -> Case:
    return frozen_by("fake")


@pytest.fixture(scope="session")
def frozen_firecracker(forkable_firecracker: Case) -> Case:
    """Where no VM is forked live: each fork is a Firecracker of its own, in its jail."""
    return Case(FirecrackerEngine(live_forks=False), forkable_firecracker.frozen)


@pytest.fixture(scope="session")
def frozen_tcg(request: pytest.FixtureRequest, shared: Path) -> Case:
    """Of the engine that forks live VMs, on this host's QEMU."""
    if not probe_kvm().usable:
        found = request.getfixturevalue("frozen_qemu")
        assert isinstance(found, Case)
        return found
    return _frozen_vm(QemuEngine("tcg"), request.getfixturevalue("python_image"), shared / "tcg")


@pytest.fixture(scope="session")
def frozen_tcg_4(python_image: Image, shared: Path) -> Case:
    return _frozen_vm(QemuEngine("tcg"), python_image, shared / "tcg-4", vcpus=4)


@pytest.fixture(scope="session")
def frozen_firecracker_4(python_image: Image, shared: Path) -> Case:
    return _frozen_vm(FirecrackerEngine(), python_image, shared / "firecracker-4", vcpus=4)


@pytest.fixture(scope="session")
def forkable_firecracker(frozen_by: Callable[[str], Case]) -> Case:
    return frozen_by("firecracker")


@pytest.fixture(scope="session")
def frozen_newer(python_image: Image, shared: Path) -> Case:
    """On the QEMU that the lab fetches where this host's is old."""
    shop = find_workshop()
    shop.kept.mkdir(parents=True, exist_ok=True)
    try:
        with locked(shop.kept / ".making"):
            binary = find_emulator(shop.kept, Silent())
    except ForkdError as error:
        pytest.skip(f"No newer QEMU: {error.message}")
    if binary == find_binary():
        pytest.skip(f"This host's QEMU is a new one: {binary.version}")
    return _frozen_vm(QemuEngine("tcg", binary=binary), python_image, shared / "newer")


def _frozen_vm(engine: Engine, image: Image, into: Path, vcpus: int = 1) -> Case:
    """Booted by the first worker that asks; the others take what it froze."""
    spec = BootSpec(MachineSpec(256, vcpus), image.kernel, image.initrd, image.root)
    made = into.with_suffix(".frozen")
    with locked(into.with_suffix(".lock")):
        if not made.exists():
            into.mkdir()
            frozen = asyncio.run(freeze(engine, spec, into, PAST + "import numpy\n"))
            made.write_bytes(pickle.dumps(frozen))
    return Case(engine, pickle.loads(made.read_bytes()))


# An engine that boots VMs wherever forkd runs needs no other mark.
_MARKS = {"fake": (), "firecracker": pytest.mark.lab}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, pytest.mark.vm)) for name in ENGINES])
def case(request: pytest.FixtureRequest, frozen_by: Callable[[str], Case]) -> Case:
    """Each engine of the table."""
    return frozen_by(request.param)


@pytest.fixture
def live(case: Case) -> Case:
    """Each that forks live VMs."""
    return forking_live(case)


@pytest.fixture
def tcg(frozen_tcg: Case) -> Case:
    return forking_live(frozen_tcg)
