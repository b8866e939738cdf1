"""Directories of the guest as tar streams, packed and unpacked by a real agent."""

import asyncio
import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from support_processes import wait_until
from support_trees import archive, describe, entry, make_tree

from forkd.errors import AgentError, Conflict, InvalidInput, NotFound, Unsupported
from forkd.guest.agent import Agent
from forkd.guest.process import Process
from forkd.wire.archive import Unpacker, pack
from forkd.wire.tar import PackFailed


async def pieces_of(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def packed(agent: Agent, path: Path) -> bytes:
    return b"".join([piece async for piece in agent.pack(str(path))])


async def test_what_is_packed_is_what_any_tar_unpacks(agent: Agent, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", files=50)
    data = await packed(agent, tmp_path / "tree")
    (tmp_path / "gnu").mkdir()
    subprocess.run(["tar", "xp", "-C", tmp_path / "gnu"], input=data, check=True)
    assert describe(tmp_path / "gnu") == describe(tmp_path / "tree")
    with tarfile.open(fileobj=io.BytesIO(data)) as read:
        assert {os.path.normpath(name) for name in read.getnames()} == describe(tmp_path / "tree").keys()
    assert (await agent.ping()).streams == 0


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7"])
async def test_archives_of_other_tars_are_unpacked(agent: Agent, tmp_path: Path, form: str) -> None:
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "below/file").write_bytes(os.urandom(70_000))
    (tree / "link").symlink_to("/below/file")
    if form != "v7":
        (tree / "below" / ("n" * 90) / ("m" * 90)).mkdir(parents=True)
    for path in [tree, *tree.rglob("*")]:
        os.utime(path, (7, 7), follow_symlinks=False)
    done = subprocess.run(["tar", "c", f"--format={form}", "-C", tree, "."], capture_output=True, check=True)
    result = await agent.unpack(str(tmp_path / "made/there"), pieces_of(done.stdout))
    assert (result.files, result.bytes, result.skipped) == (1, 70_000, ())
    assert describe(tmp_path / "made/there") == describe(tree)


async def test_what_cannot_be_is_refused_with_its_path(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFound, match=f"{tmp_path}/none: No such file"):
        await packed(agent, tmp_path / "none")
    with pytest.raises(AgentError, match=f"{tmp_path}/file: Not a directory") as caught:
        await packed(agent, tmp_path / "file")
    assert caught.value.code == "not_dir"
    with pytest.raises(AgentError, match=f"{tmp_path}/file: Not a directory"):
        await agent.unpack(str(tmp_path / "file"), pieces_of(archive([])))
    (tmp_path / "there/x").mkdir(parents=True)
    with pytest.raises(Conflict, match="there/x: It is there already, and is not a file"):
        await agent.unpack(str(tmp_path / "there"), pieces_of(archive([entry("x")])))
    with pytest.raises(InvalidInput, match="The archive has a hard link"):
        await agent.unpack(str(tmp_path / "there"), pieces_of(archive([entry("y", tarfile.LNKTYPE, "x")])))
    with pytest.raises(InvalidInput, match="The archive has no end"):
        await agent.unpack(str(tmp_path / "there"), pieces_of(archive([entry("y")])[:514]))
    with pytest.raises(InvalidInput, match="The archive has a damaged header"):
        await agent.unpack(str(tmp_path / "there"), pieces_of(os.urandom(2_000_000)))
    with pytest.raises(InvalidInput, match="must be pack, unpack or changes"):
        await Process(agent.channel, {"archive": "both", "path": "/"}, 10).started()
    assert sorted(os.listdir(tmp_path / "there")) == ["x"]
    assert (await agent.ping()).streams == 0


async def test_a_tree_that_turns_out_unreadable_half_way_says_why_in_the_archive(agent: Agent, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(bytes(200_000))
    (tree / ("z/" * 105)).mkdir(parents=True)
    data = await packed(agent, tree)
    (tmp_path / "copy").mkdir()
    unpacker = Unpacker(str(tmp_path / "copy"))
    with pytest.raises(PackFailed, match="is 101 directories deep"):
        unpacker.feed(data)
    unpacker.close()
    assert unpacker.files == 1


async def test_the_agent_answers_others_while_an_archive_waits_for_its_reader(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/large").write_bytes(bytes(5_000_000))
    async with aclosing(agent.pack(str(tmp_path / "tree"))) as pieces:
        await anext(pieces)
        assert (await agent.ping()).streams == 1
        assert (await agent.run(["echo", "1"])).stdout == b"1\n"
    while (await agent.ping()).streams:
        await asyncio.sleep(0.01)


async def test_an_upload_that_is_given_up_leaves_no_temporary_file(agent: Agent, tmp_path: Path) -> None:
    data = archive([entry("whole"), entry("half")], {"half": bytes(3_000_000)})
    stuck = asyncio.Event()

    async def stop_half_way() -> AsyncIterator[bytes]:
        yield data[:1_000_000]
        await stuck.wait()

    upload = asyncio.create_task(agent.unpack(str(tmp_path / "there"), stop_half_way()))
    while not list(tmp_path.glob("there/.forkd-*")):
        await asyncio.sleep(0.01)
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: os.listdir(tmp_path / "there") == ["whole"])


async def test_an_agent_from_before_is_told_apart(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a request to pack for a command, which has no arguments."""

    def without_archive(process: Process, channel: object, request: dict[str, object], limit_s: float) -> None:
        init(process, channel, {"stdin": request["stdin"]}, limit_s)  # type: ignore[arg-type]

    init = Process.__init__
    monkeypatch.setattr(Process, "__init__", without_archive)
    with pytest.raises(Unsupported, match="whose agent cannot copy directories"):
        async for _ in agent.pack("/tmp"):
            pass


def test_file_systems_that_are_left_out_are_packed_empty(tmp_path: Path) -> None:
    """As /proc is, of a guest's root: it has files without an end."""
    (tmp_path / "below/deep").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pack(str(tmp_path), {os.stat(tmp_path).st_dev})))) as read:
        assert read.getnames() == [".", "below"]


def test_a_file_that_vanishes_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    pieces = pack(str(tmp_path))
    made = [next(pieces), next(pieces)]
    (tmp_path / "b").unlink()
    made += pieces
    with tarfile.open(fileobj=io.BytesIO(b"".join(made))) as read:
        assert read.getnames() == [".", "a", "c"]
