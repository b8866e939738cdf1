"""What the documents tell people to type exists, and what they link to is there."""

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd import errors
from forkd.cli.commands import ALIASES, expand_alias
from forkd.cli.parser import build_parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CLI = ROOT / "docs/reference/cli.md"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TARGET = re.compile(r"^([a-z]+):", re.MULTILINE)
_MADE = re.compile(r"forkd snapshot create (?!.*--replace).*?--tag ([\w-]+)")
_INLINE_MAKE = re.compile(r"`make ([a-z]+)")


def command_lines(path: Path) -> Iterator[list[str]]:
    """The words of each line of each shell block."""
    for language, body in _FENCE.findall(path.read_text()):
        # Blocks without a language show output as well as input; those may also hold commands at the line's start.
        for line in body.splitlines():
            if language == "sh" or line.startswith("forkd "):
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def all_commands(program: str) -> list[tuple[str, list[str]]]:
    return [(path.name, words) for path in DOCUMENTS for words in command_lines(path) if words[0] == program]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of every command, below those that only lead to others."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for child in action.choices.values():
            yield from parsers(child)


def section(document: str, heading: str) -> str:
    """From a heading of the second level to the next one."""
    return document.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("where", "words"), all_commands("forkd"), ids=lambda value: " ".join(value))
def test_every_forkd_command_in_the_documents_is_one(where: str, words: list[str]) -> None:
    try:
        args = build_parser().parse_args(expand_alias(words[1:]))
    except SystemExit as stop:
        # --help and --version end the program too, and well.
        assert stop.code == 0, f"{where}: {shlex.join(words)}"
    else:
        assert callable(args.func)


@pytest.mark.parametrize(("where", "words"), all_commands("make"), ids=lambda value: " ".join(value))
def test_every_make_command_in_the_documents_is_a_target(where: str, words: list[str]) -> None:
    targets = _TARGET.findall((ROOT / "Makefile").read_text())
    wanted = [word for word in words[1:] if "=" not in word]
    assert set(wanted) <= set(targets), where
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)


def test_every_make_word_in_running_text_is_a_target() -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text()))
    named = {word for path in DOCUMENTS for word in _INLINE_MAKE.findall(path.read_text())}
    assert named <= targets


def test_shell_blocks_hold_only_commands_that_this_file_checks() -> None:
    known = {"forkd", "make"}
    unknown = [(path.name, words) for path in DOCUMENTS for words in command_lines(path) if words[0] not in known]
    assert unknown == []


def test_the_readme_has_the_two_commands() -> None:
    lines = [" ".join(words) for words in command_lines(ROOT / "README.md")]
    assert lines[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    for link in _LINK.findall(path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        # The chart is written by `make bench`.
        assert target.exists() or target == ROOT / "docs/bench.svg", link
        if anchor:
            headings = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings_of(target)}
            assert anchor in headings, link


def headings_of(path: Path) -> list[str]:
    return _HEADING.findall(path.read_text())


@pytest.mark.parametrize("parser", list(parsers(build_parser())), ids=lambda parser: parser.prog)
def test_every_option_of_every_command_is_in_the_reference(parser: argparse.ArgumentParser) -> None:
    noun = " ".join(parser.prog.split()[:2])
    text = section(CLI.read_text(), noun)
    for action in parser._actions:
        for option in action.option_strings:
            if option not in ("-h", "--help"):
                assert re.search(rf"`{re.escape(option)}[ `]", text), f"{parser.prog} {option}"
    if parser.prog != noun:
        assert f"`{parser.prog}" in text


def test_the_reference_has_every_other_word_for_a_command() -> None:
    table = section(CLI.read_text(), "Other words")
    documented = re.findall(r"^\| `forkd (\w+)` \| `forkd ([\w ]+)` \|", table, re.MULTILINE)
    assert documented == [(alias, " ".join(words)) for alias, words in ALIASES.items()]


def test_no_tag_is_made_twice_by_who_follows_the_documents_in_order() -> None:
    made: dict[str, str] = {}
    for path in DOCUMENTS:
        for tag in _MADE.findall(path.read_text()):
            assert tag not in made, f"{path.name} and {made[tag]} both make {tag}"
            made[tag] = path.name


def test_the_reference_has_every_error_with_its_exit_code() -> None:
    table = section(CLI.read_text(), "Errors and exit codes")
    documented = set(re.findall(r"^\| (\d+) \| `(\w+)` \|", table, re.MULTILINE))
    found = {
        (str(each.exit_code), each.code)
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.ForkdError)
    }
    assert documented == found
