"""What the lab machine is made of, found or made on this host, and the tag that stands for all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forkd.host.paths import Home
from forkd.image import Image, ImageStore, Progress, debian_spec, get_recipe
from forkd.image.kernel import MODULES_FILE, read_index
from forkd.image.modules import BOOT_MODULES, load_order, read_modules
from forkd.image.pieces import digest_request
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from lab.contents import home_pack, packages_pack, tools_pack
from lab.packs import Pack

# One processor more than VMs may run on, see VM_PROCESSORS.
MACHINE = MachineSpec(memory_mib=4096, vcpus=3)
PACKAGES = (
    *("python3", "qemu-system-x86"),
    *("iproute2", "nftables", "kmod", "mount", "procps", "e2fsprogs"),
    # With these forkd's doctor finds all it looks for.
    *("erofs-utils", "busybox-static", "mmdebstrap", "uidmap", "cpio"),
)
# Nothing loads one on demand there.
KERNEL_MODULES = (
    *("kvm_amd", "loop", "tun", "vhost_net", "vhost_vsock", "veth", "bridge", "dummy"),
    *("nf_tables", "nft_ct", "nft_chain_nat", "nft_nat", "nft_masq", "nft_redir"),
    *("nft_reject_inet", "nft_limit", "nft_log", "nft_quota", "nft_fib_inet"),
)
# Raise when the same design is to give another machine than before.
_VERSION = 1


@dataclass(frozen=True)
class Design:
    image: Image
    packs: tuple[Pack, ...]
    modules: tuple[tuple[str, bytes], ...]
    prepare: str

    def tag(self, qemu: str) -> SnapshotTag:
        digest = digest_request(
            version=_VERSION,
            machine=[MACHINE.memory_mib, MACHINE.vcpus],
            image=self.image.id,
            packs={pack.name: pack.sha256 for pack in self.packs},
            modules=[name for name, _ in self.modules],
            prepare=self.prepare,
            qemu=qemu,
        )
        return parse_tag(f"lab-{digest}")


def make_design(home: Home, packs: Path, pyproject: Path, progress: Progress) -> Design:
    store = ImageStore(home)
    inner = store.build(debian_spec(get_recipe("python")), "python", progress)
    image = store.build(debian_spec(PACKAGES), "lab", progress)
    progress.stage("Packing what goes into the lab machine")
    return Design(
        image,
        (
            packages_pack(packs, pyproject, parse_python(image.packages["python3"])),
            tools_pack(packs),
            home_pack(packs, inner, home.images),
        ),
        tuple(read_lab_modules(image.kernel.parent)),
        Path(__file__).with_name("prepare.sh").read_text(),
    )


def parse_python(version: str) -> str:
    """Of Debian's version 3.11.2-1+b1 the Python 3.11."""
    return ".".join(version.split(".")[:2])


def read_lab_modules(kernel: Path) -> list[tuple[str, bytes]]:
    """In the order they load, without those that the initramfs has loaded."""
    index = read_index(kernel)
    loaded = load_order(BOOT_MODULES, index)
    wanted = [name for name in load_order(KERNEL_MODULES, index) if name not in loaded]
    return read_modules(kernel / MODULES_FILE, wanted, index)
