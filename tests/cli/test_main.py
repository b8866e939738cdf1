"""The command line as people use it: exit codes, hints, JSON, signals. No VM runs.

What starts something does so in a process of its own; mere refusals are heard in this one, which is faster.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support_images import make_image

from forkd.cli.main import main
from forkd.host.paths import Home
from forkd.model.names import parse_tag
from forkd.store.snapshots import SnapshotStore

pytestmark = pytest.mark.usefixtures("nothing_left")

_DEADLINE_S = 60
_BLOCK_RICH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
sys.meta_path.insert(0, Absent())
"""


CREATE = ("snapshot", "create", "--image", "small", "--engine", "fake", "--tag")


class Cli:
    """forkd with a home and a runtime directory of its own."""

    def __init__(self, home: Path, runtime: Path) -> None:
        self.home = home
        self.runtime = runtime
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")}
        self.env = {**kept, "FORKD_HOME": str(home), "FORKD_RUNTIME_DIR": str(runtime)}

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "forkd.cli.main", *words]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=_DEADLINE_S)

    def ask(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The same in this process."""
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in [name for name in os.environ if name.startswith("FORKD_")]:
                patch.delenv(name)
            for name, value in (self.env | env).items():
                patch.setenv(name, value)
            try:
                code = main(words)
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "forkd.cli.main", *words]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def create(self, tag: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self(*CREATE, tag, *words)

    def tags(self) -> list[str]:
        done = self.ask("snapshot", "ls", "--json")
        assert done.returncode == 0, done.stderr
        return [entry["tag"] for entry in json.loads(done.stdout)]

    @property
    def snapshots(self) -> Path:
        return self.home / "snapshots"


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """With one image, called small. Its runtime directory has to be empty at the end."""
    runtime = Path(tempfile.mkdtemp(prefix="fkd-", dir="/tmp"))
    make_image(Home(tmp_path / "home", runtime))
    yield Cli(tmp_path / "home", runtime)
    left = [path.name for path in runtime.iterdir()]
    shutil.rmtree(runtime)
    assert left == []
    assert list((tmp_path / "home").glob("*/.staging-*")) == []


def check(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """An error as people see it: a sentence and a hint on standard error, nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    for each in said:
        assert each in done.stderr


def check_last(done: subprocess.CompletedProcess[str], code: int, said: str) -> None:
    """The same after progress was shown."""
    *_, sentence, hint = done.stderr.splitlines()
    check(subprocess.CompletedProcess(done.args, done.returncode, done.stdout, f"{sentence}\n{hint}"), code, said)


def test_an_unknown_command_is_bad_usage(cli: Cli) -> None:
    for words in (["fly"], [], ["snapshot"], ["snapshot", "fly"], ["snapshot", "create"], ["demo", "-n", "many"]):
        done = cli.ask(*words)
        assert done.returncode == 2
        assert "usage: forkd" in done.stderr
        assert "Traceback" not in done.stderr


def test_help_and_version_are_no_errors(cli: Cli) -> None:
    assert "snapshot" in cli.ask("--help").stdout
    assert cli.ask("--version").stdout.startswith("forkd ")


def test_the_console_script_is_the_same_program(cli: Cli) -> None:
    script = Path(sys.executable).with_name("forkd")
    done = subprocess.run(
        [script, "snapshot", "inspect", "nothing"], env=cli.env, capture_output=True, text=True, timeout=_DEADLINE_S
    )
    check(done, 3, "There is no snapshot nothing")


def test_what_is_unknown_is_not_found_and_how_to_find_it_is_told(cli: Cli) -> None:
    check(cli.ask("snapshot", "inspect", "nothing"), 3, "There is no snapshot nothing", "forkd snapshot ls")
    check(cli.ask("snapshot", "rm", "nothing"), 3, "There is no snapshot nothing")
    check(cli.ask("image", "inspect", "nothing"), 3, "There is no image nothing", "forkd image")
    unknown = cli.ask("snapshot", "create", "--tag", "x", "--image", "nothing", "--engine", "fake")
    check(unknown, 3, "There is no image nothing")
    assert cli.tags() == []


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a" * 65, "ä", "🐍", "a\nb", " "])
def test_illegal_names_are_refused(cli: Cli, name: str) -> None:
    check(cli.ask("snapshot", "inspect", name), 2, "is not a legal snapshot tag", "1 to 64")
    check(cli.ask("snapshot", "create", "--tag", name, "--image", "small"), 2, "is not a legal snapshot tag")
    check(cli.ask("snapshot", "create", "--tag", "x", "--image", name), 2, "is not a legal image name")


def test_bytes_that_are_no_text_are_refused_like_other_names(cli: Cli) -> None:
    check(cli.ask("snapshot", "inspect", os.fsdecode(b"\xff")), 2, "'\\udcff' is not a legal snapshot tag")
    check(cli.ask(*CREATE, "x", "--warm", os.fsdecode(b"'\xff'")), 2, "not UTF-8")


@pytest.mark.parametrize("n", ["0", "-1", "100000"])
def test_a_demo_of_no_or_too_many_children_is_refused_at_once(cli: Cli, n: str) -> None:
    check(cli.ask("demo", "-n", n, "--engine", "fake"), 2, f"Cannot fork {n} children", "Use 1 to 1000")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "1"], "1 MiB of memory"),
        (["--memory", "99999999"], "MiB of memory"),
        (["--vcpus", "0"], "0 vCPUs"),
        (["--warm-timeout", "0"], "no time limit"),
        (["--warm-timeout", "nan"], "no time limit"),
        (["--warm", "1", "--warm-script", "/dev/null"], "--warm and --warm-script exclude each other"),
        (["--warm-script", "/no/such/script"], "/no/such/script cannot be read: No such file or directory"),
        (["--warm-script", "/etc"], "/etc cannot be read: Is a directory"),
        (["--warm-script", "/dev/zero"], "larger than"),
        (["--warm-script", sys.executable], "cannot be read: it is not UTF-8 text"),
        (["--engine", "warp"], "There is no engine 'warp'"),
    ],
    ids=lambda each: " ".join(each)[:30] if isinstance(each, list) else None,
)
def test_a_request_that_can_never_work_is_refused(cli: Cli, words: list[str], said: str) -> None:
    check(cli.ask(*CREATE, "x", *words), 2, said)
    assert not cli.snapshots.exists()


