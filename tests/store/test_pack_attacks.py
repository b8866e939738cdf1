"""Packs that somebody made by hand: nothing of them is written, believed or inflated beyond what was declared."""

import copy
import json
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_packs import (
    add_chain,
    files_of,
    forge,
    frames,
    importing,
    is_untouched,
    made,
    open_pack,
    pack,
    trusted_by,
    unpack,
)

from forkd.errors import ForkdError, NoCapacity, SnapshotDamaged, SnapshotIncompatible, Untrusted
from forkd.host.paths import Home
from forkd.image.manifest import digest_id
from forkd.runtime import unpacking
from forkd.store.keys import UNSIGNED, SigningKey
from forkd.store.pack_frames import END, FRAME, make_frame, padding, render_header
from forkd.store.pack_manifest import (
    BLOCK,
    MAX_CHAIN,
    MAX_MANIFEST_BYTES,
    parse_extents,
    parse_pack_manifest,
    render_extents,
)
from forkd.store.pack_write import render_head

Change = Callable[[dict[str, Any]], object]
_SKIPPABLE = struct.Struct("<IIII")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with made(tmp_path_factory.mktemp("attacks") / "source") as home:
        add_chain(home, "root", "head")
        yield home


@pytest.fixture(scope="module")
def good(source: Home) -> bytes:
    return pack(source, "head")


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Home]:
    """Untouched, before and after."""
    with made(tmp_path / "inner/target", image=False) as home:
        yield home
        assert is_untouched(home)
        assert [path.name for path in tmp_path.iterdir()] == ["inner"]
        assert [path.name for path in (tmp_path / "inner").iterdir()] == ["target"]


