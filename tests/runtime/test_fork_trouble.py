"""Forks of a template that fail within a batch: the error says why, no child is left, the next batch works."""

import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forkd.engines.base import Frozen, Way
from forkd.errors import EngineFailed, NoCapacity
from forkd.host.marked import find_marked
from forkd.host.procfork.descriptors import lowest_free
from forkd.image import Image
from forkd.model.names import parse_tag
from forkd.runtime import fork
from forkd.runtime.admission import Capacity
from forkd.runtime.doctor import open_engine
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.freeze import frozen_of
from forkd.runtime.templates import Templates
from forkd.store.snapshots import SnapshotStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

TAG = parse_tag("warm")
N = 60
FAILS_AT = 57


@pytest.fixture(scope="module")
def frozen(python_image: Image, warm_vm: Path) -> Iterator[Frozen]:
    with SnapshotStore(warm_vm.parent).held(TAG) as snapshot:
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


@pytest.fixture
async def templates(frozen: Frozen, run_directory: Path) -> AsyncIterator[Templates]:
    templates = Templates(open_engine("qemu"), run_directory)
    try:
        await templates.warm(frozen, TAG)
        yield templates
    finally:
        await templates.close()


async def test_without_descriptors_in_the_middle_of_a_batch(
    templates: Templates, frozen: Frozen, run_directory: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    await _batch(templates, frozen, run_directory, 2)
    # Three of each child stay open: its channel, its monitor, its pidfd.
    last = lowest_free({int(fd) for fd in os.listdir("/proc/self/fd")}, FAILS_AT * 3)[-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
    try:
        with pytest.raises(EngineFailed) as raised:
            await _batch(templates, frozen, run_directory, N)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(raised.value)
    assert raised.value.hint is not None
    _only_the_template(run_directory)
    await _batch(templates, frozen, run_directory, 2)


async def test_without_memory_in_the_middle_of_a_batch(
    templates: Templates, frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look() -> Capacity:
        nonlocal looks
        looks += 1
        return Capacity(available_mib=65536 if looks <= FAILS_AT else 512, cpus=2)

    with monkeypatch.context() as patch:
        patch.setattr(fork, "look", look)
        with pytest.raises(NoCapacity):
            await _batch(templates, frozen, run_directory, N)
    assert looks >= FAILS_AT
    _only_the_template(run_directory)
    await _batch(templates, frozen, run_directory, 2)
