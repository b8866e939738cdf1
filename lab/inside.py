"""The lab machine from within: where things are, what a command finds there, and how files get in and out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.guest.agent import Agent

LAB = "/lab"
PACKS = f"{LAB}/packs"
MODULES = f"{LAB}/modules"
# What a run leaves here is brought back.
OUT = f"{LAB}/out"
# The pack with the working tree.
TREE = "tree"
# In QEMU, an XRSTOR on any emulated processor rewrites flags of the first one without a lock (docs/explanation/lab.md).
# Those flags change only where KVM runs a guest: so it never does so there.
VM_PROCESSORS = "1-2"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CHUNK_BYTES = 1024 * 1024
_COMMAND_S = 600.0


def render_command(command: Sequence[str]) -> list[str]:
    return ["taskset", "--cpu-list", VM_PROCESSORS, *command]


def place_of(pack: str) -> str:
    return f"{LAB}/{pack}"


def render_environment() -> dict[str, str]:
    return {
        "PATH": f"{place_of('tools')}:{_SYSTEM_PATH}",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": f"{place_of(TREE)}/src:{place_of('packages')}",
        # The tree and the packages cannot be written to, and under emulation compiling takes longer than the tests.
        "PYTHONPYCACHEPREFIX": f"{LAB}/compiled",
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{LAB}/hypothesis",
        # Emulated, SHA-256 takes three times as long with vector instructions as without.
        "OPENSSL_ia32cap": "0:0",
        "FORKD_LAB": "1",
        "FORKD_LAB_OUT": OUT,
        "FORKD_TEST_HOME": place_of("home"),
    }


def render_mount(pack: str) -> str:
    place = place_of(pack)
    return f"mkdir -p {place} && mount -t erofs -o ro,loop {PACKS}/{pack}.erofs {place}"


def render_unmount(pack: str) -> str:
    return f"umount {place_of(pack)} && rm {PACKS}/{pack}.erofs"


async def upload(agent: Agent, name: str, file: Path) -> None:
    await agent.write_file(f"{PACKS}/{name}.erofs", read_chunks(file), parents=True)


async def mount_tree(agent: Agent, file: Path) -> None:
    await upload(agent, TREE, file)
    await check_run(agent, render_mount(TREE), "Mounting the working tree in the lab machine")


async def check_run(agent: Agent, command: str, doing: str) -> None:
    """Run a shell command; BuildFailed with its output when it fails."""
    result = await agent.run(command, env=render_environment(), timeout_s=_COMMAND_S)
    if result.exit_code != 0:
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        raise BuildFailed(f"{doing} failed (exit status {result.exit_code})", details=output.strip()[-8000:])


async def bring_back(agent: Agent, into: Path) -> None:
    """Every file that the run left in OUT."""
    for entry in (await agent.list_dir(OUT)).entries:
        if entry.type == "file":
            (into / Path(entry.name).name).write_bytes(await agent.read_file(f"{OUT}/{entry.name}"))


def read_chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            yield chunk
