"""How an error is told: as text or JSON, in the words of the command line, with its exit code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forkd.cli.output import note, print_json, print_lines
from forkd.errors import CommandNotStarted, ForkdError, GuestTimeout

if TYPE_CHECKING:
    import argparse

# As Docker's `run` and `exec`, whose exit code is otherwise the command's own.
TIMED_OUT = 124
FORKD_FAILED = 125
CANNOT_EXECUTE = 126
COMMAND_NOT_FOUND = 127
_NO_SUCH_FILE = "No such file or directory"
_NO_SUCH_DIRECTORY = "working directory"

# Fields of the API, and what sets them here.
_WORDS = {
    "timeout_secs": "--timeout",
    "warm_timeout_secs": "--warm-timeout",
    "on_timeout": "--on-timeout",
    "memory_limit_mib": "--memory-limit-mib",
    "cpu_limit": "--cpu-limit",
    "pids_limit": "--pids-limit",
    "io_limit_mib_s": "--io-limit-mib-s",
    "memory_mib": "--memory",
    "vcpus": "--vcpus",
    "cpu_template": "--cpu-template",
    "warm_command": "--warm-command",
    "snapshot_tag": "the tag",
    "per_child_netns": "--per-child-netns",
    "live_fork": "--live-fork",
    "allow_partial": "--allow-partial",
    "sandbox_id": "the sandbox",
    "keep_last": "--keep-last",
    "keep_tagged": "--keep-tagged",
    "max_age_secs": "--max-age",
    "max_bytes": "--max-bytes",
}
# Short words of the API are ordinary ones too: they are fields only where a check of a field begins with them.
_CHECKED = {
    "args": "the command",
    "child": "the fork",
    "code": "the code",
    "count": "-n",
    "cwd": "--workdir",
    "env": "--env",
    "labels": "--label",
    "metadata": "--metadata",
    "limit": "-n",
    "n": "-n",
    "name": "the name",
    "since": "--since",
    "to": "the checkpoint",
    "type": "--type",
    "user": "--user",
}
# What is asked for in the API, and how it is asked for here.
_REQUESTS = {"ask to replace it": "pass --replace"}
_FIELD = re.compile(rf"\b({'|'.join(_WORDS)})\b")
_CHECK = re.compile(r"(\w+)(?:\.[\w.]+)?: (Input should|Value error,|[A-Z]\w+ should|must) ?(.*)", re.DOTALL)
_OUTPUTS = ("stdout", "stderr", "truncated")


def print_error(error: ForkdError, words: Sequence[str] = (), *, as_json: bool) -> None:
    """`words` are those of the command that failed."""
    if as_json:
        import json

        print(json.dumps(_render(error, words)))
        return
    note(f"error: {translate(error.message)}")
    for line in (error.details or "").splitlines():
        note(f"  | {line}")
    if hint := translate_hint(error.hint, words):
        note(f"hint: {hint}")


def _render(error: ForkdError, words: Sequence[str] = ()) -> dict[str, Any]:
    told = {"error": translate(error.message), "code": error.code, "hint": translate_hint(error.hint, words)}
    return {**told, "details": error.details, **_outputs(error)}


def report_removed(args: argparse.Namespace, removed: Sequence[str], failed: Mapping[str, ForkdError]) -> int:
    """Of several that were to be removed: what became of each. The exit code is that of the first failure."""
    if not removed and len(failed) == 1:
        raise next(iter(failed.values()))
    if args.json:
        errors = [{"name": name, **_render(error)} for name, error in failed.items()]
        print_json({"removed": list(removed), **({"failed": errors} if errors else {})})
    else:
        print_lines(removed)
        for error in failed.values():
            print_error(error, as_json=False)
    return next((error.exit_code for error in failed.values()), 0)


def wants_json(words: Sequence[str], args: argparse.Namespace | None) -> bool:
    """Without `args` the words could not be parsed; those behind `--` are for a command in a sandbox."""
    if args is not None:
        return bool(getattr(args, "json", False))
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own


def exit_code_of(error: ForkdError, *, ran_command: bool) -> int:
    """The error's own; of commands that pass on an exit code, one that tells forkd's failure from theirs."""
    if not ran_command:
        return error.exit_code
    if isinstance(error, GuestTimeout):
        return TIMED_OUT
    if isinstance(error, CommandNotStarted):
        absent = _NO_SUCH_FILE in error.message and _NO_SUCH_DIRECTORY not in error.message
        return COMMAND_NOT_FOUND if absent else CANNOT_EXECUTE
    return FORKD_FAILED


def translate(message: str) -> str:
    """What the daemon says of a field of the API, as said of the option that sets it."""
    if found := _CHECK.fullmatch(message):
        name = _WORDS.get(found[1]) or _CHECKED.get(found[1], found[1])
        said = f"{name}: {found[3]}" if found[2].startswith("Value") else f"{name} must {found[3]}"
        return said[:1].upper() + said[1:]
    return _FIELD.sub(lambda found: _WORDS[found[1]], message)


def translate_hint(hint: str | None, words: Sequence[str]) -> str | None:
    """The API's description is of no use at a command line; a command's help is."""
    if hint is None:
        return None
    from forkd.client.failures import FOR_CALLERS

    if "openapi.json" in hint or hint == FOR_CALLERS:
        from forkd.cli.parser import find_prog

        return f"See: {find_prog(words)} --help"
    for request, option in _REQUESTS.items():
        hint = hint.replace(request, option)
    return translate(hint)


def _outputs(error: ForkdError) -> dict[str, Any]:
    """What a command had written before it was killed at its timeout."""
    if not isinstance(error, GuestTimeout) or not isinstance(error.body, dict):
        return {}
    return {name: error.body[name] for name in _OUTPUTS if name in error.body}
