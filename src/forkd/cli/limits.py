"""The options for what a sandbox may use."""

from __future__ import annotations

import argparse
from typing import Any


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory-limit-mib", type=int, metavar="MIB", help="memory of its VM; beyond, it is ended")
    parser.add_argument("--cpu-limit", type=float, metavar="CORES", help="processor time, in cores, such as 0.5")
    parser.add_argument("--pids-limit", type=int, metavar="N", help="processes and threads of its VM on the host")
    parser.add_argument("--io-limit-mib-s", type=int, metavar="MIB", help="MiB/s it may read, and write, of each disk")


def render_limits(args: argparse.Namespace) -> dict[str, Any]:
    """As arguments of the SDK's calls."""
    names = ("memory_limit_mib", "cpu_limit", "pids_limit", "io_limit_mib_s")
    return {name: getattr(args, name) for name in names}
