"""`forkd bench`: the repository's measurements, and that of the fork itself."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import forkd
from forkd.cli.arguments import add_json
from forkd.errors import HostLacks, InvalidInput


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure forkd on this machine. It takes minutes and needs a checkout of forkd's repository; `primitive`, the "
        "fork itself of a tiny VM beside a C program that makes the same system calls, takes seconds and needs gcc."
    )
    parser.add_argument("what", nargs="?", choices=["primitive"], help="only this, without a checkout")
    parser.add_argument("--rounds", type=int, metavar="N", help="how many times to measure everything (default 10; 5)")
    parser.add_argument("-n", type=int, nargs="+", metavar="N", help="children to fork (default 1 10 100; 100)")
    parser.add_argument("--only", action="append", metavar="PART", help="a part to measure; may be repeated")
    parser.add_argument("--engine", help="the engine (default: the one that forkd doctor chooses)")
    add_json(parser, "of primitive: print one JSON object")


def run_bench(args: argparse.Namespace) -> int:
    if args.what == "primitive":
        from forkd.cli.bench_primitive import run_primitive

        return run_primitive(args)
    if args.json:
        raise InvalidInput(
            "--json is an option of forkd bench primitive", hint="The other results are in bench/results.json"
        )
    return _run_checkout(args)


def _run_checkout(args: argparse.Namespace) -> NoReturn:
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
