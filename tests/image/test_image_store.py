import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_cases import NOTHING, Heard, list_leftovers, make_python

from forkd.errors import Conflict, HostLacks, InvalidInput, NotFound, SnapshotDamaged
from forkd.host import tools
from forkd.host.paths import Home
from forkd.image import Image, ImageStore, directory_spec
from forkd.image import build as image_build

pytestmark = pytest.mark.usefixtures("small_kernel")


@pytest.fixture
def store(home: Home) -> ImageStore:
    return ImageStore(home)


@pytest.fixture
def second(store: ImageStore, tmp_path: Path) -> Image:
    make_python(tmp_path / "second")
    return store.build(directory_spec(tmp_path / "second"), "second")


@pytest.fixture
def image(store: ImageStore, root_directory: Path) -> Image:
    return store.build(directory_spec(root_directory), "mine")


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def cut_a_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def pieces_of(home: Home) -> set[str]:
    return {path.name.split("-")[0] for path in (home.images / "pieces").iterdir() if not path.name.startswith(".")}


def test_a_built_image_opens_by_name_and_by_id(store: ImageStore, image: Image) -> None:
    assert store.open("mine") == store.open(image.id) == image
    assert image.python == "/usr/bin/python3"
    assert image.kernel_version == "6.1.0-test"
    assert image.size == sum(path.stat().st_size for path in (image.root, image.kernel, image.initrd))
    assert image.root.read_bytes()[1024:1028] == b"\xe2\xe1\xf5\xe0"


def test_nothing_is_left_beside_the_image(home: Home, image: Image) -> None:
    assert list_leftovers(home.root) == NOTHING


def test_building_again_runs_no_tool(
    store: ImageStore, image: Image, root_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tool was run")

    monkeypatch.setattr(tools.subprocess, "Popen", refuse)
    assert store.build(directory_spec(root_directory), "mine") == image


def test_another_agent_makes_another_initramfs_and_keeps_the_root(
    store: ImageStore, image: Image, root_directory: Path, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    monkeypatch.setattr(image_build, "read_agent_sources", lambda: {"start.py": b"other"})
    other = store.build(directory_spec(root_directory), "mine", heard)
    assert (other.root, other.kernel) == (image.root, image.kernel)
    assert other.initrd != image.initrd
    assert other.id != image.id
    assert "Packing the initramfs" in heard.stages
    assert store.open(image.id).name is None


def test_two_images_share_one_kernel(image: Image, second: Image, small_kernel: list[str]) -> None:
    assert second.kernel == image.kernel
    assert second.root != image.root
    assert len(small_kernel) == 1


def test_two_who_build_the_same_at_once_build_it_once(
    home: Home, root_directory: Path, small_kernel: list[str]
) -> None:
    def build(number: int) -> Image:
        return ImageStore(home).build(directory_spec(root_directory), f"name{number}")

    with ThreadPoolExecutor(4) as threads:
        images = list(threads.map(build, range(4)))
    assert len({image.id for image in images}) == 1
    assert len(images) == 4
    assert len(small_kernel) == 1
    assert len(list((home.images / "pieces").glob("root-*"))) == 1


def test_a_fresh_build_of_the_same_content_repairs_the_image(
    store: ImageStore, image: Image, root_directory: Path
) -> None:
    flip_a_byte(image.root)
    with pytest.raises(SnapshotDamaged):
        store.open("mine")
    repaired = store.build(directory_spec(root_directory), "mine", fresh=True)
    assert repaired.id == image.id
    assert store.open(image.id).root == repaired.root


@pytest.mark.parametrize("role", ["root", "kernel", "initrd"])
@pytest.mark.parametrize(
    ("harm", "said"), [(flip_a_byte, "altered"), (cut_a_byte, "bytes instead of"), (Path.unlink, "missing")]
)
def test_a_damaged_file_is_named_and_a_missing_one_is_built_again(
    store: ImageStore, image: Image, root_directory: Path, role: str, harm: Callable[[Path], None], said: str
) -> None:
    store.open("mine")
    path: Path = getattr(image, role)
    harm(path)
    with pytest.raises(SnapshotDamaged, match=path.name) as caught:
        store.open("mine")
    assert said in str(caught.value)
    if harm is Path.unlink:
        assert store.build(directory_spec(root_directory), "mine").id == image.id
        store.open("mine")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_damaged_manifest_is_a_typed_error_and_hides_nothing_else(
    store: ImageStore, image: Image, second: Image, text: str
) -> None:
    (image.dir / "manifest.json").write_text(text)
    with pytest.raises(SnapshotDamaged, match="manifest"):
        store.open("mine")
    assert [entry.id for entry in store.list()] == [second.id]
    store.remove("mine")
    assert store.open("second") == second


def test_a_manifest_cannot_point_outside_the_store(store: ImageStore, image: Image) -> None:
    manifest = image.dir / "manifest.json"
    manifest.write_text(manifest.read_text().replace(image.root.parent.name, "../../../../etc"))
    with pytest.raises(SnapshotDamaged):
        store.open("mine")


@pytest.mark.parametrize("ref", ["absent", "0" * 32])
def test_what_was_never_built_is_not_found(store: ImageStore, ref: str) -> None:
    with pytest.raises(NotFound):
        store.open(ref)
    with pytest.raises(NotFound):
        store.remove(ref)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "ä", "-x", "x" * 300, "a\0", "a b", ".", "f" * 32])
