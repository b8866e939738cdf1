"""The commands of `forkd`, each declared once.

To add one: a line in COMMANDS, and in the module it names `add_NAME(parser)` for the arguments and `run_NAME(args)`,
which returns the exit code. A module is imported when its command is used: listing sandboxes needs no image builder.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from forkd.errors import HostLacks

# Packages of the server extra. Any other missing package is a bug of ours.
_SERVER_PACKAGES = frozenset(
    {"httptools", "lz4", "prometheus_client", "pydantic", "qemu", "rich", "starlette", "uvicorn"}
)


@dataclass(frozen=True)
class Subcommand:
    module: str
    about: str


COMMANDS = {
    "serve": Subcommand("daemon", "run the daemon in the foreground"),
    "up": Subcommand("daemon", "start a daemon that keeps running"),
    "down": Subcommand("daemon", "end all sandboxes and stop the daemon"),
    "status": Subcommand("daemon", "show the daemon and what it runs"),
    "image": Subcommand("image", "build, list, inspect and remove images"),
    "snapshot": Subcommand("snapshot", "create, list, inspect, warm and remove snapshots"),
    "fork": Subcommand("fork", "fork a snapshot into sandboxes"),
    "ls": Subcommand("sandboxes", "list the sandboxes"),
    "tree": Subcommand("sandboxes", "show which sandbox came from which snapshot"),
    "exec": Subcommand("exec", "run a command in a sandbox"),
    "shell": Subcommand("exec", "open a shell in a sandbox"),
    "eval": Subcommand("exec", "evaluate Python in a sandbox's warmed interpreter"),
    "cp": Subcommand("cp", "copy files into and out of a sandbox"),
    "logs": Subcommand("logs", "show a sandbox's console"),
    "pause": Subcommand("sandboxes", "pause sandboxes"),
    "resume": Subcommand("sandboxes", "resume paused sandboxes"),
    "rename": Subcommand("sandboxes", "give a sandbox a name"),
    "rm": Subcommand("sandboxes", "end and remove sandboxes"),
    "workspace": Subcommand("workspace", "create, list, suspend, resume and remove workspaces"),
    "events": Subcommand("events", "show what happened"),
    "token": Subcommand("token", "create, list and revoke tokens"),
    "doctor": Subcommand("doctor", "check this machine and say which engine will run"),
    "demo": Subcommand("demo", "fork one warmed VM into 100 and show what it cost"),
    "bench": Subcommand("bench", "measure forkd on this machine"),
    "completion": Subcommand("completion", "print a completion script for a shell"),
}


def add_commands(parser: argparse.ArgumentParser, only: str | None) -> None:
    """All commands, or `only` one of them and the names of the others: enough to parse it and for `--help`."""
    below = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, each in COMMANDS.items():
        made = below.add_parser(name, help=each.about, description=_render_description(each.about))
        if only in (None, name):
            module = importlib.import_module(f"forkd.cli.{each.module}")
            getattr(module, f"add_{name}")(made)
            if run := getattr(module, f"run_{name}", None):  # none for a noun with actions
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
    if (error.name or "").partition(".")[0] not in _SERVER_PACKAGES:
        raise error
    return HostLacks(
        f"This command needs the Python package {error.name}",
        hint="Install the server side, from a checkout of this repository: pip install '.[server]'",
    )


def _render_description(about: str) -> str:
    return about[0].upper() + about[1:] + "."
