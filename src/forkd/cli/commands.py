"""The commands of `forkd`, each declared once.

To add one: a line in COMMANDS, its name in GROUPS, and in the module it names `add_NAME(parser)` for the arguments and
`run_NAME(args)`, which returns the exit code; a dash of the name is an underscore there. A module is imported when its
command is used: listing sandboxes needs no image builder, and `forkd --help` not even argparse.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import argparse

    from forkd.errors import HostLacks

# Packages of the server extra. Any other missing package is a bug of ours.
_SERVER_PACKAGES = frozenset(
    {
        *("cryptography", "httptools", "lz4", "prometheus_client", "pydantic"),
        *("qemu", "rich", "starlette", "uvicorn", "zstandard"),
    }
)


class Subcommand(NamedTuple):
    module: str
    about: str
    runs_command: bool = False  # its exit code is that of a command in a sandbox


COMMANDS = {
    "run": Subcommand("run", "fork a snapshot, run a command in it, remove it", True),
    "fork": Subcommand("fork", "fork a snapshot, or a running sandbox, into sandboxes"),
    "ls": Subcommand("sandboxes", "list the sandboxes"),
    "inspect": Subcommand("inspect", "show everything about sandboxes"),
    "exec": Subcommand("exec", "run a command in a sandbox", True),
    "shell": Subcommand("exec", "open a shell in a sandbox", True),
    "eval": Subcommand("evaluate", "evaluate Python in a sandbox's warmed interpreter"),
    "cp": Subcommand("cp", "copy files into and out of a sandbox, or between two"),
    "diff": Subcommand("compare", "compare the files of two sandboxes or snapshots"),
    "merge": Subcommand("compare", "bring the files of a sandbox to its parent"),
    "logs": Subcommand("logs", "show a sandbox's console, or a process's output"),
    "timeout": Subcommand("inspect", "set or extend the deadline of sandboxes"),
    "rename": Subcommand("sandboxes", "give a sandbox a name"),
    "pause": Subcommand("sandboxes", "pause sandboxes"),
    "resume": Subcommand("sandboxes", "resume paused sandboxes"),
    "rm": Subcommand("sandboxes", "end and remove sandboxes"),
    "network": Subcommand("network", "show or change what a sandbox may reach"),
    "port": Subcommand("network", "make ports of a sandbox reachable from this machine"),
    "branch": Subcommand("branch", "freeze a running sandbox as a new snapshot"),
    "checkpoint": Subcommand("branch", "remember where a sandbox is; list and delete its checkpoints"),
    "rewind": Subcommand("branch", "move a sandbox back to a checkpoint"),
    "promote": Subcommand("branch", "put a fork of a sandbox in that sandbox's place"),
    "tree": Subcommand("tree", "show who came from whom, what each holds, what is alive"),
    "image": Subcommand("image", "build, list, inspect and remove images"),
    "snapshot": Subcommand("snapshot", "create, derive, list, inspect, verify and remove snapshots"),
    "snapshot-diff": Subcommand("chains", "forkd's word for: forkd snapshot derive"),
    "workspace": Subcommand("workspace", "create, list, suspend, resume and remove workspaces"),
    "pack": Subcommand("pack", "write a snapshot, its chain and its image into one signed file"),
    "unpack": Subcommand("pack", "take in a pack"),
    "push": Subcommand("pack", "send a snapshot to another daemon or a web server"),
    "pull": Subcommand("pack", "take in a snapshot from a web server or another daemon"),
    "trust": Subcommand("trust", "list, add and remove the keys whose packs are taken in"),
    "up": Subcommand("daemon", "start a daemon that keeps running"),
    "down": Subcommand("daemon", "end all sandboxes and stop the daemon"),
    "status": Subcommand("daemon", "show the daemon and what it runs"),
    "serve": Subcommand("daemon", "run the daemon in the foreground"),
    "events": Subcommand("events", "show what happened"),
    "token": Subcommand("token", "create, list and revoke tokens"),
    "doctor": Subcommand("doctor", "check this machine and say which engine will run"),
    "demo": Subcommand("demo", "fork one warmed VM into 100 and show what it cost"),
    "bench": Subcommand("bench", "measure forkd on this machine"),
    "completion": Subcommand("completion", "print a completion script for a shell"),
}
# Other words for some of them, for people who know them from elsewhere.
ALIASES: dict[str, tuple[str, ...]] = {
    "ps": ("ls",),
    "kill": ("rm",),
    "extend": ("timeout",),
    "images": ("image", "ls"),
    "rmi": ("snapshot", "rm"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    "Sandboxes": (
        *("run", "fork", "ls", "inspect", "exec", "shell", "eval", "cp", "diff", "merge", "logs"),
        *("timeout", "rename", "pause", "resume", "rm", "network", "port"),
    ),
    "Branches": ("branch", "checkpoint", "rewind", "promote", "tree"),
    "Images, snapshots, workspaces": ("image", "snapshot", "snapshot-diff", "workspace"),
    "Packs": ("pack", "unpack", "push", "pull", "trust"),
    "The daemon": ("up", "down", "status", "serve", "events", "token"),
    "This machine": ("doctor", "demo", "bench", "completion"),
}
_EXAMPLES = (
    "forkd image build",
    "forkd snapshot create --image python --tag warm --warm 'import numpy'",
    "forkd run warm -- python3 -c 'print(6 * 7)'",
    "forkd fork warm -n 3 --timeout 10m",
    "forkd exec SANDBOX -- uname -a",
    "forkd fork --from SANDBOX -n 5",
)


def render_help() -> str:
    """Of `forkd` itself, without a parser: that takes longer than all the rest of it."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: forkd COMMAND [OPTION ...]", "", "Fork warmed virtual machines, copy-on-write."]
    for heading, names in GROUPS.items():
        lines += ["", f"{heading}:", *(f"  {name:{width}}{COMMANDS[name].about}" for name in names)]
    width = max(map(len, ALIASES)) + 2
    lines += ["", "Other words:", *(f"  {alias:{width}}{' '.join(words)}" for alias, words in ALIASES.items())]
    lines += ["", "Examples:", *(f"  {example}" for example in _EXAMPLES)]
    lines += ["", "The options of a command: forkd COMMAND --help. The version: forkd --version."]
    return "\n".join(lines)


