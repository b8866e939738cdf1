"""The machine a run was made on: without it no figure means anything."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine
from forkd.engines.qemu.binary import find_binary, read_cpuinfo
from forkd.host.memory import parse_kib_table


def describe_host(engine: Engine) -> dict[str, Any]:
    # The fake engine runs where no QEMU is.
    qemu = find_binary().version if engine.name == "qemu" else None
    return {
        "cpu": parse_cpu_model(read_cpuinfo()),
        "cores": len(os.sched_getaffinity(0)),
        "ram_mib": parse_kib_table(Path("/proc/meminfo").read_text())["MemTotal"] // 2**20,
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "qemu": qemu,
        "engine": engine.name,
        "isolation": engine.isolation,
        "accelerator": engine.isolation.removeprefix("qemu-") if qemu else None,
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def parse_cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return "unknown"


def render_host(host: dict[str, Any]) -> str:
    """One line for a chart."""
    qemu = f", QEMU {host['qemu'].partition(' ')[0]} ({host['accelerator']})" if host["qemu"] else ""
    return f"{host['cpu']}, {host['cores']} cores, {host['ram_mib'] / 1024:.0f} GiB RAM{qemu}"
