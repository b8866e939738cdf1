"""One frozen parent per engine, made once: what every contract test forks from."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_cases import Case

from forkd.engines.base import BootSpec, Engine, Frozen
from forkd.engines.qemu.binary import find_binary
from forkd.errors import ForkdError
from forkd.host.files import locked
from forkd.host.kvm_probe import probe_kvm
from forkd.host.marked import find_marked
from forkd.image import Image
from forkd.image.progress import Silent
from forkd.model.machine import MachineSpec
from forkd.runtime.engines import FakeEngine, FirecrackerEngine, QemuEngine
from forkd.runtime.warmup import Warmup, booted, warm_up
from lab.emulator import find_emulator
from lab.workshop import find_workshop

PAST = "import random\npast = 41\nhooked = []\n"


async def _freeze(engine: Engine, spec: BootSpec, run: Path, into: Path, warm: str) -> Frozen:
    async with booted(engine, spec, run / "parent", into) as (machine, agent):
        await warm_up(agent, Warmup(warm))
        await agent.prepare_freeze()
        platform = await engine.freeze(machine, into)
    return Frozen(into, spec, platform)


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """Short, as sockets live in it; empty at the end, or the engine left something."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []
        assert find_marked(Path(path)) == {}


@pytest.fixture(scope="session")
def frozen_qemu(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Case:
    engine = QemuEngine("kvm" if probe_kvm().usable else "tcg")
    return _frozen_vm(engine, python_image, tmp_path_factory.mktemp("qemu"))


@pytest.fixture(scope="session")
def frozen_firecracker(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _frozen_vm(FirecrackerEngine(), python_image, tmp_path_factory.mktemp("firecracker"))


@pytest.fixture(scope="session")
def frozen_tcg(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Of the engine that forks live VMs, on this host's QEMU."""
    if not probe_kvm().usable:
        found = request.getfixturevalue("frozen_qemu")
        assert isinstance(found, Case)
        return found
    return _frozen_vm(QemuEngine("tcg"), request.getfixturevalue("python_image"), tmp_path_factory.mktemp("tcg"))


@pytest.fixture(scope="session")
def frozen_tcg_4(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _frozen_vm(QemuEngine("tcg"), python_image, tmp_path_factory.mktemp("tcg-4"), vcpus=4)


@pytest.fixture(scope="session")
def frozen_newer(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Case:
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
    return _frozen_vm(QemuEngine("tcg", binary=binary), python_image, tmp_path_factory.mktemp("newer"))


def _frozen_vm(engine: Engine, image: Image, into: Path, vcpus: int = 1) -> Case:
    spec = BootSpec(MachineSpec(256, vcpus), image.kernel, image.initrd, image.root)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as run:
        return Case(engine, asyncio.run(_freeze(engine, spec, Path(run), into, PAST + "import numpy\n")))


@pytest.fixture(scope="session")
def frozen_fake(tmp_path_factory: pytest.TempPathFactory) -> Case:
    engine = FakeEngine()
    nowhere = Path("/nonexistent")
    spec = BootSpec(MachineSpec(256, 1), nowhere, nowhere, nowhere)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as run:
        return Case(engine, asyncio.run(_freeze(engine, spec, Path(run), tmp_path_factory.mktemp("fake"), PAST)))


@pytest.fixture(
    params=[
        "fake",
        pytest.param("qemu", marks=pytest.mark.vm),
        pytest.param("firecracker", marks=pytest.mark.lab),
    ]
)
def case(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(f"frozen_{request.param}")
    assert isinstance(found, Case)
    return found
