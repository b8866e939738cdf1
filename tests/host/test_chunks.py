"""Checksums by chunks: the same as hashing each by itself, holes and all; and damage has a place."""

import hashlib
import os
from pathlib import Path

import pytest

from forkd.errors import SnapshotDamaged
from forkd.host.chunks import CHUNK, hash_chunks, join_hashes, render_place
from forkd.host.files import FileSum, digest_chunks, dump_sums, parse_sums, verify_files


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_each_chunk_has_its_own_hash(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    chunks = tuple(sha256(data[at : at + CHUNK]) for at in range(0, size, CHUNK))
    assert hash_chunks(tmp_path / "f") == (size, chunks)
    assert digest_chunks(tmp_path / "f") == FileSum(size, sha256(b"".join(map(bytes.fromhex, chunks))), chunks)


def test_holes_count_as_zeros(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        file.truncate(5 * CHUNK + 10)
        file.seek(2 * CHUNK + 7)
        file.write(b"x")
    data = (tmp_path / "f").read_bytes()
    assert hash_chunks(tmp_path / "f")[1] == tuple(sha256(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def test_sums_with_chunks_survive_their_way_through_json_and_must_agree(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(2 * CHUNK))
    (tmp_path / "empty").touch()
    sums = {name: digest_chunks(tmp_path / name) for name in ("f", "empty")}
    raw = dump_sums(sums)
    assert parse_sums(raw) == sums
    assert "chunks" not in raw["empty"]
    good = raw["f"]
    for wrong in (
        None,
        "x",
        5,
        good["chunks"][:1],
        [*good["chunks"], "0" * 64],
        ["0" * 64] * 2,
        [1, 2],
        ["z" * 64] * 2,
    ):
        with pytest.raises(ValueError):
            parse_sums({"f": {**good, "chunks": wrong}})
    with pytest.raises(ValueError):
        parse_sums({"f": {**good, "size": 9 * CHUNK}})


def test_a_chunk_that_was_altered_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(2 * CHUNK + 100))
    sums = {"f": digest_chunks(tmp_path / "f")}
    verify_files(tmp_path, sums, what="x", hint="y")
    with (tmp_path / "f").open("r+b") as file:
        file.seek(2 * CHUNK + 50)
        file.write(b"!!")
    with pytest.raises(SnapshotDamaged, match=f"chunk 2 of f, bytes {2 * CHUNK} to {2 * CHUNK + 99}, does not match"):
        verify_files(tmp_path, sums, what="x", hint="y")
    assert render_place(0, 5) == "bytes 0 to 4"
    assert join_hashes([]) == sha256(b"")
