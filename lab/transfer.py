"""To the lab machine and back: packs, small commands, results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.guest.calls import Agent
from lab.inside import OUT, PACKS, TREE, render_environment, render_mount

_CHUNK_BYTES = 1024 * 1024
_COMMAND_S = 600.0


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
    """Every file that the run left to be brought back."""
    for entry in (await agent.list_dir(OUT)).entries:
        if entry.type == "file":
            (into / Path(entry.name).name).write_bytes(await agent.read_file(f"{OUT}/{entry.name}"))


def read_chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            yield chunk
