"""Commands in the guest."""

import asyncio
import os
import pwd
import signal

import pytest
from rehearsed import Guest
from support_processes import is_reaped, until

from forkd.errors import CommandNotStarted, InvalidInput
from forkd.guest.agent import Agent
from forkd.guest.process import Process


async def read_until(process: Process, wanted: bytes) -> bytes:
    seen = b""
    async for _, data in process:
        seen += data
        if wanted in seen:
            return seen
    pytest.fail(f"{wanted!r} is not in {seen!r}")


async def test_a_list_is_executed_and_a_text_goes_to_the_shell(agent: Agent) -> None:
    result = await agent.run(["printf", "%s|", "a b", "$HOME", ""])
    assert (result.stdout, result.exit_code, result.signal, result.ok) == (b"a b|$HOME||", 0, None, True)
    shell = await agent.run("echo out; echo err >&2; exit 7")
    assert (shell.stdout, shell.stderr, shell.exit_code, shell.ok) == (b"out\n", b"err\n", 7, False)
    killed = await agent.run("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (None, signal.SIGKILL)


async def test_directory_and_environment_are_as_asked(agent: Agent, guest: Guest) -> None:
    assert (await agent.run("pwd", cwd="/usr/bin")).stdout == b"/usr/bin\n"
    assert (await agent.run("pwd")).stdout.strip() == bytes(guest.root)
    result = await agent.run("echo $ADDED:$HOME:$PYTHONPATH", env={"ADDED": "1 2"})
    assert result.stdout == f"1 2:{guest.root}:\n".encode()
    assert (await agent.run("cat")).stdout == b""


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (["/nonexistent"], {}, "program /nonexistent .*ENOENT"),
        (["no-such-program-anywhere"], {}, "program no-such-program-anywhere .*ENOENT"),
        (["no-such-program-anywhere"], {"user": "root"}, "program no-such-program-anywhere .*ENOENT"),
        (["/etc/passwd"], {}, "program /etc/passwd .*EACCES"),
        (["true"], {"cwd": "/nonexistent"}, "directory /nonexistent .*ENOENT"),
        (["true"], {"user": "nobody-by-this-name"}, "user: nobody-by-this-name .*ENOENT"),
        (["/" + "x" * 1_000_000], {}, "/xxx.*ENAMETOOLONG"),
    ],
)
async def test_a_command_that_cannot_start_says_why(
    agent: Agent, command: list[str], options: dict[str, str], said: str
) -> None:
    with pytest.raises(CommandNotStarted, match=said):
        await agent.run(command, **options)  # type: ignore[arg-type]
    assert (await agent.ping()).streams == 0


async def test_impossible_requests_are_refused_before_they_are_sent(agent: Agent) -> None:
    for command in ([], "", [""], ["a\0b"], ["x" * 2_000_000]):
        with pytest.raises(InvalidInput):
            await agent.run(command)
    with pytest.raises(InvalidInput):
        await agent.run("true", env={"A=B": "c"})
    with pytest.raises(InvalidInput):
        await agent.run("true", timeout_s=0)


async def test_a_program_is_found_where_the_commands_path_says(agent: Agent, guest: Guest) -> None:
    bin_directory = guest.root / "bin"
    bin_directory.mkdir(parents=True)
    (bin_directory / "mine").write_text("#!/bin/sh\necho mine; umask\n")
    (bin_directory / "mine").chmod(0o755)
    path = f"/nonexistent:{bin_directory}:/usr/bin:/bin"
    assert (await agent.run(["mine"], env={"PATH": path})).stdout == b"mine\n0022\n"
    assert (await agent.run(["./mine"], cwd=str(bin_directory))).stdout == b"mine\n0022\n"
    with pytest.raises(CommandNotStarted):
        await agent.run(["mine"])


async def test_a_command_runs_as_another_user(agent: Agent) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may be somebody else")
    nobody = pwd.getpwnam("nobody")
    for user in ("nobody", nobody.pw_uid, str(nobody.pw_uid)):
        result = await agent.run("id -u; id -g; id -G; echo $USER:$HOME", user=user, cwd="/")
        expected = f"{nobody.pw_uid}\n{nobody.pw_gid}\n{nobody.pw_gid}\nnobody:{nobody.pw_dir}\n"
        assert result.stdout.decode() == expected
    assert (await agent.run("id -u; id -g; id -G", user=54321, cwd="/")).stdout == b"54321\n54321\n54321\n"


async def test_megabytes_go_through_a_command_and_come_back_the_same(agent: Agent) -> None:
    data = os.urandom(5_000_000)
    assert (await agent.run(["cat"], input=data)).stdout == data


async def test_a_slow_reader_slows_its_command_and_nobody_else(agent: Agent) -> None:
    process = await agent.start("head -c 3000000 /dev/zero; echo done >&2", stdin=False)
    while not process._output:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # for more to come than may
    assert process._output.size_bytes <= 256 * 1024
    assert (await agent.run("echo quick")).stdout == b"quick\n"
    assert (await agent.eval("1")).value == 1
    result = await process.wait(max_output_bytes=4_000_000)
    assert len(result.stdout) == 3_000_000 and result.stderr == b"done\n"


