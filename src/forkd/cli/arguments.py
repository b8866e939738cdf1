"""Arguments that several commands take: the daemon's address, KEY=VALUE pairs, limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from forkd.errors import InvalidInput

if TYPE_CHECKING:
    pass

_LIMITS = ("memory_limit_mib", "cpu_limit", "pids_limit", "io_limit_mib_s")


def add_json(parser: argparse.ArgumentParser, about: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=about)


def add_daemon_options(parser: argparse.ArgumentParser, *, json: str | None = "print JSON") -> None:
    """What every command that asks the daemon takes. `json` is the help of --json, None where there is none."""
    if json is not None:
        add_json(parser, json)
    parser.add_argument("--url", metavar="URL", help="the daemon (default: FORKD_URL, else the one on this machine)")
    parser.add_argument("--token", metavar="TOKEN", help="its token; FORKD_TOKEN keeps it out of the process list")


def add_pairs(parser: argparse.ArgumentParser, *flags: str, about: str) -> None:
    parser.add_argument(*flags, action="append", default=[], metavar="KEY=VALUE", help=about)


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """The last value of a key counts."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{option} takes KEY=VALUE, got {text!r}", hint=f"For example: {option} name=value")
        pairs[name] = value
    return pairs


def parse_environment(texts: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A key alone takes this process's value; nothing when it has none."""
    given = []
    for text in texts:
        if "=" in text or not text:
            given.append(text)
        elif text in environ:
            given.append(f"{text}={environ[text]}")
    return parse_pairs(given, "-e")


def render_pairs(pairs: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(pairs.items()))


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit-mib", type=int, metavar="MIB", help="memory of its VM, which is killed when it needs more"
    )
    parser.add_argument("--cpu-limit", type=float, metavar="CORES", help="processor time, in cores, such as 0.5")
    parser.add_argument("--pids-limit", type=int, metavar="N", help="processes and threads of its VM on the host")
    parser.add_argument("--io-limit-mib-s", type=int, metavar="MIB", help="MiB/s it may read and write, for each disk")


def render_limits(args: argparse.Namespace) -> dict[str, Any]:
    """As arguments of the SDK's calls."""
    return {name: getattr(args, name) for name in _LIMITS}
