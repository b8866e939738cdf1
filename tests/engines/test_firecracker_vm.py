"""Real VMs on the firecracker engine: how they are jailed, what they share, how they end, what is left of them."""

import asyncio
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, left_behind, started, started_many
from support_sizes import sized

from forkd.engines.base import ExitReason, Frozen, Machine, Nic
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.errors import EngineFailed, ForkdError, GuestDied, InvalidInput
from forkd.host.cgroup import find_place
from forkd.host.marked import find_marked
from forkd.host.system import memory_use
from forkd.host.user_ids import DEFAULT_USERS
from forkd.model.machine import NO_LIMITS, Limits, MachineSpec
from forkd.model.names import new_identity
from forkd.runtime.fork import fork_children, fork_one, kill_all, new_identities, prove
from forkd.runtime.freeze import booted

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("nothing_left", "no_jail_left")]

_NAMESPACES = ("mnt", "net", "pid")


@pytest.fixture
def no_jail_left() -> Iterator[None]:
    """No control group, network interface or namespace more than before."""
    before = _left()
    yield
    assert _left() == before


def _left() -> tuple[set[str], set[str], set[str]]:
    base = find_place().base  # type: ignore[union-attr]
    groups = {str(path) for path in base.rglob("*") if path.is_dir()}
    namespaces = set()
    for process in Path("/proc").glob("[0-9]*"):
        for kind in _NAMESPACES:
            try:
                namespaces.add(os.readlink(process / "ns" / kind))
            except OSError:
                continue
    return groups, set(os.listdir("/sys/class/net")), namespaces


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_every_child_is_jailed_and_no_two_are_the_same_user(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    async with started_many(frozen_firecracker, run_directory, 3) as children:
        uids, taps = set(), set()
        for child in children:
            pid = child.machine.pid
            assert "firecracker" in Path(f"/proc/{pid}/cmdline").read_text()
            status = _status(pid)
            uids.add(status["Uid"])
            assert int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) >= 0
            assert status["NoNewPrivs"] == "1"
            for thread in Path(f"/proc/{pid}/task").iterdir():
                assert _status(int(thread.name))["Seccomp"] == "2", "every thread has Firecracker's own filter"
            for kind in _NAMESPACES:
                assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
            inside = {path.name for path in Path(f"/proc/{pid}/root").iterdir()}
            assert {"memory", "state", "root.erofs", "agent.sock", "api.sock"} <= inside
            assert not {"etc", "home", "proc", "usr"} & inside
            devices = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
            taps |= {line.partition(":")[0].strip() for line in devices} - {"lo"}
            group = Path(f"/proc/{pid}/cgroup").read_text().strip()
            assert group.startswith("0::/forkd/") and group.endswith(child.id)
        assert len(uids) == len(taps) == 3
        assert not taps & set(os.listdir("/sys/class/net"))
        assert all(int(word) in DEFAULT_USERS for words in uids for word in words.split())


