"""`forkd serve`: the daemon, in the foreground."""

from __future__ import annotations

import argparse
import os

from forkd.daemon.serve import serve
from forkd.daemon.settings import CONFIG_VARIABLE, OPTIONS, read_settings
from forkd.host.paths import find_home

_ABOUT = (
    "Every option can also be set by its environment variable or in the settings file; "
    "a flag wins over the variable, the variable over the file."
)


def add_parser(nouns: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("serve", help="run the daemon in the foreground", description=_ABOUT)
    parser.add_argument("--config", metavar="PATH", help=f"the settings file, TOML [{CONFIG_VARIABLE}]")
    for option in OPTIONS:
        parser.add_argument(option.flag, metavar=option.metavar, help=f"{option.help} [{option.variable}]")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    home = find_home()
    flags = {key: getattr(args, key) for key in ("config", *(option.key for option in OPTIONS))}
    return serve(home, read_settings(flags, os.environ, home))
