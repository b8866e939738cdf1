"""Words become arguments. What argparse says of wrong ones is said in forkd's own words, as a forkd error."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from forkd import __version__
from forkd.cli.commands import ALIASES, add_commands, render_help
from forkd.cli.suggestions import suggest
from forkd.errors import InvalidInput

# What argparse says, and what is said instead. {0}, {1} are the groups, {prog} is the command.
_RULES = (
    (r"the following arguments are required: (.+)", "{prog} needs {0}"),
    (r"argument (.+?): expected .*argument.*", "{0} needs a value"),
    (r"argument (.+?): invalid \w*int\w* value: (.+)", "{0} takes a whole number, got {1}"),
    (r"argument (.+?): invalid float value: (.+)", "{0} takes a number, got {1}"),
    (r"argument (.+?): ignored explicit argument (.+)", "{0} takes no value, got {1}"),
    (r"argument (.+?): (.+)", "{0} {1}"),
    (r"ambiguous option: (\S+) could match (.+)", "{0} is short for several options: {1}"),
)
_PROGRAM = "forkd"
_OWN_OPTIONS = ("-h", "--help", "--version")
_NOUNS = {"COMMAND": "a command", "ACTION": "an action"}
_CHOICE = re.compile(r"argument (.+?): invalid choice: (.+?) \(choose from .*\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return super().format_help() if self.prog != _PROGRAM else render_help() + "\n"

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(self._explain(message), hint=self._hint(message))

    def _explain(self, message: str) -> str:
        if found := _CHOICE.fullmatch(message):
            name, given = _name(found[1]), found[2]
            if name in ("COMMAND", "ACTION"):
                return f"{self.prog} has no {name.lower()} {given}"
            return f"{name} must be one of {', '.join(self._choices(name))}, got {given}"
        for pattern, template in _RULES:
            if found := re.fullmatch(pattern, message, re.DOTALL):
                first, *rest = found.groups()
                return template.format(_NOUNS.get(first, _name(first)), *rest, prog=self.prog)
        return message[:1].upper() + message[1:]

    def _hint(self, message: str) -> str:
        found = _CHOICE.fullmatch(message)
        meant = suggest(found[2].strip("'\""), self._choices(_name(found[1]))) if found else None
        return render_hint(self.prog, meant)

    def _choices(self, name: str) -> list[str]:
        for action in self._actions:
            if name in (*action.option_strings, action.metavar, action.dest) and action.choices is not None:
                more = ALIASES if name == "COMMAND" else ()
                return [*map(str, action.choices), *more]
        return []


def render_hint(prog: str, meant: str | None) -> str:
    listed = f"See: {prog} --help"
    return f"Did you mean {meant}? {listed}" if meant else listed


def parse(words: Sequence[str]) -> argparse.Namespace:
    args = argparse.Namespace()
    if words and words[0].startswith("-") and words[0] not in _OWN_OPTIONS:
        raise explain_left(build_parser(""), words)
    parse_into(args, build_parser(find_command(words)), words)
    return args


def parse_into(args: argparse.Namespace, parser: Parser, words: Sequence[str]) -> None:
    _, left = parser.parse_known_args(list(words), args)
    if left:
        raise explain_left(find_parser(parser, words), left)


def build_parser(only: str | None = None) -> Parser:
    """With every command, or with `only` one; with the names of all, if there is none of that name."""
    parser = Parser(prog=_PROGRAM)
    parser.add_argument("--version", action="version", version=f"forkd {__version__}")
    add_commands(parser, only)
    return parser


def find_command(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def find_parser(parser: argparse.ArgumentParser, words: Iterable[str]) -> argparse.ArgumentParser:
    """That of the command or action that the words lead to."""
    for word in words:
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not below:
            break
        parser = below[0].choices.get(word, parser)
    return parser


def find_prog(words: Sequence[str]) -> str:
    """`forkd snapshot create` for the words of one."""
    return find_parser(build_parser(find_command(words)), words).prog


def explain_left(parser: argparse.ArgumentParser, left: Sequence[str]) -> InvalidInput:
    """Words that the command has no use for."""
    options = [option for action in parser._actions for option in action.option_strings]
    first = left[0]
    if not first.startswith("-") or first == "-":
        return InvalidInput(
            f"{parser.prog} takes no further argument, got {first!a}", hint=render_hint(parser.prog, None)
        )
    option = first.partition("=")[0]
    return InvalidInput(
        f"{parser.prog} has no option {option}", hint=render_hint(parser.prog, suggest(option, options))
    )


def _name(text: str) -> str:
    """`-n/--limit` as `--limit`."""
    return text.rsplit("/", 1)[-1] if text.startswith("-") else text
