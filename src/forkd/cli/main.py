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
from forkd.errors import ForkdError, HostLacks

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Who started us with nohup wants no hang-up to reach us.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_termination)
    args: argparse.Namespace | None = None
    try:
        args = build_parser().parse_args(argv)
        code = args.func(args)
        sys.stdout.flush()
    except ForkdError as error:
        _print_error(error, as_json=bool(args is not None and getattr(args, "json", False)))
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forkd", description="Fork warmed virtual machines, copy-on-write.")
    parser.add_argument("--version", action="version", version=f"forkd {__version__}")
    nouns = parser.add_subparsers(metavar="COMMAND", required=True)
    try:
        from forkd.cli import demo, doctor, image, snapshot
    except ModuleNotFoundError as error:
        raise HostLacks(
            f"This command needs the Python package {error.name}",
            hint="Install the server side: pip install 'forkd[server]'",
        ) from error
    for noun in (demo, doctor, image, snapshot):
        noun.add_parser(nouns)
    return parser


def _on_termination(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _print_error(error: ForkdError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": error.message, "code": error.code, "hint": error.hint, "details": error.details}))
        return
    print(f"error: {error.message}", file=sys.stderr)
    if error.details:
        for line in error.details.splitlines():
            print(f"  | {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
