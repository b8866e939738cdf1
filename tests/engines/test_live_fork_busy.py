"""Forks of VMs in the middle of work: each one is of a single instant, and the source never notices.

FORKD_TEST_LIVE_FORKS: how many of each kind; in the lab, where all takes longer, a quarter of that if it is not set.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Case, fork_live, forking_live, started, value_of

from forkd.errors import ForkdError
from forkd.guest.agent import Agent
from forkd.runtime.child import Child

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

FORKS = int(os.environ.get("FORKD_TEST_LIVE_FORKS", "12"))
_FORKS_IN_LAB = int(os.environ.get("FORKD_TEST_LIVE_FORKS", "3"))
_STREAM_CHUNK = bytes(range(256)) * 1024


_QEMU = [pytest.param("frozen_tcg", id="1 vcpu"), pytest.param("frozen_tcg_4", id="4 vcpus")]
_FIRECRACKER = [
    pytest.param("forkable_firecracker", marks=pytest.mark.lab, id="firecracker, 1 vcpu"),
    pytest.param("frozen_firecracker_4", marks=pytest.mark.lab, id="firecracker, 4 vcpus"),
]


@pytest.fixture(params=_QEMU)
def busy(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


@pytest.fixture(params=[*_QEMU, *_FIRECRACKER])
def writing(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


# Each writer has blocks of its own, and two copies of each. It checks what it wrote the last time before it writes the
# next version, first to the one copy, then to the other: at every instant all blocks but one have two good copies of
# one version, and that one has at least one. Nothing of it goes over the agent's stream.
_WRITERS = """
import mmap, os, signal, struct, time, zlib
BLOCK, WRITERS = 16384, {writers}
BLOCKS = 32 // WRITERS
HEAD = struct.Struct("<QQ")
POOL = os.urandom(4 * BLOCK)
# Behind the copies: for each writer how often it went round, and how often something was wrong.
memory = mmap.mmap(-1, WRITERS * (2 * BLOCKS * BLOCK + 4096))
COUNTS = struct.Struct("<QQ")

def at(writer, block, copy):
    return ((writer * BLOCKS + block) * 2 + copy) * BLOCK

def counts_at(writer):
    return WRITERS * 2 * BLOCKS * BLOCK + writer * 4096

def render(writer, block, version):
    begin = (version * 7919 + block * 104729 + writer) % (3 * BLOCK)
    payload = POOL[begin:begin + BLOCK - HEAD.size]
    return HEAD.pack(version, zlib.crc32(payload, version)) + payload

def find_version(writer, block, copy):
    begin = at(writer, block, copy)
    version, checksum = HEAD.unpack_from(memory, begin)
    return version if zlib.crc32(memory[begin + HEAD.size:begin + BLOCK], version) == checksum else None

def write(writer):
    rounds = wrong = 0
    while True:
        for block in range(BLOCKS):
            if rounds and not find_version(writer, block, 0) == find_version(writer, block, 1) == rounds:
                wrong += 1
            data = render(writer, block, rounds + 1)
            for copy in (0, 1):
                memory[at(writer, block, copy):at(writer, block, copy) + BLOCK] = data
        rounds += 1
        COUNTS.pack_into(memory, counts_at(writer), rounds, wrong)

def counts():
    return [COUNTS.unpack_from(memory, counts_at(writer)) for writer in range(WRITERS)]

def verify():
    # What every writer finds on a whole round from here on, then the whole of it at an instant.
    begun = [rounds for rounds, _ in counts()]
    while any(rounds < first + 2 for (rounds, _), first in zip(counts(), begun)):
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.waitpid(pid, os.WUNTRACED)
    torn = lost = 0
    for writer in range(WRITERS):
        for block in range(BLOCKS):
            versions = [find_version(writer, block, copy) for copy in (0, 1)]
            torn += versions[0] != versions[1]
            lost += versions == [None, None]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return [sum(wrong for _, wrong in counts()), lost, max(0, torn - WRITERS)]

pids = []
for writer in range(WRITERS):
    pid = os.fork()
    if pid == 0:
        try:
            write(writer)
        finally:
            os._exit(1)
    pids.append(pid)
