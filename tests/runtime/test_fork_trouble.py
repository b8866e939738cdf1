"""Forks of a template that fail in the middle of a batch: the error says why, nobody is left, the next batch works."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.engines.base import Frozen, Way
from forkd.errors import EngineFailed, NoCapacity
from forkd.host.marked import find_marked
from forkd.host.procfork.descriptors import lowest_free
from forkd.image import Image
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime import spawn
from forkd.runtime.admission import Capacity
from forkd.runtime.engines import open_engine
from forkd.runtime.freeze import create_snapshot, frozen_of
from forkd.runtime.spawn import fork_children, kill_all, new_identities
from forkd.runtime.templates import Templates
from forkd.runtime.warmup import Warmup
from forkd.store.snapshots import SnapshotStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

TAG = parse_tag("warm")
N = 60
FAILS_AT = 57


class _Silent:
    def stage(self, text: str) -> None: ...

    def line(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def frozen(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    store = SnapshotStore(tmp_path_factory.mktemp("snapshots"))
    run = tmp_path_factory.mktemp("run")

    async def make() -> None:
        engine, machine = open_engine("qemu"), MachineSpec(192)
        await create_snapshot(engine, store, python_image, TAG, machine, Warmup("x = 41"), run, progress=_Silent())

    asyncio.run(make())
    with store.held(TAG) as snapshot:
        yield frozen_of(snapshot, python_image)


async def _batch(templates: Templates, frozen: Frozen, directory: Path, n: int) -> None:
    """A batch that works: every child is a fork of the template, and none is left."""
    forked = await fork_children(
        open_engine("qemu"), frozen, new_identities(n), directory, template=templates.find(frozen)
    )
    ways = {sandbox.machine.phases.way for sandbox in forked.sandboxes}
    values = [(await sandbox.agent.eval("x + 1")).value for sandbox in forked.sandboxes]
    await kill_all(forked.sandboxes)
    assert ways == {Way.FORK}
    assert values == [42] * n


def _only_the_template(directory: Path) -> None:
    assert [path.name.partition("-")[0] for path in find_marked(directory)] == ["template"]
    assert [path.name.partition("-")[0] for path in directory.iterdir()] == ["template"]


def test_without_descriptors_in_the_middle_of_a_batch(frozen: Frozen, run_directory: Path) -> None:
    async def run() -> None:
        engine = open_engine("qemu")
        templates = Templates(engine, run_directory)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            await templates.warm(frozen, TAG)
            await _batch(templates, frozen, run_directory, 2)
            # Three of each child stay open: its channel, its monitor, its pidfd.
            last = lowest_free({int(fd) for fd in os.listdir("/proc/self/fd")}, FAILS_AT * 3)[-1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
            with pytest.raises(EngineFailed) as raised:
                await _batch(templates, frozen, run_directory, N)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert "Too many open files" in str(raised.value)
            assert raised.value.hint is not None
            _only_the_template(run_directory)
            await _batch(templates, frozen, run_directory, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await templates.close()

    asyncio.run(run())


def test_without_memory_in_the_middle_of_a_batch(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        templates = Templates(open_engine("qemu"), run_directory)
        looks = 0

        def look() -> Capacity:
            nonlocal looks
            looks += 1
            return Capacity(available_mib=65536 if looks <= FAILS_AT else 512, cpus=2)

        try:
            await templates.warm(frozen, TAG)
            with monkeypatch.context() as patch:
                patch.setattr(spawn, "look", look)
                with pytest.raises(NoCapacity):
                    await _batch(templates, frozen, run_directory, N)
            assert looks >= FAILS_AT
            _only_the_template(run_directory)
            await _batch(templates, frozen, run_directory, 2)
        finally:
            await templates.close()

    asyncio.run(run())