async def test_the_user_of_a_jailed_vm_stays_its_own_when_it_is_taken_over(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    engine, directory = frozen_firecracker.engine, run_directory / "sb-1"
    first = await fork_one(engine, frozen_firecracker.frozen, new_identity("sb-1"), run_directory)
    await first.release()
    machine = await engine.adopt(directory)
    try:
        assert isinstance(machine, FirecrackerMachine) and isinstance(first.machine, FirecrackerMachine)
        assert machine.lineage == first.machine.lineage == (int(_status(machine.pid)["Uid"].split()[0]),)
    finally:
        await machine.kill()


async def test_a_jailed_vmm_may_read_what_it_was_given_and_write_none_of_it(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    async with started(frozen_firecracker, run_directory) as child:
        mounts = Path(f"/proc/{child.machine.pid}/mounts").read_text().splitlines()
        options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
        for name in ("/memory", "/state", "/root.erofs"):
            assert "ro" in options[name]


async def test_many_children_are_all_correct_and_share_their_memory(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    n = sized(12, 30)
    resident = (frozen_firecracker.frozen.directory / "memory").stat().st_blocks * 512
    async with started_many(frozen_firecracker, run_directory, n) as children:
        answers = await asyncio.gather(*(child.agent.eval("past + int(numpy.ones(1)[0])") for child in children))
        assert [answer.value for answer in answers] == [42] * n
        for of in ("hostname", "machine_id", "urandom", "random", "numpy"):
            assert len({getattr(child.proof, of) for child in children}) == n, of
        assert max(memory_use(child.machine.pid).unique_bytes for child in children) < resident / 10


def test_nothing_of_its_parents_place_is_frozen_into_a_snapshot(frozen_firecracker: Case) -> None:
    frozen = frozen_firecracker.frozen
    state = (frozen.directory / "state").read_bytes()
    assert b"agent.sock" in state and b"root.erofs" in state
    for place in (b"/agent.sock", b"/root.erofs", b"/tmp/", os.fsencode(frozen.directory)):
        assert place not in state
    assert stat.S_IMODE((frozen.directory / "memory").stat().st_mode) == 0o644


async def test_a_jail_works_where_the_file_system_allows_no_devices(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    place = run_directory / "no devices"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nodev,nosuid", "tmpfs", place], check=True)
    try:
        async with started(frozen_firecracker, place):
            pass
    finally:
        subprocess.run(["umount", place], check=True)
        place.rmdir()


@pytest.mark.parametrize(("vcpus", "memory_mib"), [(1, 128), (8, 320)])
async def test_a_machine_has_the_size_that_was_asked_for(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path, vcpus: int, memory_mib: int
) -> None:
    spec = replace(frozen_firecracker.frozen.boot, machine=MachineSpec(memory_mib, vcpus))
    code = "import os\n(os.cpu_count(), os.sysconf('SC_PHYS_PAGES') * 4096 // 2**20)"
    engine = frozen_firecracker.engine
    async with booted(engine, spec, run_directory / "parent", tmp_path) as (machine, agent):
        cpus, seen_mib = (await agent.eval(code)).value
        assert cpus == vcpus and memory_mib * 0.7 < seen_mib <= memory_mib
        await agent.prepare_freeze()
        platform = await engine.freeze(machine, tmp_path)
    async with started(Case(engine, Frozen(tmp_path, spec, platform)), run_directory) as child:
        assert (await child.agent.eval(code)).value == [vcpus, seen_mib]


@pytest.mark.parametrize(("key", "reason"), [("c", ExitReason.PANICKED), ("b", ExitReason.POWERED_OFF)])
async def test_why_a_guest_ended_is_told(
    frozen_firecracker: Case, run_directory: Path, key: str, reason: ExitReason
) -> None:
    async with started(frozen_firecracker, run_directory) as child:
        asking = asyncio.create_task(child.agent.eval(f"open('/proc/sysrq-trigger', 'w').write('{key}')"))
        death = await asyncio.wait_for(asyncio.shield(child.machine.death), 60)
        await asyncio.gather(asking, return_exceptions=True)
        assert death.reason is reason


async def test_a_guest_that_floods_its_console_ends_and_fills_no_disk(
    frozen_firecracker: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each byte is an exit from the guest; the real bound would take minutes to reach in the lab.
    monkeypatch.setattr("forkd.engines.firecracker.engine._MAX_CONSOLE_BYTES", 16 * 1024)
    flood = "with open('/dev/ttyS0', 'w') as tty:\n    for _ in range(40):\n        tty.write('x' * 999 + '\\n')"
    async with started(frozen_firecracker, run_directory) as child:
        asking = asyncio.create_task(child.agent.eval(flood))
        death = await asyncio.wait_for(asyncio.shield(child.machine.death), 120)
        await asyncio.gather(asking, return_exceptions=True)
        (console,) = (run_directory / child.id).rglob("console.log")
        assert 15 * 1024 < console.stat().st_size <= 16 * 1024
        assert death.reason is ExitReason.CRASHED and "xxxx" in child.machine.console_tail()


def test_what_is_left_of_a_killed_owner_can_be_ended_by_its_mark_alone(
    frozen_firecracker: Case, run_directory: Path
) -> None:
    engine = "FirecrackerEngine(outlive=True, live_forks=False)"
    with left_behind(frozen_firecracker, run_directory, engine=engine) as directory:
        (slot,) = directory.glob("firecracker/*/root")
        inside = (slot.stat().st_dev, slot.stat().st_ino)
        assert _processes_rooted_at(inside)
    # left_behind ends processes by their mark; a jailed Firecracker has none itself.
    assert not _processes_rooted_at(inside)


def _processes_rooted_at(inside: tuple[int, int]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            info = (process / "root").stat()
        except OSError:
            continue
        if (info.st_dev, info.st_ino) == inside:
            found.append(process.name)
    return found


async def _at_once(_machine: Machine) -> None: ...


async def _when_it_runs(machine: Machine) -> None:
    await machine.running()


async def _when_it_has_answered(machine: Machine) -> None:
    sandbox = await prove(machine, new_identities(1)[0])
    sandbox.agent.close()


async def _after_a_crash(machine: Machine) -> None:
    await machine.running()
    os.kill(machine.pid, signal.SIGKILL)


async def test_rounds_of_fork_and_kill_leave_nothing(frozen_firecracker: Case, run_directory: Path) -> None:
    moments = (_at_once, _when_it_runs, _at_once, _after_a_crash, *(4 * [_at_once]), _when_it_has_answered, _at_once)
    before = _left(), _sockets()
    for number in range(sized(20, 100)):
        machine = await frozen_firecracker.engine.fork(frozen_firecracker.frozen, run_directory / f"sb-{number}")
        try:
            await asyncio.sleep(number % 7 / 15)
            await moments[number % 10](machine)
        finally:
            await machine.kill()
        assert list(run_directory.iterdir()) == []
    assert find_marked(run_directory) == {}
    assert (_left(), _sockets()) == before


def _sockets() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted(name for name in (line.split()[-1] for line in lines) if "agent.sock" in name or "api.sock" in name)


@pytest.mark.parametrize("partial", [False, True])
async def test_one_that_dies_while_loading_is_named_and_the_others_are_ended_or_kept(
    frozen_firecracker: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    engine, frozen = frozen_firecracker.engine, frozen_firecracker.frozen
    memory = (frozen.directory / "memory").stat()
    begun: list[Machine] = []
    fork = engine.fork
    lost = sized(7, 17)

    async def fork_and_lose_one(
        frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        machine = await fork(frozen, directory, limits, nic)
        begun.append(machine)
        if len(begun) == lost:
            os.kill(machine.pid, signal.SIGKILL)
        return machine

    monkeypatch.setattr(engine, "fork", fork_and_lose_one)
    identities = new_identities(lost + (1 if partial else sized(5, 13)))
    forking = fork_children(engine, frozen, identities, run_directory, allow_partial=partial)
    if partial:
        forked = await forking
        assert len(forked.sandboxes) == lost
        (error,) = forked.errors.values()
        assert isinstance(error, GuestDied) and "SIGKILL" in error.message
        await kill_all(forked.sandboxes)
    else:
        with pytest.raises(GuestDied, match=r"Firecracker ended during .*SIGKILL"):
            await forking
    now = (frozen.directory / "memory").stat()
    assert (now.st_mtime_ns, now.st_size) == (memory.st_mtime_ns, memory.st_size)


@pytest.mark.parametrize(
    ("spoil", "step"),
    [
        (lambda path: (path / "state").write_bytes(b"no state"), "PUT /snapshot/load"),
        (lambda path: os.truncate(path / "memory", 4096), "PUT /snapshot/load"),
    ],
    ids=["another state", "a short memory"],
)
async def test_files_that_firecracker_does_not_load_are_an_error_with_its_own_words(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path, spoil: object, step: str
) -> None:
    engine, frozen = frozen_firecracker.engine, frozen_firecracker.frozen
    for name in ("state", "memory"):
        (tmp_path / name).write_bytes((frozen.directory / name).read_bytes())
    assert callable(spoil)
    spoil(tmp_path)
    with pytest.raises(ForkdError, match=step) as caught:
        await fork_one(engine, replace(frozen, directory=tmp_path), new_identities(1)[0], run_directory)
    assert caught.value.code in ("engine_failed", "guest_died")
    assert "napshot" in caught.value.message + str(caught.value.details)


async def test_a_cpu_template_that_is_not_for_this_cpu_is_refused_by_name(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path
) -> None:
    spec = replace(frozen_firecracker.frozen.boot, machine=MachineSpec(128, 1, "T2CL"))
    with pytest.raises(EngineFailed, match=r"Firecracker refused PUT /.*emplate"):
        async with booted(frozen_firecracker.engine, spec, run_directory / "parent", tmp_path):
            pass


@pytest.mark.parametrize("kernel", [b"", b"\x7fELF not really", b"MZ" + bytes(4096)], ids=["empty", "an ELF", "zeros"])
async def test_a_kernel_that_is_none_is_refused(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path, kernel: bytes
) -> None:
    (tmp_path / "vmlinuz").write_bytes(kernel)
    spec = replace(frozen_firecracker.frozen.boot, kernel=tmp_path / "vmlinuz")
    with pytest.raises((EngineFailed, InvalidInput), match="ernel"):
        async with booted(frozen_firecracker.engine, spec, run_directory / "parent", tmp_path):
            pass


async def test_a_firecracker_that_crashes_at_its_start_is_an_error_with_its_last_lines(
    frozen_firecracker: Case, run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "firecracker"
    broken.write_text(
        '#!/bin/busybox sh\ncase "$*" in *--version*) echo "Firecracker v1.12.1"; exit 0;; esac\n'
        "echo it hurts >&2\nexit 3\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("FORKD_FIRECRACKER", str(broken))
    engine = FirecrackerEngine(live_forks=False)
    with pytest.raises(GuestDied, match="Firecracker ended during its start") as caught:
        await fork_one(engine, frozen_firecracker.frozen, new_identities(1)[0], run_directory)
    assert caught.value.details


_NOBODY = 65534
_AS_NOBODY = """
import asyncio, logging, pickle, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from engine_cases import greet_again
from saved_layers import layer_of
from forkd.engines.base import Frozen
from forkd.errors import HostLacks
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.runtime.doctor import open_engine
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.freeze import Warmup, booted, warm_up
logging.basicConfig(format="log: %(message)s")
place, spec = Path(sys.argv[1]), pickle.loads(sys.stdin.buffer.read())

async def main():
    engine = FirecrackerEngine()
    print("isolation:", engine.isolation, flush=True)
    async with booted(engine, spec, place / "parent", place / "snapshot") as (machine, agent):
        await warm_up(agent, Warmup("past = 41"))
        await agent.prepare_freeze()
        platform = await engine.freeze(machine, place / "snapshot")
    frozen = Frozen(place / "snapshot", spec, platform)
    children = (await fork_children(engine, frozen, new_identities(2), place)).sandboxes
    try:
        print("answers:", [(await child.agent.eval("past + 1")).value for child in children], flush=True)
        print("uids:", {Path(f"/proc/{child.machine.pid}").stat().st_uid for child in children}, flush=True)
        await children[0].agent.eval("past = 99")
        await children[0].machine.pause()
        (place / "snapshot/branch").mkdir()
        saved = await engine.save(children[0].machine, place / "snapshot/branch")
        memory, runs = layer_of(saved.memory, frozen, place / "snapshot/branch")
        branch = Frozen(place / "snapshot/branch", spec, saved.platform, memory=memory, runs=runs, settled=False)
        identity = new_identities(1)[0]
        children.append(await greet_again(await engine.fork(branch, place / identity.sandbox_id), identity))
        print("branch:", (await children[-1].agent.eval("past + 1")).value, flush=True)
    finally:
        await kill_all(children)
    print("left:", sorted(path.name for path in place.iterdir()), flush=True)

try:
    open_engine("firecracker")
except HostLacks as error:
    print("lacks:", error.message, flush=True)
else:
    asyncio.run(main())
"""


@pytest.mark.parametrize("may_open_kvm", [True, False])
def test_without_root_there_is_no_jail_which_is_said_and_kvm_has_to_be_open(
    frozen_firecracker: Case, run_directory: Path, may_open_kvm: bool
) -> None:
    spec = replace(frozen_firecracker.frozen.boot, machine=MachineSpec(128, 1))
    place = run_directory / "nobody"
    (place / "snapshot").mkdir(parents=True)
    for path in (run_directory, place, place / "snapshot"):
        os.chown(path, _NOBODY, _NOBODY)
    kvm = Path("/dev/kvm")
    mode = kvm.stat().st_mode
    kvm.chmod(0o666 if may_open_kvm else 0o600)
    try:
        done = subprocess.run(
            [
                *("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--"),
                *(sys.executable, "-c", _AS_NOBODY, str(place), str(Path(__file__).parent)),
            ],
            env={**os.environ, "FORKD_HOME": str(place / "home"), "FORKD_RUNTIME_DIR": str(place / "run")},
            input=pickle.dumps(spec),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    finally:
        kvm.chmod(stat.S_IMODE(mode))
        shutil.rmtree(place)
    said = dict(line.split(": ", 1) for line in done.stdout.decode().splitlines() if ": " in line)
    if may_open_kvm:
        assert said["isolation"] == "firecracker-no-jail", done.stdout.decode()
        assert "without a jail" in said["log"]
        assert (said["answers"], said["uids"]) == ("[42, 42]", str({_NOBODY}))
        assert said["branch"] == "100", done.stdout.decode()
        assert said["left"] == "['snapshot']"
    else:
        assert "may not open /dev/kvm" in said["lacks"], done.stdout.decode()
