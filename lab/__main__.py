"""`python -m lab`: run the tests marked `lab`, on this host where it has what they need, else in the lab machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forkd.cli.report import print_error
from forkd.errors import ForkdError
from lab.host import find_lack, run_here
from lab.run import run_in_machine
from lab.selection import Asked

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(*parse_args(sys.argv[1:] if argv is None else argv))
    except ForkdError as error:
        print_error(error, as_json=False)
        return error.exit_code
    except KeyboardInterrupt:
        print("lab: interrupted", file=sys.stderr)
        return _INTERRUPTED


def parse_args(argv: Sequence[str]) -> tuple[Asked, str | None]:
    """The tests, and a shell command that is to run in their place."""
    parser = argparse.ArgumentParser(
        prog="python -m lab",
        usage="%(prog)s [TEST ...] [-- PYTEST-OPTION ...]\n       %(prog)s --shell COMMAND",
        description="Run the tests marked `lab` where there is KVM, root and a full cgroup v2.",
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help="a directory, a file or path::test (default tests)")
    parser.add_argument("--shell", metavar="COMMAND", help="run this there instead, in the working tree")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    return Asked(tuple(args.tests) or Asked.tests, tuple(argv[end + 1 :])), args.shell


def run(asked: Asked, command: str | None) -> int:
    lack = find_lack()
    if lack is None:
        print("lab: this host has KVM, root and cgroup v2; running here", file=sys.stderr)
        return run_here(asked, command)
    print(f"lab: {lack}; running in the lab machine", file=sys.stderr)
    return run_in_machine(asked, command)


if __name__ == "__main__":
    sys.exit(main())
