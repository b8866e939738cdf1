"""The lab machine from within: where things are, and what a command there finds in its environment. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LAB = "/lab"
PACKS = f"{LAB}/packs"
MODULES = f"{LAB}/modules"
# What a run leaves here is brought back.
OUT = f"{LAB}/out"
# The pack with the working tree.
TREE = "tree"
# In QEMU, an XRSTOR on any emulated processor rewrites flags of the first one without a lock (docs/contribute/lab.md).
# Those flags change only where KVM runs a guest: so it never does so there.
VM_PROCESSORS = "1-2"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def render_command(command: Sequence[str]) -> list[str]:
    return ["taskset", "--cpu-list", VM_PROCESSORS, *command]


def place_of(pack: str) -> str:
    return f"{LAB}/{pack}"


def render_environment() -> dict[str, str]:
    return {
        "PATH": f"{place_of('tools')}:{_SYSTEM_PATH}",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": f"{place_of(TREE)}/src:{place_of('packages')}",
        # The tree and the packages cannot be written to, and under emulation compiling takes longer than the tests.
        "PYTHONPYCACHEPREFIX": f"{LAB}/compiled",
        # Emulated, SHA-256 takes three times as long with vector instructions as without.
        "OPENSSL_ia32cap": "0:0",
        "FORKD_LAB": "1",
        "FORKD_LAB_OUT": OUT,
        "FORKD_TEST_HOME": place_of("home"),
    }


def render_mount(pack: str) -> str:
    place = place_of(pack)
    return f"mkdir -p {place} && mount -t erofs -o ro,loop {PACKS}/{pack}.erofs {place}"


def render_unmount(pack: str) -> str:
    return f"umount {place_of(pack)} && rm {PACKS}/{pack}.erofs"
