"""`forkd completion`: what a shell offers when Tab is pressed."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli

from forkd.cli.commands import ALIASES, COMMANDS
from forkd.cli.completion import SHELLS, Flag, Syntax, add_aliases, describe, render_bash
from forkd.cli.parser import build_parser

pytestmark = pytest.mark.usefixtures("nothing_left")

Complete = Callable[..., list[str]]

_ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}  # only a real completion may call it
_forkd
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def grammar() -> list[Syntax]:
    return add_aliases(describe(build_parser()))


@pytest.fixture
def complete(tmp_path: Path, grammar: list[Syntax]) -> Complete:
    """What bash offers for the last of some words."""
    script = tmp_path / "completion.bash"
    script.write_text(render_bash(grammar))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/forkd").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m forkd.cli.main "$@"\n')
    (tmp_path / "bin/forkd").chmod(0o755)

    def ask(cli: Cli, *words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", _ASK.format(script=shlex.quote(str(script)), words=shlex.join(["forkd", *words]))],
            env={**cli.env, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return sorted(done.stdout.split("\n")[:-1]) if done.stdout.strip() else []

    return ask


def test_the_grammar_has_every_command_with_what_it_takes(grammar: list[Syntax]) -> None:
    by_path = {" ".join(command.path): command for command in grammar}
    assert [name for name, _ in by_path[""].below] == [*COMMANDS, *ALIASES]
    assert by_path["ps"].options == by_path["ls"].options
    assert by_path["images"].options == by_path["image ls"].options
    assert by_path["kill"].takes == by_path["inspect"].takes == by_path["timeout"].takes == "sandboxes"
    assert by_path["run"].takes == "snapshots"
    assert [name for name, _ in by_path["snapshot"].below] == [
        *("create", "ls", "inspect", "warm", "derive", "compact", "verify", "prune", "rm")
    ]
    assert by_path["exec"].takes == "sandboxes"
    assert by_path["fork"].takes == by_path["snapshot rm"].takes == by_path["snapshot warm"].takes == "snapshots"
    assert by_path["image rm"].takes == "images"
    assert by_path["workspace resume"].takes == "workspaces"
    assert Flag(("--json",), "print a JSON array", None) in by_path["ls"].options
    [state] = [option for option in by_path["ls"].options if "--state" in option.names]
    assert state.takes == "starting running paused stopping dead"


def test_bash_completes_commands_and_options(cli: Cli, complete: Complete) -> None:
    assert complete(cli, "") == sorted([*COMMANDS, *ALIASES])
    assert complete(cli, "e") == ["eval", "events", "exec", "extend"]
    assert complete(cli, "ps", "--st") == ["--state"]
    assert complete(cli, "snapshot", "") == [
        *("compact", "create", "derive", "inspect", "ls", "prune", "rm", "verify", "warm")
    ]
    options = ["--warm", "--warm-command", "--warm-script", "--warm-timeout"]
    assert complete(cli, "snapshot", "create", "--warm") == options
    assert complete(cli, "ls", "--state", "p") == ["paused"]
    assert complete(cli, "fork", "x", "--on-timeout", "") == ["kill", "pause"]
    assert complete(cli, "completion", "z") == ["zsh"]
    assert complete(cli, "fork", "-n", "") == []
    # A word that is only the value of an option leads nowhere.
    assert "--settle-secs" in complete(cli, "fork", "--tag", "ls", "--s")


def test_bash_completes_files_where_files_are_meant(cli: Cli, complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "warm.py").touch()
    assert complete(cli, "snapshot", "create", "--warm-script", "wa") == ["warm.py"]
    assert complete(cli, "cp", "wa") == ["warm.py"]


def test_bash_completes_ids_and_tags_from_the_daemon(warm: Cli, complete: Complete) -> None:
    one, two = warm.fork(), warm.fork()
    assert complete(warm, "exec", "") == sorted([one, two])
    assert complete(warm, "rm", one[:8]) == [one]
    assert complete(warm, "fork", "w") == ["warm"]
    assert complete(warm, "ls", "--tag", "") == ["warm"]
    assert complete(warm, "cp", one[:9]) == [f"{one}:/"]
    assert complete(warm, "image", "inspect", "") == ["small"]


def test_a_completion_starts_no_daemon_and_says_nothing(cli: Cli, complete: Complete) -> None:
    for kind in ("sandboxes", "snapshots", "workspaces"):
        done = cli.ask("completion", kind)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
        assert cli.ask("completion", kind, FORKD_URL="http://127.0.0.1:1").stderr == ""
    assert complete(cli, "exec", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_every_script(cli: Cli, grammar: list[Syntax], shell: str) -> None:
    done = cli.ask("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "@" not in done.stdout.replace("$@", "").replace("[@]", "").replace("(@)", "")
    for command in grammar:
        assert command.path == () or command.path[-1] in done.stdout
        for option in command.options:
            assert all(name.lstrip("-") in done.stdout for name in option.names)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_that_is_here_can_read_its_script(grammar: list[Syntax], tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(SHELLS[shell](grammar))
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=DEADLINE_S)
