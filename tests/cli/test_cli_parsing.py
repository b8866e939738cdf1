"""The pure parts of the command line: words in, requests and texts out."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from forkd.cli.arguments import parse_duration, parse_environment, parse_pairs, render_pairs
from forkd.cli.background import NO_TCP, read_tail, render_command, render_environment
from forkd.cli.bench import find_checkout, render_options
from forkd.cli.connect import Address, find_address
from forkd.cli.cp import Remote, check_name, last_name, parse_place
from forkd.cli.events import render_event
from forkd.cli.exec import parse_rest
from forkd.cli.fork import parse_target, render_request
from forkd.cli.guest_command import read_exit
from forkd.cli.logs import find_news
from forkd.cli.output import measure, render_age, render_plain, render_table
from forkd.cli.parser import build_parser
from forkd.cli.report import translate, translate_hint
from forkd.cli.sandboxes import match_id, render_deadline
from forkd.errors import GuestTimeout, InvalidInput, NotFound, ProtocolError
from forkd.host.paths import Home
from forkd.wire.api import Event, SandboxInfo


def parse(*words: str) -> argparse.Namespace:
    return build_parser(words[0]).parse_args(words)


def parse_exec(*words: str) -> argparse.Namespace:
    args = parse("exec", *words)
    parse_rest(args)
    return args


@pytest.mark.parametrize(
    ("words", "command", "flags"),
    [
        (["sb", "--", "ls", "-l"], ["ls", "-l"], ""),
        (["sb", "ls", "-l"], ["ls", "-l"], ""),
        (["sb", "env", "-i"], ["env", "-i"], ""),
        (["-it", "sb", "bash"], ["bash"], "it"),
        (["sb", "-i", "-t", "--", "bash"], ["bash"], "it"),
        (["-i", "sb", "-t", "--", "bash", "-i"], ["bash", "-i"], "it"),
        (["sb", "git", "checkout", "--", "file"], ["git", "checkout", "--", "file"], ""),
        (["sb", "--", "--", "x"], ["--", "x"], ""),
        (["sb", "--", "-i", "x"], ["-i", "x"], ""),
        (["sb", "-i", "cat", "-n"], ["cat", "-n"], "i"),
        (["sb", "--json", "-w", "/tmp", "--", "-x"], ["-x"], ""),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_options_of_exec_end_where_the_command_begins(words: list[str], command: list[str], flags: str) -> None:
    args = parse_exec(*words)
    assert args.sandbox == "sb"
    assert args.command == command
    assert (args.interactive, args.tty) == ("i" in flags, "t" in flags)


def test_options_on_both_sides_of_the_sandbox_add_up() -> None:
    args = parse_exec("-e", "A=1", "-u", "me", "sb", "-e", "B=2", "-w", "/x", "--timeout", "3", "--", "true")
    assert (args.env, args.user, args.workdir, args.timeout) == (["A=1", "B=2"], "me", "/x", 3.0)


@pytest.mark.parametrize("words", [[], ["sb"], ["sb", "--"], ["sb", "-i"], ["sb", "-i", "--"]])
def test_exec_without_a_command_is_refused(words: list[str]) -> None:
    with pytest.raises(InvalidInput, match=r"needs (SANDBOX and )?a command"):
        parse_exec(*words)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"exit_code": 0, "signal": None, "timed_out": False}, 0),
        ({"exit_code": 7, "signal": None, "timed_out": False}, 7),
        ({"exit_code": None, "signal": 9, "timed_out": False}, 137),
        ({"exit_code": -15, "signal": 15, "timed_out": False}, 143),
        ({"exit_code": -15}, 143),
    ],
)
def test_a_commands_end_becomes_an_exit_code(body: dict[str, Any], code: int) -> None:
    assert read_exit(body, None) == code


def test_a_command_that_took_too_long_is_an_error() -> None:
    with pytest.raises(GuestTimeout, match="within 3 s"):
        read_exit({"exit_code": None, "signal": 9, "timed_out": True}, 3.0)


def request(*words: str, **environ: str) -> dict[str, Any]:
    return render_request(parse("fork", *words), environ)


def test_a_fork_asks_for_what_was_said() -> None:
    asked = request("warm", "-n", "3", "-e", "A=b=c", "-e", "HOME", "-e", "NONE", "-l", "k=v", HOME="/me")
    assert (asked["snapshot_tag"], asked["n"]) == ("warm", 3)
    assert asked["env"] == {"A": "b=c", "HOME": "/me"}
    assert asked["labels"] == {"k": "v"}
    assert asked["timeout_secs"] is None and asked["agent_port"] is None


def test_forkds_own_form_of_fork_gets_its_port_and_a_deadline_after_its_time() -> None:
    words = ("--tag", "T", "-n", "1", "--settle-secs", "3600")
    assert request(*words)["agent_port"] is None
    asked = request(*words, FORKD_TARGET="127.0.0.1:18888")
    assert (asked["agent_port"], asked["timeout_secs"]) == (18888, 3660.0)
    assert request("--tag", "T", "-n", "2", "--settle-secs", "1", FORKD_TARGET="127.0.0.1:18888")["agent_port"] is None
    assert request("T", FORKD_TARGET="10.42.0.2:8888")["agent_port"] is None
    assert request(*words, "--timeout", "5")["timeout_secs"] == 5.0


@pytest.mark.parametrize("words", [[], ["a", "--tag", "b"]])
def test_a_fork_is_of_one_snapshot(words: list[str]) -> None:
    with pytest.raises(InvalidInput, match="one snapshot"):
        request(*words)


@pytest.mark.parametrize("target", ["10.42.0.2:8888", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:x", "[::1]:1", ":1"])
def test_a_target_beyond_loopback_is_refused(target: str) -> None:
    with pytest.raises(InvalidInput, match="FORKD_TARGET"):
        parse_target(target)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("0", 0.0), ("90", 90.0), ("0.5", 0.5), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0)],
        *[("1h30m", 5400.0), ("1m30s", 90.0)],
    ],
)
def test_a_time_is_seconds_or_has_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert parse("fork", "warm", "--timeout", text).timeout == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "-1", "1h30", "1 h", "5M", "nan", "inf", "1e3", "٣", "5m!", "0x10"])
def test_what_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^--timeout takes seconds, or a time such as 30s, 5m, 2h or 1d, got"):
        parse("fork", "warm", f"--timeout={text}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("timeout_secs: Input should be greater than 0", "--timeout must be greater than 0"),
        ("n: Input should be less than or equal to 1000", "-n must be less than or equal to 1000"),
        ("labels.a: String should have at most 4 characters", "--label must have at most 4 characters"),
        ("args: Value error, must not be empty", "The command: must not be empty"),
        (
            "timeout_secs must be between 0.1 and 86400 seconds, got 3",
            "--timeout must be between 0.1 and 86400 seconds, got 3",
        ),
        ("since: must be a whole number", "--since must be a whole number"),
        ("memory_limit_mib cannot be enforced", "--memory-limit-mib cannot be enforced"),
        ("There is no sandbox web", "There is no sandbox web"),
    ],
)
def test_what_the_daemon_says_is_told_in_the_words_of_the_command_line(said: str, told: str) -> None:
    assert translate(said) == told


def test_the_apis_description_is_never_the_advice() -> None:
    said = "See /openapi.json for what it takes"
    assert translate_hint(said, ["fork", "x"]) == "See: forkd fork --help"
    assert translate_hint(said, ["snapshot", "create", "--tag", "x"]) == "See: forkd snapshot create --help"
    assert translate_hint(said, []) == "See: forkd --help"
    assert translate_hint("Raise timeout_secs", []) == "Raise --timeout"
    assert translate_hint("Choose another tag or ask to replace it", []) == "Choose another tag or pass --replace"
    assert translate_hint(None, []) is None


def test_a_table_is_as_wide_as_its_cells_and_folds_where_it_may() -> None:
    rows = [["a", "x" * 30], ["wide 宽", "y"]]
    assert render_table(["ID", "LABELS"], rows, None, ["LABELS"]) == [
        "ID       LABELS",
        "a        " + "x" * 30,
        "wide 宽  y",
    ]
    assert render_table(["ID", "LABELS"], rows, 24, ["LABELS"])[1:3] == ["a        " + "x" * 15, " " * 9 + "x" * 15]
    assert render_table(["ID", "LABELS"], rows, 24, [])[1] == "a        " + "x" * 30
    assert render_table(["ID", "LABELS"], rows, 12, ["LABELS"])[1] == "a        " + "x" * 30
    assert [measure(text) for text in ("abc", "宽", "e\u0301")] == [3, 2, 1]


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert parse_pairs(["a=b=c", "d=", "a=e"], "-l") == {"a": "e", "d": ""}
    assert render_pairs({"b": "2", "a": "1"}) == "a=1,b=2"
    for wrong in ("a", "=b", ""):
        with pytest.raises(InvalidInput, match="takes KEY=VALUE, got"):
            parse_pairs([wrong], "-l")
    with pytest.raises(InvalidInput, match="takes KEY=VALUE, got"):
        parse_environment([""], {})


def test_an_id_may_be_shortened_while_only_one_begins_so() -> None:
    known = ["sb-0011223344", "sb-0099887766", "sb-ab00000000"]
    assert match_id("ab", known) == match_id("sb-a", known) == "sb-ab00000000"
    assert match_id("0011", known) == "sb-0011223344"
    with pytest.raises(InvalidInput, match="2 sandboxes begin with 00") as caught:
        match_id("00", known)
    assert "sb-0011223344, sb-0099887766" in (caught.value.hint or "")
    for absent in ("x", "", "sb-", "sb-0011223344555", "1122"):
        with pytest.raises(NotFound):
            match_id(absent, known)
    with pytest.raises(NotFound) as missed:
        match_id("webb", known, ["web", "left"])
    assert missed.value.hint == "Did you mean web? List them with: forkd ls"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"FORKD_URL": "http://h:1", "FORKD_RUNTIME_DIR": "/r"}, Address("http://h:1", own=False)),
        ({"FORKD_RUNTIME_DIR": "/r"}, Address("unix:///r/forkd.sock", True, Path("/r/forkd.sock"))),
        ({"FORKD_SOCKET": "/s p"}, Address("unix:///s%20p", True, Path("/s p"))),
        ({"FORKD_SOCKET": "none"}, Address("http://127.0.0.1:8889", own=True)),
        ({"FORKD_SOCKET": "none", "FORKD_BIND": "127.0.0.1:1"}, Address("http://127.0.0.1:1", own=True)),
    ],
)
def test_the_daemon_is_looked_for_in_one_order(environ: dict[str, str], expected: Address) -> None:
    assert find_address(None, environ) == expected
    assert find_address("http://given:1", environ) == Address("http://given:1", own=False)


def test_a_daemon_in_the_background_listens_where_it_will_be_looked_for() -> None:
    address = Address("unix:///r/forkd.sock", True, Path("/r/forkd.sock"))
    command = render_command(address, 300, None)
    assert command[1:] == ["-m", "forkd.cli.main", "serve", "--idle-exit-secs", "300", "--socket", "/r/forkd.sock"]
    assert render_command(address, 300, "127.0.0.1:7") == [*command, "--bind", "127.0.0.1:7"]
    assert render_command(address, 300, NO_TCP) == [
        *command,
        "--bind",
        "none",
        "--tls-cert",
        "none",
        "--tls-key",
        "none",
    ]
    assert render_command(Address("http://127.0.0.1:1", own=True), 300, NO_TCP) == command[:-2]


def test_a_daemon_in_the_background_gets_paths_that_hold_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"FORKD_HOME": "h", "FORKD_CONFIG": "c.toml", "FORKD_AUDIT_LOG": "none", "FORKD_TOKEN": "x", "PATH": "/bin"}
    environ = render_environment(given, Home(tmp_path / "h", Path("/run/r")))
    assert environ == {
        "FORKD_HOME": str(tmp_path / "h"),
        "FORKD_RUNTIME_DIR": "/run/r",
        "FORKD_CONFIG": str(tmp_path / "c.toml"),
        "FORKD_AUDIT_LOG": "none",
        "PATH": "/bin",
    }


def test_the_tail_of_a_log_has_only_what_came_since(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n" + "".join(f"{n}\n" for n in range(30)))
    assert read_tail(log, 4) == "\n".join(map(str, range(15, 30)))
    assert read_tail(log, log.stat().st_size) is None
    assert "cannot be read" in (read_tail(tmp_path / "none", 0) or "")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sb-12:/x", Remote("sb-12", "/x")),
        ("12:/", Remote("12", "/")),
        ("12:/a\nb:/c", Remote("12", "/a\nb:/c")),
        ("./12:/x", "./12:/x"),
        ("/a:/b", "/a:/b"),
        ("sb-12:x", "sb-12:x"),
        ("-", "-"),
    ],
)
def test_a_place_in_a_sandbox_has_an_id_a_colon_and_an_absolute_path(text: str, place: Remote | str) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../x", "a\0b", "\ud800"])
def test_a_name_that_is_not_valid_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="not valid"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "...", "-rf", "a b", "\n", "ä", "\udcff", "~", "$(x)"])
def test_a_strange_name_that_is_valid_is_taken(name: str) -> None:
    assert check_name(name) == name


def test_the_last_name_of_a_path() -> None:
    assert [last_name(path) for path in ("/a/b", "/a/b/", "/", "/a/.", "b")] == ["b", "b", "", "", "b"]


def test_what_would_move_the_cursor_is_shown_as_what_it_is() -> None:
    assert render_plain("plain äöü\t") == "plain äöü\t"
    assert render_plain("\x1b]0;owned\x07\r\n\udcff\u202e") == "\\x1b]0;owned\\x07\\r\\n\\udcff\\u202e"


def test_news_of_a_console_are_what_was_not_seen() -> None:
    assert find_news("", "ab") == "ab"
    assert find_news("ab", "abc") == "c"
    assert find_news("0123", "23456") == "23456"
    long = "x" * 5000 + "end"
    assert find_news(long, long[100:] + "news") == "news"


INFO: SandboxInfo = {
    **dict.fromkeys(SandboxInfo.__annotations__),
    "id": "sb-0123456789",
    "snapshot_tag": "warm",
    "created_at_unix": 0,
    "state": "running",
    "on_timeout": "kill",
    "labels": {},
    "metadata": {},
}


def test_a_deadline_is_shown_while_there_is_one() -> None:
    assert render_deadline(INFO, 0.0) == ""
    assert render_deadline({**INFO, "deadline_unix": 90.0}, 0.0) == "kill in 1m"
    assert render_deadline({**INFO, "deadline_unix": 90.0, "on_timeout": "pause"}, 91.0) == "pause now"
    assert render_deadline({**INFO, "deadline_unix": 90.0, "state": "dead"}, 0.0) == ""
    assert [render_age(age) for age in (-1, 59, 60, 7200, 200000)] == ["0s", "59s", "1m", "2h", "2d"]


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    event: Event = {
        "id": 7,
        "ts_unix": 0.0,
        "type": "sandbox.dead",
        "sandbox_id": "sb-0123456789",
        "snapshot_tag": "warm",
        "data": {"cause": "a\nb", "n": 1, "how": "well"},
    }
    line = render_event(event)
    assert "\n" not in line
    assert line.endswith("cause=a\\nb n=1 how=well snapshot=warm")


def test_a_bench_is_found_in_a_checkout_only(tmp_path: Path) -> None:
    package = tmp_path / "src/forkd/__init__.py"
    assert find_checkout(package) is None
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__main__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    assert find_checkout(package) == tmp_path
    args = parse("bench", "--rounds", "2", "-n", "1", "10", "--only", "a", "--only", "b", "--engine", "qemu")
    words = "--rounds 2 -n 1 10 --only a --only b --engine qemu"
    assert render_options(args) == words.split()
    assert render_options(parse("bench")) == []
