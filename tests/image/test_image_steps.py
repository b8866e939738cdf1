import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_depth import make_deep

from forkd.errors import InvalidInput, NotFound
from forkd.image import Copy, Run, copy_in, directory_spec
from forkd.image.directory import scan_copied
from forkd.image.steps import MAX_STEPS, parse_copy, render_step


@pytest.mark.parametrize("command", ["", "  ", "echo \0", "x" * 70_000])
def test_commands_that_cannot_be_run_are_refused(command: str) -> None:
    with pytest.raises(InvalidInput, match="--run takes"):
        Run(command)


def test_there_is_a_limit_to_the_steps_of_an_image(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="steps"):
        directory_spec(tmp_path, steps=[Run("true")] * (MAX_STEPS + 1))


def test_the_last_colon_divides_source_and_destination(tmp_path: Path) -> None:
    assert parse_copy("/a:b/c:/srv/app") == Copy(Path("/a:b/c"), "/srv/app")
    assert parse_copy(".:/srv").source == Path.cwd()


@pytest.mark.parametrize(
    "text", ["", "x", ":", "x:", ":/x", "x:app", "x:../app", "x:/srv/../etc", "x:/\0", "x:/" + "y" * 2000, "a\0:/x"]
)
def test_what_is_not_a_source_and_an_absolute_destination_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--copy"):
        parse_copy(text)


@pytest.mark.parametrize("place", ["/dev", "/proc/x", "//run/x", "/./sys", "/tmp/"])
def test_a_copy_to_where_the_guest_mounts_its_own_is_refused(place: str) -> None:
    with pytest.raises(InvalidInput, match="no effect"):
        parse_copy(f"x:{place}")


def test_steps_are_shown_in_words() -> None:
    assert render_step(Run("make\n  all").describe()) == "run make\n  all"
    assert render_step(Copy(Path("/a"), "/b").describe()) == "copy /a to /b"
    assert Run("make\n  all").render() == "--run make all"
    assert len(Run("x" * 5000).render()) < 120


def test_content_and_mode_of_what_is_copied_count_and_nothing_else(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run/file").write_text("same")
        if os.geteuid() == 0:
            os.chown(tmp_path / name / "run/file", len(name), 7)
    (tmp_path / "two/run").touch()
    assert scan_copied(tmp_path / "one") == scan_copied(tmp_path / "two")
    seen = {scan_copied(tmp_path / "one"), scan_copied(tmp_path / "one/run/file")}
    (tmp_path / "one/run/file").chmod(0o600)
    seen |= {scan_copied(tmp_path / "one"), scan_copied(tmp_path / "one/run/file")}
    # Unlike in a root, /run counts.
    (tmp_path / "one/run/file").write_text("else")
    seen |= {scan_copied(tmp_path / "one"), scan_copied(tmp_path / "one/run/file")}
    assert len(seen) == 6


def test_a_source_that_is_absent_or_special_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound, match="absent"):
        scan_copied(tmp_path / "absent")
    for source in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidInput, match="device, socket or pipe"):
            scan_copied(source)


def put(source: Path, destination: str, name: str = "name") -> None:
    """As the image's Python would, with the same program."""
    subprocess.run([sys.executable, "-I", copy_in.__file__, source, destination, name], check=True, timeout=60)


def test_a_file_becomes_the_destination_or_goes_into_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o751)
    put(tmp_path / "file", f"{tmp_path}/a/b/exact")
    put(tmp_path / "file", f"{tmp_path}/a/b", "inside")
    put(tmp_path / "file", f"{tmp_path}/new/", "inside")
    for path in ("a/b/exact", "a/b/inside", "new/inside"):
        assert (tmp_path / path).read_text() == "x"
        assert (tmp_path / path).stat().st_mode & 0o7777 == 0o751


def test_a_directory_is_merged_into_the_destination(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    (source / "deep").mkdir(parents=True)
    (source / "deep").chmod(0o500)
    (source / "new").write_text("new")
    (source / "link").symlink_to("/etc/passwd")
    there.mkdir(mode=0o700)
    (there / "kept").write_text("kept")
    (tmp_path / "outside").write_text("outside")
    (there / "new").symlink_to(tmp_path / "outside")
    put(source, str(there))
    assert sorted(os.listdir(there)) == ["deep", "kept", "link", "new"]
    assert os.readlink(there / "link") == "/etc/passwd"
    assert (there / "new").read_text() == "new" and not (there / "new").is_symlink()
    assert (tmp_path / "outside").read_text() == "outside"
    assert [path.stat().st_mode & 0o777 for path in (there, there / "deep")] == [0o700, 0o500]
    assert (there / "new").stat().st_mtime_ns == (source / "new").stat().st_mtime_ns


def test_a_deep_directory_is_copied(tmp_path: Path) -> None:
    make_deep(tmp_path / "d", 1200, name="d")
    put(tmp_path / "d", f"{tmp_path}/copy")
    assert os.path.exists(f"{tmp_path}/copy/{'d/' * 1200}end")
    subprocess.run(["rm", "-rf", str(tmp_path / "d"), str(tmp_path / "copy")], check=True)
