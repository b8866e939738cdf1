"""`forkd completion`: a script that completes commands, options, ids and tags in a shell."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from forkd.cli.grammar import KINDS, describe
from forkd.cli.nouns import Nouns
from forkd.cli.reach import find_running
from forkd.cli.shells import SHELLS
from forkd.errors import ForkdError


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "print a completion script for a shell"
    parser = nouns.add_parser(
        "completion",
        help=about,
        description="Print a completion script for a shell, or the words such a script asks for; those without an "
        "error, and without starting a daemon.",
    )
    parser.add_argument("what", choices=(*SHELLS, *KINDS), metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.what in SHELLS:
        from forkd.cli.main import build_parser

        print(SHELLS[args.what](describe(build_parser())), end="")
        return 0
    with suppress(ForkdError, ModuleNotFoundError):
        print("\n".join(_list(args.what)))
    sys.stdout.flush()
    return 0


def _list(kind: str) -> list[str]:
    """Words of one kind. Whoever presses Tab wants no error message, and no daemon."""
    if kind == "images":
        from forkd.host.paths import find_home
        from forkd.image import ImageStore

        return [image.name for image in ImageStore(find_home()).list() if image.name]
    controller = find_running(argparse.Namespace(url=None, token=None))
    if controller is None:
        return []
    with controller:
        if kind == "sandboxes":
            return [info["id"] for info in controller.list_sandboxes()]
        if kind == "snapshots":
            return [info["tag"] for info in controller.list_snapshots()]
        return [info["name"] for info in controller.list_workspaces()]
