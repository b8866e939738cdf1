"""`forkd cp`: what goes in comes out, and a hostile guest writes nowhere but into the target.

Guests of the fake engine share this machine's files: each test gives its sandbox a directory of its own.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tarfile import DIRTYPE, REGTYPE, SYMTYPE
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from cli_cases import DEADLINE_S, Cli, Done, check
from support_recording import Reply, Seen, answering
from support_trees import archive, describe, entry, make_tree

pytestmark = pytest.mark.usefixtures("nothing_left")


def copy(cli: Cli, source: object, target: object) -> None:
    assert cli.ask("cp", str(source), str(target)).returncode == 0


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    """What of the guest's files is the test's."""
    (tmp_path / "guest").mkdir()
    return tmp_path / "guest"


def test_a_file_goes_in_and_comes_out_with_its_permissions(
    warm: Cli, sandbox: str, tmp_path: Path, guest: Path
) -> None:
    source = tmp_path / "tool"
    source.write_bytes(os.urandom(3 << 20))
    source.chmod(0o750)
    assert warm.json("cp", str(source), f"{sandbox}:{guest}/") == {"files": 1, "bytes": 3 << 20, "skipped": []}
    assert (guest / "tool").read_bytes() == source.read_bytes()
    assert (guest / "tool").stat().st_mode & 0o777 == 0o750
    (guest / "tool").chmod(0o4711)
    back = tmp_path / "back"
    done = warm.ask("cp", f"{sandbox}:{guest}/tool", str(back))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert back.read_bytes() == source.read_bytes()
    assert back.stat().st_mode & 0o7777 == 0o711
    assert list(tmp_path.glob(".forkd-*")) == []


def test_a_tree_goes_in_and_comes_out_whatever_its_files_are_called(
    warm: Cli, sandbox: str, tmp_path: Path, guest: Path
) -> None:
    source = tmp_path / "source"
    names = ["plain", "-rf", "with space", "new\nline", "äöü🐍", "~", "$(x)", "a:b", "\x1b[2J"]
    names.append(os.fsdecode(b"\xff\xfe"))
    for directory in (source, source / "below", source / "below/deep", source / "empty"):
        directory.mkdir()
        for name in names if directory.name != "empty" else []:
            (directory / name).write_text(name, errors="surrogateescape")
    copy(warm, source, f"{sandbox}:{guest}/copy")
    copy(warm, f"{sandbox}:{guest}/copy", tmp_path / "back")
    subprocess.run(["diff", "-r", source, tmp_path / "back"], check=True)
    assert (tmp_path / "back/empty").is_dir()
    # Into a directory that is there, under its own name; with /. its contents only.
    copy(warm, f"{sandbox}:{guest}/copy", tmp_path / "back")
    subprocess.run(["diff", "-r", source, tmp_path / "back/copy"], check=True)
    (tmp_path / "flat").mkdir()
    copy(warm, f"{sandbox}:{guest}/copy/.", tmp_path / "flat")
    subprocess.run(["diff", "-r", source, tmp_path / "flat"], check=True)


def test_special_files_and_links_that_lead_out_are_left_out_and_named(
    warm: Cli, sandbox: str, tmp_path: Path, guest: Path
) -> None:
    (guest / "tree").mkdir()
    (guest / "tree/file").touch()
    (guest / "tree/inside").symlink_to("file")
    (guest / "tree/link").symlink_to("/etc/passwd")
    os.mkfifo(guest / "tree/pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{warm.runtime}/s")  # a short path, as sockets need
        os.rename(f"{warm.runtime}/s", guest / "tree/socket")
    done = warm.ask("cp", f"{sandbox}:{guest}/tree", str(tmp_path / "out"))
    assert done.returncode == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["file", "inside"]
    assert sorted(done.stderr.splitlines()) == [
        f"warning: left out {guest}/tree/link: it is a symlink that leads out of the copy",
        f"warning: left out {guest}/tree/pipe: it is a fifo",
        f"warning: left out {guest}/tree/socket: it is a socket",
    ]
    # A guest is another machine: where a link leads there is its own affair.
    tally = warm.json("cp", str(guest / "tree"), f"{sandbox}:{guest}/again")
    assert tally["files"] == 1
    assert [Path(each["path"]).name for each in tally["skipped"]] == ["pipe", "socket"]
    assert os.readlink(guest / "again/link") == "/etc/passwd"


def test_a_thousand_files_go_both_ways_with_links_modes_and_times(
    warm: Cli, sandbox: str, tmp_path: Path, guest: Path
) -> None:
    make_tree(tmp_path / "source")
    tally = warm.json("cp", str(tmp_path / "source"), f"{sandbox}:{guest}/copy")
    assert (tally["files"], tally["skipped"]) == (1001, [])
    assert describe(guest / "copy") == describe(tmp_path / "source")
    assert warm.json("cp", f"{sandbox}:{guest}/copy", str(tmp_path / "back")) == tally
    assert describe(tmp_path / "back") == describe(tmp_path / "source")


def test_the_time_of_a_single_file_is_kept_too(warm: Cli, sandbox: str, tmp_path: Path, guest: Path) -> None:
    (tmp_path / "old").write_text("old")
    os.utime(tmp_path / "old", ns=(0, 1_234_567_890_123_456_789))
    copy(warm, tmp_path / "old", f"{sandbox}:{guest}/old")
    copy(warm, f"{sandbox}:{guest}/old", tmp_path / "back")
    assert (guest / "old").stat().st_mtime_ns == (tmp_path / "back").stat().st_mtime_ns == 1_234_567_890_123_456_789


def test_a_directory_is_filled_and_what_is_in_the_way_is_named(
    warm: Cli, sandbox: str, tmp_path: Path, guest: Path
) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below/new").write_text("new")
    for there in (guest / "there", tmp_path / "there"):
        (there / "source/below").mkdir(parents=True, mode=0o700)
        (there / "source/below/new").write_text("old")
        (there / "source/below/other").write_text("other")
    copy(warm, source, f"{sandbox}:{guest}/there")
    copy(warm, f"{sandbox}:{guest}/there/source/.", tmp_path / "there/source")
    for there in (guest / "there", tmp_path / "there"):
        assert everything(there / "source") == {"below/new": "new", "below/other": "other"}
    (guest / "file").touch()
    check(warm.ask("cp", str(source), f"{sandbox}:{guest}/file"), 15, f"{guest}/file: Not a directory")
    check(warm.ask("cp", f"{sandbox}:{guest}/there", str(guest / "file")), 5, f"{guest}/file cannot be written")
    (guest / "there/source/below/new").unlink()
    (guest / "there/source/below/new").mkdir()
    done = warm.ask("cp", str(source), f"{sandbox}:{guest}/there")
    check(done, 4, f"{guest}/there/source/below/new: It is there already, and is not a file")
    check(
        warm.ask("cp", f"{sandbox}:{guest}/there/source/.", str(tmp_path / "there/source")),
        5,
        f"{tmp_path}/there/source/below/new cannot be written: Not a directory",
    )


def test_files_and_trees_go_from_one_sandbox_to_another(warm: Cli, sandbox: str, tmp_path: Path, guest: Path) -> None:
    other = warm.fork()
    make_tree(guest / "tree", files=50)
    os.mkfifo(guest / "tree/pipe")
    (guest / "there").mkdir()
    done = warm.ask("cp", f"{sandbox}:{guest}/tree", f"{other}:{guest}/there")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"warning: left out {guest}/tree/pipe: it is a fifo\n"
    (guest / "tree/pipe").unlink()
    os.utime(guest / "tree", ns=(0, 77_000_000_001))
    os.utime(guest / "there/tree", ns=(0, 77_000_000_001))
    assert describe(guest / "there/tree") == describe(guest / "tree")
    tally = warm.json("cp", f"{sandbox}:{guest}/tree/.", f"{other}:{guest}/under/another/name")
    assert tally["files"] == 51 and (guest / "under/another/name/d1/to-dir").is_symlink()
    one = guest / "tree/d7/deep/file-7"
    copy(warm, f"{sandbox}:{one}", f"{other}:{guest}/there/")
    assert (guest / "there/file-7").read_bytes() == one.read_bytes()
    for what in ("st_mtime_ns", "st_mode"):
        assert getattr((guest / "there/file-7").stat(), what) == getattr(one.stat(), what)
    check(warm.ask("cp", f"{sandbox}:{guest}/tree", f"{other}:{one}"), 15, "Not a directory")
    check(warm.ask("cp", f"{sandbox}:{one}", "sb-0000000000:/x"), 3)


def test_a_link_that_is_named_is_followed(warm: Cli, sandbox: str, tmp_path: Path, guest: Path) -> None:
    (guest / "real").mkdir()
    (guest / "real/file").write_text("x")
    (guest / "to-dir").symlink_to("real")
    (guest / "to-file").symlink_to("real/file")
    copy(warm, f"{sandbox}:{guest}/to-dir", tmp_path / "dir")
    assert (tmp_path / "dir/file").read_text() == "x"
    copy(warm, f"{sandbox}:{guest}/to-file", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "mine").symlink_to("file")
    (guest / "real/file").write_text("y")
    copy(warm, f"{sandbox}:{guest}/real/file", tmp_path / "mine")
    assert (tmp_path / "mine").is_symlink() and (tmp_path / "file").read_text() == "y"


def test_standard_input_and_output_are_files_too(warm: Cli, sandbox: str, guest: Path) -> None:
    data = os.urandom(300_000)
    assert warm("cp", "-", f"{sandbox}:{guest}/input", stdin=data).returncode == 0
    assert (guest / "input").read_bytes() == data
    done = subprocess.run(
        warm.command("cp", f"{sandbox}:{guest}/input", "-"), env=warm.env, capture_output=True, timeout=DEADLINE_S
    )
    assert done.stdout == data
    assert warm("cp", f"{sandbox}:{guest}/input", "/dev/null").returncode == 0
    assert os.stat("/dev/null").st_rdev == os.makedev(1, 3)


def test_what_cannot_be_copied_is_said(warm: Cli, sandbox: str, tmp_path: Path, guest: Path) -> None:
    check(warm.ask("cp", "a", "b"), 2, "neither is SANDBOX:/path")
    check(warm.ask("cp", f"{sandbox}:{guest}", f"{sandbox}:{guest}/below/"), 2, "itself or in it")
    check(
        warm.ask("cp", f"{sandbox}:{guest}/none", f"{sandbox}:{guest}/x"), 3, f"There is no {guest}/none in {sandbox}"
    )
    check(warm.ask("cp", str(tmp_path / "none"), f"{sandbox}:{guest}/x"), 3, "No such file")
    check(warm.ask("cp", f"{sandbox}:{guest}/none", str(tmp_path)), 3, f"There is no {guest}/none in {sandbox}")
    (guest / "file").touch()
    check(warm.ask("cp", f"{sandbox}:{guest}/file", str(tmp_path / "no/where")), 3, "No such file")
    check(warm.ask("cp", "sb-0000000000:/x", str(tmp_path)), 3)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").mkdir()
    check(warm.ask("cp", f"{sandbox}:{guest}/file", str(tmp_path / "taken")), 2, "is there already")
    assert warm.ask("cp", f"{sandbox}:{guest}/file", "-", "--json").returncode == 2


def info(name: str, kind: str) -> dict[str, Any]:
    known = {"name": name, "path": name, "type": kind, "size": 4, "mode": 0o6777}
    return {**known, "uid": 0, "gid": 0, "mtime_ns": 0, "target": None}


class Hostile:
    """A daemon whose guest says what it likes: `archives` are its directories, every file says EVIL."""

    def __init__(self) -> None:
        self.url = ""
        self.archives: dict[str, bytes] = {}

    def copy(self, cli: Cli, source: str, target: Path) -> Done:
        return cli.ask("cp", f"sb-0123456789:{source}", str(target), "--url", self.url)

    def answer(self, seen: Seen) -> Reply:
        url = urlsplit(seen.target)
        path = parse_qs(url.query).get("path", [""])[0]
        if url.path.endswith("/files/stat"):
            return Reply(200, info(path, "dir" if path in self.archives else "file"))
        if url.path.endswith("/archive"):
            return Reply(200, self.archives[path])
        return Reply(200, b"EVIL" if url.path.endswith("/files") else {"ready": True})


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    with answering(made.answer) as server:
        made.url = server.url
        yield made


def everything(root: Path) -> dict[str, str]:
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(root)): path.read_text() for path in files}


@pytest.mark.parametrize("name", ["../escaped", "..", "/etc/escaped", "a/../../escaped", "", "x\0y", "x" * 5000])
@pytest.mark.parametrize("kind", [REGTYPE, DIRTYPE, SYMTYPE])
def test_a_name_that_leads_elsewhere_ends_the_copy(
    cli: Cli, hostile: Hostile, tmp_path: Path, name: str, kind: bytes
) -> None:
    hostile.archives["/d"] = archive([entry(name, kind, "x")])
    target = tmp_path / "inside/target"
    target.parent.mkdir()
    done = hostile.copy(cli, "/d", target)
    assert done.returncode == 15
    assert "The guest sent a file name that is not valid" in done.stderr
    assert everything(tmp_path / "inside") == {}
    assert not (tmp_path / "escaped").exists() and not Path("/etc/escaped").exists()


def test_links_in_the_target_are_not_followed(cli: Cli, hostile: Hostile, tmp_path: Path) -> None:
    hostile.archives["/d/."] = archive([entry("file"), entry("below", DIRTYPE), entry("below/file")])
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (outside / "file").write_text("mine")
    (target / "file").symlink_to(outside / "file")
    (target / "below").symlink_to(outside)
    check(hostile.copy(cli, "/d/.", target), 5, "below cannot be written", "after 1 file, which stays in")
    assert everything(outside) == {"file": "mine"}
    assert (target / "file").read_text() == "EVIL" and not (target / "file").is_symlink()


def test_a_name_that_comes_twice_as_file_and_as_directory_goes_nowhere(
    cli: Cli, hostile: Hostile, tmp_path: Path
) -> None:
    hostile.archives["/d"] = archive([entry("x"), entry("x", DIRTYPE), entry("x/file")])
    check(hostile.copy(cli, "/d", tmp_path / "target"), 5, "cannot be written")
    assert everything(tmp_path / "target") == {"x": "EVIL"}
    assert (tmp_path / "target/x").stat().st_mode & 0o7777 == 0o777


def test_a_tree_without_an_end_is_left_at_some_depth(cli: Cli, hostile: Hostile, tmp_path: Path) -> None:
    hostile.archives["/d"] = archive([entry("/".join("n" * depth), DIRTYPE) for depth in range(1, 200)])
    check(hostile.copy(cli, "/d", tmp_path / "target"), 2, "directories deep")
