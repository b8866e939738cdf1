"""What a frozen VM depends on in the Firecracker and the host that froze it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from forkd.engines.base import check_same
from forkd.host.cpu import parse_cpu
from forkd.host.firecracker import Binaries, parse_numbers

# Firecracker promises device state within one version, and a guest has seen the CPU it ran on.
_NEEDED = {"firecracker": "Firecracker", "cpu": "the CPU", "network": "the network"}
_OLDEST_WITH_OVERRIDES = (1, 12)


def render_platform(binaries: Binaries, cpuinfo: str, kernel: str, *, network: bool) -> dict[str, str]:
    """What a frozen VM must find again; `kernel`, the host's, is recorded only."""
    return {
        "firecracker": binaries.version,
        "cpu": parse_cpu(cpuinfo),
        "network": "tap" if network else "none",
        "kernel": kernel,
    }


def can_override_taps(version: str) -> bool:
    """Whether a child can be given another network interface of the host than its parent had."""
    return parse_numbers(version) >= _OLDEST_WITH_OVERRIDES


def check_platform(frozen: Mapping[str, str], here: Mapping[str, str]) -> None:
    for key, what in _NEEDED.items():
        check_same(what, frozen.get(key), here[key])
