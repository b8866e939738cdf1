"""Commands that outlive a request: over a real agent, their output kept, followed by many, bounded."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkd.errors import (
    AgentError,
    ChannelClosed,
    CommandNotStarted,
    Conflict,
    GuestTimeout,
    InvalidInput,
    NoCapacity,
    NotFound,
    NotRunning,
)
from forkd.guest.agent import Agent
from forkd.runtime import processes as module
from forkd.runtime.processes import CommandSpec, Exit, Gap, GuestProcess, KeptOutput, Output, Processes

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def processes(agent: Agent) -> AsyncIterator[Processes]:
    processes = Processes(lambda: agent)
    yield processes
    processes.close()


async def read_all(command: GuestProcess) -> tuple[bytes, bytes, list[Gap], Exit]:
    streams, gaps, end = {"stdout": b"", "stderr": b""}, [], None
    async for item in command.follow():
        assert end is None, "something came after the exit"
        if isinstance(item, Output):
            streams[item.kind] += item.data
        elif isinstance(item, Gap):
            gaps.append(item)
        else:
            end = item
    assert end is not None
    return streams["stdout"], streams["stderr"], gaps, end


async def test_output_exit_and_spec_of_a_command_can_be_read_after_its_end(processes: Processes) -> None:
    spec = CommandSpec("echo out; echo err >&2; echo $X; pwd; exit 3", cwd="/tmp", env={"X": "env"})
    command = await processes.start(spec)
    assert await read_all(command) == (b"out\nenv\n/tmp\n", b"err\n", [], Exit(3, None, False))
    assert await read_all(command) == (b"out\nenv\n/tmp\n", b"err\n", [], Exit(3, None, False))
    assert command.exit == Exit(3, None, False)
    assert processes.list() == [command]
    assert processes.get(command.pid) is command
    assert command.spec is spec


async def test_followers_see_output_as_it_comes_each_at_its_own_pace(processes: Processes) -> None:
    command = await processes.start(CommandSpec(["/bin/cat"], stdin=True))
    quick, slow = command.follow(), command.follow()
    for word in (b"one", b"two"):
        await command.write(word)
        assert await anext(quick) == Output("stdout", word)
    assert command.exit is None
    command.close_stdin()
    assert [item async for item in quick] == [Exit(0, None, False)]
    assert [item async for item in slow] == [Output("stdout", b"onetwo"), Exit(0, None, False)]


async def test_a_follower_that_falls_behind_gets_one_gap_and_the_last_mebibyte(processes: Processes) -> None:
    total = 5 * 1024 * 1024

    command = await processes.start(CommandSpec(f"head -c {total} /dev/zero; printf end", stdin=True))
    stdout, _, gaps, end = b"", b"", [], None
    follower = command.follow()
    first = await anext(follower)
    assert isinstance(first, Output)
    while command.exit is None:  # nobody reads, and the guest is not held up
        await asyncio.sleep(0.01)
    async for item in follower:
        if isinstance(item, Gap):
            gaps.append(item)
            assert stdout == b""
        elif isinstance(item, Output):
            stdout += item.data
        else:
            end = item
    assert len(gaps) == 1
    assert len(first.data) + gaps[0].bytes + len(stdout) == total + 3
    assert len(stdout) == module.KEPT_BYTES == command.kept_bytes
    assert stdout.endswith(b"end")
    assert end == Exit(0, None, False)


async def test_a_terminal_is_written_to_resized_and_hung_up(processes: Processes) -> None:
    command = await processes.start(CommandSpec("stty size; read x; stty size; read x", pty=(24, 80)))
    output = command.follow()
    assert await anext(output) == Output("stdout", b"24 80\r\n")
    command.resize(50, 132)
    await command.write(b"\n")
    seen = b""
    while b"50 132" not in seen:
        item = await anext(output)
        assert isinstance(item, Output)
        seen += item.data
    command.signal(signal.SIGHUP)
    assert [item async for item in output if isinstance(item, Exit)] == [Exit(None, signal.SIGHUP, False)]


async def test_a_signal_reaches_the_whole_group_and_a_deadline_ends_it(processes: Processes) -> None:
    command = await processes.start(CommandSpec("sleep 1000 & echo $!; wait"))
    first = await anext(command.follow())
    assert isinstance(first, Output)
    command.signal(signal.SIGKILL)
    assert (await read_all(command))[3] == Exit(None, signal.SIGKILL, False)
    while Path(f"/proc/{int(first.data)}").exists():
        await asyncio.sleep(0.01)
    late = await processes.start(CommandSpec(["sleep", "1000"], timeout_s=0.05))
    assert (await read_all(late))[3] == Exit(None, signal.SIGKILL, True)


async def test_what_cannot_be_done_to_a_command_says_why(processes: Processes) -> None:
    with pytest.raises(CommandNotStarted):
        await processes.start(CommandSpec(["/nonexistent"]))
    with pytest.raises(NotFound):
        processes.get(1 << 40)
    deaf = await processes.start(CommandSpec("sleep 1000"))
    with pytest.raises(Conflict, match="input of command"):
        await deaf.write(b"x")
    for number in (0, -9, 65):
        with pytest.raises(InvalidInput):
            deaf.signal(number)
    for size in ((24, 80), (0, 80), (24, 10_000)):
        with pytest.raises(InvalidInput):
            deaf.resize(*size)
    deaf.signal(signal.SIGTERM)
    await read_all(deaf)
    ended = await processes.start(CommandSpec(["cat"], stdin=True))
    ended.close_stdin()
    ended.close_stdin()
    await read_all(ended)
    with pytest.raises(Conflict, match="has ended"):
        await ended.write(b"x")
    with pytest.raises(Conflict, match="has ended"):
        ended.signal(signal.SIGTERM)


async def test_writers_take_turns_and_wait_for_a_program_that_does_not_read(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = await processes.start(CommandSpec("sleep 0.3; wc -c", stdin=True))
    await asyncio.gather(*(command.write(b"x" * 400_000) for _ in range(3)))
    command.close_stdin()
    assert (await read_all(command))[0] == b"1200000\n"
    monkeypatch.setattr(module, "WRITE_S", 0.2)
    deaf = await processes.start(CommandSpec("sleep 1000", stdin=True))
    with pytest.raises(GuestTimeout, match="did not read"):
        await deaf.write(b"x" * 1_000_000)


async def test_too_many_commands_are_refused_and_one_that_ends_makes_room(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RUNNING", 3)
    started = await asyncio.gather(
        *(processes.start(CommandSpec("sleep 1000")) for _ in range(5)), return_exceptions=True
    )
    running = [command for command in started if isinstance(command, GuestProcess)]
    assert len(running) == 3
    assert sum(isinstance(error, NoCapacity) for error in started) == 2
    running[0].signal(signal.SIGKILL)
    await read_all(running[0])
    await processes.start(CommandSpec("sleep 1000"))
    with pytest.raises(NoCapacity):
        await processes.start(CommandSpec("sleep 1000"))


async def test_ended_commands_are_forgotten_after_a_while(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting = await processes.start(CommandSpec("true"))
    running = await processes.start(CommandSpec("sleep 1000"))
    await read_all(lasting)
    assert processes.get(lasting.pid) is lasting
    monkeypatch.setattr(module, "FORGET_S", 0.1)
    command = await processes.start(CommandSpec("echo kept"))
    await read_all(command)
    await asyncio.sleep(0.2)
    assert processes.list() == [lasting, running]
    assert (await read_all(command))[0] == b"kept\n", "a caller that holds it can still read it"


@pytest.mark.parametrize(("limit", "value"), [("MAX_ENDED", 2), ("MAX_ENDED_BYTES", 2000)])
async def test_of_many_ended_commands_the_oldest_are_forgotten(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    commands = []
    for _ in range(4):
        commands.append(await processes.start(CommandSpec("head -c 1000 /dev/zero")))
        await read_all(commands[-1])
    assert processes.list() == commands[2:]


async def test_a_lost_channel_ends_every_command_with_an_error_for_its_followers(
    agent: Agent, processes: Processes
) -> None:
    command = await processes.start(CommandSpec("echo early; sleep 1000"))
    follower = command.follow()
    assert await anext(follower) == Output("stdout", b"early\n")
    agent.close()
    with pytest.raises(ChannelClosed):
        await anext(follower)
    with pytest.raises(ChannelClosed):
        await read_all(command)
    assert command.exit is None
    assert not command.running
    with pytest.raises(ChannelClosed):
        await processes.start(CommandSpec("true"))


async def test_closing_ends_commands_tasks_and_followers_and_may_be_repeated(processes: Processes) -> None:
    first = await processes.start(CommandSpec("echo $$; exec sleep 1000"))
    follower = first.follow()
    said = await anext(follower)
    assert isinstance(said, Output)
    other = await processes.start(CommandSpec("sleep 1000"))  # its task has not run yet
    starting = asyncio.create_task(processes.start(CommandSpec("sleep 1000")))
    await asyncio.sleep(0)
    processes.close()
    processes.close()
    with pytest.raises(AgentError, match="given up"):
        await anext(follower)
    with pytest.raises(AgentError, match="given up"):
        await read_all(other)
    with pytest.raises(NotRunning):
        await starting
    with pytest.raises(NotRunning):
        await processes.start(CommandSpec("true"))
    assert processes.list() == []
    await asyncio.sleep(0)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("command")] == []
    while Path(f"/proc/{int(said.data)}").exists():
        await asyncio.sleep(0.01)


def test_kept_output_is_bounded_in_bytes_and_in_pieces() -> None:
    kept = KeptOutput(10)
    kept.add("stdout", b"abc")
    kept.add("stdout", b"def")
    kept.add("stderr", b"")
    kept.add("stderr", b"ghi")
    assert kept.read(0) == (Output("stdout", b"abcdef"), 6)
    assert kept.read(4) == (Output("stdout", b"ef"), 6)
    assert kept.read(6) == (Output("stderr", b"ghi"), 9)
    assert kept.read(9) is None
    kept.add("stdout", b"jklm")
    assert kept.read(0) == (Gap(3), 3)
    assert kept.read(3) == (Output("stdout", b"def"), 6)
    kept.add("stdout", b"0123456789ABCDE")
    assert kept.read(0) == (Gap(18), 18)
    assert kept.read(18) == (Output("stdout", b"56789ABCDE"), 28)
    assert kept.size_bytes == 10

    many = KeptOutput(1024 * 1024)
    for _ in range(20_000):
        many.add("stdout", b"o")
        many.add("stderr", b"e")
    assert many.size_bytes == 4096
    assert many.read(0) == (Gap(40_000 - 4096), 40_000 - 4096)
