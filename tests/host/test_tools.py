import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support_processes import has_ended, wait_until

from forkd.errors import BuildFailed, HostLacks, NoCapacity
from forkd.host.tools import find_tool, run_tool, tool_environment


def run_shell(script: str, *, deadline_s: float = 20.0, disk: Path | None = None) -> list[str]:
    lines: list[str] = []
    run_tool(
        ["sh", "-c", script],
        doing="Trying",
        failure=BuildFailed,
        deadline_s=deadline_s,
        on_line=lines.append,
        disk=disk,
    )
    return lines


def read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


@pytest.mark.parametrize(("tool", "package"), [("mkfs.erofs", "erofs-utils"), ("mmdebstrap", "mmdebstrap")])
def test_a_missing_tool_is_named_with_its_package(
    tool: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("forkd.host.tools._SBIN", str(tmp_path))
    with pytest.raises(HostLacks, match=tool) as caught:
        find_tool(tool)
    assert caught.value.hint == f"Install it: apt install {package}"


def test_a_tool_sees_the_proxies_but_not_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    monkeypatch.setenv("FORKD_TOKEN", "secret")
    environment = tool_environment(TMPDIR="/x")
    assert environment["HTTPS_PROXY"] == "http://proxy:1"
    assert environment["TMPDIR"] == "/x"
    assert "FORKD_TOKEN" not in environment


def test_lines_of_both_streams_arrive_and_bars_are_lines_too() -> None:
    assert run_shell("echo one; echo two >&2; printf '10%%\\r20%%\\r'; printf last") == [
        "one",
        "two",
        "10%",
        "20%",
        "last",
    ]


def test_control_characters_of_a_tool_do_not_reach_the_terminal() -> None:
    (line,) = run_shell("printf 'a\\033[31mb\\n'")
    assert "\x1b" not in line


def test_a_failure_carries_the_last_lines_only() -> None:
    with pytest.raises(BuildFailed, match=r"Trying failed \(exit status 3\)") as caught:
        run_shell("seq 1 10000; exit 3")
    assert caught.value.details is not None
    assert caught.value.details.splitlines()[-1] == "10000"
    assert len(caught.value.details.splitlines()) < 100


def test_one_endless_line_is_bounded() -> None:
    lines = run_shell("head -c 1000000 /dev/zero | tr '\\0' x")
    assert max(map(len, lines)) <= 4096


def test_a_flood_of_output_does_not_outrun_the_deadline() -> None:
    with pytest.raises(BuildFailed, match="did not end within"):
        run_shell("yes", deadline_s=0.5)


def test_a_full_disk_is_recognised_by_what_the_tool_says() -> None:
    with pytest.raises(NoCapacity):
        run_shell("echo 'x: write error: No space left on device' >&2; seq 1 1000; exit 1")


def test_a_daemon_that_holds_the_pipe_does_not_hold_us() -> None:
    started = time.monotonic()
    assert run_shell("sleep 60 & echo done") == ["done"]
    assert time.monotonic() - started < 5


def test_the_whole_group_dies_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="did not end within"):
        run_shell(f"sleep 60 & echo $! > {tmp_path}/pid; wait", deadline_s=0.5)
    wait_until(lambda: has_ended(int(read(tmp_path / "pid"))))


def test_the_whole_group_dies_at_an_interrupt(tmp_path: Path) -> None:
    def interrupt() -> None:
        int(wait_until(lambda: read(tmp_path / "pid")))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_shell(f"trap '' INT TERM; sleep 60 & echo $! > {tmp_path}/pid; wait")
    thread.join()
    wait_until(lambda: has_ended(int(read(tmp_path / "pid"))))


def test_an_interrupt_while_the_tool_is_started_kills_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            wait_until(lambda: read(tmp_path / "pid"))
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("forkd.host.tools.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_shell(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    wait_until(lambda: has_ended(int(read(tmp_path / "pid"))))


def test_the_tool_dies_when_we_are_killed(tmp_path: Path) -> None:
    script = (
        "from forkd.host.tools import run_tool; from forkd.errors import BuildFailed\n"
        f"run_tool(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'],"
        " doing='x', failure=BuildFailed, deadline_s=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    pid = int(wait_until(lambda: read(tmp_path / "pid")))
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(pid))
