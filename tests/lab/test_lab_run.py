"""The lab machine itself, forked: what comes back of a run, and that nothing stays when one ends badly."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.errors import GuestDied, GuestTimeout
from forkd.guest.process import Process
from forkd.host.marked import find_marked
from lab import run
from lab.run import run_in_machine
from lab.selection import Asked

# The first run makes the machine, unless one before has.
pytestmark = [pytest.mark.vm, pytest.mark.build, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where results go. Afterwards no VM is left, nor a directory of one."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        monkeypatch.setenv("FORKD_RUNTIME_DIR", runtime)
        monkeypatch.setenv("FORKD_LAB_OUT", str(tmp_path / "results"))
        yield tmp_path / "results"
        assert find_marked(Path(runtime)) == {}
        assert list(Path(runtime).iterdir()) == []


def test_output_status_and_results_of_a_command_come_back(
    results: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    command = "echo $((6 * 7)); id -u >&2; nproc > $FORKD_LAB_OUT/processors; exit 7"
    assert run_in_machine(Asked(), command) == 7
    output = capfdbinary.readouterr()
    assert output.out == b"42\n"
    assert b"\n0\n" in output.err
    assert (results / "processors").read_text() == "2\n"
    assert (results / "console.log").is_file()


def test_a_machine_that_dies_is_an_error_and_its_console_is_kept(results: Path) -> None:
    with pytest.raises(GuestDied, match="kernel panic"):
        run_in_machine(Asked(), "echo c > /proc/sysrq-trigger")
    assert "Kernel panic" in (results / "console.log").read_text()


@pytest.mark.usefixtures("results")
def test_a_machine_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop_machine(process: Process, output: run.Output) -> None:
        for machine in find_marked(Path(os.environ["FORKD_RUNTIME_DIR"])).values():
            os.kill(machine.pid, signal.SIGSTOP)
        await pass_on(process, output)

    pass_on = run.pass_on
    monkeypatch.setattr(run, "pass_on", stop_machine)
    monkeypatch.setattr(run, "_ASK_EVERY_S", 1.0)
    monkeypatch.setattr(run, "_ANSWER_DEADLINE_S", 3.0)
    with pytest.raises(GuestTimeout):
        run_in_machine(Asked(), "sleep 600")


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_leaves_nothing(number: int, status: int) -> None:
    command = [sys.executable, "-m", "lab", "--shell", "echo running; sleep 600"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(number)
        assert process.wait(60) == status
