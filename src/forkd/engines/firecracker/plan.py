"""What Firecracker is asked over its API, call by call, and what a frozen VM needs to find again. Pure.

File names are those Firecracker meets in its own directory, never paths of the host: a snapshot remembers them, and
in every child they mean the child's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forkd.engines.base import KERNEL_ARGS, BootSpec, check_same
from forkd.engines.machine import AGENT_SOCKET
from forkd.errors import EngineFailed, InvalidInput
from forkd.host.firecracker import Binaries, parse_numbers
from forkd.host.system import parse_cpu
from forkd.model.network import GUEST_MAC

AGENT_VSOCK_PORT = 1024
MAX_VCPUS = 32
# Firecracker answers at once, or a little later on a host that is busy with many others. Writing all memory takes time.
ANSWER_DEADLINE_S = 60.0
FREEZE_DEADLINE_S = 600.0

# Firecracker promises device state within one version, and a guest has seen the CPU it ran on.
_NEEDED = {"firecracker": "Firecracker", "cpu": "the CPU", "network": "the network"}
_OLDEST_WITH_OVERRIDES = (1, 12)
# Their vsock waits, after each pause, for the guest to acknowledge a reset that was not sent: firecracker#6100.
_FIRST_DEAF, _BEHIND_DEAF = (1, 16), (1, 17)
# In a platform: not among what is needed, as a VM without it runs, but gets no network.
NIC_KEY = "nic"
_NIC = "eth0"
# The root's name is frozen into snapshots.
ROOT = "root.erofs"
_NOWHERE = "nowhere"
_NO_MEMORY_FILE = "Cannot perform open on the memory backing file"
_GUEST_CID = 3  # the first that is free; each Firecracker has a vsock of its own
# A reset through the keyboard controller is how a guest ends; the other parts of that controller are not looked for.
_KEYBOARD_ARGS = "reboot=k i8042.noaux i8042.nomux i8042.nopnp i8042.dumbkbd"
# Firecracker has kvm-clock go on while a VM is frozen: children would wake up a snapshot's age later. The TSC stops.
_CLOCK_ARGS = "clocksource=tsc"
_KERNEL_ARGS = (
    f"{KERNEL_ARGS} {_CLOCK_ARGS} {_KEYBOARD_ARGS} pci=off 8250.nr_uarts=1 forkd.agent=vsock:{AGENT_VSOCK_PORT}"
)


@dataclass(frozen=True)
class Call:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    deadline_s: float = ANSWER_DEADLINE_S

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def render_boot(spec: BootSpec, kernel: str, initrd: str, root: str, tap: str | None = None) -> list[Call]:
    """`tap`: the host's end of the guest's network interface, when it is to have one."""
    machine = spec.machine
    if machine.vcpus > MAX_VCPUS:
        raise InvalidInput(
            f"Firecracker cannot run a machine with {machine.vcpus} vCPUs",
            hint=f"Use 1 to {MAX_VCPUS}, or another engine",
        )
    config: dict[str, Any] = {"vcpu_count": machine.vcpus, "mem_size_mib": machine.memory_mib, "smt": False}
    if machine.cpu_template is not None:
        config["cpu_template"] = machine.cpu_template
    boot = {"kernel_image_path": kernel, "initrd_path": initrd, "boot_args": _KERNEL_ARGS}
    drive = {"drive_id": "root", "path_on_host": root, "is_root_device": False, "is_read_only": True}
    return [
        Call("PUT", "/machine-config", config),
        Call("PUT", "/boot-source", boot),
        Call("PUT", "/drives/root", drive),
        Call("PUT", "/vsock", {"guest_cid": _GUEST_CID, "uds_path": AGENT_SOCKET}),
        Call("PUT", "/entropy", {}),
        *([_render_nic(tap)] if tap else []),
        Call("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def render_tiny(kernel: str) -> list[Call]:
    """A machine without devices."""
    return [
        Call("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 32}),
        Call("PUT", "/boot-source", {"kernel_image_path": kernel}),
        Call("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def _render_nic(tap: str) -> Call:
    nic = {"iface_id": _NIC, "guest_mac": GUEST_MAC, "host_dev_name": tap}
    return Call("PUT", f"/network-interfaces/{_NIC}", nic)


def render_freeze(state: str, memory: str) -> list[Call]:
    create = {"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory}
    return [render_pause(), Call("PUT", "/snapshot/create", create, FREEZE_DEADLINE_S)]


def render_save(state: str) -> Call:
    """To be refused: Firecracker writes the state, and then cannot open a file for memory, which we read ourselves."""
    create = {"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": f"{_NOWHERE}/memory"}
    return Call("PUT", "/snapshot/create", create)


def is_saved(refusal: str) -> bool:
    """Whether it was refused for its memory file, which comes last."""
    return _NO_MEMORY_FILE in refusal


def render_load(state: str, memory: str, tap: str | None = None, *, resume: bool = True) -> Call:
    """The memory file is mapped privately: it stays as it is, and its pages are shared until they are written to.

    `tap` takes the place of the parent's, of which the snapshot knows the name.
    """
    load: dict[str, Any] = {
        "snapshot_path": state,
        "mem_backend": {"backend_type": "File", "backend_path": memory},
        "resume_vm": resume,
    }
    if tap is not None:
        load["network_overrides"] = [{"iface_id": _NIC, "host_dev_name": tap}]
    return Call("PUT", "/snapshot/load", load)


def render_pause() -> Call:
    return Call("PATCH", "/vm", {"state": "Paused"})


def render_resume() -> Call:
    return Call("PATCH", "/vm", {"state": "Resumed"})


def render_look() -> Call:
    return Call("GET", "/")


def parse_paused(answer: object) -> bool:
    """From `render_look`. A VM that neither runs nor was paused cannot be taken over."""
    state = answer.get("state") if isinstance(answer, dict) else None
    if state not in ("Running", "Paused"):
        raise EngineFailed(f"Firecracker says that the VM is {state}", hint="Kill it and fork another")
    return bool(state == "Paused")


def render_platform(binaries: Binaries, cpuinfo: str, kernel: str, *, network: bool) -> dict[str, str]:
    """What a frozen VM must find again; `kernel`, the host's, is recorded only.

    `nic`: its guest was set up for a network. Older ones have an interface, and a guest that knows nothing of it.
    """
    return {
        "firecracker": binaries.version,
        "cpu": parse_cpu(cpuinfo),
        "network": "tap" if network else "none",
        "kernel": kernel,
        **({NIC_KEY: "virtio-net"} if network else {}),
    }


def find_fork_lack(version: str) -> str | None:
    """Why a VM of this Firecracker cannot be paused and go on, as its live fork needs."""
    if _FIRST_DEAF <= parse_numbers(version) < _BEHIND_DEAF:
        return f"the guest of a Firecracker {version} hears nothing any more when it goes on after a pause"
    return None


def can_override_taps(version: str) -> bool:
    """Whether a child can be given another network interface of the host than its parent had."""
    return parse_numbers(version) >= _OLDEST_WITH_OVERRIDES


def check_platform(frozen: Mapping[str, str], here: Mapping[str, str]) -> None:
    for key, what in _NEEDED.items():
        check_same(what, frozen.get(key), here[key])