def test_an_unknown_engine_is_refused_wherever_it_is_named(cli: Cli) -> None:
    check(cli.ask("demo", "--engine", "warp"), 2, "There is no engine 'warp'", "qemu")
    check(cli.ask("demo", FORKD_ENGINE="warp"), 2, "There is no engine 'warp'")


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["snapshot", "inspect", "nothing", "--json"], 3, "not_found"),
        (["snapshot", "rm", "nothing", "--json"], 3, "not_found"),
        (["snapshot", "inspect", "a/b", "--json"], 2, "invalid_input"),
        (["image", "inspect", "nothing", "--json"], 3, "not_found"),
        (["demo", "-n", "0", "--json"], 2, "invalid_input"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else None,
)
def test_with_json_errors_are_json_too(cli: Cli, words: list[str], code: int, kind: str) -> None:
    done = cli.ask(*words)
    assert done.returncode == code
    error = json.loads(done.stdout)
    assert error["code"] == kind
    assert error["error"] and error["hint"]
    assert done.stderr == ""


def test_a_traceback_of_the_warm_up_is_in_the_error(cli: Cli) -> None:
    done = cli.create("x", "--warm", "1 / 0")
    assert done.returncode == 13
    assert "error: The warm-up raised ZeroDivisionError: division by zero\n" in done.stderr
    assert "  | Traceback" in done.stderr
    shown = cli.create("x", "--warm", "1 / 0", "--json")
    assert "ZeroDivisionError" in json.loads(shown.stdout)["details"]
    assert cli.tags() == []


