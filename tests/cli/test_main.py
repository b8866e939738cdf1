"""The command line as people use it: exit codes, hints, JSON. No daemon and no VM runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli, check, without

from forkd.cli.commands import ALIASES, COMMANDS, GROUPS, expand_alias
from forkd.cli.parser import build_parser

pytestmark = pytest.mark.usefixtures("nothing_left")

SERVER_SIDE = ("starlette", "uvicorn", "qemu", "prometheus_client", "pydantic")
CREATE = ("snapshot", "create", "--image", "small", "--tag")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["forkd needs a command", "See: forkd --help"]),
        (["--verison"], ["forkd has no option --verison", "Did you mean --version?"]),
        (["fly"], ["forkd has no command 'fly'", "See: forkd --help"]),
        (["frok", "warm"], ["forkd has no command 'frok'", "Did you mean fork?"]),
        (["extent"], ["Did you mean extend?"]),
        (["snapshot"], ["forkd snapshot needs an action", "See: forkd snapshot --help"]),
        (["snapshot", "crate"], ["forkd snapshot has no action 'crate'", "Did you mean create?"]),
        (["snapshot", "create"], ["forkd snapshot create needs --tag, --image"]),
        (["demo", "-n", "many"], ["-n takes a whole number, got 'many'"]),
        (["fork", "warm", "--cpu-limit", "x"], ["--cpu-limit takes a number, got 'x'"]),
        (["fork", "warm", "-n"], ["-n needs a value"]),
        (["fork", "warm", "--on-timeout", "stop"], ["--on-timeout must be one of kill, pause, got 'stop'"]),
        (["fork", "warm", "--timeot", "5"], ["forkd fork has no option --timeot", "Did you mean --timeout?"]),
        (["snapshot", "ls", "--tag=x"], ["forkd snapshot ls has no option --tag", "See: forkd snapshot ls --help"]),
        (["snapshot", "ls", "x"], ["forkd snapshot ls takes no further argument, got 'x'"]),
        (["fork", "warm", "--m", "5"], ["--m is short for several options", "--memory-limit-mib"]),
        (["ls", "--quiet=1"], ["--quiet takes no value, got '1'"]),
        (["fork", "warm", "--timeout", "soon"], ["--timeout takes seconds, or a time such as 30s, 5m", "got 'soon'"]),
        (["events", "-n", "0"], ["--limit must be between 1 and 10000, got '0'"]),
    ],
    ids=lambda each: None,
)
def test_wrong_words_are_an_error_like_any_other(cli: Cli, words: list[str], said: list[str]) -> None:
    check(cli.ask(*words), 2, *said)
    done = cli.ask(*words, "--json")
    if done.stdout:  # what has no --json of its own says so
        assert json.loads(done.stdout)["code"] == "invalid_input"
        assert done.stderr == ""


def test_wrong_options_of_a_command_that_runs_one_are_told_from_its_own_failures(cli: Cli) -> None:
    said = ("forkd exec has no option --timeot", "Did you mean --timeout?")
    check(cli.ask("exec", "--timeot", "5", "sb", "--", "true"), 125, *said)
    check(cli.ask("exec", "sb", "--timeot", "5", "--", "true"), 125, *said)
    check(cli.ask("exec"), 125, "forkd exec needs SANDBOX and a command", "forkd exec SANDBOX -- COMMAND")
    check(cli.ask("run", "warm"), 125, "forkd run needs a command", "forkd run TAG -- COMMAND")


def test_help_lists_every_command_in_its_group_and_shows_examples(cli: Cli) -> None:
    shown = cli.ask("--help").stdout
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert all(f"\n{group}:\n" in shown for group in GROUPS)
    assert "\nExamples:\n" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert [name for names in GROUPS.values() for name in names] == list(COMMANDS)
    assert cli.ask("-h").stdout == cli.ask("help").stdout == build_parser("").format_help() == shown
    assert cli.ask("--version").stdout.startswith("forkd ")


def test_help_imports_next_to_nothing(cli: Cli) -> None:
    code = "import sys; from forkd.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=cli.env, capture_output=True, text=True, timeout=DEADLINE_S)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "forkd.cli.commands" in imported
    assert imported & {"argparse", "asyncio", "dataclasses", "httpx", "inspect", "json", "pathlib", "rich"} == set()


def test_help_of_a_command_can_be_asked_for_in_two_ways(cli: Cli) -> None:
    shown = cli.ask("fork", "--help").stdout
    assert shown.startswith("usage: forkd fork")
    assert cli.ask("help", "fork").stdout == shown


def test_other_words_mean_the_same_commands() -> None:
    assert not set(ALIASES) & set(COMMANDS)
    assert expand_alias(["ps", "-q"]) == ["ls", "-q"]
    assert expand_alias(["images", "--json"]) == ["image", "ls", "--json"]
    assert expand_alias(["kill", "ps"]) == ["rm", "ps"]
    assert expand_alias(["help", "images"]) == ["image", "ls", "--help"]
    assert expand_alias([]) == []


def test_no_help_shows_a_token(cli: Cli) -> None:
    for name in COMMANDS:
        assert "hush" not in cli.ask(name, "--help", FORKD_TOKEN="hush").stdout


def test_the_console_script_is_the_same_program(cli: Cli) -> None:
    script = Path(sys.executable).with_name("forkd")
    done = subprocess.run(
        [script, "image", "inspect", "nothing"], env=cli.env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    check(done, 3, "There is no image nothing")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a" * 65, "ä", "🐍", "a\nb", " "])
def test_illegal_names_are_refused(cli: Cli, name: str) -> None:
    check(cli.ask("snapshot", "inspect", name), 2, "is not a legal snapshot tag", "1 to 64")
    check(cli.ask("snapshot", "rm", name), 2, "is not a legal snapshot tag")
    check(cli.ask("snapshot", "create", "--tag", name, "--image", "small"), 2, "is not a legal snapshot tag")
    check(cli.ask("snapshot", "create", "--tag", "x", "--image", name), 2, "is not a legal image name")
    check(cli.ask("fork", "--tag", name), 2, "is not a legal snapshot tag")
    check(cli.ask("workspace", "create", "x", "--snapshot", name), 2, "is not a legal snapshot tag")


def test_bytes_that_are_no_text_are_refused_like_other_names(cli: Cli) -> None:
    check(cli.ask("snapshot", "inspect", os.fsdecode(b"\xff")), 2, "'\\udcff' is not a legal snapshot tag")
    check(cli.ask(*CREATE, "x", "--warm", os.fsdecode(b"'\xff'")), 2, "The warm-up is not UTF-8")
    check(cli.ask(*CREATE, "x", "--rehearse", os.fsdecode(b"'\xff'")), 2, "The rehearsal is not UTF-8")


@pytest.mark.parametrize("n", ["0", "-1", "100000"])
def test_no_or_too_many_children_are_refused_at_once(cli: Cli, n: str) -> None:
    check(cli.ask("demo", "-n", n, "--engine", "fake"), 2, f"Cannot fork {n} children", "Use 1 to 1000")
    check(cli.ask("fork", "warm", "-n", n), 2, f"Cannot fork {n} children", "Use 1 to 1000")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "1"], "1 MiB of memory"),
        (["--memory", "99999999"], "MiB of memory"),
        (["--vcpus", "0"], "0 vCPUs"),
        (["--cpu-template", "T9"], "no CPU template T9"),
        (["--warm", "1", "--warm-script", "/dev/null"], "--warm and --warm-script cannot be combined"),
        (["--warm-script", "/no/such/script"], "/no/such/script cannot be read: No such file or directory"),
        (["--warm-script", "/etc"], "/etc cannot be read: Is a directory"),
        (["--warm-script", sys.executable], "cannot be read: it is not UTF-8 text"),
    ],
    ids=lambda each: " ".join(each)[:30] if isinstance(each, list) else None,
)
def test_a_snapshot_that_can_never_be_is_refused_before_a_daemon_is_asked(
    cli: Cli, words: list[str], said: str
) -> None:
    check(cli.ask(*CREATE, "x", *words), 2, said)


def test_an_unknown_engine_is_refused_wherever_it_is_named(cli: Cli) -> None:
    check(cli.ask("demo", "--engine", "warp"), 2, "There is no engine 'warp'", "qemu")
    check(cli.ask("demo", FORKD_ENGINE="warp"), 2, "There is no engine 'warp'")


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["snapshot", "inspect", "a/b", "--json"], 2, "invalid_input"),
        (["image", "inspect", "nothing", "--json"], 3, "not_found"),
        (["demo", "-n", "0", "--json"], 2, "invalid_input"),
        (["fork", "--json"], 2, "invalid_input"),
        (["rm", "--json"], 2, "invalid_input"),
        (["ls", "--label", "x", "--json"], 2, "invalid_input"),
    ],
    ids=lambda each: "-".join(each).replace("/", "_") if isinstance(each, list) else None,
)
def test_with_json_errors_are_json_too(cli: Cli, words: list[str], code: int, kind: str) -> None:
    done = cli.ask(*words)
    assert done.returncode == code
    error = json.loads(done.stdout)
    assert error["code"] == kind
    assert error["error"] and error["hint"]
    assert done.stderr == ""


def test_where_no_daemon_is_and_one_was_named_none_is_started(cli: Cli) -> None:
    for words in (["ls"], ["fork", "warm"], ["snapshot", "ls"]):
        check(cli.ask(*words, FORKD_URL="http://127.0.0.1:1"), 18, "http://127.0.0.1:1")
    check(cli.ask("exec", "sb-1", "--", "true", FORKD_URL="http://127.0.0.1:1"), 125, "http://127.0.0.1:1")
    check(cli.ask("ls", "--url", "unix:///nonexistent/forkd.sock"), 18, "/nonexistent/forkd.sock")
    check(cli.ask("ls", "--url", "gopher://x"), 2, "is not the address of a daemon")


def test_up_and_down_are_about_this_machine(cli: Cli) -> None:
    check(cli.ask("up", FORKD_URL="http://127.0.0.1:1"), 2, "FORKD_URL names another")
    check(cli.ask("down", FORKD_URL="http://127.0.0.1:1"), 2, "FORKD_URL names another")


def test_a_reader_that_goes_away_is_no_error(cli: Cli) -> None:
    assert cli.start("image", "ls", "--json").unread() == (0, "")


def test_the_base_install_says_what_to_install(cli: Cli, tmp_path: Path) -> None:
    base = without(tmp_path, "rich", *SERVER_SIDE)
    check(cli("image", "ls", **base), 5, "needs the Python package rich", "pip install '.[server]'")
    check(cli("serve", **base), 5, "needs the Python package", "pip install '.[server]'")
    done = cli("ls", **base)
    assert done.returncode == 5
    assert "started" in done.stderr and "pip install '.[server]'" in done.stderr
    assert cli("status", **base).returncode == 18


def test_a_runtime_directory_that_cannot_be_used_is_a_typed_error(cli: Cli, tmp_path: Path) -> None:
    check(cli.ask("ls", FORKD_RUNTIME_DIR="/tmp/" + "x" * 80), 5, "too long", "FORKD_RUNTIME_DIR")
    (cli.runtime / "link").symlink_to(tmp_path)
    done = cli("ls", FORKD_RUNTIME_DIR=str(cli.runtime / "link"))
    assert done.returncode == 5
    assert "not a directory of this user" in done.stderr
    (cli.runtime / "link").unlink()


def test_a_bench_that_was_not_installed_is_an_error_with_advice(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import forkd

    monkeypatch.setattr(forkd, "__file__", str(tmp_path / "site-packages/forkd/__init__.py"))
    check(cli.ask("bench"), 5, "without its bench", "make bench")
