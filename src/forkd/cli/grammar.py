"""The command line as data: which words may follow which. Completion scripts are rendered from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

# Kinds of words that are looked up when asked for; `forkd completion KIND` prints them.
KINDS = ("sandboxes", "snapshots", "workspaces", "images")
FILES = "files"
PLACES = "places"  # files, or a sandbox and a colon

_KIND_OF_METAVAR = {
    "SANDBOX": "sandboxes",
    "TAG": "snapshots",
    "WORKSPACE": "workspaces",
    "IMAGE": "images",
    "FILE": FILES,
    "DIR": FILES,
    "PATH": FILES,
    "FROM": PLACES,
    "TO": PLACES,
}


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    about: str
    takes: str | None  # None: no value; "": any; else a kind, or words separated by spaces


@dataclass(frozen=True)
class Command:
    path: tuple[str, ...]  # () is forkd itself
    about: str
    options: tuple[Option, ...]
    below: tuple[tuple[str, str], ...]  # its sub-commands, each with what it is about
    takes: str  # of its positional arguments: as in Option


def describe(parser: argparse.ArgumentParser) -> list[Command]:
    """All commands, those that lead to others before them."""
    return _describe(parser, (), "")


def _describe(parser: argparse.ArgumentParser, path: tuple[str, ...], about: str) -> list[Command]:
    below: list[tuple[str, str]] = []
    found: list[Command] = []
    options: list[Option] = []
    takes = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                below.append((name, helps.get(name, "")))
                found += _describe(child, (*path, name), helps.get(name, ""))
        elif action.option_strings:
            value = None if action.nargs == 0 else _kind(action)
            options.append(Option(tuple(action.option_strings), action.help or "", value))
        else:
            takes = takes or _kind(action)
    return [Command(path, about, tuple(options), tuple(below), takes), *found]


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return _KIND_OF_METAVAR.get(metavar, "")