def test_a_snapshot_is_created_listed_inspected_replaced_and_removed(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text("past = 'äöü'\n")
    made = cli.create("warm", "--warm-script", str(script), "--memory", "300", "--json")
    assert made.returncode == 0, made.stderr
    facts = json.loads(made.stdout)
    assert (facts["tag"], facts["memory_mib"], facts["engine"], facts["warm"]) == (
        "warm",
        300,
        "fake",
        "past = 'äöü'\n",
    )
    listed = cli.ask("snapshot", "ls").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["TAG", "warm"]
    assert json.loads(cli.ask("snapshot", "inspect", "warm", "--json").stdout) == facts
    assert facts["image_id"] in cli.ask("snapshot", "inspect", "warm").stdout
    check(cli.create("warm"), 4, "exists already", "--replace")
    assert cli.create("warm", "--warm", "new = 1", "--replace").returncode == 0
    assert json.loads(cli.ask("snapshot", "inspect", "warm", "--json").stdout)["warm"] == "new = 1"
    check(cli.ask("image", "rm", "small"), 4, "in use")
    removed = cli.ask("snapshot", "rm", "warm", "--json")
    assert json.loads(removed.stdout) == {"removed": ["warm"]}
    assert cli.tags() == []


def test_a_long_tag_is_not_folded_for_who_reads_a_pipe(cli: Cli) -> None:
    tag = "t" * 64
    assert cli.create(tag, "--warm", "x = 'a rather long piece of code'").returncode == 0
    lines = cli.ask("snapshot", "ls").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(tag + " ")


def test_a_snapshot_in_use_is_not_removed(cli: Cli) -> None:
    assert cli.create("warm").returncode == 0
    with SnapshotStore(cli.snapshots).held(parse_tag("warm")):
        check(cli("snapshot", "rm", "warm"), 4, "Snapshot warm is in use")
        check_last(cli.create("warm", "--replace"), 4, "Snapshot warm is in use")
    assert cli.tags() == ["warm"]


def test_several_snapshots_are_removed_together_or_not_at_all(cli: Cli) -> None:
    for tag in ("a", "b"):
        assert cli.create(tag).returncode == 0
    check(cli.ask("snapshot", "rm", "a", "nothing", "b"), 3, "There is no snapshot nothing")
    check(cli.ask("snapshot", "rm", "a", "b/c"), 2, "not a legal snapshot tag")
    assert cli.tags() == ["a", "b"]
    assert cli.ask("snapshot", "rm", "b", "a", "b").returncode == 0
    assert cli.tags() == []


def test_a_damaged_snapshot_is_listed_as_such_beside_the_others_and_can_be_removed(cli: Cli) -> None:
    for tag in ("good", "hurt"):
        assert cli.create(tag).returncode == 0
    (cli.snapshots / "hurt/manifest.json").write_text("{")
    (cli.snapshots / "not.ours").mkdir()
    done = cli.ask("snapshot", "ls")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TAG", "good"]
    assert "warning: The manifest of snapshot hurt is damaged" in done.stderr
    assert "hint: Remove it and make it again: forkd snapshot rm hurt" in done.stderr
    entries: list[dict[str, Any]] = json.loads(cli.ask("snapshot", "ls", "--json").stdout)
    assert [entry["tag"] for entry in entries] == ["good", "hurt"]
    assert "error" not in entries[0]
    assert (entries[1]["code"], "damaged" in entries[1]["error"]) == ("snapshot_damaged", True)
    check(cli.ask("snapshot", "inspect", "hurt"), 8, "The manifest of snapshot hurt is damaged")
    check(cli.ask("image", "rm", "small"), 8, "snapshot hurt", "forkd snapshot rm hurt")
    assert cli.ask("snapshot", "rm", "hurt").returncode == 0
    assert cli.tags() == ["good"]
    (cli.snapshots / "good/journal").unlink()
    check(cli.ask("snapshot", "inspect", "good"), 8, "The file journal of snapshot good is missing")
    check(cli.ask("image", "rm", "small"), 4, "in use")
    assert cli.ask("snapshot", "rm", "good").returncode == 0


def start_long_warm_up(cli: Cli) -> tuple[subprocess.Popen[str], list[int]]:
    """The process, and those of its machine, in the middle of the warm-up."""
    process = cli.start(*CREATE, "never", "--warm", "import time; time.sleep(60)")
    assert process.stderr is not None
    for line in process.stderr:
        if "warming up" in line:
            break
    deadline = time.monotonic() + 10
    while not (pids := list(cli.runtime.glob("*/*/pid"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    return process, [int(path.read_text().split()[0]) for path in pids]


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_snapshot_is_made_leaves_nothing(cli: Cli, number: int, code: int, times: int) -> None:
    process, machines = start_long_warm_up(cli)
    assert len(machines) == 1
    for _ in range(times):  # the impatient press it more than once
        process.send_signal(number)
        time.sleep(0.02)
    _, said = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == code
    assert "Traceback" not in said
    assert not Path(f"/proc/{machines[0]}").exists()
    assert list(cli.runtime.iterdir()) == []
    assert list(cli.snapshots.iterdir()) == []


def test_a_forkd_that_is_killed_takes_its_machine_with_it_and_the_next_one_cleans_up(cli: Cli) -> None:
    process, machines = start_long_warm_up(cli)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{machines[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{machines[0]}").exists()
    assert cli.tags() == []
    assert len(list(cli.runtime.iterdir())) == len(list(cli.snapshots.iterdir())) == 1
    assert cli.create("later").returncode == 0
    assert list(cli.runtime.iterdir()) == []
    assert [path.name for path in cli.snapshots.iterdir()] == ["later"]


def test_a_hang_up_that_was_to_be_ignored_is(cli: Cli) -> None:
    command = [sys.executable, "-m", "forkd.cli.main", *CREATE, "kept"]
    process = subprocess.Popen(
        ["nohup", *command, "--warm", "import time; time.sleep(0.5)"],
        env=cli.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "warming up" in line:
            break
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0
    assert cli.tags() == ["kept"]


def test_a_reader_that_goes_away_is_no_error(cli: Cli) -> None:
    process = cli.start("snapshot", "ls", "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(_DEADLINE_S) == 0
    process.stderr.close()


def test_the_base_install_says_what_to_install(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BLOCK_RICH)
    done = cli("snapshot", "ls", PYTHONPATH=str(tmp_path))
    check(done, 5, "needs the Python package rich", "pip install 'forkd[server]'")


def test_a_home_that_cannot_be_written_is_a_typed_error(cli: Cli, tmp_path: Path) -> None:
    shutil.rmtree(cli.snapshots, ignore_errors=True)
    cli.snapshots.touch()
    check(cli.create("x"), 5, "cannot be changed", "FORKD_HOME")


def test_a_runtime_directory_that_cannot_be_used_is_a_typed_error(cli: Cli, tmp_path: Path) -> None:
    check(cli.ask(*CREATE, "x", FORKD_RUNTIME_DIR="/tmp/" + "x" * 80), 5, "too long", "FORKD_RUNTIME_DIR")
    (cli.runtime / "link").symlink_to(tmp_path)
    check(cli.ask(*CREATE, "x", FORKD_RUNTIME_DIR=str(cli.runtime / "link")), 5, "not a directory of this user")
    (cli.runtime / "link").unlink()
