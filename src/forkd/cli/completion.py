"""`forkd completion`: a script that completes commands, options, ids and tags in a shell.

The script is rendered from the parser itself: a new command is in it without further work. What an argument takes is
told by its metavar.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from forkd.cli.commands import ALIASES
from forkd.cli.connect import find_running
from forkd.cli.output import print_lines
from forkd.errors import ForkdError

# Kinds of words that a script asks for, with `forkd completion KIND`.
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

# Shared by bash and zsh: which command the words lead to, what it takes, and what the word before the cursor takes.
_TABLES = """\
_forkd_path() {
    local word next
    path=''
    for word in "$@"; do
        next="${path:+$path }$word"
        case "$next" in
@PATHS@) path="$next" ;;
        esac
    done
}
_forkd_grammar() {
    below='' options='' positional='' takes='-'
    case "$1" in
@COMMANDS@
    esac
    case "$1:$2" in
@VALUES@
    esac
}
_forkd_list() { command forkd completion "$1" 2>/dev/null; }
"""

_BASH = """\
# bash completion of forkd. For this shell: source <(forkd completion bash)
@TABLES@\
_forkd_words() { local IFS=$' \\n'; COMPREPLY+=($(compgen -W "$1" -- "$2")); }
_forkd_value() {
    case "$1" in
    '') ;;
    @FILES@) COMPREPLY+=($(compgen -f -- "$2")); compopt -o filenames ;;
    @PLACES@)
        _forkd_words "$(_forkd_list sandboxes | sed 's|$|:/|')" "$2"
        ((${#COMPREPLY[@]})) && compopt -o nospace
        COMPREPLY+=($(compgen -f -- "$2")); compopt -o filenames ;;
    @KINDS@) _forkd_words "$(_forkd_list "$1")" "$2" ;;
    *) _forkd_words "$1" "$2" ;;
    esac
}
_forkd() {
    local cur="${COMP_WORDS[COMP_CWORD]}" path below options positional takes
    COMPREPLY=()
    _forkd_path "${COMP_WORDS[@]:1:COMP_CWORD-1}"
    _forkd_grammar "$path" "${COMP_WORDS[COMP_CWORD-1]}"
    if [[ $takes != '-' ]]; then _forkd_value "$takes" "$cur"
    elif [[ $cur == -* ]]; then _forkd_words "$options" "$cur"
    elif [[ -n $below ]]; then _forkd_words "$below" "$cur"
    else _forkd_value "$positional" "$cur"
    fi
}
complete -F _forkd forkd
"""

_ZSH = """\
#compdef forkd
# zsh completion of forkd. For this shell: source <(forkd completion zsh)
@TABLES@\
_forkd_value() {
    case "$1" in
    '') ;;
    @FILES@) _files ;;
    @PLACES@) compadd -S ':/' -- ${(f)"$(_forkd_list sandboxes)"}; _files ;;
    @KINDS@) compadd -- ${(f)"$(_forkd_list "$1")"} ;;
    *) compadd -- ${=1} ;;
    esac
}
_forkd() {
    local path below options positional takes
    _forkd_path "${(@)words[2,CURRENT-1]}"
    _forkd_grammar "$path" "${words[CURRENT-1]}"
    if [[ $takes != '-' ]]; then _forkd_value "$takes"
    elif [[ ${words[CURRENT]} == -* ]]; then compadd -- ${=options}
    elif [[ -n $below ]]; then compadd -- ${=below}
    else _forkd_value "$positional"
    fi
}
compdef _forkd forkd
"""

_FISH = """\
# fish completion of forkd. For this shell: forkd completion fish | source
function __forkd_path
    set -l path ''
    for word in (commandline -opc)[2..-1]
        set -l next (string trim -- "$path $word")
        if contains -- "$next" @PATHS@
            set path $next
        end
    end
    echo $path
end
function __forkd_at
    set -l at (__forkd_path)
    test "$at" = "$argv[1]"
end
function __forkd_list
    command forkd completion $argv[1] 2>/dev/null
end
complete -c forkd -f
@LINES@
"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a completion script for a shell, or the words that such a script asks for. Printing words never fails "
        "and never starts a daemon."
    )
    parser.add_argument("what", choices=(*SHELLS, *KINDS), metavar="SHELL", help=", ".join(SHELLS))


def run_completion(args: argparse.Namespace) -> int:
    if args.what in SHELLS:
        from forkd.cli.parser import build_parser

        print(SHELLS[args.what](add_aliases(describe(build_parser()))), end="")
        return 0
    with suppress(ForkdError, ModuleNotFoundError):
        print_lines(_list(args.what))
    return 0


def _list(kind: str) -> list[str]:
    """Words of one kind; none when no daemon runs."""
    if kind == "images":
        from forkd.host.paths import find_home
        from forkd.image import ImageStore

        return [image.name for image in ImageStore(find_home()).list() if image.name]
    controller = find_running()
    if controller is None:
        return []
    with controller:
        if kind == "sandboxes":
            return [info["id"] for info in controller.list_sandboxes()]
        if kind == "snapshots":
            return [info["tag"] for info in controller.list_snapshots()]
        return [info["name"] for info in controller.list_workspaces()]


