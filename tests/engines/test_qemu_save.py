"""Branches of running VMs by QEMU: the paused fork is saved, forked on, and started again from files."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, fork_live, forking_live, greet, live_forks, started, value_of, values_of
from live_fork_looks import find_shared_memory, list_fds
from saved_layers import layer_of

from forkd.engines.base import Engine, Frozen, Machine
from forkd.engines.qemu import engine as qemu_engine
from forkd.engines.qemu import memory as qemu_memory
from forkd.engines.qemu.memory import find_live_memory
from forkd.engines.qemu.monitor import Incoming, Monitor
from forkd.errors import EngineFailed, GuestTimeout, Unsupported
from forkd.host.files import digest_file
from forkd.host.marked import find_marked
from forkd.host.pages import LiveMemory, opened_memory
from forkd.model.memory import PAGE
from forkd.model.names import parse_tag
from forkd.runtime.child import Child
from forkd.runtime.fork import new_identities
from forkd.store.layers import write_layer
from forkd.store.manifest import Manifest, Parent
from forkd.store.snapshots import Snapshot, SnapshotStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

_WALL_CLOCK_BYTES = 12
# It writes all the time, and every block has the checksum of its content.
_BUSY = """
import threading, zlib
blocks = [None] * 64
def work(number=0):
    while True:
        number += 1
        content = os.urandom(64) * 256
        blocks[number % 64] = (zlib.crc32(content), content)
def is_whole():
    return all(zlib.crc32(block[1]) == block[0] for block in list(blocks) if block)
import os
secret = int.from_bytes(os.urandom(7), 'big')
threading.Thread(target=work, daemon=True).start()
"""


@pytest.fixture(params=["frozen_tcg", pytest.param("frozen_newer", marks=pytest.mark.build)], ids=["host", "newer"])
def tcg(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


@contextlib.asynccontextmanager
async def branched(engine: Engine, source: Machine, run: Path, name: str = "branch") -> AsyncIterator[Machine]:
    """A fork that waits."""
    machine = await engine.fork_live(source, run / name, paused=True)
    try:
        await machine.running()
        yield machine
    finally:
        await machine.kill()


async def save(engine: Engine, machine: Machine, base: Frozen, into: Path) -> Frozen:
    into.mkdir()
    saved = await engine.save(machine, into)
    memory, runs = layer_of(saved.memory, base, into)
    return Frozen(into, base.boot, saved.platform, memory=memory, runs=runs, settled=False)


@contextlib.asynccontextmanager
async def gone_on(engine: Engine, frozen: Frozen, run: Path) -> AsyncIterator[Child]:
    identity = new_identities(1)[0]
    child = await greet(await engine.fork(frozen, run / identity.sandbox_id), identity)
    try:
        yield child
    finally:
        await child.kill()


def read_all(memory: LiveMemory) -> bytes:
    content = bytearray(memory.size)
    with opened_memory(memory) as reader:
        reader.read_into(0, memoryview(content))
    return bytes(content)


def differing(one: bytes, other: bytes) -> list[int]:
    """The pages; what is told of two whole memories would take minutes."""
    assert len(one) == len(other)
    return [at for at in range(0, len(one), PAGE) if one[at : at + PAGE] != other[at : at + PAGE]]


@pytest.fixture
def loaded(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The memory of each VM that is started, by its name, before its guest runs."""
    seen: dict[str, bytes] = {}
    load_state = Monitor.load_state

    async def look(monitor: Monitor, state: Incoming) -> None:
        await load_state(monitor, state)
        for directory, marked in find_marked(run_directory).items():
            if directory.name not in seen:
                seen[directory.name] = read_all(find_live_memory(marked.pid))

    monkeypatch.setattr(Monitor, "load_state", look)
    return seen


