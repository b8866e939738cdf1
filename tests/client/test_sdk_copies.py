"""`files.upload` and `files.download`, over a real daemon with the fake engine, whose guests share our file system."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_daemon import TAG
from support_mounts import as_root, small_disk
from support_trees import describe, make_tree

from forkd import AsyncSandbox, ForkdError, InvalidInput, NotFound, Sandbox
from forkd.client.results import CopyInfo
from forkd.errors import AgentError, GuestFull, NoCapacity

pytestmark = pytest.mark.usefixtures("daemon")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.create(TAG) as made:
        yield made


def test_a_directory_goes_there_and_back(sandbox: Sandbox, tmp_path: Path) -> None:
    make_tree(tmp_path / "source", files=200)
    sent = sandbox.files.upload(tmp_path / "source", f"{tmp_path}/guest/copy")
    assert (sent.files, sent.skipped) == (201, [])
    assert describe(tmp_path / "guest/copy") == describe(tmp_path / "source")
    assert sandbox.files.download(f"{tmp_path}/guest/copy", str(tmp_path / "back")) == sent
    assert describe(tmp_path / "back") == describe(tmp_path / "source")


async def test_the_same_with_await_and_several_at_once(tmp_path: Path) -> None:
    async with await AsyncSandbox.create(TAG) as sandbox:
        make_tree(tmp_path / "source", files=100)
        names = [str(tmp_path / f"guest-{n}") for n in range(4)]
        sent = await asyncio.gather(*(sandbox.files.upload(tmp_path / "source", name) for name in names))
        got = await asyncio.gather(*(sandbox.files.download(name, f"{name}-back") for name in names))
        assert sent == got == [CopyInfo(101, sent[0].bytes)] * 4
        for name in names:
            assert describe(Path(f"{name}-back")) == describe(tmp_path / "source")


async def test_a_download_that_is_cancelled_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large/file").write_bytes(bytes(64 << 20))
    async with await AsyncSandbox.create(TAG) as sandbox:
        task = asyncio.create_task(sandbox.files.download(f"{tmp_path}/large", tmp_path / "copy"))
        while not list(tmp_path.glob("copy/.forkd-*")):
            assert not task.done()
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert os.listdir(tmp_path / "copy") == []
        assert (await sandbox.files.list(str(tmp_path / "large")))[0].name == "file"


def test_a_file_goes_too_and_the_target_is_its_name(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(2 << 20))
    source.chmod(0o751)
    os.utime(source, ns=(0, 12_345_678_901))
    (tmp_path / "link").symlink_to("guest")
    assert sandbox.files.upload(source, f"{tmp_path}/guest") == CopyInfo(1, 2 << 20)
    assert sandbox.files.download(f"{tmp_path}/guest", tmp_path / "back") == CopyInfo(1, 2 << 20)
    assert sandbox.files.download(f"{tmp_path}/link", tmp_path / "by-link").files == 1
    for copy in (tmp_path / "guest", tmp_path / "back"):
        assert copy.read_bytes() == source.read_bytes()
        assert (copy.stat().st_mode & 0o7777, copy.stat().st_mtime_ns) == (0o751, 12_345_678_901)
    assert (tmp_path / "by-link").stat().st_mode & 0o7777 == 0o644


def test_errors_name_the_path(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(bytes(1000))
    with pytest.raises(NotFound, match=f"{tmp_path}/none cannot be read"):
        sandbox.files.upload(tmp_path / "none", "/tmp/x")
    with pytest.raises(NotFound):
        sandbox.files.download(f"{tmp_path}/none", tmp_path / "made")
    with pytest.raises(AgentError, match=f"{tmp_path}/tree/file: Not a directory"):
        sandbox.files.upload(tmp_path / "tree", f"{tmp_path}/tree/file")
    with pytest.raises(ForkdError, match=f"{tmp_path}/tree/file cannot be written: Not a directory"):
        sandbox.files.download(str(tmp_path / "tree"), tmp_path / "tree/file")
    with pytest.raises(InvalidInput, match="is there already, and is not a file"):
        sandbox.files.download(str(tmp_path / "tree/file"), tmp_path / "tree")
    with pytest.raises(InvalidInput, match="There are more than 999 bytes"):
        sandbox.files.download(str(tmp_path / "tree"), tmp_path / "made", max_bytes=999)
    assert not (tmp_path / "made").exists()


@as_root
def test_a_full_disk_on_either_side_is_no_capacity_and_names_the_file(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_bytes(bytes(1000))
    (tmp_path / "tree/b").write_bytes(bytes(5 << 20))
    with small_disk(tmp_path / "small", "1m"):
        with pytest.raises(GuestFull, match="small/guest/b") as caught:
            sandbox.files.upload(tmp_path / "tree", f"{tmp_path}/small/guest")
        assert caught.value.code == "no_space" and "stays in" in (caught.value.hint or "")
        assert os.listdir(tmp_path / "small/guest") == ["a"]
        with pytest.raises(NoCapacity, match=r"small/here/b cannot be written: No space .*\(after 1 file, which stays"):
            sandbox.files.download(f"{tmp_path}/tree", tmp_path / "small/here")
        assert os.listdir(tmp_path / "small/here") == ["a"]


def test_a_sandbox_that_ends_half_way_is_an_error_that_says_what_is_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_bytes(bytes(1000))
    (tmp_path / "tree/b").write_bytes(bytes(64 << 20))
    killed = []

    def kill_it(_size: int) -> None:
        if not killed:
            killed.append(sandbox.kill())

    from forkd.client.copying import download, upload

    controller, sandbox_id = sandbox._controller, sandbox.id
    with pytest.raises(ForkdError, match="after 1 file, which stays in"):
        download(controller, sandbox_id, f"{tmp_path}/tree", tmp_path / "back", kill_it)
    assert os.listdir(tmp_path / "back") == ["a"]
    with Sandbox.create(TAG) as another:
        killed.clear()

        def kill_another(_size: int) -> None:
            if not killed:
                killed.append(another.kill())

        with pytest.raises(ForkdError):
            upload(another._controller, another.id, tmp_path / "tree", f"{tmp_path}/guest", kill_another)
