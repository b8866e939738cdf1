"""The commands there are. A module is imported when its command is used: listing sandboxes needs no image builder."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from forkd.errors import HostLacks

Nouns = argparse._SubParsersAction  # what `add_parser` of a command's module is given

# Third-party packages of the server extra. Anything else that is missing is a fault of ours.
_OF_THE_SERVER = frozenset({"fastapi", "httptools", "lz4", "prometheus_client", "qemu", "rich", "uvicorn", "starlette"})


@dataclass(frozen=True)
class Noun:
    module: str
    about: str
    add: str = "add_parser"


NOUNS = {
    "serve": Noun("serve", "run the daemon in the foreground"),
    "up": Noun("service", "start a daemon that stays", "add_up"),
    "down": Noun("service", "end all sandboxes and the daemon", "add_down"),
    "status": Noun("service", "show the daemon and what it runs", "add_status"),
    "image": Noun("image", "build, list, inspect and remove images"),
    "snapshot": Noun("snapshot", "create, list, inspect, warm and remove snapshots"),
    "fork": Noun("fork", "fork a snapshot into sandboxes"),
    "ls": Noun("ls", "list the sandboxes"),
    "tree": Noun("tree", "show which sandbox came from which snapshot"),
    "exec": Noun("exec", "run a command in a sandbox"),
    "shell": Noun("exec", "open a shell in a sandbox", "add_shell"),
    "eval": Noun("evaluate", "evaluate Python in a sandbox's warmed interpreter"),
    "cp": Noun("cp", "copy files into and out of a sandbox"),
    "logs": Noun("logs", "show a sandbox's console"),
    "pause": Noun("sandboxes", "stop the clock of sandboxes", "add_pause"),
    "resume": Noun("sandboxes", "let paused sandboxes go on", "add_resume"),
    "rm": Noun("sandboxes", "end sandboxes", "add_rm"),
    "workspace": Noun("workspace", "create, list, suspend, resume and remove workspaces"),
    "events": Noun("events", "show what happened"),
    "token": Noun("token", "create, list and revoke tokens"),
    "doctor": Noun("doctor", "check this machine and say which engine will run"),
    "demo": Noun("demo", "fork one warmed VM into 100 and show what it cost"),
    "bench": Noun("bench", "measure forkd on this machine"),
    "completion": Noun("completion", "print a completion script for a shell"),
}


def add_nouns(parser: argparse.ArgumentParser, only: str | None) -> None:
    """All commands, or `only` one of them with the others by name: enough for its own parsing and for `--help`."""
    nouns = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, noun in NOUNS.items():
        if only is None or name == only:
            getattr(_import(noun), noun.add)(nouns)
        else:
            nouns.add_parser(name, help=noun.about)


def add_action(
    actions: Nouns[argparse.ArgumentParser], name: str, func: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    """One of the commands that a noun has."""
    parser = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    parser.set_defaults(func=func)
    return parser


def explain_missing(error: ModuleNotFoundError) -> HostLacks:
    """What to install, when it is one of the packages a base install does without."""
    if (error.name or "").partition(".")[0] not in _OF_THE_SERVER:
        raise error
    return HostLacks(
        f"This command needs the Python package {error.name}",
        hint="Install the server side: pip install 'forkd[server]'",
    )


def _import(noun: Noun) -> object:
    return importlib.import_module(f"forkd.cli.{noun.module}")
