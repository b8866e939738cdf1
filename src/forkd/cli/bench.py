"""`forkd bench`: the repository's measurements."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import forkd
from forkd.errors import HostLacks


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure forkd on this machine. It takes minutes and needs a checkout of forkd's repository."
    parser.add_argument("--rounds", type=int, metavar="N", help="how many times to measure everything (default 10)")
    parser.add_argument("-n", type=int, nargs="+", metavar="N", help="children to fork (default 1 10 100)")
    parser.add_argument("--only", action="append", metavar="PART", help="a part to measure; may be repeated")
    parser.add_argument("--engine", help="the engine (default: the one that forkd doctor chooses)")


def run_bench(args: argparse.Namespace) -> int:
    root = find_checkout(Path(forkd.__file__))
    if root is None:
        raise HostLacks(
            "This forkd was installed without its bench",
            hint="Get forkd's repository and run there: make bench",
        )
    command = [sys.executable, "-m", "bench", *render_options(args)]
    sys.stdout.flush()
    # It writes below the checkout, and handles its own signals.
    os.chdir(root)
    os.execv(sys.executable, command)


def find_checkout(package: Path) -> Path | None:
    """The repository this package is in, when it is in one."""
    for root in package.resolve().parents:
        if (root / "bench/__main__.py").is_file() and (root / "pyproject.toml").is_file():
            return root
    return None


def render_options(args: argparse.Namespace) -> list[str]:
    words: list[str] = []
    if args.rounds is not None:
        words += ["--rounds", str(args.rounds)]
    if args.n:
        words += ["-n", *map(str, args.n)]
    for part in args.only or []:
        words += ["--only", part]
    if args.engine is not None:
        words += ["--engine", args.engine]
    return words