def test_what_is_no_name_is_refused_before_anything_is_made(
    store: ImageStore, home: Home, root_directory: Path, name: str
) -> None:
    with pytest.raises(InvalidInput):
        store.build(directory_spec(root_directory), name)
    assert not home.root.exists()


def test_removing_the_last_image_leaves_no_piece(store: ImageStore, home: Home, image: Image) -> None:
    store.remove("mine")
    assert store.list() == []
    assert pieces_of(home) == set()


def test_pieces_another_image_names_stay(store: ImageStore, image: Image, second: Image) -> None:
    store.remove("mine")
    assert store.open("second") == second
    assert not image.root.exists()


def test_an_image_with_two_names_goes_with_the_second(store: ImageStore, image: Image, root_directory: Path) -> None:
    store.build(directory_spec(root_directory), "also")
    assert sorted(str(entry.name) for entry in store.list()) == ["also", "mine"]
    store.remove("mine", in_use={image.id: ("warm",)})
    assert store.open("also").id == image.id
    store.remove("also")
    with pytest.raises(NotFound):
        store.open(image.id)


@pytest.mark.parametrize("by_id", [False, True])
def test_an_image_in_use_is_not_removed(store: ImageStore, image: Image, by_id: bool) -> None:
    with pytest.raises(Conflict, match="in use by snapshots warm, cold") as caught:
        store.remove(image.id if by_id else "mine", in_use={image.id: ("warm", "cold")})
    assert "forkd snapshot rm warm cold" in (caught.value.hint or "")
    assert store.open("mine") == image


def test_pruning_takes_what_has_no_name_and_no_use(
    store: ImageStore, image: Image, root_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_build, "read_agent_sources", lambda: {"start.py": b"other"})
    other = store.build(directory_spec(root_directory), "mine")
    assert store.prune(in_use={image.id}) == ()
    assert store.prune() == (image.id,)
    assert [entry.id for entry in store.list()] == [other.id]
    store.open("mine")


def test_a_directory_without_python_is_refused_before_the_kernel_is_fetched(
    store: ImageStore, home: Home, tmp_path: Path, small_kernel: list[str]
) -> None:
    (tmp_path / "bare/usr/bin").mkdir(parents=True)
    (tmp_path / "bare/usr/bin/python3").symlink_to(shutil.which("python3") or "/usr/bin/python3")
    with pytest.raises(InvalidInput, match="no Python") as caught:
        store.build(directory_spec(tmp_path / "bare"), "bare")
    assert caught.value.hint is not None and "python3" in caught.value.hint
    assert small_kernel == []
    assert list_leftovers(home.root) == NOTHING


def test_a_home_that_cannot_be_made_is_a_typed_error(tmp_path: Path, root_directory: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostLacks, match="cannot be kept"):
        ImageStore(Home(tmp_path / "file/home", tmp_path)).build(directory_spec(root_directory), "mine")


def test_leftovers_of_a_killed_build_are_swept(store: ImageStore, home: Home, root_directory: Path) -> None:
    left = home.images / "pieces/.staging-0123456789ab"
    left.mkdir(parents=True)
    (left / "root.erofs").write_bytes(b"half")
    store.build(directory_spec(root_directory), "mine")
    assert not left.exists()
