"""`forkd`: the command line. Commands have their own modules; errors and signals are handled here, once."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from forkd import __version__
from forkd.cli.commands import COMMANDS, add_commands, explain_missing
from forkd.cli.output import note
from forkd.errors import ForkdError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup a hang-up stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_termination)
    words = sys.argv[1:] if argv is None else list(argv)
    args: argparse.Namespace | None = None
    try:
        try:
            args = build_parser(find_command(words)).parse_args(words)
            code = args.func(args)
            sys.stdout.flush()
        except ModuleNotFoundError as error:
            raise explain_missing(error) from error
    except ForkdError as error:
        print_error(error, as_json=bool(args is not None and getattr(args, "json", False)))
        return error.exit_code
    except KeyboardInterrupt:
        note("forkd: interrupted; everything it had started is gone")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output closed it (`forkd … | head`). This is not an error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    assert isinstance(code, int)
    return code


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """With every command, or with the arguments of `only` one ("" for none) and the names of the others."""
    parser = argparse.ArgumentParser(
        prog="forkd", description="Fork warmed virtual machines, copy-on-write.", formatter_class=_Formatter
    )
    parser.add_argument("--version", action="version", version=f"forkd {__version__}")
    add_commands(parser, only)
    return parser


def find_command(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def print_error(error: ForkdError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": error.message, "code": error.code, "hint": error.hint, "details": error.details}))
        return
    note(f"error: {error.message}")
    for line in (error.details or "").splitlines():
        note(f"  | {line}")
    if error.hint:
        note(f"hint: {error.hint}")


class _Formatter(argparse.HelpFormatter):
    """With room for the longest command beside its help; argparse forgets that commands are indented twice."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, COMMANDS)) + 4


def _on_termination(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
