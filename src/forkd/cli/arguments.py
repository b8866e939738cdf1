"""Arguments that several commands take: the daemon's address, KEY=VALUE pairs, times, sizes, limits."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from forkd.errors import InvalidInput

_LIMITS = ("memory_limit_mib", "cpu_limit", "pids_limit", "io_limit_mib_s")

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"\d+(?:\.\d+)?"
_DURATION = re.compile(rf"{_NUMBER}|(?:{_NUMBER}[smhd])+", re.ASCII)
_SIZE = re.compile(rf"({_NUMBER})([KMGT])?I?B?", re.ASCII)
_PART = re.compile(rf"({_NUMBER})([smhd]?)", re.ASCII)


def parse_duration(text: str) -> float:
    """Seconds: `90`, `30s`, `5m`, `1h30m`, `2d`."""
    if not _DURATION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"takes seconds, or a time such as 30s, 5m, 2h or 1d, got {text!a}")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def add_duration(parser: argparse.ArgumentParser, flag: str, about: str, default: float | None = None) -> None:
    parser.add_argument(flag, type=parse_duration, default=default, metavar="TIME", help=about)


def parse_size(text: str) -> int:
    """Bytes: `1048576`, `512M`, `1.5G`; a unit is 1024 of the one before."""
    found = _SIZE.fullmatch(text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"takes bytes, or a size such as 512M, 10G or 1T, got {text!a}")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


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
