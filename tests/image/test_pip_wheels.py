"""The host's pip, with wheels of the test's own: no index is asked."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_cases import Heard
from support_roots import make_wheel

from forkd.errors import BuildFailed, HostLacks
from forkd.host.files import FileSum, digest_file
from forkd.image import wheels
from forkd.image.root import Node
from forkd.image.target import Target, debian_target, directory_target
from forkd.image.wheels import build_wheels, explain, find_pip, parse_wheels

TARGET = debian_target(11, "2.36-9+deb12u10")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that is all pip knows of."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    yield tmp_path / "index"


def fetch(where: Path, *requirements: str, target: Target = TARGET) -> set[str]:
    out, work = where / "out", where / "work"
    out.mkdir()
    work.mkdir()
    build_wheels(requirements, target, out, work, Heard())
    found = parse_wheels({path.name: digest_file(path) for path in out.iterdir()})
    return {f"{wheel.name}=={wheel.version}" for wheel in found}


def test_a_package_comes_with_all_that_it_needs(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "First", "1.0", {"first.py": b""}, requires=["second_part>=2"])
    for version in ("1.0", "2.1", "2.2"):
        make_wheel(index, "second_part", version, {"second.py": b""})
    assert fetch(tmp_path, "first", "second-part<2.2") == {"first==1.0", "second-part==2.1"}


def test_wheels_fit_the_images_python_and_c_library_and_not_the_hosts(index: Path, tmp_path: Path) -> None:
    for number, tag in enumerate(
        ["cp38-cp38-manylinux_2_17_x86_64", "cp38-cp38-manylinux_2_31_x86_64", "cp38-cp38-manylinux_2_32_x86_64"]
    ):
        make_wheel(index, "binary", f"1.{number}", {"binary.py": b""}, tag=tag)
    make_wheel(index, "binary", "2.0", {"binary.py": b""}, tag="cp311-cp311-manylinux_2_17_x86_64")
    make_wheel(index, "binary", "3.0", {"binary.py": b""}, tag="cp38-cp38-musllinux_1_1_x86_64")
    assert fetch(tmp_path, "binary", target=debian_target(8, "2.31-13")) == {"binary==1.1"}


def test_requirements_are_asked_about_the_images_python(index: Path, tmp_path: Path) -> None:
    needs = ['old; python_version < "3.9"', 'new; python_version >= "3.9"', 'not-linux; sys_platform == "win32"']
    make_wheel(index, "asking", "1", {"asking.py": b""}, requires=needs)
    make_wheel(index, "old", "1", {"old.py": b""})
    make_wheel(index, "new", "1", {"new.py": b""})
    assert fetch(tmp_path, "asking", target=debian_target(8, "2.31")) == {"asking==1", "old==1"}


def test_a_package_that_is_not_there_is_one_line_with_a_hint(index: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"(?m)no wheel of absent==1\.0 for Python 3\.11$") as caught:
        fetch(tmp_path, "absent==1.0")
    assert caught.value.hint is not None and caught.value.details is None


def test_a_version_that_is_not_there_names_those_that_are(index: Path, tmp_path: Path) -> None:
    for version in range(1, 9):
        make_wheel(index, "there", f"{version}.0", {"there.py": b""})
    with pytest.raises(BuildFailed, match=r"(?m)newest it has: 4\.0, 5\.0, 6\.0, 7\.0, 8\.0$") as caught:
        fetch(tmp_path, "there==9")
    assert caught.value.details is None


def test_source_packages_are_never_built(index: Path, tmp_path: Path) -> None:
    (index / "source-1.0.tar.gz").write_bytes(b"would run setup.py")
    with pytest.raises(BuildFailed, match="no wheel of source"):
        fetch(tmp_path, "source")


def test_versions_that_exclude_each_other_are_one_line(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "wants_one", "1", {"one.py": b""}, requires=["shared==1"])
    make_wheel(index, "wants_two", "1", {"two.py": b""}, requires=["shared==2"])
    for version in ("1", "2"):
        make_wheel(index, "shared", version, {"shared.py": b""})
    with pytest.raises(BuildFailed, match="conflicting dependencies") as caught:
        fetch(tmp_path, "wants-one", "wants-two")
    assert caught.value.details is None


def test_a_wheel_with_another_hash_than_asked_for_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "pinned", "1", {"pinned.py": b""})
    with pytest.raises(BuildFailed) as caught:
        fetch(tmp_path, f"pinned==1 --hash=sha256:{'0' * 64}")
    assert "HASHES" in (caught.value.details or "").upper()


def test_an_index_that_does_not_answer_is_one_line() -> None:
    lines = [
        "WARNING: Retrying (Retry(total=4)) after connection broken",
        "ERROR: No matching distribution found for x",
    ]
    error = explain(lines, TARGET)
    assert error is not None and "does not answer" in error.message and "example" not in error.message


def test_words_of_pip_that_are_not_known_are_left_to_speak() -> None:
    assert explain(["ERROR: something new"], TARGET) is None


def test_where_packages_come_from_is_not_shown(index: Path, tmp_path: Path) -> None:
    heard = Heard()
    make_wheel(index, "there", "1", {"there.py": b""})
    (tmp_path / "out").mkdir()
    build_wheels(["there"], TARGET, tmp_path / "out", tmp_path, heard)
    assert heard.lines and not [line for line in heard.lines if line.startswith("Looking in")]


@pytest.mark.parametrize(
    ("file", "locked"),
    [
        ("six-1.16.0-py2.py3-none-any.whl", "six==1.16.0"),
        ("Big_Name.x-1.0+cpu-1build-cp311-cp311-linux_x86_64.whl", "big-name-x==1.0+cpu"),
        ("epoch-1!2.0-py3-none-any.whl", "epoch==1!2.0"),
    ],
)
def test_names_and_versions_are_read_from_the_files(file: str, locked: str) -> None:
    assert parse_wheels({file: FileSum(1, "ab")})[0].locked == f"{locked} --hash=sha256:ab"


@pytest.mark.parametrize("file", ["six-1.16.0.tar.gz", "six.whl", "a b-1-py3-none-any.whl", "x\n-1-py3-none-any.whl"])
def test_what_is_not_a_wheel_is_refused(file: str) -> None:
    with pytest.raises(BuildFailed, match="not named as a wheel"):
        parse_wheels({file: FileSum(1, "ab")})


def test_a_host_without_pip_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels, "ask", lambda *argv: "No module named pip")
    with pytest.raises(HostLacks, match="pip is not installed"):
        find_pip()


def test_the_c_library_of_a_directory_is_found_by_reading(tmp_path: Path) -> None:
    tree = {"lib64": Node("d", 0o755), "lib64/libc.so.6": Node("f", 0o755)}
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libc.so.6").write_bytes(b"\x7fELF GNU C Library stable release version 2.31.\n")
    assert directory_target(tmp_path, tree, 9) == debian_target(9, "2.31")
    musl = {"lib": Node("d", 0o755), "lib/ld-musl-x86_64.so.1": Node("f", 0o755)}
    assert directory_target(tmp_path, musl, 9).platforms[0].startswith("musllinux")
    assert "manylinux2014_x86_64" in directory_target(tmp_path, {}, 9).platforms
