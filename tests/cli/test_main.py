"""The command line as people use it: exit codes, hints, JSON. No daemon and no VM runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli, check, without

from forkd.cli.commands import COMMANDS
from forkd.cli.main import build_parser

pytestmark = pytest.mark.usefixtures("nothing_left")

SERVER_SIDE = ("starlette", "uvicorn", "qemu", "prometheus_client", "pydantic")
CREATE = ("snapshot", "create", "--image", "small", "--tag")


def test_an_unknown_command_is_bad_usage(cli: Cli) -> None:
    for words in (["fly"], [], ["snapshot"], ["snapshot", "fly"], ["snapshot", "create"], ["demo", "-n", "many"]):
        done = cli.ask(*words)
        assert done.returncode == 2
        assert "usage: forkd" in done.stderr
        assert "Traceback" not in done.stderr


def test_help_and_version_are_no_errors(cli: Cli) -> None:
    shown = cli.ask("--help").stdout
    assert all(f"\n    {name} " in shown for name in COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80
    assert cli.ask("--version").stdout.startswith("forkd ")


def test_help_says_of_each_command_what_the_command_says_of_itself() -> None:
    def listed(only: str | None) -> dict[str, str | None]:
        [nouns] = build_parser(only)._subparsers._group_actions  # type: ignore[union-attr]
        return {choice.dest: choice.help for choice in nouns._choices_actions}  # type: ignore[attr-defined]

    assert listed(None) == listed("") == {name: each.about for name, each in COMMANDS.items()}


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
    for words in (["ls"], ["fork", "warm"], ["snapshot", "ls"], ["exec", "sb-1", "--", "true"]):
        check(cli.ask(*words, FORKD_URL="http://127.0.0.1:1"), 18, "http://127.0.0.1:1")
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
