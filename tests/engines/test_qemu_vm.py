"""Real VMs on the qemu engine: how they end, what they print, what they may not do, and who they become."""

import asyncio
import re
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, adopted, left_behind, started, started_many

from forkd.engines.base import ExitReason
from forkd.errors import ContractBroken, EngineFailed, GuestDied
from forkd.guest.agent import Agent
from forkd.guest.identity import become
from forkd.model.names import new_identity
from forkd.runtime.child import explain
from forkd.runtime.fork import fork_one, new_identities

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]


async def _end(case: Case, run: Path, code: str) -> tuple[ExitReason, str]:
    """Run `code` in a child, wait for the child's end; why it ended and what its console said last."""
    async with started(case, run) as child:
        asking = asyncio.create_task(child.agent.eval(code))
        death = await asyncio.wait_for(asyncio.shield(child.machine.death), 60)
        await asyncio.gather(asking, return_exceptions=True)
        return death.reason, child.machine.console_tail()


async def test_a_kernel_panic_is_told_from_the_console(frozen_qemu: Case, run_directory: Path) -> None:
    reason, console = await _end(frozen_qemu, run_directory, "open('/proc/sysrq-trigger', 'w').write('c')")
    assert reason is ExitReason.PANICKED
    assert "Kernel panic" in console


async def test_a_guest_that_powers_itself_off_says_so(frozen_qemu: Case, run_directory: Path) -> None:
    reason, _ = await _end(frozen_qemu, run_directory, "open('/proc/sysrq-trigger', 'w').write('o')")
    assert reason is ExitReason.POWERED_OFF


@pytest.mark.parametrize(("key", "reason"), [("c", ExitReason.PANICKED), ("o", ExitReason.POWERED_OFF)])
async def test_the_end_of_an_adopted_vm_is_told_from_the_console_alone(
    frozen_qemu: Case, run_directory: Path, key: str, reason: ExitReason
) -> None:
    with left_behind(frozen_qemu, run_directory) as directory:
        async with adopted(frozen_qemu.engine, directory) as (machine, agent):
            asking = asyncio.create_task(agent.eval(f"open('/proc/sysrq-trigger', 'w').write('{key}')"))
            death = await asyncio.wait_for(asyncio.shield(machine.death), 60)
            await asyncio.gather(asking, return_exceptions=True)
            assert (death.reason, death.status) == (reason, "exit status unknown")


async def test_a_call_to_a_guest_that_panics_ends_with_its_last_words(frozen_qemu: Case, run_directory: Path) -> None:
    async with started(frozen_qemu, run_directory) as child:
        with pytest.raises(GuestDied, match="kernel panic") as caught:
            try:
                await child.agent.eval("open('/proc/sysrq-trigger', 'w').write('c')")
            except Exception as error:
                raise await explain(error, child.machine, "evaluating") from error  # type: ignore[arg-type]
        assert caught.value.details is not None
        assert "Kernel panic" in caught.value.details
        assert caught.value.hint


async def test_the_console_is_kept_and_a_flood_of_it_is_bounded(frozen_qemu: Case, run_directory: Path) -> None:
    async with started(frozen_qemu, run_directory) as child:
        await child.agent.eval("open('/dev/console', 'w').write('a line of mine\\x1b[2J\\n')")
        await asyncio.sleep(0.5)
        assert "a line of mine\n" in child.machine.console_tail()
        await child.agent.run("yes flood | head -c 1500000 > /dev/console", timeout_s=120)
        assert (run_directory / child.id / "console.log").stat().st_size <= 1024 * 1024
        assert (await child.agent.eval("1 + 1")).value == 2


async def test_a_fork_has_names_clock_entropy_and_environment_of_its_own(
    frozen_qemu: Case, run_directory: Path
) -> None:
    code = (
        "import os, socket, time\n"
        "def line(path): return open(path).read().strip()\n"
        "[socket.gethostname(), line('/etc/hostname'), line('/etc/machine-id'), "
        "os.environ['MY_TASK'], os.urandom(16).hex(), numpy.random.bytes(16).hex(), time.time()]"
    )
    async with started_many(frozen_qemu, run_directory, 3, env={"MY_TASK": "seven"}) as children:
        seen = []
        for child in children:
            before = time.time()
            result = await child.agent.eval(code)
            after = time.time()
            assert result.error is None, result.error
            name, in_file, machine_id, task, urandom, drawn, clock = result.value
            assert name == in_file == child.identity.hostname
            assert machine_id == child.identity.machine_id
            assert task == "seven"
            # The step is exact to half a round trip; a busy host makes those long.
            assert before - 0.5 < clock < after + 0.5
            seen.append((name, machine_id, urandom, drawn))
            output = await child.agent.run("echo $MY_TASK; hostname", timeout_s=30)
            assert output.stdout.decode().split() == ["seven", name]
        assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))


