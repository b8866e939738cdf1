"""What a snapshot says about itself."""

import dataclasses
import json
from typing import Any

import pytest

from forkd.errors import SnapshotDamaged, SnapshotIncompatible
from forkd.host.files import FileSum
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.store.manifest import (
    FORMAT,
    Manifest,
    Origin,
    Parent,
    find_image_id,
    find_parent,
    parse_manifest,
    render_manifest,
)

MANIFEST = Manifest(
    tag=parse_tag("warm"),
    created_at_unix=1_700_000_000,
    engine="qemu",
    image_id="0123456789abcdef" * 2,
    machine=MachineSpec(256, 2),
    warm='import numpy\nprint("ü")',
    platform={"qemu": "7.2", "accelerator": "tcg"},
    files={"memory": FileSum(268435456, "aa"), "state": FileSum(1, "bb")},
)


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(render_manifest(MANIFEST)), **fields}).encode()


def test_a_manifest_survives_its_way_to_disk_and_back() -> None:
    assert parse_manifest(render_manifest(MANIFEST), "warm") == MANIFEST


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        render_manifest(MANIFEST)[:-20],
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format": null}',
        b'{"format": "1"}',
        b'{"format": true}',
    ],
    ids=range(11),
)
def test_what_is_no_manifest_is_damaged(data: bytes) -> None:
    with pytest.raises(SnapshotDamaged, match="The manifest of snapshot warm is damaged") as caught:
        parse_manifest(data, "warm")
    assert caught.value.hint is not None and "forkd snapshot rm warm" in caught.value.hint


@pytest.mark.parametrize(
    "field", ["tag", "created_at_unix", "engine", "image_id", "machine", "warm", "platform", "files"]
)
@pytest.mark.parametrize("value", [None, True, 1.5, [], [1], {"a": 1}, {"a": [2]}, float("inf"), -1, 10**30])
def test_a_field_of_a_wrong_type_is_damage(field: str, value: object) -> None:
    with pytest.raises(SnapshotDamaged, match="warm"):
        parse_manifest(changed(**{field: value}), "warm")


@pytest.mark.parametrize(
    "field", ["tag", "created_at_unix", "engine", "image_id", "machine", "warm", "platform", "files"]
)
def test_a_missing_field_is_damage(field: str) -> None:
    raw = json.loads(render_manifest(MANIFEST))
    del raw[field]
    with pytest.raises(SnapshotDamaged):
        parse_manifest(json.dumps(raw).encode(), "warm")


@pytest.mark.parametrize(
    "machine", [{}, {"memory_mib": 256}, {"memory_mib": 1, "vcpus": 1}, {"memory_mib": 256, "vcpus": "1"}]
)
def test_a_machine_that_cannot_be_is_damage(machine: dict[str, object]) -> None:
    with pytest.raises(SnapshotDamaged):
        parse_manifest(changed(machine=machine), "warm")


def test_a_rehearsal_is_kept_and_manifests_from_before_there_were_any_are_read() -> None:
    assert "rehearsal" not in json.loads(render_manifest(MANIFEST))
    assert parse_manifest(render_manifest(MANIFEST), "warm").rehearsal is None
    rehearsed = dataclasses.replace(MANIFEST, rehearsal="numpy.zeros(5)")
    assert parse_manifest(render_manifest(rehearsed), "warm") == rehearsed
    for wrong in (None, 2, ["x"], {}):
        with pytest.raises(SnapshotDamaged):
            parse_manifest(changed(rehearsal=wrong), "warm")


def test_a_cpu_template_is_kept_and_manifests_from_before_there_were_any_are_read() -> None:
    assert "cpu_template" not in json.loads(render_manifest(MANIFEST))["machine"]
    templated = dataclasses.replace(MANIFEST, machine=MachineSpec(256, 2, "T2A"))
    assert parse_manifest(render_manifest(templated), "warm") == templated
    for wrong in ("T9", "", None, 2, ["T2"]):
        with pytest.raises(SnapshotDamaged):
            parse_manifest(changed(machine={"memory_mib": 256, "vcpus": 2, "cpu_template": wrong}), "warm")


