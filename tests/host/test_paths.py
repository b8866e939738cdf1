"""Where forkd keeps things."""

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from forkd.errors import HostLacks
from forkd.host.finding import Status
from forkd.host.paths import ensure_home, ensure_private, find_home, probe_home
from forkd.wire.endpoint import find_runtime_directory, find_socket


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORKD_HOME", "FORKD_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_forkd_home_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("FORKD_HOME", "/here")
    home = find_home()
    assert (home.root, home.images, home.snapshots) == (Path("/here"), Path("/here/images"), Path("/here/snapshots"))


def test_else_it_is_the_data_directory_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert find_home().root == Path("/home/someone/.local/share/forkd")
    monkeypatch.setenv("FORKD_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert find_home().root == Path("/data/forkd")


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORKD_HOME", "here")
    assert find_home().root == tmp_path / "here"


def test_who_has_no_home_directory_can_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(lacking))
    monkeypatch.setenv("FORKD_HOME", "/here")
    assert find_home().root == Path("/here")


@dataclass(frozen=True)
class Flags:
    f_flag: int


@pytest.mark.parametrize(
    ("mounts", "flags", "places"),
    [
        ({"/run", "/tmp", "/dev/shm"}, 0, ("/run", "/tmp")),
        ({"/dev/shm"}, 0, ("/dev/shm", "/dev/shm")),
        ({"/run", "/dev/shm"}, 0, ("/run", "/dev/shm")),
        ({"/dev/shm"}, os.ST_NOEXEC, ("/run", "/tmp")),
        ({"/dev/shm"}, os.ST_NODEV | os.ST_NOSUID, ("/run", "/tmp")),
        ({"/dev/shm"}, os.ST_NOSUID, ("/dev/shm", "/dev/shm")),
        (set(), 0, ("/run", "/tmp")),
    ],
)
def test_the_runtime_directory_is_in_memory_where_there_is_a_place_for_it(
    monkeypatch: pytest.MonkeyPatch, mounts: set[str], flags: int, places: tuple[str, str]
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path in mounts)
    monkeypatch.setattr(os, "statvfs", lambda _: Flags(flags))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_home().runtime == Path(places[0]) / "forkd"
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert find_home().runtime == Path(places[1]) / "forkd-1234"


def test_the_runtime_directory_is_the_one_given_else_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_home().runtime == Path("/run/forkd")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert find_home().runtime == Path("/tmp/forkd-1234")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert find_home().runtime == Path("/run/user/1234/forkd")
    monkeypatch.setenv("FORKD_RUNTIME_DIR", "/short")
    assert find_home().runtime == Path("/short")


def test_each_home_has_a_runtime_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os.path, "ismount", lambda _: True)
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path)

    def runtime(**environ: str) -> Path:
        found = find_runtime_directory({"HOME": "/home/someone", **environ})
        assert found is not None
        return found

    monkeypatch.setenv("HOME", "/home/someone")
    default = runtime()
    assert runtime(FORKD_HOME="/home/someone/.local/share/forkd") == default == Path("/tmp/forkd-1234")
    assert runtime(FORKD_HOME="/data/forkd", XDG_DATA_HOME="/data") == default
    one, two = runtime(FORKD_HOME=str(tmp_path / "one")), runtime(FORKD_HOME=str(tmp_path / "two"))
    assert len({default, one, two}) == 3
    assert one.name.startswith("forkd-1234-") and len(one.name) == len("forkd-1234-") + 8
    assert runtime(FORKD_HOME="one") == runtime(FORKD_HOME=str(tmp_path / "link")) == one
    assert runtime(FORKD_HOME="one", XDG_RUNTIME_DIR="/run/user/1234").parent == Path("/run/user/1234")
    assert runtime(FORKD_HOME="one", FORKD_RUNTIME_DIR="/short") == Path("/short")
    assert find_socket({"FORKD_HOME": "one", "HOME": "/home/someone"}) == one / "forkd.sock"


@pytest.mark.parametrize("path", ["/" + "a" * 60, "/" + "ü" * 30])
def test_a_runtime_directory_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("FORKD_RUNTIME_DIR", path)
    with pytest.raises(HostLacks, match="too long") as caught:
        find_home()
    assert caught.value.hint is not None and "FORKD_RUNTIME_DIR" in caught.value.hint


def test_in_the_longest_runtime_directory_the_socket_of_a_sandbox_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = Path(f"/tmp/fkd-{secrets.token_hex(8)}".ljust(60, "r"))
    monkeypatch.setenv("FORKD_RUNTIME_DIR", str(longest))
    # The highest pid there is, and a start time after a year of uptime.
    directory = find_home().runtime / "4194304-3153600000" / "sb-0123456789"
    directory.mkdir(parents=True)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(directory / "agent.sock"))
        (directory / "agent.sock").unlink()
    finally:
        for path in (directory, directory.parent, longest):
            path.rmdir()


def test_a_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep/run"
    assert ensure_private(path) == path
    assert path.stat().st_mode & 0o777 == 0o700
    assert ensure_private(path) == path


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(HostLacks, match="not a directory of this user"):
            ensure_private(tmp_path / name)
    with pytest.raises(HostLacks, match="cannot be made"):
        ensure_private(tmp_path / "file/below")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(HostLacks, match="not a directory of this user") as caught:
        ensure_private(tmp_path / "run")
    assert caught.value.hint is not None and "FORKD_RUNTIME_DIR" in caught.value.hint


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_directory_others_may_write_to_is_refused_and_left_alone(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(HostLacks, match="Others may write"):
        ensure_private(path)
    assert path.stat().st_mode & 0o7777 == mode


def test_a_home_is_made_for_us_alone_and_one_that_others_may_only_read_is_taken(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = ensure_home(tmp_path / "home")
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    (tmp_path / "link").symlink_to(made)
    assert ensure_home(tmp_path / "link") == tmp_path / "link"
    assert probe_home(made).status is not Status.FAIL


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_home_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(mode)
    with pytest.raises(HostLacks, match="Others may write to the home") as caught:
        ensure_home(home)
    assert caught.value.hint is not None and "FORKD_HOME" in caught.value.hint
    assert probe_home(home).status is Status.FAIL


def test_a_home_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(HostLacks, match=r"(?m)may replace the home .*/open/home: they may write to .*/open$"):
        ensure_home(tmp_path / "open" / "home")
    (tmp_path / "open").chmod(0o1777)
    ensure_home(tmp_path / "open" / "home")


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(HostLacks, match="belongs to another user"):
        ensure_home(tmp_path)
