"""The machine a run was made on: without it no figure means anything."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine
from forkd.engines.qemu.binary import find_binary
from forkd.host.cpu import read_cpuinfo
from forkd.host.firecracker import find_binaries
from forkd.host.memory import parse_kib_table


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": parse_cpu_model(read_cpuinfo()),
        "cores": len(os.sched_getaffinity(0)),
        "ram_mib": parse_kib_table(Path("/proc/meminfo").read_text())["MemTotal"] // 2**20,
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def describe_host(engine: Engine) -> dict[str, Any]:
    # The fake engine runs where no QEMU is.
    qemu = find_binary().version if engine.name == "qemu" else None
    return {
        **describe_machine(),
        "qemu": qemu,
        "engine": engine.name,
        "isolation": engine.isolation,
        "accelerator": engine.isolation.removeprefix("qemu-") if qemu else None,
    }


def describe_engines(engines: Sequence[Engine]) -> dict[str, Any]:
    return {
        **describe_machine(),
        "qemu": find_binary().version,
        "accelerator": "kvm",
        "firecracker": find_binaries().version,
        "isolation": {engine.name: engine.isolation for engine in engines},
    }


def parse_cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return "unknown"


def render_host(host: Mapping[str, Any]) -> str:
    """One line for a chart."""
    qemu = f", QEMU {host['qemu'].partition(' ')[0]} ({host['accelerator']})" if host["qemu"] else ""
    firecracker = f", Firecracker {host['firecracker']}" if "firecracker" in host else ""
    return f"{host['cpu']}, {host['cores']} cores, {host['ram_mib'] / 1024:.0f} GiB RAM{qemu}{firecracker}"
