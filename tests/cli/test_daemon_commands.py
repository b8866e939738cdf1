"""The daemon as the command line handles it: started when needed, found, shown, ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli, check
from support_processes import find_processes, has_ended, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")

_STARTED = re.compile(r"^forkd: started a daemon \(pid (\d+)\), which ends after 300 s .*: forkd down$", re.MULTILINE)


def create(cli: Cli, tag: str = "warm", *words: str) -> None:
    done = cli("snapshot", "create", "--image", "small", "--tag", tag, *words)
    assert done.returncode == 0, done.stderr


def test_a_daemon_is_started_when_one_is_needed_and_that_is_said_once(alone: Cli) -> None:
    first = alone("ls", "--json")
    assert (first.returncode, first.stdout) == (0, "[]\n")
    [pid] = _STARTED.findall(first.stderr)
    assert alone.pid() == int(pid)
    assert alone("ls", "--json").stderr == ""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert words[words.index("serve") :][:3] == ["serve", "--idle-exit-secs", "300"]
    assert alone.json("status")["idle_exit_secs"] == 300
    assert "ends after 300 s without sandboxes" in alone.ask("status").stdout
    check_detached(alone, int(pid))


def check_detached(alone: Cli, pid: int) -> None:
    """It has nothing to do with this terminal."""
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    log = alone.home / "daemon.log"
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(log)
    assert log.stat().st_mode & 0o777 == 0o600
    assert "Listening on" in log.read_text()


def test_commands_that_need_a_daemon_at_the_same_time_share_one(alone: Cli) -> None:
    starting = [alone.start("ls", "--json") for _ in range(4)]
    ends = [process.communicate(timeout=DEADLINE_S) for process in starting]
    assert [process.returncode for process in starting] == [0] * 4, ends
    claimed = [pid for _, said in ends for pid in _STARTED.findall(said)]
    assert claimed == [str(alone.pid())]
    wait_until(lambda: len(find_processes(str(alone.home), "\0serve\0")) == 1)
    assert alone.pid() == int(claimed[0])


def test_up_starts_one_that_stays_and_says_when_there_is_one(alone: Cli) -> None:
    log = alone.home / "daemon.log"
    log.write_text("x" * (2 << 20))
    first = alone("up", "--json")
    facts = json.loads(first.stdout)
    assert facts == {"pid": alone.pid(), "started": True, "url": f"unix://{alone.runtime}/forkd.sock"}
    assert b"--idle-exit-secs\x000\0" in Path(f"/proc/{facts['pid']}/cmdline").read_bytes()
    assert json.loads(alone.ask("up", "--json").stdout)["started"] is False
    again = alone.ask("up")
    assert again.returncode == 0
    assert f"A daemon runs already (pid {facts['pid']})" in again.stdout
    # Its log had grown, and was set aside.
    assert log.stat().st_size < 10_000
    assert (alone.home / "daemon.log.1").stat().st_size == 2 << 20


def test_up_makes_a_daemon_stay_that_was_to_end_when_idle(alone: Cli) -> None:
    assert alone("ls").returncode == 0
    pid = alone.pid()
    done = alone.ask("up")
    assert done.stdout.startswith(f"A daemon runs already (pid {pid})") and ", and stays;" in done.stdout
    assert (alone.pid(), alone.json("status")["idle_exit_secs"]) == (pid, 0)
    assert "ends after" not in alone.ask("status").stdout


def test_only_who_asks_for_tcp_gets_it_and_a_taken_port_is_no_obstacle(alone: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        (alone.home / "forkd.toml").write_text(f'bind = "{place}"\ntls_cert = "/absent"\ntls_key = "/absent"\n')
        assert alone("ls", FORKD_BIND=place).returncode == 0, "started on demand, it has a unix socket only"
        facts = alone.json("status")
        assert (facts["tcp_access"], facts["listeners"]) == ("off", [f"unix://{alone.runtime}/forkd.sock"])
        check(alone.ask("up", "--bind", place), 4, f"does not listen on {place}", "forkd down --keep")
        assert alone.ask("down").returncode == 0
        (alone.home / "forkd.toml").unlink()
        check(alone("up", FORKD_BIND=place), 5, "exited with 4")
        assert alone("up", FORKD_BIND="").returncode == 0, "nobody named a port"
        assert alone.json("status")["tcp_access"] == "off"
        assert alone.ask("down").returncode == 0
    done = alone("up", "--bind", "127.0.0.1:0", FORKD_BIND="")
    assert "asks for no token" in done.stderr and "forkd token create" in done.stderr
    assert "NO TOKEN is needed" in alone.ask("status").stdout
    assert alone.json("status")["tcp_access"] == "open"


def test_after_the_last_token_is_revoked_everything_says_how_to_get_in_again(alone: Cli) -> None:
    assert alone("up", FORKD_BIND="127.0.0.1:0").returncode == 0
    [_, url] = alone.json("status")["listeners"]
    assert alone.ask("ls", "--url", url).returncode == 0
    assert alone("token", "create", "a").returncode == 0
    assert alone.json("status")["tcp_access"] == "token"
    said = alone("token", "revoke", "a").stderr
    assert "lets nobody in over TCP" in said and "forkd token create NAME" in said
    assert f"remove {alone.home}/tokens.json" in said
    assert "nobody is let in" in alone.ask("status").stdout
    check(alone.ask("ls", "--url", url), 16, "No token is left", "forkd token create")
    token = alone("token", "create", "b").stdout.strip()
    assert alone.ask("ls", "--url", url, "--token", token).returncode == 0
    (alone.home / "tokens.json").unlink()
    assert alone.ask("ls", "--url", url).returncode == 0


def test_status_shows_the_daemon_and_never_starts_one(alone: Cli) -> None:
    absent = alone.ask("status")
    assert (absent.returncode, absent.stdout) == (18, "")
    assert absent.stderr == f"No daemon answers at unix://{alone.runtime}/forkd.sock\nhint: Start one with: forkd up\n"
    done = alone.ask("status", "--json")
    assert done.returncode == 18
    assert json.loads(done.stdout) == {"running": False, "url": f"unix://{alone.runtime}/forkd.sock"}
    assert list(alone.runtime.iterdir()) == []
    assert alone("up", FORKD_BIND="127.0.0.1:0").returncode == 0
    assert "forkd snapshot create" in alone.ask("tree").stderr
    listed = alone.ask("snapshot", "ls")
    assert (listed.returncode, listed.stdout.split()[0]) == (0, "TAG")
    assert "forkd snapshot create" in listed.stderr
    create(alone)
    alone.fork()
    facts = alone.json("status")
    assert (facts["running"], facts["ready"], facts["engine"], facts["isolation"]) == (True, True, "fake", "none")
    assert facts["sandboxes"] == {"running": 1, "paused": 0, "starting": 0, "stopping": 0, "dead": 0}
    assert (facts["snapshots"], facts["workspaces"], facts["templates"]) == (1, 0, [])
    [_, listener] = facts["listeners"]
    assert listener.startswith("http://127.0.0.1:")
    shown = alone.ask("status").stdout
    assert f"pid {facts['pid']}" in shown and "1 running" in shown and listener in shown
    assert facts["home"] == str(alone.home) and facts["home"] in shown
    assert alone.ask("status", "--url", listener).returncode == 0


def test_down_ends_the_sandboxes_and_the_daemon(alone: Cli) -> None:
    assert alone.ask("down").stdout == "No daemon runs\n"
    create(alone)
    assert alone("fork", "warm", "-n", "3").returncode == 0
    daemon = alone.pid()
    assert daemon is not None
    machines = [info["pid"] for info in alone.json("ls")]
    done = alone.ask("down")
    assert done.stdout == f"3 sandboxes ended, the daemon (pid {daemon}) stopped\n"
    assert all(map(has_ended, [daemon, *machines]))
    assert json.loads(alone.ask("down", "--json").stdout) == {"pid": None, "removed": 0}


def test_down_with_keep_leaves_the_sandboxes_to_the_next_daemon(alone: Cli) -> None:
    create(alone)
    sandbox = alone("fork", "warm", "-q").stdout.strip()
    assert alone("eval", sandbox, "kept = 7").returncode == 0
    done = alone("down", "--keep")
    assert re.fullmatch(r"The daemon \(pid \d+\) stopped; 1 sandbox keeps running\n", done.stdout)
    assert alone.pid() is None
    assert alone("eval", sandbox, "kept").stdout == "7\n"


def test_a_daemon_that_cannot_start_says_why(cli: Cli) -> None:
    done = cli("ls", FORKD_LOG_LEVEL="loud")
    assert done.returncode == 5
    assert re.search(r"^error: The daemon that was started \(pid \d+\) exited with 2$", done.stderr, re.MULTILINE)
    assert "  | error: FORKD_LOG_LEVEL cannot be 'loud'" in done.stderr
    assert "hint: " in done.stderr
    assert json.loads(cli("ls", "--json", FORKD_LOG_LEVEL="loud").stdout)["code"] == "host_lacks"


def test_a_conflict_with_somebody_who_is_no_daemon_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    path = cli.runtime / "taken"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        stop = threading.Event()
        thread = threading.Thread(target=refuse_all, args=(taken, stop))
        thread.start()
        try:
            done = cli("ls", FORKD_SOCKET=str(path))
        finally:
            stop.set()
            thread.join()
    assert done.returncode == 5
    assert "exited with 4" in done.stderr and f"Another daemon listens on {path}" in done.stderr
    path.unlink()
    (cli.runtime / "vms").rmdir()
    (cli.runtime / "daemon.lock").unlink()


def refuse_all(listener: socket.socket, stop: threading.Event) -> None:
    listener.settimeout(0.05)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            listener.accept()[0].close()


def test_a_home_that_cannot_be_written_is_a_typed_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check(cli.ask("ls", FORKD_HOME=str(tmp_path / "file/home")), 5, "cannot be made: Not a directory", "FORKD_HOME")


def test_an_interrupt_while_a_daemon_starts_leaves_at_most_the_daemon(alone: Cli) -> None:
    process = alone.start("ls")
    wait_until(lambda: (alone.home / "daemon.log").exists())
    process.finish(signal.SIGINT)
    assert process.returncode == 130
    # Whatever was begun comes up, and takes work.
    assert alone("ls").returncode == 0


def test_a_token_reaches_the_daemon_by_option_and_by_environment(alone: Cli) -> None:
    made = alone("token", "create", "me", "--json")
    token = json.loads(made.stdout)["token"]
    assert alone("up", FORKD_BIND="127.0.0.1:0").returncode == 0
    [_, url] = alone.json("status")["listeners"]
    assert alone.ask("ls", "--url", url, "--token", token).returncode == 0
    assert alone.ask("ls", FORKD_URL=url, FORKD_TOKEN=token).returncode == 0
    for wrong in ({}, {"FORKD_TOKEN": "wrong"}):
        done = alone.ask("ls", "--url", url, **wrong)
        check(done, 16)
        assert token not in done.stderr


def test_the_daemon_is_found_from_another_directory_with_a_relative_home(alone: Cli, tmp_path: Path) -> None:
    relative = {**alone.env, "FORKD_HOME": "home"}
    command = alone.command("ls", "--json")
    done = subprocess.run(command, env=relative, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home/daemon.log").exists()
    assert alone.pid() is not None
