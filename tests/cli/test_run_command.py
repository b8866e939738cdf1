"""`forkd run`: a sandbox for one command. `inspect`, `timeout`, `exec -d`, `logs`, `events`: looking after others."""

import json
import signal
import subprocess

import pytest
from cli_cases import Cli, check
from support_recording import Reply, recording

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_run_is_a_fork_a_command_and_nothing_afterwards(warm: Cli) -> None:
    done = warm("run", "warm", "-e", "A=b", "--", "sh", "-c", "cat; echo $A; echo err >&2; exit 7", stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, "in\nb\n", "err\n")
    assert warm.ids() == []


def test_a_run_fails_as_exec_does_and_leaves_nothing(warm: Cli) -> None:
    check(warm("run", "wram", "--", "true"), 125, "There is no snapshot wram", "Did you mean warm?")
    check(warm("run", "warm", "--", "no-such-program"), 127, "No such file")
    check(warm("run", "warm", "--timeout", "0.3", "--", "sleep", "60"), 124, "within 0.3 s")
    assert warm("run", "warm", "--", "sh", "-c", "kill -9 $$").returncode == 137
    done = warm("run", "--json", "warm", "--", "sh", "-c", "echo hi; exit 3")
    assert (done.returncode, json.loads(done.stdout)["stdout"]) == (3, "hi\n")
    assert warm.ids() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE], ids=["no input", "input"])
def test_a_signal_removes_the_sandbox_of_a_run(warm: Cli, number: int, code: int, stdin: int) -> None:
    process = warm.start("run", "warm", "--", "sh", "-c", "echo started; sleep 60", stdin=stdin)
    assert process.line() == "started\n"
    assert len(warm.ids()) == 1
    process.finish(number)
    assert process.returncode == code
    assert warm.ids() == []


def test_a_run_that_is_killed_outright_leaves_a_sandbox_that_ends_by_itself(warm: Cli) -> None:
    process = warm.start("run", "warm", "--timeout", "1h", "--", "sh", "-c", "echo started; sleep 60")
    assert process.line() == "started\n"
    process.finish(signal.SIGKILL)
    [info] = warm.json("ls")
    assert 3600 < info["deadline_unix"] - info["created_at_unix"] < 3700


def test_what_is_kept_can_be_found(warm: Cli) -> None:
    done = warm("run", "warm", "--keep", "-l", "a=b", "--", "sh", "-c", "echo mine > /tmp/kept")
    [info] = warm.json("ls", "-l", "a=b")
    assert f"forkd rm {info['id']}" in done.stderr
    assert warm.ask("kill", info["id"]).stdout == f"{info['id']}\n"


def test_a_tag_or_a_name_that_was_mistyped_gets_advice(warm: Cli) -> None:
    for words in (
        ["fork", "wram"],
        ["snapshot", "inspect", "wram"],
        ["workspace", "create", "w", "--snapshot", "wram"],
    ):
        check(warm.ask(*words), 3, "There is no snapshot wram", "Did you mean warm?")
    done = warm.ask("fork", "nothing-like-it")
    check(done, 3, "There is no snapshot nothing-like-it")
    assert "Did you mean" not in done.stderr
    warm.ask("rename", warm.fork(), "web")
    check(warm.ask("inspect", "wbe"), 3, "There is no sandbox wbe", "Did you mean web?")


def test_all_about_a_sandbox_can_be_seen(warm: Cli) -> None:
    sandbox = warm.fork("--timeout", "1h", "-l", "run=7")
    [info] = warm.json("inspect", sandbox)
    assert (info["id"], info["labels"], info["engine"]) == (sandbox, {"run": "7"}, "fake")
    shown = dict(line.split(None, 1) for line in warm.ask("inspect", sandbox).stdout.splitlines())
    assert shown["id"] == sandbox
    assert shown["labels"] == "run=7"
    assert shown["deadline"].startswith("kill in ")
    assert "cause" not in shown  # it has none
    assert shown["created_at_unix"].endswith(" ago")


def test_a_deadline_is_set_extended_and_taken_away(warm: Cli, sandbox: str) -> None:
    info = warm.json("timeout", sandbox, "1h")
    soon = info["deadline_unix"]
    assert warm.json("extend", sandbox, "2h")["deadline_unix"] > soon + 1800
    assert "pause in " in warm.ask("timeout", sandbox, "10m", "--on-timeout", "pause").stdout
    assert warm.json("timeout", sandbox, "none")["deadline_unix"] is None
    check(warm.ask("timeout", sandbox, "later"), 2, "TIME takes seconds, or a time such as", "got 'later'")


def test_a_command_that_is_left_alone_runs_on_and_its_output_can_be_read(warm: Cli, sandbox: str) -> None:
    done = warm("exec", "-d", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exec sleep 60")
    pid = done.stdout.strip()
    assert f"forkd logs {sandbox} --pid {pid}" in done.stderr
    reader = warm.start("logs", sandbox, "--pid", pid)
    assert reader.line() == "out\n"
    reader.finish(signal.SIGINT)
    assert warm.ask("exec", sandbox, "--", "kill", "-0", pid).returncode == 0  # only the reader was interrupted
    assert warm.ask("exec", sandbox, "--", "kill", pid).returncode == 0
    done = warm("logs", sandbox, "--pid", pid)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    assert json.loads(warm.ask("exec", "-d", "--json", sandbox, "--", "true").stdout)["pid"] > 0
    check(warm.ask("exec", "-d", "-i", sandbox, "--", "true"), 125, "-d cannot be combined")
    check(warm.ask("logs", sandbox, "--pid", "999999"), 3)


def test_an_empty_console_is_explained(warm: Cli, sandbox: str) -> None:
    done = warm.ask("logs", sandbox)
    assert done.returncode == 0
    assert bool(done.stdout) != ("is empty" in done.stderr)


def test_of_many_events_the_newest_are_shown(warm: Cli) -> None:
    ids = [warm.fork() for _ in range(3)]
    everything = warm.json("events")
    assert warm.json("events", "-n", "2") == everything[-2:]
    created = warm.json("events", "--type", "sandbox.created", "-n", "2")
    assert [event["sandbox_id"] for event in created] == ids[1:]
    assert [event["id"] for event in warm.json("events", "--since", str(everything[-3]["id"]), "-n", "1")] == [
        everything[-1]["id"]
    ]


def test_other_words_work_as_those_they_stand_for(warm: Cli, sandbox: str) -> None:
    assert warm.ask("ps", "-q").stdout == f"{sandbox}\n"
    assert [image["name"] for image in warm.json("images")] == ["small"]
    assert warm.ask("kill", sandbox).returncode == 0


def test_a_fork_that_does_not_fit_is_asked_for_once(cli: Cli) -> None:
    full = Reply(503, {"error": "Full", "code": "no_capacity", "hint": "Fork fewer"}, {"Retry-After": "0"})
    with recording(full, Reply(201, [])) as server:
        check(cli.ask("fork", "warm", "-n", "1000", "--url", server.url), 6, "Full", "Fork fewer")
        assert [seen.target for seen in server.seen] == ["/v1/sandboxes"]
