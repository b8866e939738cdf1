"""The shape of a virtual machine, checked when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.errors import InvalidInput

# The least that is worth a try. What a kernel needs to boot depends on the image; see docs/limits.md.
MIN_MEMORY_MIB = 32
MAX_MEMORY_MIB = 1024 * 1024
MAX_VCPUS = 64
MAX_CHILDREN = 1000


@dataclass(frozen=True)
class MachineSpec:
    memory_mib: int = 512
    vcpus: int = 1

    def __post_init__(self) -> None:
        if not MIN_MEMORY_MIB <= self.memory_mib <= MAX_MEMORY_MIB:
            raise InvalidInput(
                f"A machine cannot have {self.memory_mib} MiB of memory",
                hint=f"Use {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB; an image with Python wants 128 or more",
            )
        if not 1 <= self.vcpus <= MAX_VCPUS:
            raise InvalidInput(f"A machine cannot have {self.vcpus} vCPUs", hint=f"Use 1 to {MAX_VCPUS}")


def parse_count(n: int) -> int:
    """How many children one fork may ask for."""
    if not 1 <= n <= MAX_CHILDREN:
        raise InvalidInput(f"Cannot fork {n} children", hint=f"Use 1 to {MAX_CHILDREN}")
    return n
