"""What was written, as a real agent lists it: on a host there is nothing to list, and directories made by hand."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support_trees import archive, entry

from forkd.agent import changes
from forkd.agent.changes import Walk
from forkd.agent.platform import Rehearsal
from forkd.errors import Unsupported
from forkd.guest.agent import Agent
from forkd.guest.process import Process
from forkd.wire.archive import Exceeded, Unpacker
from forkd.wire.tar import END, Entry, render_entry


async def test_an_agent_without_an_overlay_says_so(agent: Agent) -> None:
    with pytest.raises(Unsupported, match="has no disk of its own"):
        await anext(agent.changes())
    assert (await agent.ping()).streams == 0


@pytest.mark.parametrize("knows", [{"archive": "other"}, {}])
async def test_an_agent_from_before_is_told_to_be_made_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, knows: dict[str, str]
) -> None:
    """It refuses the task, or takes it for a command without arguments."""

    def as_before(process: Process, channel: object, request: dict[str, object], limit_s: float) -> None:
        del request["archive"]
        init(process, channel, {**request, **knows}, limit_s)  # type: ignore[arg-type]

    init = Process.__init__
    monkeypatch.setattr(Process, "__init__", as_before)
    monkeypatch.setattr("forkd.guest.changes._OLD_AGENT", ("archive must be pack", "A command needs"))
    with pytest.raises(Unsupported, match="cannot tell what was written") as caught:
        await anext(agent.changes())
    assert caught.value.hint == "Make the snapshot again"


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("image", "upper"):
        (tmp_path / name / "etc").mkdir(parents=True)
    return tmp_path / "image", tmp_path / "upper"


def walk(roots: tuple[Path, Path], **more: Any) -> dict[str, Any]:
    """By path, without /tmp, which is this machine's."""
    fds = [os.open(root, os.O_RDONLY | os.O_DIRECTORY) for root in roots]
    try:
        lines = b"".join(Walk(**more).lines(fds[0], fds[1])).splitlines()
    finally:
        for fd in fds:
            os.close(fd)
    found = {each["path"]: each for each in map(json.loads, filter(None, lines))}
    return {path: each for path, each in found.items() if not path.startswith("/tmp")}


def test_what_is_in_the_upper_directory_is_told_with_what_is_below_it(roots: tuple[Path, Path]) -> None:
    image, upper = roots
    (image / "etc/both").write_text("image")
    (upper / "etc/both").write_text("upper")
    (upper / "etc/new").symlink_to("both")
    (upper / "etc/machine-id").write_text("identity")
    (upper / "proc").mkdir()
    (upper / "proc/covered").touch()
    os.mknod(upper / "etc/gone", 0o20000, os.makedev(0, 0))
    (image / "etc/gone").mkdir()
    (image / "etc/gone/file").touch()
    os.mknod(upper / "etc/never", 0o20000, os.makedev(0, 0))
    found = walk(roots, hashed=True)
    assert found.keys() == {"/", "/etc", "/etc/both", "/etc/new", "/etc/gone"}
    both = found["/etc/both"]
    assert both["file"]["sha256"] != both["base"]["sha256"] and len(both["base"]["sha256"]) == 64
    assert (found["/etc/new"]["file"]["target"], found["/etc/new"]["base"]) == ("both", None)
    assert (found["/etc/gone"]["file"], found["/etc/gone"]["base"]["type"]) == (None, "dir")
    assert walk(roots, since_ns=max(each["ctime_ns"] for each in found.values())) == {}


def test_more_than_is_listed_is_refused(roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (roots[1] / str(number)).touch()
    monkeypatch.setattr(changes, "MAX_CHANGES", 5)
    with pytest.raises(Exceeded, match="has more than 5 files"):
        walk(roots)
    monkeypatch.setattr(changes, "MAX_CHANGES", 6)
    with pytest.raises(Exceeded, match="More than 6 files"):
        walk(roots)
    monkeypatch.undo()
    (roots[1] / "/".join(["d"] * 200)).mkdir(parents=True)
    with pytest.raises(Exceeded, match="directories deep"):
        walk(roots)


def test_the_clock_of_a_fork_is_remembered(tmp_path: Path) -> None:
    platform = Rehearsal(str(tmp_path))
    assert platform.describe() == {"began_ns": 0, "born_ns": 0, "steps": [], "roots": None}
    platform.begin()
    platform.finish(7)
    assert platform.describe()["born_ns"] == 7 and platform.describe()["began_ns"] > 7


async def content(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_an_archive_with_owners_keeps_them_and_follows_no_link(agent: Agent, tmp_path: Path) -> None:
    here = (os.geteuid(), os.getegid())
    owner = (12, 3_000_000) if here[0] == 0 else here
    (tmp_path / "there/old").mkdir(parents=True, mode=0o755)
    data = render_entry(Entry("old", "dir", 0o1700, 0, owner=owner))
    data += render_entry(Entry("old/file", "file", 0o4711, 0, owner=owner))
    data += render_entry(Entry("old/link", "symlink", 0o777, 0, target="/anywhere", owner=owner)) + END
    await agent.unpack(str(tmp_path / "there"), content(data), keep=True)
    modes = {path.name: path.lstat() for path in (tmp_path / "there").rglob("*")}
    assert {name: (each.st_uid, each.st_gid) for name, each in modes.items()} == dict.fromkeys(modes, owner)
    bits = {name: each.st_mode & 0o7777 for name, each in modes.items()}
    assert bits == {"old": 0o1700, "file": 0o4711, "link": 0o777}
    (tmp_path / "outside").mkdir()
    (tmp_path / "there/away").symlink_to(tmp_path / "outside")
    with pytest.raises(Exception, match="away/file"):
        await agent.unpack(str(tmp_path / "there"), content(archive([entry("away/file")])), keep=True)
    assert list((tmp_path / "outside").iterdir()) == []


def test_without_that_owners_of_an_archive_are_nobodys(tmp_path: Path) -> None:
    unpacker = Unpacker(str(tmp_path))
    unpacker.feed(render_entry(Entry("file", "file", 0o4711, 0, owner=(12, 13))) + END)
    unpacker.finish()
    unpacker.close()
    made = (tmp_path / "file").stat()
    assert (made.st_uid, made.st_mode & 0o7777) == (os.geteuid(), 0o711)
