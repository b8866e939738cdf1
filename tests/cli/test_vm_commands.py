"""The command line with real VMs: the demo, snapshots, and what bad input and bad luck get."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forkd.errors import Unsupported
from forkd.host.paths import Home
from forkd.image import Image

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

_DEADLINE_S = 200


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, built_home: Home, python_image: Image) -> Path:
    """A home of its own, with the image of the shared one."""
    root = tmp_path_factory.mktemp("home")
    (root / "images").symlink_to(built_home.images)
    return root


@contextmanager
def runtime_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        yield Path(path)
        assert list(Path(path).glob("vms/*")) == []


def environment(home: Path, runtime: Path) -> dict[str, str]:
    return {**os.environ, "FORKD_HOME": str(home), "FORKD_RUNTIME_DIR": str(runtime), "FORKD_BIND": "none"}


def down(env: dict[str, str]) -> None:
    done = forkd(env, "down")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def env(home: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of commands whose daemon, if they start one, is ended after the test."""
    with runtime_directory() as runtime:
        made = environment(home, runtime)
        yield made
        down(made)
    assert [path.name for path in (home / "snapshots").glob(".*")] == []


def forkd(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forkd.cli.main", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=_DEADLINE_S)


def create(env: dict[str, str], tag: str, *args: str) -> subprocess.CompletedProcess[str]:
    return forkd(env, "snapshot", "create", "--tag", tag, "--image", "python", "--memory", "256", *args)


def tags(env: dict[str, str]) -> list[str]:
    listed = json.loads(forkd(env, "snapshot", "ls", "--json").stdout)
    return [entry["tag"] for entry in listed if entry["status"] != "failed"]


def machines(env: dict[str, str]) -> list[int]:
    """The VMs whose files are in this runtime directory, templates aside."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        ours = b"qemu-system" in words and os.fsencode(env["FORKD_RUNTIME_DIR"]) in words
        if entry.name.isdigit() and ours and b"\0forkd-template-" not in words:
            found.append(int(entry.name))
    return found


def wait_for_machine(env: dict[str, str], process: subprocess.Popen[str]) -> int:
    while not (found := machines(env)):
        assert process.poll() is None
        time.sleep(0.01)
    return found[0]


@pytest.fixture(scope="module")
def original(home: Path) -> Path:
    with runtime_directory() as runtime:
        made = create(environment(home, runtime), "victim", "--json")
        down(environment(home, runtime))
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["tag"] == "victim"
    return home / "snapshots/victim"


@pytest.fixture
def victim(original: Path, tmp_path: Path) -> Path:
    """A copy of a good snapshot, to be harmed, in a home of its own."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "images").symlink_to(original.parents[1] / "images")
    subprocess.run(["cp", "-a", "--sparse=always", str(original), str(tmp_path / "snapshots")], check=True)
    return tmp_path / "snapshots/victim"


def test_the_demo_forks_evaluates_and_proves(env: dict[str, str]) -> None:
    run = forkd(env, "demo", "-n", "4", "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert (result["n"], result["ok"], result["distinct"]) == (4, 4, 4)
    assert result["isolation"].startswith("qemu-")
    assert 0 < result["fork_one_s"] < result["cold_boot_s"]
    assert result["per_child_ms"]["p50"] <= result["per_child_ms"]["p99"]
    assert result["unique_mib_per_child"] > 1
    assert result["idle_cpu_percent_per_child"] >= 0
    forked = result["way"] == "fork"
    assert forked or result["way"] == "start"
    assert (result["template_s"] is not None) == (result["template_mib"] is not None) == forked
    again = forkd(env, "demo", "-n", "2")
    assert again.returncode == 0
    assert "booting the parent" not in again.stderr  # the stored parent is used again
    assert "2 of 2 VMs" in again.stdout
    assert ("forked from a template" in again.stdout) == ("their template, made once" in again.stdout) == forked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["booting the parent", "warming up"])
def test_a_signal_while_a_snapshot_is_made_leaves_nothing(env: dict[str, str], moment: str, number: int) -> None:
    args = ["snapshot", "create", "--tag", "never", "--image", "python", "--warm", "import time; time.sleep(100)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forkd.cli.main", *args],
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if moment in line:
            break
    time.sleep(0.5)
    process.send_signal(number)
    process.send_signal(number)  # the impatient press it twice
    process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "never" not in tags(env)


def test_a_signal_while_the_demo_forks_leaves_nothing(env: dict[str, str]) -> None:
    assert forkd(env, "demo", "-n", "1", "--json").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "forkd.cli.main", "demo", "-n", "40"], env=env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "forking 40" in line:
            break
    wait_for_machine(env, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_snapshot_goes_on_without_its_command_and_can_be_given_up(env: dict[str, str]) -> None:
    assert forkd(env, "up").returncode == 0
    args = ["snapshot", "create", "--tag", "never", "--image", "python", "--warm", "import time; time.sleep(100)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forkd.cli.main", *args], env=env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.readline()
    process.kill()
    process.wait()
    process.stderr.close()
    [made] = [each for each in json.loads(forkd(env, "snapshot", "ls", "--json").stdout) if each["tag"] == "never"]
    assert made["status"] == "writing"
    deadline = time.monotonic() + 30
    while not machines(env) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(machines(env)) == 1
    assert forkd(env, "snapshot", "rm", "never").returncode == 0
    assert machines(env) == []
    assert "never" not in tags(env)


def test_a_fork_runs_answers_stays_and_ends(env: dict[str, str], original: Path) -> None:
    done = forkd(env, "fork", "victim", "-n", "2", "--json")
    assert done.returncode == 0, done.stderr
    one, two = (info["id"] for info in json.loads(done.stdout))
    kernel = forkd(env, "exec", one, "--", "uname", "-sn").stdout
    assert kernel.startswith("Linux ") and kernel != forkd(env, "exec", two, "--", "uname", "-sn").stdout
    assert forkd(env, "eval", one, "6 * 7").stdout == "42\n"
    source = Path(env["FORKD_HOME"]) / "sent"
    source.write_text("to the guest")
    assert forkd(env, "cp", str(source), f"{one}:/tmp/").returncode == 0
    assert forkd(env, "exec", one, "--", "cat", "/tmp/sent").stdout == "to the guest"
    assert forkd(env, "exec", two, "--", "cat", "/tmp/sent").returncode == 1
    assert forkd(env, "cp", f"{one}:/tmp/sent", "-").stdout == "to the guest"
    assert forkd(env, "pause", one).returncode == 0
    assert forkd(env, "resume", one).returncode == 0
    assert forkd(env, "down", "--keep").returncode == 0
    assert forkd(env, "eval", one, "_ if False else 43").stdout == "43\n"
    assert sorted(forkd(env, "rm", "--all").stdout.split()) == sorted([one, two])


def test_a_snapshot_is_warmed_and_its_template_is_shown(env: dict[str, str], original: Path) -> None:
    done = forkd(env, "snapshot", "warm", "victim")
    if done.returncode == Unsupported.exit_code:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("victim  template of ") and " MiB, made in " in done.stdout, done.stderr
    warmed = json.loads(forkd(env, "snapshot", "warm", "victim", "--json").stdout)
    assert (warmed["tag"], warmed["forks"]) == ("victim", 0)
    assert json.loads(forkd(env, "status", "--json").stdout)["templates"] == [warmed]
    assert f"1, {warmed['memory_bytes'] / 2**20:.1f} MiB" in forkd(env, "status").stdout
    heading, *rows = forkd(env, "snapshot", "ls").stdout.splitlines()
    assert "TEMPLATE" in heading
    assert [row.split()[0] for row in rows if " yes" in row] == ["victim"]
    assert forkd(env, "fork", "victim", "-n", "2").returncode == 0
    assert [info["way"] for info in json.loads(forkd(env, "ls", "--json").stdout)] == ["fork", "fork"]
    assert forkd(env, "rm", "--all").returncode == 0
    assert json.loads(forkd(env, "status", "--json").stdout)["templates"][0]["forks"] == 2


def test_a_fork_that_is_interrupted_leaves_no_vm(env: dict[str, str]) -> None:
    # One that takes its time, however fast the machine is.
    assert create(env, "slow", "--warm", "import forkd, time; forkd.on_fork(lambda: time.sleep(3))").returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "forkd.cli.main", "fork", "slow", "-n", "4"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_machine(env, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(forkd(env, "ls", "--json").stdout) == []
    assert machines(env) == []
    assert forkd(env, "snapshot", "rm", "slow").returncode == 0


def test_a_warm_up_that_raises_shows_its_traceback(env: dict[str, str]) -> None:
    run = create(env, "bad", "--warm", "import no_such_module")
    assert run.returncode == 13
    assert "ModuleNotFoundError" in run.stderr
    assert "import no_such_module" in run.stderr
    assert "bad" not in tags(env)


def test_a_warm_up_that_hangs_is_stopped(env: dict[str, str]) -> None:
    run = create(env, "bad", "--warm", "while True: pass", "--warm-timeout", "2")
    assert run.returncode == 13
    assert "within 2 s" in run.stderr and "--warm-timeout" in run.stderr


def test_a_warm_up_command_that_fails_shows_its_output(env: dict[str, str]) -> None:
    run = create(env, "bad", "--warm-command", "echo nearly there; exit 4")
    assert run.returncode == 13
    assert "exited with 4" in run.stderr and "nearly there" in run.stderr


def test_a_warm_up_that_kills_the_guest_shows_the_console(env: dict[str, str]) -> None:
    run = create(env, "bad", "--warm", "open('/proc/sysrq-trigger', 'w').write('c')")
    assert run.returncode == 11
    assert "kernel panic" in run.stderr and "Kernel panic - not syncing" in run.stderr


def test_memory_too_small_to_boot_is_said_at_once(env: dict[str, str]) -> None:
    begun = time.monotonic()
    run = forkd(env, "snapshot", "create", "--tag", "tiny", "--image", "python", "--memory", "40")
    assert run.returncode == 11
    assert "--memory" in run.stderr
    assert time.monotonic() - begun < 60
    assert forkd(env, "snapshot", "create", "--tag", "tiny", "--image", "python", "--memory", "1").returncode == 2


def test_memory_that_the_host_does_not_have_is_refused(env: dict[str, str]) -> None:
    run = forkd(env, "snapshot", "create", "--tag", "huge", "--image", "python", "--memory", "1000000")
    assert run.returncode == 6
    assert "available" in run.stderr


def test_a_qemu_killed_while_the_parent_boots_is_a_typed_error(env: dict[str, str]) -> None:
    # A warm-up without an end: where the boot takes less than a second, the parent is still being made.
    args = ["snapshot", "create", "--tag", "bad", "--image", "python", "--warm", "import time; time.sleep(100)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forkd.cli.main", *args], env=env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    machine = wait_for_machine(env, process)
    time.sleep(1)
    os.kill(machine, signal.SIGKILL)
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 11
    assert "crashed (killed by SIGKILL)" in said


def test_a_missing_qemu_is_named_with_its_package(env: dict[str, str], tmp_path: Path) -> None:
    for tool in ("setpriv", "busybox"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    run = forkd({**env, "PATH": str(tmp_path)}, "snapshot", "create", "--tag", "x", "--image", "python")
    assert run.returncode == 5
    assert "qemu" in run.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(env: dict[str, str], home: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "none", str(small)], check=True)
    try:
        (small / "images").symlink_to((home / "images").resolve())
        run = create({**env, "FORKD_HOME": str(small)}, "full")
        assert run.returncode == 6, run.stderr
        assert "space" in run.stderr
        assert list((small / "snapshots").iterdir()) == []
    finally:
        down({**env, "FORKD_HOME": str(small)})
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("memory", "truncate", "bytes instead of"),
        ("memory", "alter", "was altered"),
        ("state", "remove", "is missing"),
        ("state", "alter", "was altered"),
        ("manifest.json", "alter", "damaged"),
    ],
)
def test_a_damaged_snapshot_is_refused_by_the_name_of_the_file(
    env: dict[str, str], victim: Path, name: str, harm: str, said: str
) -> None:
    home = {**env, "FORKD_HOME": str(victim.parents[1])}
    assert forkd(home, "snapshot", "inspect", "victim").returncode == 0
    path = victim / name
    path.chmod(0o600)
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        os.truncate(path, 1000)
    else:
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\0changed\0")
    run = forkd(home, "fork", "victim")
    assert run.returncode == 8
    assert said in run.stderr
    assert (name if name != "manifest.json" else "manifest") in run.stderr
