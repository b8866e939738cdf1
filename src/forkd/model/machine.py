"""The shape of a virtual machine, checked when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.errors import InvalidInput

# The least that is worth a try. What a kernel needs to boot depends on the image; see docs/limits.md.
MIN_MEMORY_MIB = 32
MAX_MEMORY_MIB = 1024 * 1024
MAX_VCPUS = 64
MAX_CHILDREN = 1000
# Firecracker's own, which make CPUs of different hosts look alike to guests.
CPU_TEMPLATES = ("T2", "T2S", "T2CL", "T2A", "V1N1")


@dataclass(frozen=True)
class MachineSpec:
    memory_mib: int = 512
    vcpus: int = 1
    cpu_template: str | None = None

    def __post_init__(self) -> None:
        if not MIN_MEMORY_MIB <= self.memory_mib <= MAX_MEMORY_MIB:
            raise InvalidInput(
                f"A machine cannot have {self.memory_mib} MiB of memory",
                hint=f"Use {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB; an image with Python wants 128 or more",
            )
        if not 1 <= self.vcpus <= MAX_VCPUS:
            raise InvalidInput(f"A machine cannot have {self.vcpus} vCPUs", hint=f"Use 1 to {MAX_VCPUS}")
        if self.cpu_template is not None and self.cpu_template not in CPU_TEMPLATES:
            known = ", ".join(CPU_TEMPLATES)
            raise InvalidInput(f"There is no CPU template {self.cpu_template}", hint=f"Use one of {known}, or none")


def parse_count(n: int) -> int:
    """How many children one fork may ask for."""
    if not 1 <= n <= MAX_CHILDREN:
        raise InvalidInput(f"Cannot fork {n} children", hint=f"Use 1 to {MAX_CHILDREN}")
    return n
