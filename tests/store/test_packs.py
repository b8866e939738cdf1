"""Packs: what goes in comes out, the same bytes each time, from any place on, for those who trust its key."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from support_packs import (
    MEMORY_BYTES,
    add_chain,
    add_layer,
    add_root,
    describe,
    files_of,
    importing,
    is_untouched,
    key_of,
    made,
    pack,
    packing_of,
    store_of,
    trusted_by,
    unpack,
)

from forkd.errors import (
    Conflict,
    HostLacks,
    InvalidInput,
    NoCapacity,
    NotFound,
    SnapshotDamaged,
    SnapshotIncompatible,
    Untrusted,
)
from forkd.host.paths import Home
from forkd.image import ImageStore
from forkd.model.names import parse_tag
from forkd.model.network import NO_NETWORK, Network
from forkd.runtime import unpacking
from forkd.store.keys import FILES, SigningKey

ROOT, HEAD = parse_tag("root"), parse_tag("head")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Home]:
    """With the chain root, middle, head."""
    with made(tmp_path / "source") as home:
        add_chain(home, "root", "middle", "head")
        yield home


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Home]:
    """Empty."""
    with made(tmp_path / "target", image=False) as home:
        yield home


def test_a_chain_comes_out_as_it_went_in_with_its_image(source: Home, target: Home) -> None:
    done = unpack(target, pack(source, "head"))
    assert (done.head, done.made, done.reused) == ("head", ("root", "middle", "head"), ())
    assert (done.image_reused, done.key, done.warning) == (False, key_of(source), None)
    assert files_of(target) == files_of(source)
    with store_of(target).held(HEAD) as snapshot:
        assert [each.manifest.tag for each in snapshot.ancestors] == ["root", "middle"]
        assert len(snapshot.runs) == 2
    assert store_of(target).verify(HEAD).chain == ("root", "middle", "head")
    image = ImageStore(target).open(done.image_id)
    assert image.root.read_bytes() == b"the root of small"
    assert (image.kernel_version, image.name) == ("6.1.0-test", None)
    assert [path.name for path in target.images.rglob(".staging*")] == []


def test_only_what_a_snapshot_stands_on_is_in_its_pack(source: Home, target: Home) -> None:
    add_layer(source, "beside", "root")
    unpack(target, pack(source, "middle"))
    assert sorted(path.name for path in target.snapshots.iterdir()) == ["middle", "root"]


def test_a_pack_is_the_same_bytes_each_time_and_wherever_its_files_have_holes(source: Home) -> None:
    first = pack(source, "head")
    assert pack(source, "head") == first
    memory = source.snapshots / "root/memory"
    subprocess.run(["cp", "--sparse=never", str(memory), str(memory) + "2"], check=True)
    os.replace(str(memory) + "2", memory)
    assert memory.stat().st_blocks * 512 >= MEMORY_BYTES
    assert pack(source, "head") == first


def test_holes_are_neither_in_the_pack_nor_in_what_is_made_of_it(source: Home, target: Home) -> None:
    data = pack(source, "root")
    assert len(data) < 64 * 1024
    unpack(target, data)
    memory = target.snapshots / "root/memory"
    assert memory.stat().st_size == MEMORY_BYTES
    assert memory.stat().st_blocks * 512 <= 1 << 20


def test_a_pack_can_be_made_from_any_byte_on(source: Home) -> None:
    noise = os.urandom(9 << 20)
    add_root(source, "noisy", text=noise)
    packing = packing_of(source)
    with packing.opened(parse_tag("noisy"), image=True) as opened:
        assert opened.size is None
        size = opened.measure()
        whole = b"".join(opened.stream())
    assert len(whole) == size > len(noise)
    with packing.opened(parse_tag("noisy"), image=True) as again:
        assert again.size == size  # remembered
        for offset in (0, 1, 15, 16, 1000, size // 3, size - (4 << 20), size - 1):
            assert b"".join(again.stream(offset)) == whole[offset:]


def test_other_tools_can_read_it(source: Home) -> None:
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(pack(source, "head")), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        names = archive.getnames()
    assert names[:5] == ["forkd-pack.json", "forkd-pack.sig", "+image/root", "+image/kernel", "+image/initrd"]
    assert names[5:7] == ["root/memory", "root/state"]
    assert names[-3:] == ["head/extents", "head/pages", "head/state"]


@pytest.mark.parametrize("step", [1, 16, 4095, 1 << 30])
def test_it_may_arrive_in_pieces_of_any_size(source: Home, target: Home, step: int) -> None:
    data = pack(source, "root", image=step > 1)
    if step == 1:
        ImageStore(target)._prepare()
        os.rmdir(target.images / "names")
        os.rmdir(target.images)
        target.images.symlink_to(source.images)
    unpack(target, data, step=step)
    assert (target.snapshots / "root/memory").read_bytes() == (source.snapshots / "root/memory").read_bytes()


# What is there already


def test_what_is_there_with_the_same_content_is_used(source: Home, target: Home) -> None:
    unpack(target, pack(source, "middle"))
    before = (target.snapshots / "root").stat().st_ino
    done = unpack(target, pack(source, "head"))
    assert (done.made, done.reused, done.image_reused) == (("head",), ("root", "middle"), True)
    assert (target.snapshots / "root").stat().st_ino == before
    again = unpack(target, pack(source, "head"))
    assert (again.made, again.reused) == ((), ("root", "middle", "head"))


def test_a_tag_with_other_content_is_kept_unless_it_is_to_be_replaced(source: Home, target: Home) -> None:
    unpack(target, pack(source, "root"))
    store_of(source).remove(HEAD, parse_tag("middle"), ROOT)
    add_root(source, text=b"another root")
    before = files_of(target)
    with pytest.raises(Conflict, match="another snapshot root") as caught:
        unpack(target, pack(source, "root"))
    assert "--force" in str(caught.value.hint)
    assert files_of(target) == before
    assert unpack(target, pack(source, "root"), force=True).made == ("root",)
    assert (target.snapshots / "root/memory").read_bytes().startswith(b"another root")


def test_what_layers_lie_over_is_not_replaced(source: Home, target: Home) -> None:
    unpack(target, pack(source, "head"))
    before = files_of(target)
    store_of(source).remove(ROOT, cascade=True)
    add_root(source, text=b"another root")
    with pytest.raises(Conflict, match="middle"):
        unpack(target, pack(source, "root"), force=True)
    assert files_of(target) == before


def test_a_damaged_one_is_replaced_when_asked_for(source: Home, target: Home) -> None:
    unpack(target, pack(source, "root"))
    (target.snapshots / "root/state").write_bytes(b"altered!!")
    (target.snapshots / "root/.verified").unlink(missing_ok=True)
    with pytest.raises(Conflict):
        unpack(target, pack(source, "root"))
    unpack(target, pack(source, "root"), force=True)
    assert files_of(target) == {name: data for name, data in files_of(source).items() if name.startswith("root/")}


def test_the_head_can_get_another_tag(source: Home, target: Home) -> None:
    done = unpack(target, pack(source, "head"), tag=parse_tag("mine"))
    assert done.made == ("root", "middle", "mine")
    with store_of(target).held(parse_tag("mine")) as snapshot:
        assert snapshot.depth == 2
    assert unpack(target, pack(source, "head"), tag=parse_tag("mine")).made == ()
    with pytest.raises(InvalidInput, match="already"):
        unpack(target, pack(source, "head"), tag=ROOT)


def test_the_network_of_a_pack_stays_behind_and_that_is_said(source: Home, target: Home) -> None:
    web = Network(allow=["pypi"])
    add_root(source, "webbed", network=web)
    add_layer(source, "over", "webbed")
    done = unpack(target, pack(source, "over"))
    assert (done.made, done.network_dropped) == (("webbed", "over"), ("webbed",))
    assert store_of(target).get(parse_tag("webbed")).manifest.network == NO_NETWORK
    assert store_of(target).verify(parse_tag("over")).chain == ("webbed", "over")
    again = unpack(target, pack(source, "over"))
    assert (again.reused, again.network_dropped) == (("webbed", "over"), ())
    # Where it was made it is its owner's own.
    assert unpack(source, pack(source, "over")).reused == ("webbed", "over")
    assert store_of(source).get(parse_tag("webbed")).manifest.network == web


def test_without_its_image_a_pack_is_for_those_who_have_it(source: Home, target: Home) -> None:
    bare = pack(source, "root", image=False)
    with pytest.raises(NotFound, match="without its image"):
        unpack(target, bare)
    assert is_untouched(target)
    unpack(target, pack(source, "root"))
    store_of(target).remove(ROOT)
    assert unpack(target, bare).made == ("root",)


def test_a_damaged_image_is_replaced_by_the_one_of_the_pack(source: Home, target: Home) -> None:
    done = unpack(target, pack(source, "root"))
    kernel = ImageStore(target).open(done.image_id).kernel
    kernel.write_bytes(b"?" * kernel.stat().st_size)
    (kernel.parent / ".verified").unlink(missing_ok=True)
    assert unpack(target, pack(source, "middle")).image_reused is False
    assert ImageStore(target).open(done.image_id).kernel.read_bytes() == b"the kernel of small"


# Whose it is


def test_a_key_that_is_not_known_is_named_and_refused(source: Home, target: Home) -> None:
    with pytest.raises(Untrusted, match=key_of(source)) as caught:
        unpack(target, pack(source, "root"), trust=False)
    assert "--trust" in str(caught.value.hint)
    assert is_untouched(target) and trusted_by(target).list() == []


def test_a_key_that_was_accepted_is_remembered_for_its_origin_only(source: Home, target: Home) -> None:
    unpack(target, pack(source, "root"), origin="https://here")
    assert [(each.key, each.origin) for each in trusted_by(target).list()] == [(key_of(source), "https://here")]
    unpack(target, pack(source, "middle"), origin="https://here", trust=False)
    with pytest.raises(Untrusted):
        unpack(target, pack(source, "head"), origin="https://there", trust=False)


def test_an_origin_that_changes_its_key_is_refused_whatever_is_said(source: Home, target: Home) -> None:
    unpack(target, pack(source, "root"), origin="https://here")
    old = key_of(source)
    source.signing_key.unlink()
    with pytest.raises(Untrusted, match=old) as caught:
        unpack(target, pack(source, "middle"), origin="https://here")
    assert "forkd trust rm https://here" in str(caught.value.hint)
    trusted_by(target).remove("https://here")
    unpack(target, pack(source, "middle"), origin="https://here")


def test_files_may_come_from_several_people(source: Home, target: Home) -> None:
    unpack(target, pack(source, "root"), origin=FILES)
    source.signing_key.unlink()
    unpack(target, pack(source, "middle"), origin=FILES)
    assert len(trusted_by(target).list()) == 2


def test_a_key_of_the_list_counts_everywhere_and_so_does_our_own(source: Home, target: Home) -> None:
    trusted_by(target).add(key_of(source), name="the other machine")
    unpack(target, pack(source, "root"), origin="https://any", trust=False)
    store_of(source).remove(ROOT, cascade=True)
    unpack(source, pack(target, "root"), trust=True)
    assert unpack(target, pack(target, "root"), trust=False).reused == ("root",)
    trusted_by(target).remove("the other machine")
    assert trusted_by(target).list() == []
    with pytest.raises(NotFound):
        trusted_by(target).remove("the other machine")
    for wrong in ("", "ed25519:short", key_of(source)[:-1] + "=", "rsa:" + "a" * 43):
        with pytest.raises(InvalidInput):
            trusted_by(target).add(wrong)


def test_a_key_is_not_remembered_for_a_pack_that_was_refused(source: Home, target: Home) -> None:
    data = bytearray(pack(source, "root"))
    data[-400] ^= 1
    with pytest.raises(SnapshotDamaged):
        unpack(target, bytes(data))
    assert trusted_by(target).list() == []
    assert is_untouched(target)


def test_the_signing_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home/signing.key"
    key = SigningKey(path)
    assert key.find_public() is None
    assert key.public() == key.public() == SigningKey(path).public()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(HostLacks, match="Others may read"):
        key.public()
    path.chmod(0o600)
    path.write_text("not a key")
    with pytest.raises(HostLacks, match="cannot be used"):
        key.sign(b"")


# What cannot be


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"engine": "firecracker"}, "needs the engine firecracker, this daemon runs fake"),
        ({"platform": {"python": "2.7"}}, "python 2.7"),
    ],
)
def test_what_cannot_run_here_is_refused_unless_it_is_to_be_kept(
    source: Home, target: Home, changed: dict[str, object], why: str
) -> None:
    add_root(source, "strange", **changed)
    data = pack(source, "strange")
    work = importing(target)
    try:
        with pytest.raises(SnapshotIncompatible, match=why) as caught:
            work.feed(data[:16000])  # its head is enough
    finally:
        work.abort()
    assert "--keep-anyway" in str(caught.value.hint)
    assert is_untouched(target)
    done = unpack(target, data, keep_anyway=True)
    assert done.warning is not None and why in done.warning


def test_a_pack_for_which_there_is_no_disk_is_refused_first(
    source: Home, target: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NoCapacity, match="of disk"):
        unpack(target, pack(source, "root"))
    assert is_untouched(target)


def test_one_that_ends_early_leaves_nothing(source: Home, target: Home) -> None:
    data = pack(source, "head")
    for length in (0, 1, 16, 700, len(data) // 2, len(data) - 1):
        with pytest.raises(SnapshotDamaged, match="too early"):
            unpack(target, data[:length])
        assert is_untouched(target)


def test_a_damaged_snapshot_is_not_packed(source: Home) -> None:
    (source.snapshots / "root/state").write_bytes(b"altered!!")
    (source.snapshots / "root/.verified").unlink(missing_ok=True)
    with pytest.raises(SnapshotDamaged):
        pack(source, "head")
    with pytest.raises(NotFound):
        pack(source, "nobody")


def test_what_is_packed_cannot_be_removed_meanwhile(source: Home) -> None:
    with packing_of(source).opened(HEAD) as opened:
        stream = opened.stream()
        next(stream)
        with pytest.raises(Conflict):
            store_of(source).remove(ROOT, cascade=True)
        for _ in stream:
            pass
    store_of(source).remove(ROOT, cascade=True)


def test_a_tag_that_appears_meanwhile_is_kept(source: Home, target: Home) -> None:
    data = pack(source, "root")
    work = importing(target)
    work.feed(data)
    with store_of(target).created(ROOT, replace_existing=False) as (staging, seal):
        (staging / "state").write_bytes(b"mine")
        seal(replace(describe(source, "root"), warm="mine"))
    with pytest.raises(Conflict):
        work.finish()
    assert (target.snapshots / "root/state").read_bytes() == b"mine"
    assert [path.name for path in target.snapshots.iterdir()] == ["root"]


def test_images_that_came_for_nothing_are_dropped(source: Home, target: Home) -> None:
    done = unpack(target, pack(source, "root"))
    images = ImageStore(target)
    images.drop_unused_imports(store_of(target).images_in_use())
    assert images.has(done.image_id)
    store_of(target).remove(ROOT)
    images.drop_unused_imports(store_of(target).images_in_use())
    assert not images.has(done.image_id)
    assert list(target.images.glob("pieces/*")) == []
