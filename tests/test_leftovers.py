"""`nothing_left` notices what is ours, and nothing else."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_leftovers
from support_leftovers import Holdings, find_left, left_clean, parse_mounts, take_holdings, temporary_directories
from support_processes import sleeping

_MOUNT = """
import subprocess, sys
from pathlib import Path
from support_leftovers import find_left, take_holdings
ours, theirs = Path(sys.argv[1]), Path(sys.argv[2])
before = take_holdings([ours])
for command in (
    ["-t", "tmpfs", "none", str(theirs / "there")],
    ["-t", "tmpfs", "none", str(ours / "with space")],
    ["--bind", str(ours), str(theirs / "bound")],
):
    Path(command[-1]).mkdir()
    subprocess.run(["mount", *command], check=True)
    print(find_left(before, take_holdings([ours])))
"""


@contextlib.contextmanager
def orphan(**variables: str) -> Iterator[int]:
    """A process that is nobody's child here any more, as a daemon or the process of a stranger is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")} | variables
    script = "sleep 60 </dev/null >/dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], env=env, stdout=subprocess.PIPE, timeout=30, check=True).stdout)
    try:
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":  # still the shell, or between the two
            time.sleep(0.01)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_below_us_is_noticed_until_somebody_asked_how_it_ended(tmp_path: Path) -> None:
    before = take_holdings([tmp_path])
    with sleeping() as process:
        (left,) = find_left(before, take_holdings([tmp_path]))
        assert left.startswith(f"process {process.pid}: ")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert find_left(before, take_holdings([tmp_path])) == [f"process {process.pid}: "]
    assert find_left(before, take_holdings([tmp_path])) == []


@pytest.mark.parametrize("name", ["FORKD_HOME", "FORKD_RUNTIME_DIR", "FORKD_VM"])
def test_a_process_that_lost_us_and_works_in_a_directory_of_ours_is_noticed(tmp_path: Path, name: str) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "link").symlink_to("ours")
    before = take_holdings([tmp_path / "ours"])
    with orphan(**{name: str(tmp_path / "link/vms")}) as pid:
        assert find_left(before, take_holdings([tmp_path / "ours"])) == [f"orphan {pid}: sleep 60"]


def test_a_process_of_somebody_else_is_none_of_ours(tmp_path: Path) -> None:
    before = take_holdings([tmp_path])
    with orphan(PWD=str(tmp_path)), orphan(FORKD_HOME=f"{tmp_path}-too"), orphan(FORKD_VM=str(tmp_path.parent)):
        assert find_left(before, take_holdings([tmp_path])) == []


def test_a_pid_that_was_given_to_another_process_is_another_process() -> None:
    before, after = Holdings({(7, 100): "old"}, {}, {}, {}), Holdings({(7, 200): "new"}, {}, {}, {})
    assert find_left(before, after) == ["process 7: new"]
    assert find_left(after, after) == []
    assert find_left(after, Holdings({}, {(7, 200): "new"}, {}, {})) == [], "it was there when it had a parent"


def test_mounts_of_and_in_our_directories_are_noticed_and_no_others(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "ours-too"
    ours.mkdir()
    theirs.mkdir()
    # In a mount namespace of its own: whatever becomes of this test, the machine keeps its mounts.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshared = ["unshare", *user, "--mount", "--propagation", "private", "--"]
    if subprocess.run([*unshared, "mount", "-t", "tmpfs", "none", str(ours)], check=False).returncode != 0:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        [*unshared, sys.executable, "-c", _MOUNT, str(ours), str(theirs)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    nothing, one, two = done.stdout.splitlines()
    assert nothing == "[]"
    assert one == f"['mount {ours}/with space']"
    assert f"'mount {theirs}/bound'" in two


def test_a_mount_is_looked_for_by_whole_names() -> None:
    line = "{} 30 0:50 {} {} rw,relatime shared:9 - tmpfs none rw"
    table = "\n".join(
        [
            line.format(41, "/", "/"),
            line.format(42, "/", "/tmp/pytest-10/a"),
            line.format(43, "/", "/tmp/pytest-1"),
            line.format(44, "/", r"/tmp/pytest-1/with\040space"),
            line.format(45, "/tmp/pytest-1/a", "/mnt"),
        ]
    )
    assert parse_mounts(table, ["/tmp/pytest-1"]) == {
        43: "/tmp/pytest-1",
        44: "/tmp/pytest-1/with space",
        45: "/mnt",
    }


def test_a_descriptor_is_noticed_by_what_it_refers_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first = os.open(tmp_path / "file", os.O_RDONLY)
    before = take_holdings([])
    second = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert find_left(before, take_holdings([])) == [f"descriptor of {tmp_path}/file"]
        os.close(first)
        assert find_left(before, take_holdings([])) == []
        # As many as before, and not the same.
        with socket.socket() as sock:
            inode = os.fstat(sock.fileno()).st_ino
            os.close(second)
            second = os.open("/dev/null", os.O_RDONLY)
            assert f"descriptor of socket:[{inode}]" in find_left(before, take_holdings([]))
    finally:
        os.close(second)


def test_directories_are_ours_as_soon_as_they_are_made() -> None:
    with tempfile.TemporaryDirectory(prefix="fkd-") as made:
        assert Path(made) in temporary_directories()
    other = subprocess.run(["mktemp", "-d"], stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout.strip()
    os.rmdir(other)
    assert Path(other) not in temporary_directories()


def test_a_block_that_leaves_something_fails_and_one_that_does_not_passes(tmp_path: Path) -> None:
    made: list[Path] = []
    with left_clean(lambda: made):
        made.append(tmp_path)
    with contextlib.ExitStack() as ended, pytest.raises(AssertionError, match="process"), left_clean(lambda: made):
        ended.enter_context(sleeping())


def test_an_orphan_that_ends_in_a_moment_is_not_left_and_one_that_stays_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as ended, left_clean(lambda: [tmp_path]):
        ended.enter_context(orphan(FORKD_VM=str(tmp_path / "vm")))
        threading.Timer(0.2, ended.close).start()
    monkeypatch.setattr(support_leftovers, "_ORPHAN_S", 0.2)
    with contextlib.ExitStack() as ended, pytest.raises(AssertionError, match="orphan"), left_clean(lambda: [tmp_path]):
        ended.enter_context(orphan(FORKD_VM=str(tmp_path / "vm")))
