"""CPU templates are Firecracker's; the other engines say so."""

from __future__ import annotations

from forkd.errors import Unsupported
from forkd.model.machine import MachineSpec


def refuse_cpu_template(machine: MachineSpec, engine: str) -> None:
    if machine.cpu_template is not None:
        raise Unsupported(
            f"The engine {engine} has no CPU template {machine.cpu_template}",
            hint="Leave it out, or use the engine firecracker",
        )