def expand_alias(words: Sequence[str]) -> list[str]:
    """`forkd ps -q` as `forkd ls -q`; `forkd help fork` as `forkd fork --help`."""
    if not words:
        return []
    first, *rest = words
    if first == "help":
        return [*expand_alias(rest), "--help"]
    return [*ALIASES.get(first, (first,)), *rest]


def add_commands(parser: argparse.ArgumentParser, only: str | None) -> None:
    """All commands, or `only` one of them; without arguments all of them, if there is none of that name."""
    below = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in (only,) if only in COMMANDS else COMMANDS:
        each = COMMANDS[name]
        made = below.add_parser(name, help=each.about, description=_render_description(each.about))
        if only in (None, name):
            module = importlib.import_module(f"forkd.cli.{each.module}")
            word = name.replace("-", "_")
            getattr(module, f"add_{word}")(made)
            if run := getattr(module, f"run_{word}", None):  # none for a noun with actions
                made.set_defaults(func=run)


class Actions:
    """The actions of a noun, such as build and ls of `forkd image`."""

    def __init__(self, noun: argparse.ArgumentParser) -> None:
        self._below = noun.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(self, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        parser = self._below.add_parser(name, help=about, description=_render_description(about))
        parser.set_defaults(func=run)
        return parser

    def parsers(self) -> list[argparse.ArgumentParser]:
        return list(self._below.choices.values())


def explain_missing(error: ModuleNotFoundError) -> HostLacks:
    """What to install, when it is one of the packages that a base install does not have."""
    from forkd.errors import HostLacks

    if (error.name or "").partition(".")[0] not in _SERVER_PACKAGES:
        raise error
    return HostLacks(
        f"This command needs the Python package {error.name}",
        hint="Install the server side, from a checkout of this repository: pip install '.[server]'",
    )


def _render_description(about: str) -> str:
    return about[0].upper() + about[1:] + "."
