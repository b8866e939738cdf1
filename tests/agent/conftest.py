"""Fixtures: a real agent in a process of its own, rehearsing over a socket pair."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rehearsed import Guest

import forkd
from forkd.guest.agent import Agent
from forkd.image.initramfs import GUEST_WIRE

_SOURCE = Path(forkd.__file__).parent


@pytest.fixture(scope="session")
def guest_lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guest's library, as the image builder lays it out."""
    lib = tmp_path_factory.mktemp("lib")
    (lib / "forkd/wire").mkdir(parents=True)
    (lib / "forkd/agent").mkdir()
    shutil.copy(_SOURCE / "agent/guest_api.py", lib / "forkd/__init__.py")
    (lib / "forkd/wire/__init__.py").touch()
    for name in GUEST_WIRE:
        shutil.copy(_SOURCE / "wire" / name, lib / "forkd/wire")
    for path in (_SOURCE / "agent").glob("*.py"):
        shutil.copy(path, lib / "forkd/agent")
    return lib


@pytest.fixture
def guest(guest_lib: Path, tmp_path: Path) -> Iterator[Guest]:
    guest = Guest(guest_lib, tmp_path / "root")
    yield guest
    assert guest.end() == "", "the agent complained"


@pytest.fixture
async def agent(guest: Guest) -> AsyncIterator[Agent]:
    async with guest.connected() as agent:
        yield agent