async def test_each_fork_has_its_own_kernel_and_memory(frozen_qemu: Case, run_directory: Path) -> None:
    async with started_many(frozen_qemu, run_directory, 2) as (first, second):
        await first.agent.write_file("/root/mine", b"only here")
        await first.agent.run("echo 7 > /proc/sys/kernel/printk; mount -t tmpfs none /mnt", timeout_s=30)
        there = await second.agent.run(
            "cat /root/mine; cat /proc/sys/kernel/printk; grep /mnt /proc/mounts", timeout_s=30
        )
        assert not there.stdout.decode().startswith("only here")
        assert not there.stdout.decode().startswith("7")
        assert "/mnt" not in there.stdout.decode()
        assert (await first.agent.read_file("/root/mine")) == b"only here"


async def test_commands_and_files_work_in_a_real_guest(frozen_qemu: Case, run_directory: Path) -> None:
    async with started(frozen_qemu, run_directory) as child:
        agent = child.agent
        blob = bytes(range(256)) * 4096
        await agent.write_file("/tmp/blob", blob)
        assert await agent.read_file("/tmp/blob") == blob
        counted = await agent.run(["/usr/bin/wc", "-c", "/tmp/blob"], timeout_s=60)
        assert counted.stdout.split()[0] == b"1048576"
        who = await agent.run("id -un; echo oops >&2; exit 3", user="nobody", cwd="/", timeout_s=60)
        assert (who.stdout, who.stderr, who.exit_code) == (b"nobody\n", b"oops\n", 3)
        slow = await agent.run("sleep 1000 & sleep 1000", timeout_s=1)
        assert slow.timed_out
        left = await agent.run("for p in /proc/[0-9]*/comm; do cat $p; done", timeout_s=60)
        assert b"sleep" not in left.stdout.split()
        assert b"Z" not in (await agent.run("grep -h State /proc/[0-9]*/status || true", timeout_s=60)).stdout


async def test_a_guest_can_talk_to_itself_over_its_loopback(frozen_qemu: Case, run_directory: Path) -> None:
    code = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname(), 5).sendall(b'hello')\n"
        "server.accept()[0].recv(5).decode()"
    )
    async with started(frozen_qemu, run_directory) as child:
        assert (await child.agent.eval(code)).value == "hello"


async def test_a_client_that_vanishes_is_followed_by_another(frozen_qemu: Case, run_directory: Path) -> None:
    """Over the real virtio port: half a frame, a hang-up, and a new connection that has to get through."""
    async with started(frozen_qemu, run_directory) as child:
        await child.agent.eval("kept = 5")
        left = await child.agent.start("sleep 1000")
        child.agent.channel.send(b"\xf0\x6bgarbage, then half a frame")
        child.agent.close()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(run_directory / child.id / "agent.sock"))
            with closing(await Agent.connect(sock.dup(), deadline_s=30)) as agent:
                assert (await agent.eval("kept")).value == 5
                probe = await agent.run(f"kill -0 {left.pid}", timeout_s=30)
                assert probe.exit_code != 0  # what the vanished client had running is gone
                await asyncio.sleep(1)


async def test_a_hook_of_user_code_runs_in_each_fork_and_a_failing_one_kills_it(
    frozen_qemu: Case, run_directory: Path
) -> None:
    async with started(frozen_qemu, run_directory) as child:
        agent = child.agent
        await agent.eval("import forkd\nforkd.on_fork(lambda: hooked.append(forkd.identity()['hostname']))")
        await become(agent, new_identity("sb-again"))
        assert (await agent.eval("hooked")).value == ["sb-again"]
        await agent.eval("forkd.on_fork(lambda: 1 / 0)")
        with pytest.raises(ContractBroken, match="interpreter") as caught:
            await become(agent, new_identity("sb-broken"))
        assert "ZeroDivisionError" in (caught.value.details or "")


async def test_qemu_that_cannot_start_says_what_it_said(frozen_qemu: Case, run_directory: Path, tmp_path: Path) -> None:
    broken = frozen_qemu.frozen.boot
    (tmp_path / "not-an-image").write_bytes(b"")
    spec = replace(broken, kernel=tmp_path / "missing-kernel")
    machine = await frozen_qemu.engine.boot(spec, run_directory / "vm", tmp_path)
    try:
        with pytest.raises(EngineFailed) as caught:
            await machine.running()
        assert re.search("missing-kernel", caught.value.details or "")
    finally:
        await machine.kill()


async def test_truncated_device_state_is_an_error_not_a_hang(
    frozen_qemu: Case, run_directory: Path, tmp_path: Path
) -> None:
    source = frozen_qemu.frozen.directory
    (tmp_path / "memory").symlink_to(source / "memory")
    (tmp_path / "state").write_bytes((source / "state").read_bytes()[:1000])
    damaged = replace(frozen_qemu.frozen, directory=tmp_path)
    with pytest.raises(GuestDied) as caught:
        await fork_one(frozen_qemu.engine, damaged, new_identities(1)[0], run_directory)
    assert "load" in (caught.value.details or "") or "migration" in (caught.value.details or "")


@pytest.mark.lab
async def test_children_run_on_kvm_too(frozen_qemu: Case, run_directory: Path) -> None:
    assert frozen_qemu.engine.isolation == "qemu-kvm"
    async with started_many(frozen_qemu, run_directory, 3) as children:
        assert [(await child.agent.eval("past + 1")).value for child in children] == [42] * 3
        assert len({child.proof.urandom for child in children}) == 3
        await children[0].machine.pause()
        await children[0].machine.resume()
        await children[0].agent.ping()