@pytest.fixture(autouse=True)
def inner(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir(exist_ok=True)


def refuse(home: Home, data: bytes, error: type[ForkdError] = SnapshotDamaged, **options: Any) -> ForkdError:
    with pytest.raises(error) as caught:
        unpack(home, data, **({"unsigned": True} | options))
    assert is_untouched(home)
    return caught.value


def changed(good: bytes, change: Change) -> bytes:
    """The same pack with another manifest; its members are those of the old one."""
    manifest, members = open_pack(good)
    change(manifest)
    return forge(manifest, members)


def inner_manifest(entry: dict[str, Any], change: Change) -> None:
    """Change the manifest.json of a snapshot in a pack."""
    own = json.loads(entry["manifest"])
    change(own)
    entry["manifest"] = json.dumps(own)


def test_a_forged_pack_that_is_right_is_taken(good: bytes, tmp_path: Path, source: Home) -> None:
    """So that all others are refused for what was done to them."""
    with made(tmp_path / "taker", image=False) as taker:
        assert unpack(taker, changed(good, lambda manifest: None), unsigned=True).key is None
        assert files_of(taker) == files_of(source)


# Who signed it


def test_nobody_signed_it(good: bytes, target: Home) -> None:
    data = changed(good, lambda manifest: None)
    assert "--unsigned" in str(refuse(target, data, Untrusted, unsigned=False).hint)


def test_the_manifest_was_changed_after_it_was_signed(good: bytes, source: Home, target: Home) -> None:
    manifest, members = open_pack(good)
    signature = SigningKey(source.signing_key).sign(json.dumps(manifest).encode())
    manifest["chain"][0]["files"]["state"]["size"] += 1
    for said in (signature, signature[:-3] + b"A=\n", b"", b"ed25519:x y\n", b"\xff\xfe", signature[:60] + b"\n"):
        refuse(target, forge(manifest, members, sign=lambda text, said=said: said))  # type: ignore[misc]


def test_the_signature_of_another_pack_does_not_count(good: bytes, source: Home, target: Home, tmp_path: Path) -> None:
    """Also not by a key that is trusted."""
    trusted_by(target).add(SigningKey(source.signing_key).public())
    _, signature = good, SigningKey(source.signing_key).sign(b"something else")
    manifest, members = open_pack(good)
    refuse(target, forge(manifest, members, sign=lambda text: signature), unsigned=False)


def test_an_untrusted_manifest_is_not_even_parsed(target: Home, tmp_path: Path) -> None:
    enemy = SigningKey(tmp_path / "inner/target/enemy.key")
    data = forge(b"[" * 1000, [], sign=enemy.sign)
    refuse(target, data, Untrusted, trust=False)
    refuse(target, data, trust=True)
    for path in (tmp_path / "inner/target").glob("enemy.*"):
        path.unlink()


# What the manifest says

_BAD_NAMES = ["../x", "/etc/x", "a/b", "..", ".", "", ".hidden", "x" * 100, "manifest.json", "a\0b", "UPPER", "\u00e9"]
_BAD_TAGS = ["../x", "/x", "", ".", "..", "a/b", "-x", "a" * 65, "a.b", "x\n", "\u00e9"]


@pytest.mark.parametrize("name", _BAD_NAMES)
def test_a_file_with_a_name_that_is_none(good: bytes, target: Home, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        entry = manifest["chain"][0]
        entry["files"][name] = entry["files"].pop("state")
        inner_manifest(entry, lambda own: own["files"].__setitem__(name, own["files"].pop("state")))

    refuse(target, changed(good, change))


@pytest.mark.parametrize("tag", _BAD_TAGS)
def test_a_snapshot_with_a_tag_that_is_none(good: bytes, target: Home, tag: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["head"] = manifest["chain"][-1]["tag"] = tag
        inner_manifest(manifest["chain"][-1], lambda own: own.__setitem__("tag", tag))

    refuse(target, changed(good, change))


def _swap(manifest: dict[str, Any]) -> None:
    manifest["chain"].reverse()
    manifest["head"] = "root"


_LIES: dict[str, Change] = {
    "another kind": lambda m: m.__setitem__("kind", "tar"),
    "no chain": lambda m: m.__setitem__("chain", []),
    "a chain that is none": lambda m: m.__setitem__("chain", {"tag": "root"}),
    "entries that are none": lambda m: m.__setitem__("chain", [1, None]),
    "another head": lambda m: m.__setitem__("head", "root"),
    "a snapshot twice": lambda m: m["chain"].insert(0, copy.deepcopy(m["chain"][0])),
    "the wrong order": _swap,
    "no root": lambda m: m["chain"].pop(0),
    "a deep chain": lambda m: m.__setitem__("chain", m["chain"] * MAX_CHAIN),
    "another parent": lambda m: inner_manifest(
        m["chain"][1], lambda own: own.__setitem__("parent", {"tag": "root", "hash": "0" * 64})
    ),
    "a parent of itself": lambda m: inner_manifest(m["chain"][1], lambda own: own["parent"].__setitem__("tag", "head")),
    "a manifest of another tag": lambda m: m["chain"][1].__setitem__("tag", "other"),
    "a manifest that is none": lambda m: m["chain"][0].__setitem__("manifest", "{}"),
    "a manifest that is no text": lambda m: m["chain"][0].__setitem__("manifest", 1),
    "a manifest with surrogates": lambda m: m["chain"][0].__setitem__("manifest", "\ud800"),
    "another image": lambda m: inner_manifest(m["chain"][0], lambda own: own.__setitem__("image_id", "0" * 32)),
    "fewer files": lambda m: m["chain"][0]["files"].pop("state"),
    "more files": lambda m: m["chain"][0]["files"].__setitem__("more", m["chain"][0]["files"]["state"]),
    "another size": lambda m: m["chain"][0]["files"]["state"].__setitem__("size", 8),
    "a size that is none": lambda m: m["chain"][0]["files"]["state"].__setitem__("size", -1),
    "a size that is a text": lambda m: m["chain"][0]["files"]["state"].__setitem__("size", "9"),
    "another digest": lambda m: m["chain"][0]["files"]["state"].__setitem__("sha256", "0" * 64),
    "places that are none": lambda m: m["chain"][0]["files"]["memory"].__setitem__("data", "x"),
    "places beyond the end": lambda m: m["chain"][0]["files"]["memory"].__setitem__("data", "0,1000000"),
    "places that overlap": lambda m: m["chain"][0]["files"]["memory"].__setitem__("data", "0,1,0,1"),
    "too few places": lambda m: m["chain"][0]["files"]["memory"].__setitem__("data", ""),
    "an image without an id": lambda m: m["image"].__setitem__("id", "../../x"),
    "an image without a kernel": lambda m: m["image"]["files"].pop("kernel"),
    "an image with another id": lambda m: m["image"]["files"]["root"].__setitem__("sha256", "0" * 64),
    "an image without facts": lambda m: m["image"].__setitem__("facts", {}),
    "an image with escapes": lambda m: m["image"]["facts"].__setitem__("kernel_version", "\x1b[2J"),
    "an image made never": lambda m: m["image"]["facts"].__setitem__("created", 1e300),
    "wheels that are none": lambda m: m["image"]["facts"].__setitem__("pip", {"x": 1}),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_manifest_with(lie: str, good: bytes, target: Home) -> None:
    refuse(target, changed(good, _LIES[lie]))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"kind": "forkd-pack", "kind": "forkd-pack"}',
        b'{"kind": "forkd-pack", "version": NaN}',
        b'{"kind": "forkd-pack", "version": 1, "chain": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_manifest_that_is_no_json_of_ours(text: bytes, target: Home) -> None:
    refuse(target, forge(text or b" ", []))


def test_a_newer_pack_says_so(good: bytes, target: Home) -> None:
    error = refuse(target, changed(good, lambda m: m.__setitem__("version", 2)), SnapshotIncompatible)
    assert "version 2" in error.message


def test_a_declared_size_that_is_absurd(good: bytes, target: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def enlarge(size: int) -> Change:
        def change(manifest: dict[str, Any]) -> None:
            files = manifest["image"]["files"]
            files["root"] |= {"size": size, "data": f"0,{-(-size // BLOCK)}", "sha256": "0" * 64}
            image_id = digest_id({role: files[role]["sha256"] for role in files})
            manifest["image"]["id"] = image_id
            manifest["chain"] = manifest["chain"][:1]
            manifest["head"] = "root"
            inner_manifest(manifest["chain"][0], lambda own: own.__setitem__("image_id", image_id))

        return change

    refuse(target, changed(good, enlarge(1 << 62)))
    refuse(target, changed(good, enlarge((1 << 38) + 1)))
    monkeypatch.setattr(unpacking, "SPARE_BYTES", 1 << 50)
    refuse(target, changed(good, enlarge(1 << 30)), NoCapacity)


def test_layers_that_point_out_of_their_files(good: bytes, target: Home) -> None:
    """Right by all hashes, and nonsense."""
    import hashlib

    from forkd.store.extents import render_extents as render_layer

    manifest, members = open_pack(good)
    entry, evil = manifest["chain"][1], render_layer([(3, 1, 1 << 40)])
    digest = hashlib.sha256(evil).hexdigest()
    total = hashlib.sha256(bytes.fromhex(digest)).hexdigest()
    inner_manifest(
        entry,
        lambda own: own["files"].__setitem__("extents", {"size": len(evil), "sha256": total, "chunks": [digest]}),
    )
    entry["files"]["extents"] = {"size": len(evil), "sha256": total, "data": "0,1"}
    replaced = [(name, evil if name == "head/extents" else data) for name, data in members]
    assert "extents" in refuse(target, forge(manifest, replaced)).message


# What the members are


def _members(good: bytes, change: Callable[[list[tuple[str, bytes]]], object]) -> bytes:
    manifest, members = open_pack(good)
    change(members)
    return forge(manifest, members)


_TRICKS: dict[str, Callable[[list[tuple[str, bytes]]], object]] = {
    "missing": lambda m: m.pop(),
    "the first one missing": lambda m: m.pop(0),
    "there twice": lambda m: m.append(m[-1]),
    "there twice, in the middle": lambda m: m.insert(3, m[3]),
    "undeclared": lambda m: m.append(("evil", b"x")),
    "undeclared, first": lambda m: m.insert(0, ("../evil", b"x")),
    "in another order": lambda m: m.reverse(),
    "with another name": lambda m: m.__setitem__(0, ("/etc/evil", m[0][1])),
    "with a name that leads out": lambda m: m.__setitem__(0, ("../../evil", m[0][1])),
    "longer": lambda m: m.__setitem__(0, (m[0][0], m[0][1] + b"x")),
    "shorter": lambda m: m.__setitem__(0, (m[0][0], m[0][1][:-1])),
    "altered": lambda m: m.__setitem__(0, (m[0][0], b"?" * len(m[0][1]))),
    "altered, the last": lambda m: m.__setitem__(-1, (m[-1][0], b"?" * len(m[-1][1]))),
    "altered memory": lambda m: m.__setitem__(3, (m[3][0], b"?" + m[3][1][1:])),
}


@pytest.mark.parametrize("trick", _TRICKS)
def test_a_member_that_is(trick: str, good: bytes, target: Home) -> None:
    refuse(target, _members(good, _TRICKS[trick]))


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6", b"x", b"L", b"S"])
def test_a_member_that_is_a_link_a_device_or_a_directory(kind: bytes, good: bytes, target: Home) -> None:
    manifest, members = open_pack(good)
    text = json.dumps(manifest).encode()
    name, data = members[0]
    header = bytearray(render_header(name, len(data)))
    header[156:157] = kind
    header[157:168] = b"/etc/passwd"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    rest = b"".join(render_header(n, len(d)) + d + bytes(padding(len(d))) for n, d in members[1:])
    body = bytes(header) + data + bytes(padding(len(data))) + rest + END
    refuse(target, frames(render_head(text, UNSIGNED)) + frames(body))


def test_the_first_members_are_others(good: bytes, target: Home) -> None:
    manifest, _ = open_pack(good)
    text = json.dumps(manifest).encode()
    head = render_head(text, UNSIGNED)
    refuse(target, frames(head.replace(b"forkd-pack.json", b"forkd-pack.toml")))
    refuse(target, frames(render_header("forkd-pack.json", 10) + head[512:]))
    refuse(target, frames(bytes(2048)))
    refuse(target, frames(head[:600]))
    huge = render_header("forkd-pack.json", MAX_MANIFEST_BYTES + 1)
    assert "too large" in refuse(target, frames(huge + bytes(10_000))).message


# The bytes


def test_more_after_the_end(good: bytes, target: Home) -> None:
    for more in (b"\0", good[:16], make_frame(b"x"), b"\0" * 100_000, good):
        refuse(target, good + more)
        assert trusted_by(target).list() == []


def test_padding_that_hides_something(good: bytes, target: Home) -> None:
    manifest, members = open_pack(good)
    refuse(target, forge(manifest, members, end=END[:-1] + b"x"))
    text = json.dumps(manifest).encode()
    body = b"".join(render_header(n, len(d)) + d + b"x" * padding(len(d)) for n, d in members) + END
    refuse(target, frames(render_head(text, UNSIGNED)) + frames(body))


def test_frames_of_another_size(good: bytes, target: Home) -> None:
    manifest, members = open_pack(good)
    head, text = render_head, json.dumps(manifest).encode()
    body = b"".join(render_header(n, len(d)) + d + bytes(padding(len(d))) for n, d in members) + END
    refuse(target, frames(head(text, UNSIGNED)) + frames(body, 512))
    refuse(target, frames(head(text, UNSIGNED), 512) + frames(body))
    refuse(target, frames(head(text, UNSIGNED) + body))


def _announce(packed: int, size: int, magic: int = 0x184D2A5E, length: int = 8) -> bytes:
    return _SKIPPABLE.pack(magic, length, packed, size)


def test_a_frame_that_is_a_bomb_inflates_to_no_more_than_it_announced(target: Home) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    unsized = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        for data in (bomb, unsized):
            refuse(target, _announce(len(data), FRAME) + data)
            refuse(target, _announce(len(data), 600) + data)
            refuse(target, data)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        _announce(0, 600),
        _announce(100, 0),
        _announce(1 << 31, FRAME),
        _announce(100, FRAME + 1),
        _announce(100, 600, magic=0xFD2FB528),
        _announce(100, 600, length=9),
        b"\0" * 16,
        b"\x7fELF" + b"\0" * 12,
    ],
)
def test_an_announcement_that_is_none(header: bytes, target: Home) -> None:
    refuse(target, header + bytes(100))


def test_two_frames_where_one_was_announced(target: Home) -> None:
    one = zstandard.ZstdCompressor().compress(bytes(600))
    refuse(target, _announce(2 * len(one), 600) + one + one)
    refuse(target, _announce(len(one) + 3, 600) + one + b"abc")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_flips_anywhere(good: bytes, source: Home, target: Home, place: float, bit: int) -> None:
    data = bytearray(good)
    data[int(place * len(data))] ^= 1 << bit
    try:
        unpack(target, bytes(data))
    except SnapshotDamaged:
        pass
    else:  # zstd has bits that mean nothing
        assert files_of(target) == files_of(source)
        for directory in (target.snapshots, target.images):
            shutil.rmtree(directory)
    assert is_untouched(target)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=5000), head=st.booleans())