@dataclass(frozen=True)
class Flag:
    names: tuple[str, ...]
    about: str
    takes: str | None  # None: no value; "": any; else a kind, or words separated by spaces


@dataclass(frozen=True)
class Syntax:
    """What may follow one command."""

    path: tuple[str, ...]  # () is forkd itself
    about: str
    options: tuple[Flag, ...]
    below: tuple[tuple[str, str], ...]  # its sub-commands, each with what it is about
    takes: str  # of its positional arguments: as in Flag


def describe(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), about: str = "") -> list[Syntax]:
    """A command, then all commands below it."""
    below: list[tuple[str, str]] = []
    found: list[Syntax] = []
    options: list[Flag] = []
    takes = ""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                below.append((name, helps.get(name, "")))
                found += describe(child, (*path, name), helps.get(name, ""))
        elif action.option_strings:
            value = None if action.nargs == 0 else _kind(action)
            options.append(Flag(tuple(action.option_strings), action.help or "", value))
        else:
            takes = takes or _kind(action)
    return [Syntax(path, about, tuple(options), tuple(below), takes), *found]


def add_aliases(commands: Sequence[Syntax]) -> list[Syntax]:
    """Each alias takes what the command takes that it stands for."""
    root, *rest = commands
    by_path = {command.path: command for command in rest}
    made = [replace(by_path[path], path=(alias,)) for alias, path in ALIASES.items()]
    names = tuple((alias, f"the same as {' '.join(path)}") for alias, path in ALIASES.items())
    return [replace(root, below=(*root.below, *names)), *rest, *made]


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return _KIND_OF_METAVAR.get(metavar, "")


def render_bash(commands: Sequence[Syntax]) -> str:
    return _fill(_BASH, {**_kinds(), "TABLES": _render_tables(commands)})


def render_zsh(commands: Sequence[Syntax]) -> str:
    # In zsh `path` is the search path for commands: a local of that name would leave nothing to run.
    tables = _render_tables(commands).replace("path=", "at=").replace("${path:+$path }", "${at:+$at }")
    script = _ZSH.replace("local path", "local at").replace('"$path"', '"$at"')
    return _fill(script, {**_kinds(), "TABLES": tables})


def render_fish(commands: Sequence[Syntax]) -> str:
    paths = " ".join(shlex.quote(" ".join(command.path)) for command in commands if command.path)
    lines = [line for command in commands for line in _render_fish(command)]
    return _fill(_FISH, {"PATHS": paths, "LINES": "\n".join(lines)})


SHELLS = {"bash": render_bash, "zsh": render_zsh, "fish": render_fish}


def _render_tables(commands: Sequence[Syntax]) -> str:
    paths = " | ".join(shlex.quote(" ".join(command.path)) for command in commands if command.path)
    return _fill(
        _TABLES,
        {
            "PATHS": f"        {paths}",
            "COMMANDS": "\n".join(map(_render_command, commands)),
            "VALUES": "\n".join(_render_values(commands)),
        },
    )


def _render_command(command: Syntax) -> str:
    below = " ".join(name for name, _ in command.below)
    options = " ".join(name for option in command.options for name in option.names)
    words = (shlex.quote(each) for each in (" ".join(command.path), below, options, command.takes))
    return "    {}) below={} options={} positional={} ;;".format(*words)


def _render_values(commands: Iterable[Syntax]) -> Iterable[str]:
    for command in commands:
        for option in command.options:
            if option.takes is not None:
                cases = " | ".join(shlex.quote(f"{' '.join(command.path)}:{name}") for name in option.names)
                yield f"    {cases}) takes={shlex.quote(option.takes)} ;;"


def _render_fish(command: Syntax) -> Iterable[str]:
    at = _fish_quote(f"__forkd_at '{' '.join(command.path)}'")
    for name, about in command.below:
        yield f"complete -c forkd -n {at} -a {name} -d {_fish_quote(about)}"
    if not command.below and command.takes:
        yield f"complete -c forkd -n {at} {_fish_value(command.takes, option=False)}"
    for option in command.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        value = "" if option.takes is None else " " + _fish_value(option.takes, option=True)
        yield f"complete -c forkd -n {at} {names}{value} -d {_fish_quote(_short(option))}"


def _fish_value(takes: str, *, option: bool) -> str:
    """`-x`: a value and no file names, `-r`: a value; an argument needs neither, only `-F` where files are meant."""
    if takes == FILES:
        return "-r -F" if option else "-F"
    if takes == PLACES:
        return "-F -a '(__forkd_list sandboxes | string replace -r \\$ :/)'"
    words = f"(__forkd_list {takes})" if takes in KINDS else takes
    return f"{'-x ' if option else ''}-a {_fish_quote(words)}"


def _short(option: Flag) -> str:
    return option.about.partition(" (")[0].partition(";")[0]


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _kinds() -> dict[str, str]:
    return {"FILES": FILES, "PLACES": PLACES, "KINDS": " | ".join(KINDS)}


def _fill(template: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template
