"""The command line with real VMs: the demo, snapshots, and what bad input and bad luck get."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import Cli, Done, Running, ended
from support_images import made_home
from support_mounts import as_root, small_disk
from support_processes import wait_until

from forkd.errors import Unsupported
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

LONG = ("--image", "python", "--warm", "import time; time.sleep(100)")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, built_home: Home, python_image: Image) -> Iterator[Home]:
    """A home of its own, with the image of the shared one."""
    with made_home(tmp_path_factory.mktemp("home"), built_home.images) as made:
        yield made


@pytest.fixture
def cli(home: Home) -> Iterator[Cli]:
    """The daemon, if commands start one, is ended afterwards."""
    with ended(Cli(home, real=True)) as made:
        yield made
    assert [path.name for path in home.snapshots.glob(".*")] == []


def create(cli: Cli, tag: str, *words: str, **env: str) -> Done:
    return cli("snapshot", "create", "--tag", tag, "--image", "python", "--memory", "256", *words, **env)


def usable(cli: Cli) -> list[str]:
    return [entry["tag"] for entry in cli.json("snapshot", "ls") if entry["status"] != "failed"]


def machines(cli: Cli) -> list[int]:
    """The VMs whose files are in this runtime directory, templates aside."""
    found = find_marked(cli.runtime)
    return sorted(leader.pid for directory, leader in found.items() if not directory.name.startswith("template-"))


def wait_for_machine(cli: Cli, process: Running) -> int:
    while not (found := machines(cli)):
        assert process.poll() is None
        time.sleep(0.01)
    return found[0]


@pytest.fixture(scope="module")
def original(home: Home) -> Path:
    with ended(Cli(home, real=True)) as cli:
        made = create(cli, "victim", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["tag"] == "victim"
    return home.snapshots / "victim"


@pytest.fixture
def victim(original: Path, tmp_path: Path) -> Path:
    """A copy of a good snapshot, to be harmed, in a home of its own."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "images").symlink_to(original.parents[1] / "images")
    subprocess.run(["cp", "-a", "--sparse=always", str(original), str(tmp_path / "snapshots")], check=True)
    return tmp_path / "snapshots/victim"


def test_the_demo_forks_evaluates_and_proves(cli: Cli) -> None:
    result = cli.json("demo", "-n", "4")
    assert (result["n"], result["ok"], result["distinct"]) == (4, 4, 4)
    assert result["isolation"].startswith("qemu-")
    assert 0 < result["fork_one_s"] < result["cold_boot_s"]
    assert result["per_child_ms"]["p50"] <= result["per_child_ms"]["p99"]
    assert result["unique_mib_per_child"] > 1
    assert result["idle_cpu_percent_per_child"] >= 0
    forked = result["way"] == "fork"
    assert forked or result["way"] == "start"
    assert (result["template_s"] is not None) == (result["template_mib"] is not None) == forked
    again = cli("demo", "-n", "2")
    assert again.returncode == 0
    assert "booting the parent" not in again.stderr  # the stored parent is used again
    assert "2 of 2 VMs" in again.stdout
    assert ("forked from a template" in again.stdout) == ("their template, made once" in again.stdout) == forked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["booting the parent", "warming up"])
def test_a_signal_while_a_snapshot_is_made_leaves_nothing(cli: Cli, moment: str, number: int) -> None:
    process = cli.start("snapshot", "create", "--tag", "never", *LONG)
    process.until(moment)
    time.sleep(0.5)
    process.finish(number, times=2)  # the impatient press it twice
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "never" not in usable(cli)


def test_a_signal_while_the_demo_forks_leaves_nothing(cli: Cli) -> None:
    if "demo" not in usable(cli):
        assert cli("demo", "-n", "1", "--json").returncode == 0
    process = cli.start("demo", "-n", "40")
    process.until("forking 40")
    wait_for_machine(cli, process)
    process.finish(signal.SIGINT)
    assert process.returncode == 130


def test_a_snapshot_goes_on_without_its_command_and_can_be_given_up(cli: Cli) -> None:
    assert cli("up").returncode == 0
    process = cli.start("snapshot", "create", "--tag", "never", *LONG)
    process.until("")
    process.finish(signal.SIGKILL)
    [made] = [each for each in cli.json("snapshot", "ls") if each["tag"] == "never"]
    assert made["status"] == "writing"
    wait_until(lambda: machines(cli))
    assert len(machines(cli)) == 1
    assert cli("snapshot", "rm", "never").returncode == 0
    assert machines(cli) == []
    assert "never" not in usable(cli)


def test_a_fork_runs_answers_stays_and_ends(cli: Cli, original: Path) -> None:
    one, two = (info["id"] for info in cli.json("fork", "victim", "-n", "2"))
    kernel = cli("exec", one, "--", "uname", "-sn").stdout
    assert kernel.startswith("Linux ") and kernel != cli("exec", two, "--", "uname", "-sn").stdout
    assert cli("eval", one, "6 * 7").stdout == "42\n"
    source = cli.home / "sent"
    source.write_text("to the guest")
    assert cli("cp", str(source), f"{one}:/tmp/").returncode == 0
    assert cli("exec", one, "--", "cat", "/tmp/sent").stdout == "to the guest"
    assert cli("exec", two, "--", "cat", "/tmp/sent").returncode == 1
    assert cli("cp", f"{one}:/tmp/sent", "-").stdout == "to the guest"
    assert cli("pause", one).returncode == 0
    assert cli("resume", one).returncode == 0
    assert cli("down", "--keep").returncode == 0
    assert cli("eval", one, "_ if False else 43").stdout == "43\n"
    assert sorted(cli("rm", "--all").stdout.split()) == sorted([one, two])


