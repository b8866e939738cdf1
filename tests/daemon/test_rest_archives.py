"""The routes of archives: streamed both ways, errors with a status, and nothing left of a client that disconnects."""

import os
import socket
import tarfile
from io import BytesIO
from pathlib import Path

from support_client import Client
from support_processes import wait_until
from support_trees import archive, describe, entry, make_tree

from forkd.daemon.call import GAP_S


def test_an_archive_goes_out_and_in(client: Client, sandbox: str, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", files=100)
    got = client.get(f"{sandbox}/archive?path={tmp_path}/tree")
    assert (got.status, got.headers["Content-Type"]) == (200, "application/octet-stream")
    put = client.ask("PUT", f"{sandbox}/archive?path={tmp_path}/deep/copy", data=got.content)
    size = sum(
        path.stat().st_size for path in (tmp_path / "tree").rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert (put.status, put.body) == (
        200,
        {"path": f"{tmp_path}/deep/copy", "files": 101, "bytes": size, "skipped": []},
    )
    assert describe(tmp_path / "deep/copy") == describe(tmp_path / "tree")


def test_what_is_left_out_is_named(client: Client, sandbox: str, tmp_path: Path) -> None:
    made = archive([entry("pipe", tarfile.FIFOTYPE), entry("file"), entry("device", tarfile.CHRTYPE)])
    answer = client.ask("PUT", f"{sandbox}/archive?path={tmp_path}/there", data=made)
    assert answer.body["skipped"] == [
        {"path": "pipe", "why": "it is a fifo"},
        {"path": "device", "why": "it is a char device"},
    ]
    os.mkfifo(tmp_path / "there/pipe")
    with tarfile.open(fileobj=BytesIO(client.get(f"{sandbox}/archive?path={tmp_path}/there").content)) as read:
        assert {each.name: each.isfifo() for each in read} == {".": False, "file": False, "pipe": True}


def test_refusals_have_a_status_and_name_the_path(client: Client, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for asked, error, path in [
        (client.get(f"{sandbox}/archive?path={tmp_path}/none"), (404, "not_found"), "none"),
        (client.get(f"{sandbox}/archive?path={tmp_path}/file"), (400, "not_dir"), "file"),
        (client.ask("PUT", f"{sandbox}/archive?path={tmp_path}/file", data=archive([])), (400, "not_dir"), "file"),
        (client.get(f"{sandbox}/archive?path=relative"), (400, "invalid_input"), "relative"),
        (client.ask("PUT", f"{sandbox}/archive?path={tmp_path}/x", data=b"x" * 99_999), (400, "invalid_input"), ""),
        (client.get("/v1/sandboxes/sb-0000000000/archive?path=/"), (404, "not_found"), "sb-0000000000"),
    ]:
        assert asked.error == error and path in asked.body["error"], asked.content


def test_a_guest_without_an_overlay_cannot_tell_what_was_written(client: Client, sandbox: str) -> None:
    assert client.get(f"{sandbox}/changes").error == (501, "unsupported")
    assert client.get(f"{sandbox}/changes?sha256=true&since=5").error == (501, "unsupported")
    for query in ("since=-1", "since=x", "sha256=1"):
        assert client.get(f"{sandbox}/changes?{query}").error == (400, "invalid_input")
    assert client.get("/v1/sandboxes/sb-0000000000/changes").error == (404, "not_found")


def test_a_client_that_disconnects_half_way_leaves_nothing_unfinished(
    client: Client, sandbox: str, places: list[str], tmp_path: Path
) -> None:
    data = archive([entry("whole"), entry("half")], {"half": bytes(3_000_000)})
    head = f"PUT {sandbox}/archive?path={tmp_path}/there HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(places[0].removeprefix("unix://"))
        connection.sendall(head.encode() + data[:1_000_000])
        wait_until(lambda: list(tmp_path.glob("there/.forkd-*")))
    # At the latest when the daemon has waited long enough for more of it.
    wait_until(lambda: os.listdir(tmp_path / "there") == ["whole"], within_s=2 * GAP_S)
    (tmp_path / "there/large").write_bytes(bytes(32 << 20))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(places[0].removeprefix("unix://"))
        connection.sendall(f"GET {sandbox}/archive?path={tmp_path}/there HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(100_000).startswith(b"HTTP/1.1 200")
    again = client.ask("PUT", f"{sandbox}/archive?path={tmp_path}/again", data=data)
    assert again.body["files"] == 2
