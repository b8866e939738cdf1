"""`forkd`: the command line. Commands have their own modules; errors and signals are handled here, once.

Only what `forkd --help` needs is imported at the top: this module is what people wait for.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from forkd.cli.commands import COMMANDS, expand_alias, explain_missing, render_help
from forkd.errors import ForkdError

if TYPE_CHECKING:
    import argparse
    from types import FrameType

_INTERRUPTED = 130
_GC_THRESHOLD = 100_000  # objects; more than all modules make
_HELP = (["-h"], ["--help"])


def run() -> NoReturn:
    """The console script. Looking for garbage while modules are imported and once more at the end is a sixth of the
    time of a short command, and finds none."""
    long_running = sys.argv[1:2] == ["serve"]
    if not long_running:
        gc.set_threshold(_GC_THRESHOLD)
    code = main()
    if not long_running:
        gc.freeze()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup a hang-up stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_termination)
    words = expand_alias(sys.argv[1:] if argv is None else argv)
    args: argparse.Namespace | None = None
    try:
        if words in _HELP:
            print(render_help())
            return 0
        try:
            from forkd.cli.parser import parse

            args = parse(words)
            code = args.func(args)
            sys.stdout.flush()
        except ModuleNotFoundError as error:
            raise explain_missing(error) from error
    except ForkdError as error:
        return _report(error, words, args)
    except KeyboardInterrupt:
        print("forkd: interrupted; everything it had started is gone", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output closed it (`forkd … | head`). This is not an error, and nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    assert isinstance(code, int)
    return code


def _report(error: ForkdError, words: list[str], args: argparse.Namespace | None) -> int:
    from forkd.cli.report import exit_code_of, print_error, wants_json

    print_error(error, words, as_json=wants_json(words, args))
    command = COMMANDS.get(words[0]) if words else None
    return exit_code_of(error, ran_command=command is not None and command.runs_command)


def _on_termination(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    run()
