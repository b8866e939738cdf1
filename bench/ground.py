"""What is measured on: the machine, without which no figure means anything; an engine, a frozen parent, a guest."""

from __future__ import annotations

import os
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine, Frozen, Way
from forkd.engines.qemu.args import find_binary
from forkd.errors import ContractBroken, EngineFailed
from forkd.guest.agent import Agent
from forkd.host.firecracker import find_binaries
from forkd.host.system import parse_kib_table, read_cpuinfo
from forkd.image import Progress
from forkd.runtime import demo
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_one, new_identities
from forkd.runtime.origin import Template
from forkd.runtime.templates import Templates

_TAG = "bench"


@dataclass(frozen=True)
class Ground:
    engine: Engine
    frozen: Frozen
    directory: Path
    progress: Progress


@asynccontextmanager
async def templated(ground: Ground) -> AsyncIterator[Template]:
    templates = Templates(ground.engine, ground.directory)
    try:
        await templates.warm(ground.frozen, _TAG)
        template = templates.find(ground.frozen)
        if template is None:
            raise EngineFailed("The template ended as soon as it was made")
        yield template
    finally:
        await templates.close()


@asynccontextmanager
async def sandboxed(ground: Ground, template: Template | None = None) -> AsyncIterator[Child]:
    """A VM as forkd makes them; where there is a template, it has to come from it."""
    sandbox = await fork_one(ground.engine, ground.frozen, new_identities(1)[0], ground.directory, template=template)
    try:
        if template and sandbox.machine.phases.way is not Way.FORK:
            raise ContractBroken(f"{sandbox.id} was started, and not forked from the template")
        yield sandbox
    finally:
        await sandbox.kill()


async def evaluate(agent: Agent) -> None:
    """The demo's expression."""
    await expect(agent, demo.CODE, demo.EXPECTED)


async def expect(agent: Agent, code: str, wanted: object) -> None:
    """A wrong answer is an error, not a measurement."""
    result = await agent.eval(code)
    if not result.has_value or result.value != wanted:
        raise ContractBroken(
            f"The guest answered {result.repr} instead of {wanted!r}",
            details=result.error.traceback or result.error.message if result.error else None,
        )


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