def test_a_snapshot_is_warmed_and_its_template_is_shown(cli: Cli, original: Path) -> None:
    done = cli("snapshot", "warm", "victim")
    if done.returncode == Unsupported.exit_code:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("victim  template of ") and " MiB, made in " in done.stdout, done.stderr
    warmed = cli.json("snapshot", "warm", "victim")
    assert (warmed["tag"], warmed["forks"]) == ("victim", 0)
    assert cli.json("status")["templates"] == [warmed]
    assert f"1, {warmed['memory_bytes'] / 2**20:.1f} MiB" in cli("status").stdout
    heading, *rows = cli("snapshot", "ls").stdout.splitlines()
    assert "TEMPLATE" in heading
    assert [row.split()[0] for row in rows if " yes" in row] == ["victim"]
    assert cli("fork", "victim", "-n", "2").returncode == 0
    assert [info["way"] for info in cli.json("ls")] == ["fork", "fork"]
    assert cli("rm", "--all").returncode == 0
    assert cli.json("status")["templates"][0]["forks"] == 2


def test_a_fork_that_is_interrupted_leaves_no_vm(cli: Cli) -> None:
    # One that takes its time, however fast the machine is.
    assert create(cli, "slow", "--warm", "import forkd, time; forkd.on_fork(lambda: time.sleep(3))").returncode == 0
    process = cli.start("fork", "slow", "-n", "4")
    wait_for_machine(cli, process)
    process.finish(signal.SIGINT)
    assert process.returncode == 130
    assert cli.json("ls") == []
    assert machines(cli) == []
    assert cli("snapshot", "rm", "slow").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--warm", "import no_such_module"], 13, ["ModuleNotFoundError", "import no_such_module"]),
        (["--warm", "while True: pass", "--warm-timeout", "2"], 13, ["within 2 s", "--warm-timeout"]),
        (["--warm-command", "echo nearly there; exit 4"], 13, ["exited with 4", "nearly there"]),
        (
            ["--warm", "open('/proc/sysrq-trigger', 'w').write('c')"],
            11,
            ["kernel panic", "Kernel panic - not syncing"],
        ),
    ],
    ids=["raises", "hangs", "fails", "kills the guest"],
)
def test_a_warm_up_that_fails_says_how(cli: Cli, words: list[str], code: int, said: list[str]) -> None:
    run = create(cli, "bad", *words)
    assert run.returncode == code
    assert all(each in run.stderr for each in said)
    assert "bad" not in usable(cli)


def test_memory_too_small_to_boot_is_said_at_once(cli: Cli) -> None:
    begun = time.monotonic()
    run = cli("snapshot", "create", "--tag", "tiny", "--image", "python", "--memory", "40")
    assert run.returncode == 11
    assert "--memory" in run.stderr
    assert time.monotonic() - begun < 60
    assert cli("snapshot", "create", "--tag", "tiny", "--image", "python", "--memory", "1").returncode == 2


def test_memory_that_the_host_does_not_have_is_refused(cli: Cli) -> None:
    run = cli("snapshot", "create", "--tag", "huge", "--image", "python", "--memory", "1000000")
    assert run.returncode == 6
    assert "available" in run.stderr


def test_a_qemu_killed_while_the_parent_boots_is_a_typed_error(cli: Cli) -> None:
    # A warm-up without an end: where the boot takes less than a second, the parent is still being made.
    process = cli.start("snapshot", "create", "--tag", "bad", *LONG)
    machine = wait_for_machine(cli, process)
    time.sleep(1)
    try:
        os.kill(machine, signal.SIGKILL)
    except ProcessLookupError:
        pytest.fail(f"the VM ended by itself: {process.finish()}")
    said = process.finish()
    assert process.returncode == 11
    assert "crashed (killed by SIGKILL)" in said


def test_a_missing_qemu_is_named_with_its_package(cli: Cli, tmp_path: Path) -> None:
    for tool in ("setpriv", "busybox"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    run = cli("snapshot", "create", "--tag", "x", "--image", "python", PATH=str(tmp_path))
    assert run.returncode == 5
    assert "qemu" in run.stderr


@as_root
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(cli: Cli, home: Home, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "60m") as small:
        (small / "images").symlink_to(home.images.resolve())
        run = create(cli, "full", FORKD_HOME=str(small))
        assert cli("down", FORKD_HOME=str(small)).returncode == 0
        assert run.returncode == 6, run.stderr
        assert "space" in run.stderr
        assert list((small / "snapshots").iterdir()) == []


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
    cli: Cli, victim: Path, name: str, harm: str, said: str
) -> None:
    home = {"FORKD_HOME": str(victim.parents[1])}
    assert cli("snapshot", "inspect", "victim", **home).returncode == 0
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
    run = cli("fork", "victim", **home)
    assert run.returncode == 8
    assert said in run.stderr
    assert (name if name != "manifest.json" else "manifest") in run.stderr
