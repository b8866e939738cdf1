"""Firecracker and its jailer: found, asked for their version, judged. Programs here are scripts, or the real ones."""

import os
import shutil
import time
from pathlib import Path

import pytest

from forkd.errors import HostLacks
from forkd.host import firecracker, tools
from forkd.host.finding import Finding, Status
from forkd.host.firecracker import find_binaries, judge_version, parse_version, probe_firecracker

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """First on PATH, and the only place that may have a firecracker."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.delenv("FORKD_FIRECRACKER", raising=False)
    monkeypatch.delenv("FORKD_JAILER", raising=False)
    monkeypatch.setattr(tools, "_SBIN", "/nonexistent")
    elsewhere = [place for place in os.environ["PATH"].split(":") if not (Path(place) / "firecracker").exists()]
    monkeypatch.setenv("PATH", ":".join([str(directory), *elsewhere]))
    return directory


@pytest.fixture(params=[True, False], ids=["root", "not root"])
def root(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(firecracker, "_is_root", lambda: bool(request.param))
    return bool(request.param)


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker, "_is_root", lambda: True)


def put(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def put_both(directory: Path, version: str = "1.12.1") -> tuple[Path, Path]:
    return (
        put(directory / "firecracker", f"echo 'Firecracker v{version}'; echo; echo 2026-11-16 exiting successfully"),
        put(directory / "jailer", f"echo 'Jailer v{version}'"),
    )


def refused(match: str | None = None) -> HostLacks:
    with pytest.raises(HostLacks, match=match) as caught:
        find_binaries()
    return caught.value


def probe() -> tuple[Finding, Finding]:
    found, jailer = probe_firecracker()
    assert (found.name, jailer.name) == ("firecracker", "jailer")
    return found, jailer


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Firecracker v1.12.1\n\n2025-09-26 [anonymous-instance:main] exit_code=0\n", "1.12.1"),
        ("Firecracker v1.7.0\n", "1.7.0"),
        ("Firecracker v1.13.0-dev-3-gabc\n", "1.13.0-dev-3-gabc"),
        ("Jailer 1.10.1", "1.10.1"),
    ],
)
def test_a_version_is_read_with_its_suffix(text: str, version: str) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "Firecracker", "hello v1.7.0", "2026-11-16T02:31:43.870 exiting"])
def test_what_tells_no_version_is_none_of_ours(text: str) -> None:
    with pytest.raises(HostLacks, match="does not print its version"):
        parse_version(text)


def test_both_are_found_on_path_and_the_jailer_only_for_root(bin_directory: Path, root: bool) -> None:
    program, jailer = put_both(bin_directory)
    found = find_binaries()
    assert (found.firecracker, found.version) == (program, "1.12.1")
    assert found.jailer == (jailer if root else None)
    here, jail = probe()
    assert (here.status, here.found) == (Status.OK, f"1.12.1 at {program}")
    if root:
        assert (jail.status, jail.found) == (Status.OK, f"1.12.1 at {jailer}")
    else:
        assert jail.status is Status.WARN and jail.remedy
        assert "no cell" in jail.found and "best-effort" in jail.found


@pytest.mark.usefixtures("as_root")
def test_a_release_is_found_behind_a_link_with_its_own_jailer_beside_it(bin_directory: Path, tmp_path: Path) -> None:
    release = tmp_path / "release-v1.12.1-x86_64"
    release.mkdir()
    program = put(release / "firecracker-v1.12.1-x86_64", "echo Firecracker v1.12.1")
    jailer = put(release / "jailer-v1.12.1-x86_64", "echo Jailer v1.12.1")
    put(bin_directory / "jailer", "echo Jailer v1.0.0")
    (bin_directory / "firecracker").symlink_to(program)
    found = find_binaries()
    assert (found.firecracker, found.jailer) == (program, jailer)


@pytest.mark.usefixtures("as_root")
def test_settings_come_before_path(bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_both(bin_directory)
    other = tmp_path / "other"
    other.mkdir()
    program, beside = put_both(other, "1.9.0")
    monkeypatch.setenv("FORKD_FIRECRACKER", str(program))
    assert (find_binaries().firecracker, find_binaries().jailer) == (program, beside)
    mine = put(tmp_path / "my-jailer", "echo Jailer v1.9.0")
    monkeypatch.setenv("FORKD_JAILER", str(mine))
    assert find_binaries().jailer == mine
    beside.unlink()
    monkeypatch.delenv("FORKD_JAILER")
    assert find_binaries().jailer == bin_directory / "jailer"


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("setting", ["FORKD_FIRECRACKER", "FORKD_JAILER"])
@pytest.mark.parametrize("what", ["nothing", "directory", "not executable"])
def test_a_setting_that_names_no_program_is_not_passed_over(
    bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, what: str
) -> None:
    put_both(bin_directory)
    path = tmp_path / "named"
    if what == "directory":
        path.mkdir()
    elif what == "not executable":
        path.write_text("#!/bin/sh\n")
    monkeypatch.setenv(setting, str(path))
    assert refused(f"(?m)^{setting} is {path}, which is not a program$").hint
    finding = probe()[0 if setting == "FORKD_FIRECRACKER" else 1]
    assert finding.status is Status.FAIL and setting in finding.found and finding.remedy


@pytest.mark.usefixtures("bin_directory", "root")
def test_where_there_is_none_an_engine_is_refused_and_doctor_only_mentions_it() -> None:
    hint = refused(r"(?m)^firecracker is not installed$").hint or ""
    assert "FORKD_FIRECRACKER" in hint and "releases" in hint
    found, jailer = probe()
    assert (found.status, jailer.status) == (Status.INFO, Status.INFO)
    assert "not installed" in found.found and "releases" in found.found


def test_without_a_jailer_only_others_than_root_go_on(bin_directory: Path, root: bool) -> None:
    _, jailer = put_both(bin_directory)
    jailer.unlink()
    if not root:
        assert find_binaries().jailer is None
        return
    hint = refused("jailer").hint or ""
    assert "FORKD_JAILER" in hint
    found, jail = probe()
    assert (found.status, jail.status) == (Status.OK, Status.FAIL)
    assert jail.remedy == hint


@pytest.mark.usefixtures("as_root")
def test_a_program_that_no_jailer_would_take_is_refused_before_it_is_tried(
    bin_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_both(bin_directory)
    monkeypatch.setenv("FORKD_FIRECRACKER", str(put(tmp_path / "fc", "echo Firecracker v1.12.1")))
    refused("with firecracker in its name")
    assert probe()[1].status is Status.FAIL and probe()[1].remedy


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("version", ["1.6.9", "1.0.0", "0.25.2"])
def test_one_that_is_too_old_is_refused_with_its_version(bin_directory: Path, version: str) -> None:
    put_both(bin_directory, version)
    assert "1.7 or newer" in (refused(f"version {version}, too old").hint or "")
    found, _ = probe()
    assert found.status is Status.FAIL and version in found.found and found.remedy


@pytest.mark.parametrize(
    ("version", "status"),
    [("1.7.0", Status.WARN), ("1.7.9", Status.WARN), ("1.8.0", Status.OK), ("1.12.1", Status.OK), ("2.0", Status.OK)],
)
def test_one_without_acpi_runs_and_is_doubtful(bin_directory: Path, version: str, status: Status) -> None:
    put_both(bin_directory, version)
    assert find_binaries().version == version
    finding = judge_version(Path("/f"), version)
    assert finding.status is status and version in finding.found
    assert bool(finding.remedy) == (status is Status.WARN)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo first; echo the last words >&2; exit 3", "the last words"),
        ("echo dying; kill -ABRT $$", "dying"),
        ("echo no number here", "no number here"),
    ],
)
def test_one_that_crashes_is_refused_with_its_last_lines(bin_directory: Path, script: str, told: str) -> None:
    put(bin_directory / "firecracker", script)
    error = refused()
    assert told in (error.details or "") and error.hint
    found, jailer = probe()
    assert found.status is Status.FAIL and told in found.found
    assert jailer.status is Status.INFO


@pytest.mark.usefixtures("as_root")
def test_a_jailer_that_crashes_is_refused_too(bin_directory: Path) -> None:
    put_both(bin_directory)
    put(bin_directory / "jailer", "echo broken; exit 1")
    refused("jailer --version failed")
    assert probe()[1].status is Status.FAIL


def test_one_that_hangs_is_given_up(bin_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bin_directory / "firecracker", "echo waiting; sleep 60 & wait")
    monkeypatch.setattr(firecracker, "_ANSWER_S", 0.5)
    began = time.monotonic()
    assert refused("did not end within").details == "waiting"
    assert time.monotonic() - began < 10.0


def test_one_that_is_no_program_is_refused(bin_directory: Path) -> None:
    path = bin_directory / "firecracker"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    refused("--version failed")


def test_the_real_one_is_accepted() -> None:
    if (os.environ.get("FORKD_FIRECRACKER") or shutil.which("firecracker")) is None:
        pytest.skip("no firecracker on PATH or in FORKD_FIRECRACKER")
    found = find_binaries()
    assert found.version[0].isdigit() and found.firecracker.is_file()
    here, jailer = probe()
    assert here.status is Status.OK and found.version in here.found
    assert jailer.status is (Status.OK if os.geteuid() == 0 else Status.WARN)
