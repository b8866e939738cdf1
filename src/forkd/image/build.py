"""From a spec to the three pieces of an image. A piece is made again only when its inputs have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forkd.host.tools import find_tool
from forkd.image.debian import build_debian_root
from forkd.image.directory import build_directory_root, scan_directory
from forkd.image.initramfs import (
    INITRD_FILE,
    check_static,
    digest_bytes,
    digest_sources,
    read_agent_sources,
    render_init,
    render_initramfs,
)
from forkd.image.kernel import (
    BOOT_MODULES,
    KERNEL_FILE,
    KERNEL_PACKAGE,
    MODULES_FILE,
    build_kernel,
    load_order,
    read_index,
    read_modules,
)
from forkd.image.pieces import Piece, digest_request, obtain_piece
from forkd.image.root import ROOT_FILE, get_interpreter
from forkd.image.spec import DEFAULT_SUITE, DebianSource, ImageSpec, Progress

# Raise one when the same request gives another result than before.
_ROOT_VERSION = 1
_KERNEL_VERSION = 1
_INITRD_VERSION = 1


def build_pieces(spec: ImageSpec, pieces: Path, progress: Progress, *, fresh: bool) -> dict[str, tuple[Piece, str]]:
    """For each role the piece and the file in it."""
    root = _root(spec, pieces, progress, fresh=fresh)
    kernel = _kernel(spec, pieces, progress, fresh=fresh)
    initrd = _initrd(kernel, root.facts["python"], pieces, progress, fresh=fresh)
    return {"root": (root, ROOT_FILE), "kernel": (kernel, KERNEL_FILE), "initrd": (initrd, INITRD_FILE)}


def describe_source(spec: ImageSpec) -> dict[str, Any]:
    source = spec.source
    if isinstance(source, DebianSource):
        return {
            "kind": "debian",
            "suite": source.suite,
            "mirror": source.mirror,
            "packages": list(source.packages),
        }
    return {"kind": "directory", "path": str(source.path)}


def _root(spec: ImageSpec, pieces: Path, progress: Progress, *, fresh: bool) -> Piece:
    source = spec.source
    if isinstance(source, DebianSource):
        key = digest_request(version=_ROOT_VERSION, source=describe_source(spec))

        def make(out: Path, work: Path) -> dict[str, Any]:
            return build_debian_root(source, out, work, progress)

        return obtain_piece(pieces, "root", key, make, fresh=fresh)

    progress.stage(f"Reading {source.path}")
    scan = scan_directory(source.path)
    # Before anything is fetched or packed.
    get_interpreter(scan.tree)

    def make_copy(out: Path, work: Path) -> dict[str, Any]:
        return build_directory_root(source.path, scan, out, progress)

    key = digest_request(version=_ROOT_VERSION, tree=scan.digest)
    return obtain_piece(pieces, "root", key, make_copy, fresh=fresh)


def _kernel(spec: ImageSpec, pieces: Path, progress: Progress, *, fresh: bool) -> Piece:
    suite, mirror = DEFAULT_SUITE, None
    if isinstance(spec.source, DebianSource):
        suite, mirror = spec.source.suite, spec.source.mirror
    key = digest_request(version=_KERNEL_VERSION, package=KERNEL_PACKAGE, suite=suite, mirror=mirror)

    def make(out: Path, work: Path) -> dict[str, Any]:
        return build_kernel(suite, mirror, out, work, progress)

    return obtain_piece(pieces, "kernel", key, make, fresh=fresh)


def _initrd(kernel: Piece, python: str, pieces: Path, progress: Progress, *, fresh: bool) -> Piece:
    busybox = check_static(find_tool("busybox").read_bytes())
    agent = read_agent_sources()
    key = digest_request(
        version=_INITRD_VERSION,
        modules=kernel.files[MODULES_FILE].sha256,
        wanted=BOOT_MODULES,
        busybox=digest_bytes(busybox),
        agent=digest_sources(agent),
        init=render_init((), python),
    )

    def make(out: Path, work: Path) -> dict[str, Any]:
        progress.stage("Packing the initramfs")
        index = read_index(kernel.dir)
        modules = read_modules(kernel.dir / MODULES_FILE, load_order(BOOT_MODULES, index), index)
        (out / INITRD_FILE).write_bytes(render_initramfs(busybox, modules, agent, python))
        return {}

    return obtain_piece(pieces, "initrd", key, make, fresh=fresh)
