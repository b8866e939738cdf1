"""Where a Firecracker is in neither a cell nor a jail, and whom one in a jail runs as. Both programs are scripts."""

import asyncio
import os
from pathlib import Path

import pytest

from forkd.engines.base import BootSpec, Engine, Frozen, Opening
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.table import get_entry
from forkd.errors import HostLacks
from forkd.host import firecracker
from forkd.host.id_maps import UserRange
from forkd.host.user_ids import BLOCK, user_ids
from forkd.model.machine import MachineSpec

pytestmark = pytest.mark.usefixtures("nothing_left")

USERS = UserRange(1_900_100_000, BLOCK)


@pytest.fixture
def frozen(tmp_path: Path) -> Frozen:
    for name in ("memory", "state", "kernel", "initrd", "root"):
        (tmp_path / name).touch()
    spec = BootSpec(MachineSpec(128), tmp_path / "kernel", tmp_path / "initrd", tmp_path / "root")
    return Frozen(tmp_path, spec, {})


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """They wait to be ended. The jailer writes down what it was told."""
    told = tmp_path / "told"
    for name, says in (("firecracker", "Firecracker"), ("jailer", "Jailer")):
        path = tmp_path / name
        path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && {{ echo "{says} v1.12.1"; exit; }}\n'
            f"echo {name} $* >> '{told}'\nexec sleep 60\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv(f"FORKD_{name.upper()}", str(path))
    return told


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """To whom the engine gives no jail, and no fork a cell."""
    monkeypatch.setattr(firecracker, "_is_root", lambda: False)
    monkeypatch.setattr(FirecrackerEngine, "why_no_live_forks", lambda _: "not root")


async def read_words(told: Path, count: int) -> list[list[str]]:
    """What so many programs were told, once all have been."""
    async with asyncio.timeout(30):
        while not told.exists() or len(lines := told.read_text().splitlines()) < count:
            await asyncio.sleep(0.02)
    return [line.split() for line in lines]


def opened(opening: Opening) -> Engine:
    return get_entry("firecracker").open("kvm", opening)


@pytest.mark.usefixtures("programs", "as_user")
async def test_without_a_cell_or_a_jail_none_is_started_where_one_is_required(
    frozen: Frozen, run_directory: Path
) -> None:
    engine = opened(Opening(cell="required"))
    with pytest.raises(HostLacks, match="Neither a cell nor a jail") as caught:
        await engine.fork(frozen, run_directory / "child")
    assert "best-effort" in (caught.value.hint or "")
    with pytest.raises(HostLacks, match="Neither a cell nor a jail"):
        await engine.boot(frozen.boot, run_directory / "parent", frozen.directory)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("opening", [Opening(cell="best-effort"), Opening()], ids=["best-effort", "as demo does"])
async def test_where_a_cell_is_only_wanted_one_is_started_and_its_lack_is_told(
    frozen: Frozen, programs: Path, run_directory: Path, opening: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    machine = await opened(opening).fork(frozen, run_directory / "child")
    try:
        assert (await read_words(programs, 1))[0][:3] == ["firecracker", "--id", "child"]
        assert "without a jail" in caplog.text
    finally:
        await machine.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="users of their own are root's to give")
async def test_each_in_a_jail_is_told_a_user_that_no_other_vm_has_until_it_ends(
    frozen: Frozen, programs: Path, run_directory: Path
) -> None:
    engine = FirecrackerEngine(cell="required", users=USERS, live_forks=False)
    ids = user_ids(USERS)
    machines = [await engine.fork(frozen, run_directory / name) for name in ("one", "two")]
    try:
        words = await read_words(programs, 2)
        users = {int(told[told.index("--uid") + 1]) for told in words}
        assert len(users) == 2 and all(user in USERS for user in users)
        assert not users & {ids.claim() for _ in range(BLOCK - 2)}
    finally:
        for machine in machines:
            await machine.kill()
    assert {ids.claim(), ids.claim()} == users