LAYER = dataclasses.replace(
    MANIFEST,
    parent=Parent(parse_tag("below"), "ab" * 32),
    settled=False,
    origin=Origin("sb-1", "sb-0", 3, 1_700_000_000.25, "diff", 1.5, 20, 1 << 26, 1 << 25, "before", True),
)


def test_a_layer_survives_its_way_to_disk_and_back() -> None:
    assert parse_manifest(render_manifest(LAYER), "warm") == LAYER
    bare = dataclasses.replace(LAYER, origin=Origin())
    assert parse_manifest(render_manifest(bare), "warm") == bare
    assert find_parent(render_manifest(LAYER)) == LAYER.parent
    assert find_parent(changed(format=99, parent={"tag": "x", "hash": "0" * 64})) == Parent(parse_tag("x"), "0" * 64)
    for none in (b"", b"[]", b"null", render_manifest(MANIFEST), changed(parent={"tag": "../x", "hash": "0" * 64})):
        assert find_parent(none) is None


def test_manifests_from_before_there_were_layers_are_read() -> None:
    raw = json.loads(render_manifest(MANIFEST))
    del raw["settled"]
    assert parse_manifest(json.dumps({**raw, "format": 1}).encode(), "warm") == MANIFEST
    with pytest.raises(SnapshotDamaged):
        parse_manifest(json.dumps(raw).encode(), "warm")


@pytest.mark.parametrize(
    "parent",
    [None, "below", [], {}, {"tag": "below"}, {"hash": "ab" * 32}, {"tag": "../x", "hash": "ab" * 32}]
    + [{"tag": "below", "hash": wrong} for wrong in ("", "ab", "AB" * 32, "x" * 64, 5, None)],
)
def test_a_parent_that_cannot_be_is_damage(parent: object) -> None:
    with pytest.raises(SnapshotDamaged):
        parse_manifest(changed(parent=parent), "warm")


@pytest.mark.parametrize(
    "field",
    [
        {"auto": 1},
        {"auto": None},
        {"depth": -1},
        {"depth": 1.5},
        {"depth": True},
        {"bytes_dirty": 10**30},
        {"pause_ms": "1"},
        {"pause_ms": float("nan")},
        {"pause_ms": float("inf")},
        {"mode": 3},
        {"branched_from": "x" * 300},
        {"checkpoint": None},
    ],
)
def test_an_origin_that_cannot_be_is_damage(field: dict[str, object]) -> None:
    origin = json.loads(render_manifest(LAYER))["origin"]
    assert parse_manifest(changed(origin={**origin, "of a newer one": 1}), "warm").origin == LAYER.origin
    with pytest.raises(SnapshotDamaged):
        parse_manifest(changed(origin={**origin, **field}), "warm")
    for wrong in (None, [], {}, 5):
        with pytest.raises(SnapshotDamaged):
            parse_manifest(changed(origin=wrong), "warm")


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "/etc/shadow", "a/b", "a\0b"])
def test_a_file_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(SnapshotDamaged):
        parse_manifest(changed(files={name: {"size": 1, "sha256": "aa"}}), "warm")


@pytest.mark.parametrize("number", [0, FORMAT + 1, -1])
def test_another_format_is_incompatible_not_damaged(number: int) -> None:
    with pytest.raises(
        SnapshotIncompatible, match=f"format {number}, this forkd reads formats 1 to {FORMAT}"
    ) as caught:
        parse_manifest(changed(format=number), "warm")
    assert caught.value.hint is not None and "again" in caught.value.hint


def test_the_manifest_of_another_tag_is_not_believed() -> None:
    with pytest.raises(SnapshotDamaged, match="snapshot other is for warm"):
        parse_manifest(render_manifest(MANIFEST), "other")
    with pytest.raises(SnapshotDamaged):
        parse_manifest(changed(tag="../warm"), "../warm")


def test_the_image_is_found_in_what_is_otherwise_unreadable() -> None:
    assert find_image_id(changed(format=99, machine=None)) == MANIFEST.image_id
    for lost in (b"", b"[]", b"{}", b"null", b"[" * 100_000, changed(image_id=None)):
        assert find_image_id(lost) is None
