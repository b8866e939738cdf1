import gzip
import lzma
from pathlib import Path

import pytest
from image_cases import make_module, write_modules

from forkd.errors import BuildFailed
from forkd.image.kernel import (
    Module,
    ModuleIndex,
    find_modinfo,
    index_modules,
    load_order,
    module_name,
    parse_modinfo,
    read_modules,
)


def index(builtin: tuple[str, ...] = (), **needs: str) -> ModuleIndex:
    modules = {name: Module(f"kernel/{name}.ko", tuple(text.split()), ()) for name, text in needs.items()}
    return ModuleIndex(modules, frozenset(builtin))


def test_what_a_module_needs_is_loaded_before_it() -> None:
    order = load_order(["net", "blk"], index(net="failover ring", failover="", ring="core", core="", blk="ring core"))
    assert order == ["failover", "core", "ring", "net", "blk"]


def test_what_is_built_into_the_kernel_is_not_loaded() -> None:
    assert load_order(["erofs", "ext4"], index(builtin=("ext4", "crc"), erofs="crc")) == ["erofs"]


def test_a_module_that_is_nowhere_is_named() -> None:
    with pytest.raises(BuildFailed, match="no module ghost"):
        load_order(["erofs"], index(erofs="ghost"))


def test_modules_that_need_each_other_are_an_error_and_no_endless_loop() -> None:
    with pytest.raises(BuildFailed, match="a -> b -> a"):
        load_order(["a"], index(a="b", b="a"))


def test_a_soft_dependency_counts_only_when_there_is_such_a_module() -> None:
    modules = {"lib": Module("lib.ko", (), ("crc", "absent")), "crc": Module("crc.ko", (), ())}
    assert load_order(["lib"], ModuleIndex(modules, frozenset())) == ["crc", "lib"]


@pytest.mark.parametrize(
    "path", ["virtio-rng.ko", "kernel/drivers/virtio-rng.ko.xz", "virtio_rng", "a/b/virtio_rng.ko.zst"]
)
def test_a_module_has_one_name_however_its_file_is_called(path: str) -> None:
    assert module_name(path) == "virtio_rng"


def test_modinfo_says_what_is_needed_and_what_is_liked() -> None:
    section = find_modinfo(make_module("license=GPL", "depends=virtio,virtio-ring", "softdep=pre: a b-c post: d"))
    assert parse_modinfo(section) == (("virtio", "virtio_ring"), ("a", "b_c"))


@pytest.mark.parametrize("damage", [b"", b"#!/bin/sh", make_module("depends=")[:80], b"\x7fELF\x02\x01" + b"\xff" * 90])
def test_a_damaged_module_is_a_typed_error(damage: bytes) -> None:
    with pytest.raises(BuildFailed):
        find_modinfo(damage)


def test_packed_modules_are_read_as_if_they_were_not(tmp_path: Path) -> None:
    plain, xz, gz = make_module("depends=b"), make_module("depends=c"), make_module("depends=")
    archive = tmp_path / "modules.tar"
    write_modules(
        archive,
        {
            "kernel/a.ko": plain,
            "kernel/b.ko.xz": lzma.compress(xz),
            "kernel/c.ko.gz": gzip.compress(gz),
            "modules.builtin": b"kernel/fs/ext4/ext4.ko\n",
        },
    )
    found = index_modules(archive)
    assert found.builtin == {"ext4"}
    order = load_order(["a", "ext4"], found)
    assert read_modules(archive, order, found) == [("c", gz), ("b", xz), ("a", plain)]


def test_an_index_survives_being_written_down() -> None:
    found = index(builtin=("x",), a="b", b="")
    assert ModuleIndex.from_json(found.as_json()) == found