def test_noise(target: Home, data: bytes, head: bool) -> None:
    refuse(target, (frames(data) if head and data else data) or b"\0")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_in_place_of_any_other(good: bytes, data: st.DataObject) -> None:
    manifest, _ = open_pack(good)
    at: Any = manifest
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        at[key] = data.draw(_JSON)
        break
    text = json.dumps(manifest).encode()
    try:
        parsed = parse_pack_manifest(text)
    except (SnapshotDamaged, SnapshotIncompatible):
        return
    assert all("/" not in each.tag and "." not in each.tag for each in parsed.chain)
    assert all(name.count("/") == 1 and ".." not in name for name, _ in parsed.members())


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20), st.integers(1, BLOCK))
def test_places_are_written_as_they_are_read(pairs: list[tuple[int, int]], rest: int) -> None:
    extents, at = [], 0
    for zeros, blocks in pairs:
        extents.append(((at + zeros) * BLOCK, blocks * BLOCK))
        at += zeros + blocks
    size = at * BLOCK
    if extents:
        start, length = extents[-1]
        size = start + length - BLOCK + rest
        extents[-1] = (start, size - start)
    assert parse_extents(render_extents(tuple(extents)), size) == tuple(extents)


def test_staging_that_is_swapped_for_a_link_is_not_followed(good: bytes, target: Home, tmp_path: Path) -> None:
    """Whoever can do that owns the home; even so nothing is written through it."""
    outside = tmp_path / "inner/target/outside"
    work = importing(target, unsigned=True)
    try:
        at = 0
        while work.unpacker.manifest is None:
            work.feed(good[at : at + 50])
            at += 50
        [staging] = target.snapshots.glob(".staging-*")
        os.symlink(outside, staging / "0/memory")
        with pytest.raises(OSError):
            work.feed(good[at:])
    finally:
        work.abort()
    assert not outside.exists()
