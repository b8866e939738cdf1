"""Files of the guest."""

import errno
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkd.agent.server import refusal
from forkd.errors import AgentError, Conflict, InvalidInput, NotFound
from forkd.guest.agent import Agent
from forkd.guest.files import MAX_ENTRIES


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


async def test_a_file_is_written_and_read_back(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "deep/er/file"
    data = os.urandom(3_000_000)
    assert await agent.write_file(str(path), data, parents=True, mode=0o640) == len(data)
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert await agent.read_file(str(path)) == data
    assert await agent.read_file(str(path), offset=100, length=50) == data[100:150]
    assert await agent.read_file(str(path), offset=5_000_000) == b""
    assert await agent.read_file(str(path), length=0) == b""
    with pytest.raises(InvalidInput):
        await agent.read_file(str(path), max_bytes=1000)
    assert (await agent.ping()).streams == 0
    assert names_in(path.parent) == ["file"]


async def test_files_are_streamed_from_iterators(agent: Agent, tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for n in range(10):
            yield b"%d" % n * 50_000

    path = str(tmp_path / "file")
    assert await agent.write_file(path, pieces()) == 500_000
    assert await agent.write_file(path, [b"a", b"", b"b"], append=True) == 2
    received = [data async for data in agent.read_file_stream(path)]
    assert len(received) > 4 and b"".join(received).endswith(b"999ab")


async def test_a_file_appears_only_when_complete_and_keeps_its_rights(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o751)
    link = tmp_path / "link"
    link.symlink_to(path)

    async def halfway() -> AsyncIterator[bytes]:
        yield b"new"
        assert path.read_bytes() == b"old"
        raise RuntimeError("the sender fails")

    with pytest.raises(RuntimeError):
        await agent.write_file(str(path), halfway())
    await agent.ping()
    assert path.read_bytes() == b"old" and names_in(tmp_path) == ["file", "link", "root"]
    await agent.write_file(str(link), b"new")
    assert path.read_bytes() == b"new" and link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o751


async def test_names_that_are_no_text_go_through(agent: Agent, tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff\nname")
    await agent.write_file(f"{tmp_path}/{name}", b"x")
    assert name in [entry.name for entry in (await agent.list_dir(str(tmp_path))).entries]
    assert await agent.read_file(f"{tmp_path}/{name}") == b"x"
    await agent.remove(f"{tmp_path}/{name}")


async def test_directories_are_made_listed_renamed_and_removed(agent: Agent, tmp_path: Path) -> None:
    root = str(tmp_path / "top")
    link = tmp_path / "top/a/link"
    await agent.mkdir(root + "/a/b", parents=True)
    await agent.mkdir(root + "/a/b", parents=True)
    await agent.mkdir(root + "/c", mode=0o700)
    await agent.write_file(root + "/a/file", b"12345")
    link.symlink_to("/nowhere")
    entries = {entry.name: entry for entry in (await agent.list_dir(root + "/a")).entries}
    assert {name: entry.type for name, entry in entries.items()} == {"b": "dir", "file": "file", "link": "symlink"}
    assert entries["file"].size == 5 and entries["file"].mtime_ns > 0
    assert (await agent.stat(root + "/a/link")).target == "/nowhere"
    assert (await agent.stat(root + "/c")).mode == 0o700
    await agent.rename(root + "/a/file", root + "/moved")
    assert await agent.read_file(root + "/moved") == b"12345"
    with pytest.raises(Conflict):
        await agent.remove(root)
    await agent.remove(root, recursive=True)
    with pytest.raises(NotFound):
        await agent.stat(root)


async def test_removing_a_tree_does_not_follow_links(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (tmp_path / "tree/sub").mkdir(parents=True)
    (tmp_path / "tree/sub/link").symlink_to(tmp_path / "precious")
    await agent.remove(str(tmp_path / "tree"), recursive=True)
    assert not (tmp_path / "tree").exists() and (tmp_path / "precious/file").exists()


async def test_a_listing_is_bounded(agent: Agent, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    for n in range(MAX_ENTRIES + 10):
        (full / f"{n}").touch()
    for n in range(1100):
        (tmp_path / os.fsdecode(b"%04d" % n + b"\xff" * 200)).touch()
    listing = await agent.list_dir(str(full))
    assert listing.truncated and len(listing.entries) == MAX_ENTRIES
    assert len((await agent.list_dir(str(full), limit=3)).entries) == 3
    assert (await agent.list_dir(str(tmp_path))).truncated


async def test_errors_have_codes(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    there = str(tmp_path)
    for attempt, error, code in [
        (agent.read_file(there + "/none"), NotFound, "not_found"),
        (agent.mkdir(there + "/dir"), Conflict, "conflict"),
        (agent.read_file(there + "/dir"), AgentError, "is_dir"),
        (agent.list_dir(there + "/file"), AgentError, "not_dir"),
        (agent.read_file(there + "/fifo"), InvalidInput, "invalid_input"),
        (agent.write_file(there + "/fifo", b"x"), InvalidInput, "invalid_input"),
        (agent.write_file(there + "/fifo", b"x", append=True), InvalidInput, "invalid_input"),
        (agent.read_file("/dev/zero"), InvalidInput, "invalid_input"),
        (agent.write_file("/dev/null", b"x"), InvalidInput, "invalid_input"),
        (agent.write_file("/dev/full/x", b"x"), AgentError, "not_dir"),
        (agent.write_file(there + "/none/file", b"x"), NotFound, "not_found"),
        (agent.write_file(there + "/dir", b"x"), AgentError, "is_dir"),
        (agent.stat(there + "/" + "x" * 300), InvalidInput, "invalid_input"),
        (agent.remove("/"), InvalidInput, "invalid_input"),
        (agent.stat("relative"), InvalidInput, "invalid_input"),
        (agent.stat(""), InvalidInput, "invalid_input"),
        (agent.stat("/a\0b"), InvalidInput, "invalid_input"),
        (agent.stat("/" + "x/" * 3000), InvalidInput, "invalid_input"),
        (agent.stat("/\ud800"), InvalidInput, "invalid_input"),
    ]:
        with pytest.raises(error) as caught:
            await attempt
        assert caught.value.code == code
    assert (await agent.ping()).streams == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EACCES, "denied"),
        (errno.EROFS, "denied"),
        (errno.ENOTEMPTY, "not_empty"),
        (errno.EIO, "io"),
        (errno.EBUSY, "io"),
    ],
)
def test_what_the_kernel_says_has_a_code(number: int, code: str) -> None:
    refused = refusal(OSError(number, os.strerror(number)))
    assert (refused.code, refused.errno_name) == (code, errno.errorcode[number])
