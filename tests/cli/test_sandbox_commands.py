"""Sandboxes through the command line and a daemon: fork, list, run, look, pause, end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli, check, without
from support_processes import has_ended, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")

_ID = re.compile(r"sb-[0-9a-f]{10}")


def test_a_fork_prints_what_it_made_and_they_stay(warm: Cli) -> None:
    done = warm.ask("fork", "warm", "-n", "3", "-l", "run=7", "--timeout", "600")
    assert done.returncode == 0
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["ID", "SNAPSHOT", "STATE", "AGE", "ADDRESS", "DEADLINE", "LABELS"]
    assert len(rows) == 3
    assert all(_ID.match(row) and "running" in row and "kill in 9m" in row and "run=7" in row for row in rows)
    assert re.fullmatch(r"forked 3 in \d+ ms\n", done.stderr)
    assert warm.ids() == [row.split()[0] for row in rows]


def test_a_fork_can_print_ids_or_json(warm: Cli) -> None:
    quiet = warm.ask("fork", "--tag", "warm", "-n", "2", "--quiet")
    assert quiet.stdout.splitlines() == warm.ids()
    assert quiet.stderr == ""
    [info] = warm.json("fork", "warm", "--metadata", "owner=me", "--on-timeout", "pause", "--timeout", "60")
    assert (info["snapshot_tag"], info["state"], info["metadata"]) == ("warm", "running", {"owner": "me"})
    assert (info["on_timeout"], info["deadline_unix"] > time.time()) == ("pause", True)


def test_what_was_asked_of_a_fork_reaches_the_guest(warm: Cli) -> None:
    sandbox = warm.fork("-e", "ROLE=a=b", "-e", "FROM_HERE")
    assert warm.ask("eval", sandbox, "import os; os.environ['ROLE']").stdout == "'a=b'\n"


def test_a_fork_that_is_refused_says_why(warm: Cli) -> None:
    check(warm.ask("fork", "nothing"), 3, "There is no snapshot nothing")
    check(warm.ask("fork", "warm", "--memory-limit-mib", "0"), 2)
    check(warm.ask("fork", "warm", "--timeout", "-1"), 2)
    check(warm.ask("fork", "warm", "-l", "bad name=1"), 2)
    check(warm.ask("fork", "warm", "--hugepages"), 17)
    assert json.loads(warm.ask("fork", "nothing", "--json").stdout)["code"] == "not_found"
    assert warm.ids() == []


def test_forkds_own_form_holds_its_child_for_a_while_and_ends_it(warm: Cli) -> None:
    done = warm.ask("fork", "--tag", "warm", "-n", "2", "--settle-secs", "0.2", "--per-child-netns")
    assert done.returncode == 0
    total, alive = done.stdout.splitlines()
    assert "total wall-clock" in total and total.split()[3].isdigit()
    assert alive == "2 / 2 children alive"
    assert warm.ids() == []


def test_a_list_can_be_filtered(warm: Cli) -> None:
    one = warm.fork("-l", "a=1", "-l", "b=2", "--metadata", "m=x")
    other = warm.fork("-l", "a=1")
    assert warm.ask("pause", other).returncode == 0
    assert [info["id"] for info in warm.json("ls", "-l", "a=1")] == [one, other]
    assert [info["id"] for info in warm.json("ls", "-l", "a=1", "-l", "b=2")] == [one]
    assert [info["id"] for info in warm.json("ls", "--state", "paused")] == [other]
    assert [info["id"] for info in warm.json("ls", "--metadata", "m=x")] == [one]
    assert warm.json("ls", "--tag", "other") == []
    assert warm.ask("ls", "-q", "--tag", "warm").stdout.split() == [one, other]
    assert warm.ask("ls", "--state", "asleep").returncode == 2


@pytest.mark.parametrize("columns", [30, 60, 80, 120])
def test_no_id_is_cut_off_on_a_narrow_terminal(warm: Cli, columns: int) -> None:
    [info] = warm.json("fork", "warm", "--timeout", "60", "-l", "label=" + "rather-long-" * 5)
    os.kill(info["pid"], signal.SIGKILL)
    wait_until(lambda: warm.json("ls", "--state", "dead"))
    shown = warm.ask("ls", COLUMNS=str(columns), FORCE_COLOR="1", NO_COLOR="1").stdout
    assert info["id"] in shown and info["guest_addr"] in shown
    listed = warm.ask("snapshot", "ls", COLUMNS=str(columns), FORCE_COLOR="1", NO_COLOR="1").stdout
    assert warm.json("snapshot", "inspect", "warm")["image_id"][:12] in listed


def test_an_empty_list_has_its_heading_and_says_what_to_do(warm: Cli) -> None:
    done = warm.ask("ls")
    assert (done.returncode, done.stdout.split()) == (0, ["ID", "SNAPSHOT", "STATE", "AGE", "ADDRESS"])
    assert "forkd fork TAG" in done.stderr
    assert warm.ask("ls", "--tag", "x").stderr == "No sandbox matches tag x\n"
    assert warm.ask("ls", "-q").stdout == ""


def test_a_command_writes_to_both_streams_and_its_exit_code_is_ours(warm: Cli, sandbox: str) -> None:
    done = warm.ask("exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert warm.ask("exec", sandbox, "sh", "-c", "kill -9 $$").returncode == 137
    done = warm.ask("exec", sandbox, "-w", "/tmp", "-e", "A=b", "--", "sh", "-c", "pwd; echo $A")
    assert done.stdout == "/tmp\nb\n"
    whole = json.loads(warm.ask("exec", "--json", sandbox, "--", "sh", "-c", "echo hi; kill $$").stdout)
    assert whole == {"stdout": "hi\n", "stderr": "", "exit_code": -15, "truncated": False}
    assert warm.ask("exec", "--json", sandbox, "--", "sh", "-c", "kill $$").returncode == 143


def test_a_command_that_cannot_run_or_takes_too_long_exits_as_docker_says_it(warm: Cli, sandbox: str) -> None:
    check(warm.ask("exec", sandbox, "--", "no-such-program"), 127, "No such file", "Check no-such-program")
    check(warm.ask("exec", sandbox, "--", "/etc/passwd"), 126, "Permission denied")
    check(warm.ask("exec", sandbox, "-w", "/nowhere", "--", "true"), 126, "working directory")
    check(warm.ask("exec", sandbox, "--timeout", "0.3", "--", "sleep", "60"), 124, "within 0.3 s")
    check(warm.ask("exec", sandbox, "--timeout", "0.005m", "--", "sleep", "60"), 124, "within 0.3 s")
    check(warm("exec", "-i", sandbox, "--timeout", "0.3", "--", "sleep", "60"), 124, "within 0.3 s")
    refused = warm.ask("exec", sandbox, "--json", "-i", "--", "true")
    assert (refused.returncode, json.loads(refused.stdout)["code"]) == (125, "invalid_input")
    check(warm("exec", "-it", sandbox, "--", "true"), 125, "-t needs a terminal")
    check(warm("shell", sandbox), 125, "A shell needs a terminal")
    check(warm.ask("exec", "sb-0000000000", "--", "true"), 125)
    check(warm.ask("exec", "nope", "--", "true"), 125, "There is no sandbox nope", "forkd ls")


def test_what_was_written_before_a_timeout_is_in_the_json(warm: Cli, sandbox: str) -> None:
    done = warm.ask("exec", sandbox, "--json", "--timeout", "1", "--", "sh", "-c", "echo out; echo err >&2; sleep 60")
    told = json.loads(done.stdout)
    assert (done.returncode, told["code"]) == (124, "guest_timeout")
    assert (told["stdout"], told["stderr"]) == ("out\n", "err\n")


def test_what_the_daemon_says_of_a_field_is_said_of_the_option(warm: Cli, sandbox: str) -> None:
    for words in (["fork", "warm", "--timeout", "400d"], ["timeout", sandbox, "400d"]):
        done = warm.ask(*words)
        check(done, 2, "--timeout must be")
        assert "timeout_secs" not in done.stderr and "openapi" not in done.stderr
    done = warm.ask("exec", sandbox, "--timeout", "2d", "--", "true")
    check(done, 125, "--timeout must be", "See: forkd exec --help")
    done = warm.ask("fork", "warm", "--cpu-limit", "-1")
    check(done, 2, "--cpu-limit must be", "See: forkd fork --help")


def test_output_comes_as_it_is_written(warm: Cli, sandbox: str) -> None:
    process = warm.start("exec", sandbox, "--", "sh", "-c", "echo first; sleep 60")
    assert process.line() == "first\n"
    process.finish(signal.SIGINT)
    assert process.returncode == 130


def test_bytes_that_are_no_text_arrive_as_they_were(warm: Cli, sandbox: str) -> None:
    command = warm.command("exec", sandbox, "--", "sh", "-c", r"printf '\377\000\n'")
    done = subprocess.run(command, env=warm.env, capture_output=True, timeout=DEADLINE_S)
    assert done.stdout == b"\xff\0\n"


@pytest.mark.parametrize("words", [[], ["-i"]], ids=["plain", "-i"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_kills_the_command_in_the_guest(warm: Cli, sandbox: str, words: list[str], number: int) -> None:
    process = warm.start("exec", sandbox, *words, "--", "sh", "-c", "echo $$; exec sleep 60", stdin=subprocess.PIPE)
    guest = int(process.line())
    assert not has_ended(guest)
    process.finish(number)
    assert process.returncode == 128 + number
    wait_until(lambda: has_ended(guest))


def test_a_reader_that_goes_away_ends_the_command(warm: Cli, sandbox: str) -> None:
    process = warm.start("exec", sandbox, "--", "sh", "-c", "echo $$; exec yes")
    guest = int(process.line())
    assert process.unread() == (0, "")
    wait_until(lambda: has_ended(guest))


def test_standard_input_is_passed_on_when_asked(warm: Cli, sandbox: str) -> None:
    data = bytes(range(256)) * 2000
    assert warm("exec", "-i", sandbox, "--", "wc", "-c", stdin=data).stdout.split() == [str(len(data))]
    assert warm("exec", sandbox, "--", "cat", stdin="unheard").stdout == ""
    # A command that does not read what it is given ends all the same.
    assert warm("exec", "-i", sandbox, "--", "sh", "-c", "exit 3", stdin=data * 10).returncode == 3


def test_code_is_evaluated_where_the_warm_up_left_off(warm: Cli, sandbox: str) -> None:
    assert warm.ask("eval", sandbox, "x + 1").stdout == "42\n"
    done = warm.ask("eval", sandbox, "import sys; print('a'); print('b', file=sys.stderr)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "b\n")
    raised = warm.ask("eval", sandbox, "1 / 0")
    assert (raised.returncode, raised.stdout) == (1, "")
    assert raised.stderr.startswith("Traceback") and raised.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert warm("eval", sandbox, "-", stdin="y = 5\ny * x").stdout == "205\n"
    answer = warm.json("eval", sandbox, "[x]")
    assert (answer["result"], answer["value"], answer["error"]) == ("[41]", [41], None)
    assert warm.ask("eval", sandbox, "1 / 0", "--json").returncode == 1
    check(warm.ask("eval", sandbox, "while True: pass", "--timeout", "0.3"), 12)
    check(warm("eval", sandbox, "-", stdin=b"\xff"), 2, "not UTF-8")


def test_a_value_cannot_play_tricks_with_the_terminal(warm: Cli, sandbox: str) -> None:
    code = "class Trick:\n  def __repr__(self): return '\\x1b]0;owned\\x07'\nTrick()"
    assert warm.ask("eval", sandbox, code).stdout == "\\x1b]0;owned\\x07\n"


def test_an_id_can_be_shortened(warm: Cli, sandbox: str) -> None:
    assert warm.ask("eval", sandbox[3:8], "x").stdout == "41\n"
    assert warm.ask("eval", sandbox[:8], "x").stdout == "41\n"
    assert warm.ask("rm", sandbox[3:9]).stdout == f"{sandbox}\n"


def test_a_paused_sandbox_says_so_until_it_is_resumed(warm: Cli, sandbox: str) -> None:
    shown = warm.ask("pause", sandbox)
    assert "paused" in shown.stdout
    assert warm.json("pause", sandbox)[0]["state"] == "paused"
    check(warm.ask("exec", sandbox, "--", "true"), 125, "paused")
    assert warm.json("resume", sandbox)[0]["state"] == "running"
    assert warm.ask("exec", sandbox, "--", "true").returncode == 0
    check(warm.ask("pause", "sb-0000000000"), 3)


def test_a_name_can_be_typed_in_place_of_an_id(warm: Cli, sandbox: str) -> None:
    assert "NAME" not in warm.ask("ls").stdout
    assert warm.json("rename", sandbox, "web")["name"] == "web"
    heading, row = warm.ask("ls").stdout.splitlines()
    assert heading.split()[:2] == ["ID", "NAME"] and row.split()[:2] == [sandbox, "web"]
    assert f"{sandbox} web  running" in warm.ask("tree").stdout
    assert warm.ask("eval", "web", "x").stdout == "41\n"
    assert warm.json("pause", "web", sandbox)[0]["id"] == sandbox
    assert warm.ask("resume", "web").returncode == 0
    assert "sandbox.renamed" in warm.ask("events", "--sandbox", "web").stdout
    other = warm.fork()
    check(warm.ask("rename", other, "web"), 4, "Another sandbox is named web")
    check(warm.ask("rename", other, "sb-web"), 2, "must not start with sb-")
    check(warm.ask("rename", other, "a b"), 2, "not a legal sandbox name")
    check(warm.ask("rename", "nope", "web"), 3)
    # A name that is also the beginning of an id is a name.
    assert warm.ask("rename", "web", other.removeprefix("sb-")[:4]).returncode == 0
    assert warm.json("ls")[0]["name"] == other.removeprefix("sb-")[:4]
    assert warm.ask("rm", other.removeprefix("sb-")[:4]).stdout == f"{sandbox}\n"
    assert warm.json("rename", other, "web")["name"] == "web"
    assert warm.json("rename", "web")["name"] is None
    check(warm.ask("rm", "web"), 3)


def test_sandboxes_are_ended_by_id_by_tag_by_label_or_all(warm: Cli) -> None:
    one, two, three, four = (warm.fork("-l", f"n={n}") for n in range(4))
    check(warm.ask("rm", one, "nope", two), 3, "There is no sandbox nope")
    assert warm.ids() == [one, two, three, four]
    assert warm.ask("rm", one, one).stdout == f"{one}\n"
    check(warm.ask("rm", one), 3)
    assert warm.json("rm", "--label", "n=1") == {"removed": [two]}
    assert warm.json("rm", "--tag", "nothing") == {"removed": []}
    assert warm.json("rm", "--tag", "warm", "-l", "n=2") == {"removed": [three]}
    assert warm.ask("rm", "--all").stdout == f"{four}\n"
    done = warm.ask("rm", "--all")
    assert (done.returncode, done.stdout) == (0, "")
    for words in ([], [one, "--all"], ["--all", "--tag", "warm"], [one, "--label", "a=b"]):
        assert warm.ask("rm", *words).returncode == 2


def test_the_console_is_shown_also_of_a_dead_sandbox(warm: Cli) -> None:
    [info] = warm.json("fork", "warm")
    sandbox = info["id"]
    assert warm.ask("logs", sandbox).returncode == 0
    assert set(warm.json("logs", sandbox)) == {"id", "console"}
    assert warm.ask("logs", sandbox, "-f", "--json").returncode == 2
    following = warm.start("logs", "-f", sandbox)
    time.sleep(0.5)
    assert following.poll() is None
    os.kill(info["pid"], signal.SIGKILL)
    following.finish()
    assert following.returncode == 0
    assert warm.json("ls")[0]["state"] == "dead"
    listed = warm.ask("ls").stdout
    assert "CAUSE" in listed and "dead" in listed
    assert warm.ask("logs", sandbox).returncode == 0
    check(warm.ask("logs", "sb-0000000000"), 3)


def test_the_tree_has_snapshots_and_their_sandboxes(warm: Cli) -> None:
    one, two = warm.fork(), warm.fork()
    done = warm.ask("tree")
    heading, *lines = done.stdout.splitlines()
    assert heading.split()[:3] == ["LINEAGE", "STATE", "AGE"]
    assert lines[0].split()[:2] == ["warm", "ready"]
    assert lines[1].startswith(f"├─ {one}  running") and lines[2].startswith(f"└─ {two}  running")
    assert "1 snapshot; 2 sandboxes, 2 running" in done.stderr
    lineage = warm.json("tree")
    assert [info["id"] for info in lineage["snapshots"][0]["sandboxes"]] == [one, two]
    assert lineage["orphans"] == []


def test_events_are_listed_and_followed(warm: Cli, sandbox: str) -> None:
    events = warm.json("events", "--sandbox", sandbox)
    assert [event["type"] for event in events] == ["sandbox.created", "sandbox.running"]
    last = events[-1]["id"]
    assert warm.json("events", "--since", str(last)) == []
    assert len(warm.json("events", "-n", "1")) == 1
    assert all(event["type"] == "snapshot.ready" for event in warm.json("events", "--type", "snapshot.ready"))
    lines = warm.ask("events", "--sandbox", sandbox).stdout.splitlines()
    assert len(lines) == 2 and sandbox in lines[0] and "sandbox.created" in lines[0]
    following = warm.start("events", "-f", "--since", str(last), "--json")
    assert warm.ask("rm", sandbox).returncode == 0
    event = json.loads(following.line())
    assert (event["type"], event["sandbox_id"]) == ("sandbox.removed", sandbox)
    following.finish(signal.SIGINT)
    assert following.returncode == 130


_SAY_WHAT_WAS_IMPORTED = """
import sys
from forkd.cli.main import main
main(sys.argv[1:])
print(*sorted(sys.modules))
"""


@pytest.mark.parametrize("words", [["ls"], ["exec", "SANDBOX", "--", "true"], ["eval", "SANDBOX", "None"]])
def test_a_command_that_asks_the_daemon_imports_nothing_of_the_servers_side(
    warm: Cli, sandbox: str, words: list[str]
) -> None:
    words = [sandbox if word == "SANDBOX" else word for word in words]
    command = [sys.executable, "-c", _SAY_WHAT_WAS_IMPORTED, *words]
    done = subprocess.run(command, env=warm.env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    imported = set(done.stdout.splitlines()[-1].split())
    assert "forkd.client.controller" in imported
    server = {"starlette", "uvicorn", "qemu", "pydantic", "prometheus_client", "sqlite3", "rich", "click"}
    ours = {f"forkd.{name}" for name in ("daemon", "runtime", "store", "engines", "guest", "image", "agent", "host")}
    assert imported & (server | ours) == set()


def test_without_the_servers_packages_sandboxes_and_trees_work(warm: Cli, tmp_path: Path) -> None:
    base = without(tmp_path, "rich")
    sandbox = warm("fork", "warm", "-q", **base).stdout.strip()
    assert json.loads(warm("ls", "--json", **base).stdout)[0]["id"] == sandbox
    assert warm("exec", sandbox, "--", "echo", "hi", **base).stdout == "hi\n"
    assert sandbox in warm("ls", **base).stdout
    assert sandbox in warm("tree", **base).stdout
    check(warm("snapshot", "create", "--image", "a", "--tag", "b", **base), 5, "rich", "pip install '.[server]'")
    assert warm("rm", sandbox, **base).returncode == 0


def test_a_workspace_is_made_suspended_resumed_and_removed(warm: Cli) -> None:
    assert "forkd workspace create" in warm.ask("workspace", "ls").stderr
    made = warm.json("workspace", "create", "mine", "--snapshot", "warm")
    assert (made["name"], made["status"]) == ("mine", "running")
    sandbox = made["live_sandbox_id"]
    assert warm.ask("eval", sandbox, "x").stdout == "41\n"
    check(warm.ask("workspace", "create", "mine", "--snapshot", "warm"), 4)
    assert "mine" in warm.ask("ls").stdout
    assert warm.ask("eval", sandbox, "x = 42").returncode == 0
    assert warm.json("workspace", "suspend", "mine")[0]["status"] == "suspended"
    assert "suspended" in warm.ask("workspace", "ls").stdout
    assert warm.ids() == []
    [resumed] = warm.json("workspace", "resume", "mine")
    assert resumed["status"] == "running"
    assert warm.ask("eval", resumed["live_sandbox_id"], "x").stdout == "42\n"
    check(warm.ask("workspace", "rm", "mine", "other"), 3)
    assert [info["name"] for info in warm.json("workspace", "ls")] == ["mine"]
    assert warm.json("workspace", "rm", "mine") == {"removed": ["mine"]}
    assert warm.json("workspace", "ls") == []
