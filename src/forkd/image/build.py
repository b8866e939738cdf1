"""From a spec to the three pieces of an image. A piece is made again only when its inputs have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.host.tools import find_tool
from forkd.image.debian import build_debian_root
from forkd.image.directory import build_directory_root, scan_copied, scan_directory
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
from forkd.image.layer import Layer, build_layer
from forkd.image.pack import ROOT_FILE, TREE_FILE, Render, render_mkfs, render_tar
from forkd.image.pieces import Piece, digest_request, obtain_piece
from forkd.image.root import get_interpreter
from forkd.image.spec import DEFAULT_SUITE, DebianSource, DirectorySource, ImageSpec, Progress
from forkd.image.steps import Copy
from forkd.image.target import Target
from forkd.image.wheels import build_wheels, parse_wheels

# Raise one when the same request gives another result than before.
_ROOT_VERSION = 1
_TREE_VERSION = 1
_WHEELS_VERSION = 1
_LAYER_VERSION = 1
_KERNEL_VERSION = 1
_INITRD_VERSION = 1


@dataclass(frozen=True)
class Made:
    """For each role of an image the piece and the file in it; and the pieces that its root was made from."""

    roles: dict[str, tuple[Piece, str]]
    inputs: tuple[Piece, ...] = ()


def build_pieces(spec: ImageSpec, pieces: Path, progress: Progress, *, fresh: bool) -> Made:
    if spec.is_layered:
        root, inputs = _layered_root(spec, pieces, progress, fresh=fresh)
    else:
        root, inputs = _base(spec, "root", _ROOT_VERSION, render_mkfs, pieces, progress, fresh=fresh), ()
    kernel = _kernel(spec, pieces, progress, fresh=fresh)
    initrd = _initrd(kernel, root.facts["python"], pieces, progress, fresh=fresh)
    roles = {"root": (root, ROOT_FILE), "kernel": (kernel, KERNEL_FILE), "initrd": (initrd, INITRD_FILE)}
    return Made(roles, inputs)


def describe_source(spec: ImageSpec) -> dict[str, Any]:
    described = _describe_base(spec.source)
    if spec.pip:
        described["pip"] = list(spec.pip)
    if spec.steps:
        described["steps"] = [step.describe() for step in spec.steps]
    return described


def _describe_base(source: DebianSource | DirectorySource) -> dict[str, Any]:
    if isinstance(source, DebianSource):
        return {
            "kind": "debian",
            "suite": source.suite,
            "mirror": source.mirror,
            "packages": list(source.packages),
        }
    return {"kind": "directory", "path": str(source.path)}


def _base(
    spec: ImageSpec, kind: str, version: int, render: Render, pieces: Path, progress: Progress, *, fresh: bool
) -> Piece:
    """What the source alone gives, packed by what `render` says."""
    source = spec.source
    if isinstance(source, DebianSource):
        key = digest_request(version=version, source=_describe_base(source))

        def make(out: Path, work: Path) -> dict[str, Any]:
            return build_debian_root(source, render, out, work, progress)

        return obtain_piece(pieces, kind, key, make, fresh=fresh)

    progress.stage(f"Reading {source.path}")
    scan = scan_directory(source.path)
    # Before anything is fetched or packed.
    get_interpreter(scan.tree)

    def make_copy(out: Path, work: Path) -> dict[str, Any]:
        return build_directory_root(source.path, scan, render, out, progress)

    key = digest_request(version=version, tree=scan.digest)
    return obtain_piece(pieces, kind, key, make_copy, fresh=fresh)


def _layered_root(spec: ImageSpec, pieces: Path, progress: Progress, *, fresh: bool) -> tuple[Piece, tuple[Piece, ...]]:
    """The source's root with packages and steps on top; and the pieces it was made from, kept for the next build."""
    # Before anything is fetched, and part of what is asked for.
    digests = [scan_copied(step.source) for step in spec.steps if isinstance(step, Copy)]
    tree = _base(spec, "tree", _TREE_VERSION, render_tar, pieces, progress, fresh=fresh)
    fetched = _wheels(spec.pip, Target.from_json(tree.facts["target"]), pieces, progress, fresh=fresh)
    wheels = parse_wheels(fetched.files) if fetched is not None else ()
    key = digest_request(
        version=_LAYER_VERSION,
        tree=tree.files[TREE_FILE].sha256,
        pip=spec.pip,
        wheels=[wheel.locked for wheel in wheels],
        steps=[step.asked() for step in spec.steps],
        copied=digests,
    )
    wheels_dir = fetched.dir if fetched is not None else pieces
    layer = Layer(tree.dir / TREE_FILE, tree.facts["python"], wheels_dir, wheels, spec.steps, digests)

    def make(out: Path, work: Path) -> dict[str, Any]:
        facts = build_layer(layer, out, work, progress)
        installed = {wheel.name: {"version": wheel.version, "sha256": wheel.sha256} for wheel in wheels}
        return {"packages": tree.facts.get("packages", {}), "pip": installed, **facts}

    root = obtain_piece(pieces, "root", key, make, fresh=fresh)
    return root, (tree, fetched) if fetched is not None else (tree,)


def _wheels(
    requirements: Sequence[str], target: Target, pieces: Path, progress: Progress, *, fresh: bool
) -> Piece | None:
    if not requirements:
        return None
    key = digest_request(version=_WHEELS_VERSION, target=target.as_json(), requirements=list(requirements))

    def make(out: Path, work: Path) -> dict[str, Any]:
        build_wheels(requirements, target, out, work, progress)
        return {}

    return obtain_piece(pieces, "wheels", key, make, fresh=fresh)


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
