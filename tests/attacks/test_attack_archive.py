"""A guest that answers a download with an archive of its own making, and clients that send one.

Whatever it holds, nothing is written outside the target, and what is taken is bounded.
"""

import io
import os
import stat
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_recording import Pieces, Recorder, Reply, answering
from support_trees import archive, entry

from forkd.client.controller import Controller
from forkd.client.copying import download
from forkd.client.results import CopyInfo
from forkd.errors import ForkdError, HostLacks, InvalidInput, ProtocolError, Unreachable
from forkd.wire import archive as archives
from forkd.wire.archive import Unpacker, leads_out
from forkd.wire.tar import Entry, TarError, render_entry

Fetch = Callable[[bytes], CopyInfo]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """With neighbours that nobody may touch."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "outside").mkdir()
    return tmp_path / "target"


@pytest.fixture
def daemon() -> Iterator[Recorder]:
    with answering(lambda _: Reply(404)) as server:
        yield server


@pytest.fixture
def fetch(daemon: Recorder, target: Path, tmp_path: Path) -> Iterator[Fetch]:
    """Download a directory whose archive is this. Afterwards all is as it was, but for the target."""

    def copy(data: bytes) -> CopyInfo:
        daemon.answer = lambda _: Reply(200, data)
        with Controller(daemon.url) as controller:
            return download(controller, "sb-1", "/d", target)

    yield copy
    assert sorted(os.listdir(tmp_path)) in (["outside", "secret"], ["outside", "secret", "target"])
    assert (tmp_path / "secret").read_text() == "mine" and os.listdir(tmp_path / "outside") == []
    left = [path.name for path in target.rglob("*") if path.name.startswith(".forkd-")]
    assert left == [], "a temporary file stays"


NAMES = ["../secret", "..", "a/../../secret", "/tmp/escaped", "//tmp/escaped", "./../secret", "a/..", "x\0y"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_name_that_leads_out_ends_the_copy(fetch: Fetch, target: Path, name: str, kind: bytes) -> None:
    with pytest.raises(ProtocolError, match="The guest sent a file name that is not valid"):
        fetch(archive([entry(name, kind, "x")]))
    assert not target.exists() and not Path("/tmp/escaped").exists()


LINKS = ["/etc", "..", "../outside", "../secret", "a/../../outside", "./../outside", "/", "//etc", "x/.."]


@pytest.mark.parametrize("link", LINKS)
def test_a_link_that_may_lead_out_is_left_out_and_not_written_through(fetch: Fetch, target: Path, link: str) -> None:
    copied = fetch(archive([entry("link", tarfile.SYMTYPE, link)]))
    assert [each.why for each in copied.skipped] == ["it is a symlink that leads out of the copy"]
    assert not (target / "link").is_symlink()


def test_links_that_only_together_lead_out_are_left_out(fetch: Fetch, target: Path) -> None:
    """Read one by one, `d/e/up` is the target itself and `out` is d. Together `out` is two above the target."""
    links = [entry("d/e/up", tarfile.SYMTYPE, "../.."), entry("out", tarfile.SYMTYPE, "d/e/up/../..")]
    copied = fetch(archive(links))
    assert [each.path for each in copied.skipped] == ["/d/out"]
    assert os.path.realpath(target / "d/e/up") == str(target)


def test_a_link_is_never_a_way_for_what_comes_after_it(fetch: Fetch, target: Path, tmp_path: Path) -> None:
    target.mkdir()
    (target / "theirs").symlink_to(tmp_path / "outside")
    inside = [entry("inside", tarfile.DIRTYPE), entry("way", tarfile.SYMTYPE, "inside")]
    for name in ("way/file", "theirs/file"):
        with pytest.raises(HostLacks, match="cannot be written"):
            fetch(archive([*inside, entry(name)]))
    with pytest.raises(InvalidInput, match="inside is there already, and is not a file"):
        fetch(archive([*inside, entry("inside", tarfile.SYMTYPE, "way")]))
    assert os.listdir(target / "inside") == []


def test_a_file_in_place_of_a_link_replaces_the_link(fetch: Fetch, target: Path, tmp_path: Path) -> None:
    target.mkdir()
    (target / "file").symlink_to(tmp_path / "secret")
    fetch(archive([entry("file"), entry("file"), entry("file", tarfile.SYMTYPE, "other"), entry("file")]))
    assert (target / "file").read_text() == "EVIL" and not (target / "file").is_symlink()


@pytest.mark.parametrize("victim", ["../secret", "/etc/passwd", "file"])
def test_hard_links_are_refused(fetch: Fetch, victim: str) -> None:
    with pytest.raises(ProtocolError, match="a hard link"):
        fetch(archive([entry("file"), entry("link", tarfile.LNKTYPE, victim)]))


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_and_pipes_are_not_made(fetch: Fetch, target: Path, kind: bytes) -> None:
    made = entry("null", kind)
    made.devmajor, made.devminor = 1, 3
    copied = fetch(archive([made]))
    assert len(copied.skipped) == 1 and os.listdir(target) == []


def test_set_id_bits_and_owners_are_not_taken_over(fetch: Fetch, target: Path) -> None:
    made = [entry("file", mode=0o7755), entry("below", tarfile.DIRTYPE, mode=0o7755)]
    for each in made:
        each.uid = each.gid = 4321
    fetch(archive(made))
    for path in (target / "file", target / "below"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert (path.stat().st_uid, path.stat().st_gid) == (os.geteuid(), os.getegid())


def test_names_are_bytes_and_every_one_that_linux_has_is_taken(fetch: Fetch, target: Path) -> None:
    names = ["new\nline", "\x1b[2J", os.fsdecode(b"\xff\xfe"), "a" * 255, ".forkd-", "-rf", "..."]
    fetch(b"".join(render_entry(Entry(name, "file", 0o644, 0)) for name in names) + bytes(1024))
    assert set(os.listdir(target)) == set(names)
    for name in names:
        (target / name).unlink()


def test_a_directory_without_rights_is_filled_before_it_is_closed(fetch: Fetch, target: Path) -> None:
    fetch(archive([entry("below", tarfile.DIRTYPE, mode=0), entry("below/file", mode=0)]))
    assert stat.S_IMODE((target / "below").stat().st_mode) == 0
    assert stat.S_IMODE((target / "below/file").stat().st_mode) == 0


DAMAGED = {
    "a header of": lambda: _header(b"x", 1 << 33),
    "a header of 65537 bytes": lambda: _header(b"L", 65537),
    "more than 8 headers": lambda: _pax_only(b"comment=x") * 9,
    "an entry of a wrong size": lambda: _header(b"5", 512),
    "an entry of unknown type": lambda: _header(b"S", 0),
    "a damaged header": lambda: b"x" * 512,
    "something behind its end": lambda: bytes(1024) + b"x" * 512,
    "no end": lambda: b"",
    "a sparse file": lambda: _pax(b"GNU.sparse.major=1"),
    "an entry of a wrong time": lambda: _pax(b"mtime=99999999999999"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_archive_is_the_guests_fault(fetch: Fetch, what: str) -> None:
    with pytest.raises(ProtocolError, match=f"The guest sent {what}"):
        fetch(DAMAGED[what]())


def test_an_archive_that_is_cut_short_says_so(daemon: Recorder, target: Path) -> None:
    data = archive([entry("first"), entry("second")], {"second": bytes(100_000)})
    daemon.answer = lambda _: Pieces((data[:2000], data[2000:50_000]), whole=False)
    with Controller(daemon.url) as controller, pytest.raises(Unreachable, match="after 1 file, which stays in"):
        download(controller, "sb-1", "/d", target)
    assert os.listdir(target) == ["first"]


def test_bytes_and_entries_are_bounded(fetch: Fetch, daemon: Recorder, target: Path, tmp_path: Path) -> None:
    data = archive([entry("a"), entry("b")], {"a": bytes(1000), "b": bytes(1000)})
    daemon.answer = lambda _: Reply(200, data)
    with Controller(daemon.url) as controller, pytest.raises(InvalidInput, match="There are more than 1999 bytes"):
        download(controller, "sb-1", "/d", target, max_bytes=1999)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidInput, match="There are more than 1 files"):
        patch.setattr(archives, "MAX_ENTRIES", 1)
        fetch(data)


def test_an_endless_archive_takes_no_memory(tmp_path: Path) -> None:
    """Headers of the largest size that is read at once, each with other records, as many as are taken; and zeros."""
    unpacker = Unpacker(str(tmp_path))
    tracemalloc.start()
    try:
        for number in range(50):
            for part in range(8):
                unpacker.feed(_pax_only(b"key%d=" % (8 * number + part) + b"x" * 60_000))
            unpacker.feed(_header(b"0", 0))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        with pytest.raises(TarError, match="something behind its end"):
            for _ in range(100):
                unpacker.feed(bytes(100_000))
    finally:
        tracemalloc.stop()
        unpacker.close()


def test_random_damage_never_leads_out_or_escapes_as_another_error(tmp_path: Path) -> None:
    """A bit is flipped, and the sum made right again, at each place of every header."""
    data = bytearray(archive([entry("dir", tarfile.DIRTYPE), entry("dir/link", tarfile.SYMTYPE, "x"), entry("file")]))
    for at in range(0, 512 * 3, 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        for block in range(0, 512 * 3, 512):
            damaged[block + 148 : block + 156] = b" " * 8
            damaged[block + 148 : block + 156] = b"%06o\0 " % sum(damaged[block : block + 512])
        root = tmp_path / f"{at}/root"
        root.mkdir(parents=True)
        unpacker = Unpacker(str(root))
        try:
            unpacker.feed(bytes(damaged))
            unpacker.finish()
        except (TarError, archives.Exceeded, OSError):
            pass
        finally:
            unpacker.close()
        assert os.listdir(root.parent) == ["root"]
    assert sorted(os.listdir(tmp_path)) == sorted(str(at) for at in range(0, 512 * 3, 7))


@pytest.mark.parametrize(
    ("link", "depth", "out"),
    [
        ("x", 0, False),
        ("./x/y", 0, False),
        ("..", 0, True),
        ("..", 1, False),
        ("../../x", 1, True),
        ("../x/../y", 3, True),
        ("/x", 9, True),
    ],
)
def test_where_a_link_may_lead(link: str, depth: int, out: bool) -> None:
    assert leads_out(link, depth) is out


def test_a_bomb_of_gnu_tar_is_refused(fetch: Fetch, tmp_path: Path) -> None:
    """A terabyte of nothing, in a few blocks."""
    source = tmp_path / "outside/sparse"
    with source.open("wb") as file:
        file.truncate(1 << 40)
    for form in ("gnu", "pax"):
        command = ["tar", "c", "--sparse", f"--format={form}", "-C", tmp_path / "outside", "sparse"]
        made = subprocess.run(command, capture_output=True, check=True)
        with pytest.raises(ForkdError, match=r"a sparse file|unknown type"):
            fetch(made.stdout)
    source.unlink()


def _header(kind: bytes, size: int) -> bytes:
    made = tarfile.TarInfo("name")
    made.type, made.size = kind, size
    return made.tobuf(tarfile.GNU_FORMAT)


def _pax_only(record: bytes) -> bytes:
    body = b"%d %s\n" % (len(record) + 2 + len(str(len(record) + 7)), record)
    return _header(b"x", len(body)) + body + bytes(-len(body) % 512)


def _pax(record: bytes) -> bytes:
    return _pax_only(record) + io.BytesIO(archive([entry("file")])).getvalue()
