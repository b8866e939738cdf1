"""Whether processes can be forked here is tried on a real one, of which nothing stays."""

import os
import secrets
import signal
import subprocess
import sys

import pytest
from support_processes import find_processes, wait_until

from forkd.host.finding import Status
from forkd.host.procfork import trial

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_program_is_forked_for_real_here() -> None:
    assert trial.find_lack() is None
    assert trial.probe_live_forks().status is Status.OK


def test_a_program_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_PROGRAM", ("/nonexistent",))
    finding = trial.probe_live_forks()
    assert finding.status is Status.WARN
    assert "/nonexistent does not start: No such file or directory" in finding.found
    assert finding.remedy is not None and "ptrace" in finding.remedy


@pytest.mark.parametrize("point", ["fork.held", "fork.let_go"])
def test_of_a_trial_that_is_killed_nothing_stays(point: str) -> None:
    token = secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-c", "from forkd.host.procfork.trial import find_lack; find_lack()"],
        env={**os.environ, "FORKD_FAULT": point, "FORKD_TEST_TOKEN": token},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not find_processes(token), every_s=0.05)