async def test_a_branch_of_a_busy_vm_is_forked_and_started_from_files_with_the_same_memory(
    tcg: Case, run_directory: Path, tmp_path: Path, loaded: dict[str, bytes]
) -> None:
    engine, before = tcg.engine, digest_file(tcg.frozen.memory_file)
    async with started(tcg, run_directory) as source:
        await source.agent.eval(_BUSY)
        await asyncio.sleep(0.3)
        secret = await value_of(source, "secret")
        async with branched(engine, source.machine, run_directory) as branch:
            frozen = await save(engine, branch, tcg.frozen, tmp_path / "saved")
            assert branch.paused and not source.machine.paused
            await source.agent.eval("secret = 0")
            kept = read_all(find_live_memory(branch.pid))
            async with live_forks(engine, branch, run_directory, 3) as forks:
                assert await values_of(forks, "secret") == [secret] * 3
                assert await values_of(forks, "is_whole()") == [True] * 3
                assert len({fork.proof.urandom for fork in forks}) == 3
                await forks[0].agent.eval("secret = 1")
            assert differing(read_all(find_live_memory(branch.pid)), kept) == []
            async with gone_on(engine, frozen, run_directory) as child:
                assert differing(loaded[child.id], kept) == []
                assert await value_of(child, "secret") == secret
                assert await value_of(child, "is_whole()") is True
                assert (await child.agent.run("echo $((6 * 7)); hostname")).stdout.split() == [
                    b"42",
                    child.identity.hostname.encode(),
                ]
                # A VM of a layer is a source like any other.
                async with live_forks(engine, child.machine, run_directory, 1) as (fork,):
                    assert await value_of(fork, "secret") == secret
            # Only now does it go on itself.
            await branch.resume()
            again = await greet(branch, new_identities(1)[0])
            assert await value_of(again, "secret") == secret
            again.agent.close()
        assert await value_of(source, "[secret, is_whole()]") == [0, True]
    assert digest_file(tcg.frozen.memory_file) == before


async def test_a_branch_is_saved_before_between_and_after_its_forks_and_so_are_its_paused_forks(
    tcg: Case, run_directory: Path, tmp_path: Path
) -> None:
    engine = tcg.engine
    async with started(tcg, run_directory) as source:
        await source.agent.eval("kept = past * 2")
        async with branched(engine, source.machine, run_directory) as branch:
            saves = []
            for number in range(3):
                fork = await fork_live(engine, branch, run_directory)
                saves.append(await save(engine, branch, tcg.frozen, tmp_path / f"{number}"))
                assert await value_of(fork, "kept") == 82
                await fork.kill()
            assert len({(frozen.directory / "state").read_bytes() for frozen in saves}) == 1
            async with branched(engine, branch, run_directory, "deeper") as deeper:
                saves.append(await save(engine, deeper, tcg.frozen, tmp_path / "deeper"))
                await deeper.resume()
                child = await greet(deeper, new_identities(1)[0])
                await child.agent.eval("kept += 1")
                await deeper.pause()
                saves.append(await save(engine, deeper, tcg.frozen, tmp_path / "later"))
                child.agent.close()
        for frozen, kept in ((saves[2], 82), (saves[3], 82), (saves[4], 83)):
            async with gone_on(engine, frozen, run_directory) as child:
                assert await value_of(child, "kept") == kept


async def test_a_template_of_a_layer_is_forked_like_any_other(tcg: Case, run_directory: Path, tmp_path: Path) -> None:
    engine = tcg.engine
    async with started(tcg, run_directory) as source:
        await source.agent.eval("kept = past * 2")
        async with branched(engine, source.machine, run_directory) as branch:
            frozen = await save(engine, branch, tcg.frozen, tmp_path / "saved")
    template = await engine.template(frozen, run_directory / "template")
    try:
        await template.running()
        await template.pause()
        async with live_forks(engine, template, run_directory, 3) as forks:
            assert await values_of(forks, "kept") == [82] * 3
    finally:
        await template.kill()


