import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from image_cases import Heard, make_python
from support_depth import make_deep
from support_mounts import as_root, small_disk

from forkd.errors import Conflict, InvalidInput, NotFound
from forkd.host.paths import Home
from forkd.image import ImageStore, directory_spec
from forkd.image.directory import build_directory_root, scan_directory
from forkd.image.pack import Render, render_mkfs, render_tar


def digest(directory: Path) -> str:
    return scan_directory(directory).digest


def test_the_same_content_elsewhere_has_the_same_digest(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_python(tmp_path / name)
    (tmp_path / "two/usr").touch()
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_whatever_counts_changes_the_digest(root_directory: Path) -> None:
    etc = root_directory / "etc"
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: (etc / "issue").write_text("jello\n"),
        lambda: (etc / "issue").chmod(0o600),
        lambda: (etc / "issue").rename(etc / "issue.net"),
        lambda: (etc / "link").symlink_to("issue"),
        lambda: (etc / "link").unlink() or (etc / "link").symlink_to("issue.net"),
        lambda: (etc / "empty").mkdir(),
        *([lambda: os.chown(etc / "empty", 7, 7)] if os.geteuid() == 0 else []),
    ]
    seen = set()
    for number, change in enumerate(changes):
        change()
        seen.add(digest(root_directory))
        assert len(seen) == number + 1


def test_content_and_name_cannot_be_traded_for_each_other(tmp_path: Path) -> None:
    for name, inner, content in (("one", "ab", "c"), ("two", "a", "bc")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inner).write_text(content)
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_what_the_guest_mounts_over_does_not_count(root_directory: Path) -> None:
    for name in ("dev", "proc", "run", "sys", "tmp"):
        (root_directory / name).mkdir()
    before = digest(root_directory)
    (root_directory / "run/pid").write_text("1")
    assert digest(root_directory) == before


def test_links_are_never_followed(root_directory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root_directory / "out").symlink_to(outside)
    before = digest(root_directory)
    (outside / "secret").write_text("x")
    assert digest(root_directory) == before
    assert "out/secret" not in scan_directory(root_directory).tree


def test_names_in_any_encoding_are_taken(root_directory: Path) -> None:
    os.close(os.open(os.fsencode(root_directory) + b"/\xff\n\xfe", os.O_CREAT, 0o644))
    assert "\udcff\n\udcfe" in scan_directory(root_directory).tree


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        *((path, InvalidInput, "root") for path in ("/", "/..", "/proc/self/root", "/etc/../")),
        ("absent", NotFound, "no directory"),
        ("file", InvalidInput, "not a directory"),
        ("loop", InvalidInput, "not a directory"),
        ("x" * 300, InvalidInput, "not a directory"),
    ],
)
def test_what_cannot_be_an_image_is_refused(tmp_path: Path, path: str, error: type[Exception], said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(error, match=said):
        scan_directory(tmp_path / path)


def test_sockets_and_pipes_are_refused_by_name(root_directory: Path) -> None:
    os.mkfifo(root_directory / "etc/pipe")
    with pytest.raises(InvalidInput, match="etc/pipe"):
        scan_directory(root_directory)
    (root_directory / "etc/pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root_directory / "etc/sock"))
        with pytest.raises(InvalidInput, match="etc/sock"):
            scan_directory(root_directory)


@as_root
def test_devices_are_refused_but_not_those_below_dev(root_directory: Path) -> None:
    (root_directory / "dev").mkdir()
    os.mknod(root_directory / "dev/null", 0o20666, os.makedev(1, 3))
    scan_directory(root_directory)
    os.mknod(root_directory / "etc/disk", 0o60600, os.makedev(254, 0))
    with pytest.raises(InvalidInput, match="etc/disk"):
        scan_directory(root_directory)


@as_root
def test_another_file_system_mounted_inside_is_refused(root_directory: Path) -> None:
    with small_disk(root_directory / "etc", "1m"), pytest.raises(InvalidInput, match="another file system"):
        scan_directory(root_directory)


@pytest.mark.usefixtures("small_kernel")
def test_a_directory_of_1200_levels_becomes_an_image(root_directory: Path, home: Home) -> None:
    make_deep(root_directory / "d", 1200, name="d")
    assert f"{'d/' * 1201}end" in scan_directory(root_directory).tree
    image = ImageStore(home).build(directory_spec(root_directory), "deep")
    assert image.root.stat().st_size > 0
    subprocess.run(["rm", "-rf", str(root_directory / "d")], check=True)


def test_a_path_that_is_too_long_is_refused(root_directory: Path) -> None:
    make_deep(root_directory / "deep", 600)
    with pytest.raises(InvalidInput, match="more than 4095 bytes") as caught:
        scan_directory(root_directory)
    assert len(caught.value.message) < 400 and caught.value.hint is not None
    subprocess.run(["rm", "-rf", str(root_directory / "deep")], check=True)


@pytest.mark.parametrize(("render", "file"), [(render_mkfs, "root.erofs"), (render_tar, "tree.tar")])
def test_the_same_directory_packs_to_the_same_bytes(
    root_directory: Path, tmp_path: Path, render: Render, file: str
) -> None:
    packed = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        build_directory_root(root_directory, scan_directory(root_directory), render, tmp_path / name, Heard())
        packed.append((tmp_path / name / file).read_bytes())
    assert packed[0] == packed[1]


def test_a_directory_that_changes_while_it_is_packed_is_refused(root_directory: Path, tmp_path: Path) -> None:
    scan = scan_directory(root_directory)
    (root_directory / "etc/issue").write_text("later\n")
    with pytest.raises(Conflict, match="changed while it was read"):
        build_directory_root(root_directory, scan, render_mkfs, tmp_path, Heard())
