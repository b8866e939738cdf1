"""`forkd`: the command line. Nouns live in their own modules; errors and signals are handled here, once."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from forkd import __version__
from forkd.cli.nouns import NOUNS, add_nouns, explain_missing
from forkd.cli.plain import render_plain
from forkd.errors import ForkdError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Who started us with nohup wants no hang-up to reach us.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_termination)
    words = sys.argv[1:] if argv is None else list(argv)
    args: argparse.Namespace | None = None
    try:
        try:
            args = build_parser(find_noun(words)).parse_args(words)
            code = args.func(args)
            sys.stdout.flush()
        except ModuleNotFoundError as error:
            raise explain_missing(error) from error
    except ForkdError as error:
        print_error(error, as_json=bool(args is not None and getattr(args, "json", False)))
        return error.exit_code
    except KeyboardInterrupt:
        print("forkd: interrupted; everything it had started is gone", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`forkd … | head`). Not a fault, and nothing may be printed any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    assert isinstance(code, int)
    return code


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """With every command, or with `only` one that can be parsed ("" for none) and the others named."""
    parser = argparse.ArgumentParser(
        prog="forkd", description="Fork warmed virtual machines, copy-on-write.", formatter_class=_Formatter
    )
    parser.add_argument("--version", action="version", version=f"forkd {__version__}")
    add_nouns(parser, only)
    return parser


def find_noun(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def print_error(error: ForkdError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": error.message, "code": error.code, "hint": error.hint, "details": error.details}))
        return
    print(f"error: {render_plain(error.message)}", file=sys.stderr)
    if error.details:
        for line in error.details.splitlines():
            print(f"  | {render_plain(line)}", file=sys.stderr)
    if error.hint:
        print(f"hint: {render_plain(error.hint)}", file=sys.stderr)


class _Formatter(argparse.HelpFormatter):
    """Room for the longest command beside what it is about; argparse forgets that commands are indented twice."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, NOUNS)) + 4


def _on_termination(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