async def test_a_paused_vm_that_was_just_forked_is_resumed_and_paused_as_told(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        for _ in range(3):
            await source.machine.pause()
            async with live_forks(tcg.engine, source.machine, run_directory, 2) as forks:
                await source.machine.resume()
                assert await values_of((source, *forks), "past + 1") == [42] * 3
            await source.machine.pause()
            with pytest.raises(GuestTimeout):
                await source.agent.ping(deadline_s=0.3)
            await source.machine.resume()


async def test_of_many_small_pieces_of_a_layer_the_most_are_copied(
    tcg: Case, run_directory: Path, tmp_path: Path, loaded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tcg.engine
    async with started(tcg, run_directory) as source:
        await source.agent.eval("kept = past * 2")
        async with branched(engine, source.machine, run_directory) as branch:
            frozen = await save(engine, branch, tcg.frozen, tmp_path / "saved")
            kept = read_all(find_live_memory(branch.pid))
    for most in (0, 5, qemu_memory.MOST_MAPPED):
        monkeypatch.setattr(qemu_memory, "MOST_MAPPED", most)
        async with gone_on(engine, frozen, run_directory) as child:
            assert differing(loaded[child.id], kept) == []
            assert await value_of(child, "kept") == 82
            lines = Path(f"/proc/{child.machine.pid}/maps").read_text()
            assert lines.count(f" {tmp_path}/saved/pages\n") <= most
            links = [os.readlink(f"/proc/{child.machine.pid}/fd/{fd}") for fd in list_fds(child.machine.pid)]
            assert str(tmp_path / "saved/pages") not in links
            assert find_shared_memory(child.machine.pid) == []


async def test_a_qemu_that_goes_on_sharing_its_memory_is_not_started(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_file(tcg.frozen.memory_file)
    monkeypatch.setattr(qemu_memory, "render_mapping", lambda *_: [])
    machine = await tcg.engine.fork(tcg.frozen, run_directory / "vm")
    try:
        with pytest.raises(EngineFailed, match="shares its memory"):
            await machine.running()
    finally:
        await machine.kill()
    assert digest_file(tcg.frozen.memory_file) == before


async def test_where_tracing_is_not_allowed_no_vm_is_saved_and_no_layer_started(
    tcg: Case, run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tcg, run_directory) as source:
        await source.machine.pause()
        frozen = await save(tcg.engine, source.machine, tcg.frozen, tmp_path / "saved")
    with monkeypatch.context() as forbidden:
        forbidden.setattr(qemu_engine, "find_tracing_lack", lambda: "made up")
        forbidden.setattr(tcg.engine, "_cell_required", False)
        with pytest.raises(Unsupported, match="made up") as refused:
            await tcg.engine.fork(frozen, run_directory / "vm")
        assert refused.value.hint
        async with started(tcg, run_directory) as child:
            await child.machine.pause()
            with pytest.raises(Unsupported, match="made up"):
                await tcg.engine.save(child.machine, tmp_path)
            # Nor where it is allowed again: it was started with memory that QEMU would save with its devices.
            forbidden.undo()
            with pytest.raises(EngineFailed, match="cannot be saved"):
                await tcg.engine.save(child.machine, tmp_path)
            await child.machine.resume()
            assert await value_of(child, "past + 1") == 42
    runs = tuple(replace(run, start=run.start + (1 << 40)) for run in frozen.runs)
    machine = await tcg.engine.fork(replace(frozen, runs=runs), run_directory / "vm")
    with pytest.raises(EngineFailed, match="A layer has memory up to byte"):
        await machine.running()
    await machine.kill()


async def test_layers_that_the_store_wrote_are_started_with_the_memory_they_were_written_of(
    tcg: Case, run_directory: Path, tmp_path: Path, loaded: dict[str, bytes]
) -> None:
    store, engine, spec = SnapshotStore(tmp_path), tcg.engine, tcg.frozen.boot

    def manifest(tag: str, below: Snapshot | None = None) -> Manifest:
        parent = None if below is None else Parent(below.manifest.tag, below.hash)
        return Manifest(parse_tag(tag), 1, "qemu", "0" * 32, spec.machine, "", tcg.frozen.platform, {}, parent=parent)

    def frozen(snapshot: Snapshot) -> Frozen:
        runs = snapshot.runs
        settled = not snapshot.ancestors
        return Frozen(snapshot.directory, spec, tcg.frozen.platform, None, snapshot.root_memory, runs, settled)

    with store.created(parse_tag("layer-0"), replace_existing=False) as (staging, seal):
        for name in ("memory", "state"):
            shutil.copyfile(tcg.frozen.directory / name, staging / name)
        seal(manifest("layer-0"))
    before = digest_file(tmp_path / "layer-0/memory")
    for depth in range(1, 4):
        with store.held(parse_tag(f"layer-{depth - 1}")) as below:
            identity = new_identities(1)[0]
            machine = await engine.fork(frozen(below), run_directory / identity.sandbox_id)
            source = await greet(machine, identity, settled=not below.ancestors)
            await source.agent.eval(f"past += 1\nmade_{depth} = os.urandom(1 << 20)" if depth > 1 else _BUSY)
            async with branched(engine, source.machine, run_directory) as branch:
                with store.created(parse_tag(f"layer-{depth}"), replace_existing=False) as (staging, seal):
                    saved = await engine.save(branch, staging)
                    assert saved.memory is not None
                    write_layer(saved.memory, below, staging)
                    seal(manifest(f"layer-{depth}", below))
                kept = read_all(find_live_memory(branch.pid))
            secret = await value_of(source, "secret")
            await source.kill()
        with store.held(parse_tag(f"layer-{depth}")) as head:
            async with gone_on(engine, frozen(head), run_directory) as child:
                assert differing(loaded[child.id], kept) == []
                assert await value_of(child, "[secret, past, is_whole()]") == [secret, 40 + depth, True]
    assert digest_file(tmp_path / "layer-0/memory") == before


@pytest.mark.lab
async def test_under_kvm_a_paused_vm_is_saved_started_again_and_saved_as_a_layer_of_that(
    frozen_qemu: Case, run_directory: Path, tmp_path: Path, loaded: dict[str, bytes]
) -> None:
    engine, before = frozen_qemu.engine, digest_file(frozen_qemu.frozen.memory_file)
    assert engine.isolation == "qemu-kvm"
    async with started(frozen_qemu, run_directory) as source:
        await source.agent.eval(_BUSY)
        secret = await value_of(source, "secret")
        await source.machine.pause()
        frozen = await save(engine, source.machine, frozen_qemu.frozen, tmp_path / "saved")
        kept = read_all(find_live_memory(source.machine.pid))
        again = await save(engine, source.machine, frozen_qemu.frozen, tmp_path / "again")
        await source.machine.resume()
        await source.agent.eval("secret = 0")
        # A vCPU's page is shared with KVM, and nothing else with anybody.
        assert all("kvm-vcpu" in line for line in find_shared_memory(source.machine.pid))
        for each in (frozen, again):
            async with gone_on(engine, each, run_directory) as child:
                # KVM writes the wall clock anew, when it is told at its load where the guest has that.
                (at,) = differing(loaded[child.id], kept)
                assert loaded[child.id][at + _WALL_CLOCK_BYTES : at + PAGE] == kept[at + _WALL_CLOCK_BYTES : at + PAGE]
                assert await value_of(child, "[secret, is_whole()]") == [secret, True]
                await child.agent.eval("secret += 1")
                await child.machine.pause()
                deeper = await save(engine, child.machine, each, each.directory / "deeper")
        async with gone_on(engine, deeper, run_directory) as child:
            assert await value_of(child, "[secret, is_whole()]") == [secret + 1, True]
        assert await value_of(source, "[secret, is_whole()]") == [0, True]
    assert digest_file(frozen_qemu.frozen.memory_file) == before
