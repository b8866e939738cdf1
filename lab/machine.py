"""The lab machine: designed, booted once, filled, warmed up, and frozen as a snapshot that every run is a fork of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Frozen
from forkd.engines.qemu.args import Binary
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import Conflict, ForkdError
from forkd.guest.agent import Agent
from forkd.host.paths import Home
from forkd.image import Image, ImageStore, Progress, debian_spec, get_recipe
from forkd.image.kernel import BOOT_MODULES, MODULES_FILE, load_order, read_index, read_modules
from forkd.image.pieces import collect_pieces, digest_request
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime.freeze import Warmup, create_snapshot, frozen_of
from forkd.store.snapshots import SnapshotStore
from lab.inside import MODULES, check_run, upload
from lab.packs import PACK_FILE, Pack, home_pack, packages_pack, request_keys, tools_pack

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
    *("nf_tables", "nft_ct", "nft_chain_nat", "nft_nat", "nft_masq", "nft_redir", "nft_connlimit", "nft_objref"),
    *("nft_reject_inet", "nft_reject_ipv4", "nft_limit", "nft_log", "nft_quota", "nft_fib_inet"),
    *("nfnetlink_log", "nf_conntrack", "nf_conntrack_netlink"),
)
# Raise when the same design is to give another machine than before.
_VERSION = 2

Warm = Callable[[Agent], Awaitable[None]]


@dataclass(frozen=True)
class Design:
    """What the machine is asked to be. What a package index offers today is not part of it."""

    image: Image
    packs: tuple[Pack, ...]
    prepare: str

    def tag(self, qemu: str) -> SnapshotTag:
        digest = digest_request(
            version=_VERSION,
            machine=[MACHINE.memory_mib, MACHINE.vcpus],
            image=request_keys(self.image),
            packs={pack.name: pack.key for pack in self.packs},
            modules=KERNEL_MODULES,
            prepare=self.prepare,
            qemu=qemu,
        )
        return parse_tag(f"lab-{digest}")


def make_design(home: Home, pyproject: Path, progress: Progress) -> Design:
    store = ImageStore(home)
    inner = store.build(debian_spec(get_recipe("python")), "python", progress)
    image = store.build(debian_spec(PACKAGES), "lab", progress)
    packages = packages_pack(pyproject, parse_python(image.packages["python3"]))
    prepare = Path(__file__).with_name("prepare.sh").read_text()
    return Design(image, (packages, tools_pack(), home_pack(inner, home.images)), prepare)


def parse_python(version: str) -> str:
    """Of Debian's version 3.11.2-1+b1 the Python 3.11."""
    return ".".join(version.split(".")[:2])


@dataclass(frozen=True)
class LabMachine:
    """Emulated also where the host has KVM: so it is the same everywhere."""

    design: Design
    images: ImageStore
    store: SnapshotStore
    engine: QemuEngine
    tag: SnapshotTag

    @classmethod
    def open(cls, design: Design, home: Home, snapshots: Path, emulator: Binary) -> LabMachine:
        engine = QemuEngine("tcg", binary=emulator)
        return cls(design, ImageStore(home), SnapshotStore(snapshots), engine, design.tag(emulator.version))

    @contextmanager
    def held(self) -> Iterator[Frozen]:
        """With the image that it was frozen with, which may be an older one than that of the design."""
        with self.store.held(self.tag) as snapshot:
            frozen = frozen_of(snapshot, self.images.open(snapshot.manifest.image_id))
            self.engine.check(frozen)
            yield frozen

    def is_frozen(self, progress: Progress) -> bool:
        if not self.store.has(self.tag):
            return False
        try:
            with self.held():
                return True
        except ForkdError as error:
            progress.stage(f"making the lab machine again: {error.message}")
            return False

    async def freeze(self, directory: Path, packs: Path, warm: Warm, progress: Progress) -> None:
        """`warm` is the last that runs in it. Other machines, and packs that are not in this one, are removed.

        The caller holds the lock under which machines are made.
        """
        progress.stage("packing what goes into the lab machine")
        pieces = {pack.name: pack.obtain(packs) for pack in self.design.packs}

        async def fill(agent: Agent) -> None:
            await load_modules(agent, self.design.image.kernel.parent)
            for name, piece in pieces.items():
                await upload(agent, name, piece.dir / PACK_FILE)
            await check_run(agent, self.design.prepare, "Preparing the lab machine")
            progress.stage("warming up the lab machine")
            await warm(agent)

        await create_snapshot(
            self.engine,
            self.store,
            self.design.image,
            self.tag,
            MACHINE,
            Warmup(),
            directory,
            replace=True,
            progress=progress,
            fill=fill,
        )
        listing = self.store.list()
        tags = {*(one.manifest.tag for one in listing.snapshots), *(one.tag for one in listing.unusable)}
        for tag in tags - {self.tag}:
            with suppress(Conflict):  # a run of another tree; the next one removes it
                self.store.remove(tag)
        collect_pieces(packs, {piece.name for piece in pieces.values()})


async def load_modules(agent: Agent, kernel: Path) -> None:
    """Bring them in, without those that the initramfs has loaded, and the order in which prepare.sh loads them."""
    index = read_index(kernel)
    loaded = load_order(BOOT_MODULES, index)
    wanted = [name for name in load_order(KERNEL_MODULES, index) if name not in loaded]
    for name, data in read_modules(kernel / MODULES_FILE, wanted, index):
        await agent.write_file(f"{MODULES}/{name}.ko", data, parents=True)
    await agent.write_file(f"{MODULES}/order", "".join(f"{name}\n" for name in wanted).encode())