"""


async def test_a_guest_that_writes_all_the_time_is_forked_at_an_instant(writing: Case, run_directory: Path) -> None:
    async with started(writing, run_directory) as source:
        code = _WRITERS.format(writers=writing.frozen.boot.machine.vcpus)
        assert (await source.agent.eval(code)).error is None
        assert await value_of(source, "verify()") == [0, 0, 0]

        async def look(fork: Child) -> None:
            assert await value_of(fork, "verify()") == [0, 0, 0]
            assert (await fork.agent.run(["true"])).ok

        await _fork_and_look(writing, source, run_directory, look)
        assert await value_of(source, "verify()") == [0, 0, 0]


async def test_a_block_that_was_torn_is_noticed(frozen_tcg: Case, run_directory: Path) -> None:
    """The check above can fail."""
    spoil = "os.kill(pids[0], signal.SIGSTOP); os.waitpid(pids[0], os.WUNTRACED)\n"
    spoil += "for copy in (0, 1): memory[at(0, 3, copy) + 99] ^= 1\nos.kill(pids[0], signal.SIGCONT)\nverify()"
    async with started(frozen_tcg, run_directory) as source:
        assert (await source.agent.eval(_WRITERS.format(writers=1))).error is None
        assert await value_of(source, "verify()") == [0, 0, 0]
        wrong, _, _ = await value_of(source, spoil)
        assert wrong > 0


async def _read_output(agent: Agent) -> None:
    # Not all it can: a fork asks for the time behind what is queued, and has to set its clock to within a second.
    pace = "[ $((i % 100)) -gt 0 ] || sleep 0.01"
    script = f"i=0; while [ ! -e /tmp/enough ]; do echo line $i; i=$((i + 1)); {pace}; done"
    expected, rest = 0, b""
    async with await agent.start(script, stdin=False) as process:
        async for _, data in process:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                assert line == b"line %d" % expected
                expected += 1
    assert rest == b"" and expected > 1000


async def _write_input(agent: Agent) -> None:
    digest = "import hashlib; hashlib.sha256(bytes(range(256)) * 1024 * {}).hexdigest()"
    written = 0
    async with await agent.start("sha256sum; wc -c < /dev/null") as process:
        while not await _is_enough(agent):
            await process.write_stdin(_STREAM_CHUNK)
            written += 1
        process.close_stdin()
        result = await process.wait(max_output_bytes=1000)
    expected = (await agent.eval(digest.format(written))).value
    assert result.stdout.split()[0].decode() == expected and written > 1


async def _transfer_files(agent: Agent) -> None:
    number = 0
    while not await _is_enough(agent):
        number += 1
        content = bytes([number % 256]) + _STREAM_CHUNK * 8 + b"%d" % number
        await agent.write_file("/tmp/blob", content)
        assert await agent.read_file("/tmp/blob") == content
    assert number > 1


async def _evaluate(agent: Agent) -> None:
    number = 0
    while not await _is_enough(agent):
        number += 1
        asked = [agent.eval(f"print('{i}' * 20000)\n{number} * 1000 + {i}") for i in range(8)]
        for i, result in enumerate(await asyncio.gather(*asked)):
            assert (result.value, result.stdout) == (number * 1000 + i, b"%d" % i * 20000 + b"\n")
    assert number > 1


@pytest.mark.parametrize(
    "work",
    [_read_output, _write_input, _transfer_files, _evaluate],
    ids=["output of a command", "input of a command", "files", "evaluations"],
)
async def test_what_goes_over_the_stream_is_complete_though_the_guest_is_forked(
    busy: Case, run_directory: Path, work: Callable[[Agent], Coroutine[Any, Any, None]]
) -> None:
    """Until there is a file /tmp/enough; each fork works too."""

    async def look(fork: Child) -> None:
        assert await value_of(fork, "past + 1") == 42
        assert (await fork.agent.run("echo $((6 * 7))")).stdout == b"42\n"
        await fork.agent.write_file("/tmp/mine", _STREAM_CHUNK)
        assert await fork.agent.read_file("/tmp/mine") == _STREAM_CHUNK

    async with started(busy, run_directory) as source:
        working = asyncio.create_task(work(source.agent))
        try:
            await asyncio.sleep(0.2)
            await _fork_and_look(busy, source, run_directory, look)
            assert not working.done(), await working
            await source.agent.write_file("/tmp/enough", b"")
            await working
        finally:
            working.cancel()
            await asyncio.wait([working])


async def _fork_and_look(case: Case, source: Child, run: Path, look: Callable[[Child], Awaitable[None]]) -> None:
    refused = []
    for _ in range(_FORKS_IN_LAB if case.engine.name == "firecracker" else FORKS):
        try:
            fork = await fork_live(case.engine, source.machine, run)
        except ForkdError as error:
            refused.append(repr(error))
            continue
        try:
            await look(fork)
            assert not fork.machine.death.done()
        finally:
            await fork.kill()
        assert not source.machine.death.done() and not source.machine.paused
    assert refused == []


async def _is_enough(agent: Agent) -> bool:
    return any(entry.name == "enough" for entry in (await agent.list_dir("/tmp")).entries)