async def test_a_command_that_does_not_read_holds_up_only_its_writer(agent: Agent) -> None:
    async with await agent.start(["sleep", "30"]) as process:
        writer = asyncio.create_task(process.write_stdin(bytes(2_000_000)))
        await asyncio.sleep(0.2)
        assert not writer.done()
        assert (await agent.run(["echo", "free"])).stdout == b"free\n"
        process.kill()
        result = await process.wait()
        assert result.signal == signal.SIGKILL
        await asyncio.wait_for(writer, 3)


async def test_a_command_that_closed_its_input_still_ends_well(agent: Agent) -> None:
    result = await agent.run("exec 0<&-; sleep 0.2; echo ok", input=bytes(3_000_000))
    assert (result.stdout, result.exit_code) == (b"ok\n", 0)


async def test_input_is_streamed_and_its_end_is_told(agent: Agent) -> None:
    async with await agent.start("while read line; do echo got $line; done; echo end") as process:
        assert process.pid > 0
        await process.write_stdin(b"one\n")
        assert await read_until(process, b"got one\n")
        await process.write_stdin(b"two\n")
        process.close_stdin()
        assert (await process.wait(max_output_bytes=100)).stdout == b"got two\nend\n"


async def test_a_deadline_kills_the_whole_group(agent: Agent) -> None:
    result = await agent.run("sleep 60 & echo $!; sleep 60", timeout_s=0.3)
    assert result.timed_out and result.signal == signal.SIGKILL
    await until(lambda: is_reaped(int(result.stdout)))


async def test_signals_reach_the_process_or_its_group(agent: Agent) -> None:
    script = "trap 'echo caught; exit 4' TERM; echo ready; while :; do sleep 0.05; done"
    async with await agent.start(script) as process:
        await read_until(process, b"ready")
        process.signal(signal.SIGTERM, group=False)
        result = await process.wait(max_output_bytes=100)
        assert (result.stdout, result.exit_code) == (b"caught\n", 4)


async def test_the_end_is_told_though_a_grandchild_holds_the_output(agent: Agent) -> None:
    result = await agent.run("echo first; sleep 60 & echo $!")
    first, holder = result.stdout.split()
    os.kill(int(holder), signal.SIGKILL)  # it was still there
    assert first == b"first" and result.exit_code == 0
    await until(lambda: is_reaped(int(holder)))
    flooding = await agent.run("yes & sleep 0.1; kill -STOP $!; echo $! >&2", max_output_bytes=100)
    os.kill(int(flooding.stderr), signal.SIGKILL)
    await until(lambda: is_reaped(int(flooding.stderr)))


async def test_a_terminal_is_a_terminal(agent: Agent) -> None:
    script = "tty >/dev/null && echo is-a-tty; stty size; read x; stty size; echo [$x]; cat >/dev/null; echo end"
    async with await agent.start(script, pty=(30, 100)) as process:
        assert b"is-a-tty\r\n30 100\r\n" in await read_until(process, b"30 100\r\n")
        process.resize(50, 120)
        await process.write_stdin(b"typed\n")
        assert b"[typed]" in await read_until(process, b"[typed]\r\n")
        process.close_stdin()
        result = await process.wait(max_output_bytes=1000)
        assert result.stdout.endswith(b"end\r\n") and result.exit_code == 0


async def test_the_last_words_on_a_terminal_are_not_lost(agent: Agent) -> None:
    for number in range(60):
        async with await agent.start(f"echo last words {number}", pty=(24, 80)) as process:
            result = await process.wait(max_output_bytes=1000)
        assert result.stdout == b"last words %d\r\n" % number


async def test_a_terminal_that_somebody_keeps_holds_nobody_up(agent: Agent) -> None:
    async with await agent.start("trap '' HUP; sleep 60 & echo said $!", pty=(24, 80)) as process:
        result = await process.wait(max_output_bytes=1000)
    said, keeper = result.stdout.split()
    os.kill(int(keeper), signal.SIGKILL)  # it was still there
    assert said == b"said"
    await until(lambda: is_reaped(int(keeper)))


async def test_ctrl_c_in_a_terminal_interrupts(agent: Agent) -> None:
    async with await agent.start("echo go; sleep 30", pty=(24, 80)) as process:
        await read_until(process, b"go\r\n")
        await process.write_stdin(b"\x03")
        assert (await process.wait()).signal == signal.SIGINT


async def test_a_command_left_behind_is_killed(agent: Agent) -> None:
    async with await agent.start("sleep 61 & echo $!; wait") as process:
        grandchild = int(await read_until(process, b"\n"))
    await until(lambda: is_reaped(process.pid) and is_reaped(grandchild))
    assert (await agent.ping()).streams == 0


async def test_signals_ignored_by_python_are_not_ignored_by_commands(agent: Agent) -> None:
    result = await agent.run("yes | head -n 1; grep SigIgn /proc/self/status")
    yes, _, ignored = result.stdout.split()
    # 32 and 33 are the C library's own, and ignored by its posix_spawn.
    assert yes == b"y" and int(ignored, 16) & 0x7FFF_FFFF == 0


async def test_many_commands_run_at_once_and_too_many_are_refused(agent: Agent) -> None:
    results = await asyncio.gather(*(agent.run(f"sleep 0.1; echo {n}") for n in range(40)))
    assert [int(result.stdout) for result in results] == list(range(40))
    assert (await agent.ping()).streams == 0


async def test_orphans_are_reaped(agent: Agent) -> None:
    result = await agent.run("(sh -c 'sleep 0.2; exit 3' >/dev/null 2>&1 & echo $!)")
    await until(lambda: is_reaped(int(result.stdout)))
