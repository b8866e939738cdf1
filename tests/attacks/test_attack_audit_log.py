"""Outsiders who want the audit log to forget."""

import json
from pathlib import Path

from support_client import Client
from support_daemon import served
from support_images import made_home

from forkd.daemon.audit import OUTSIDE_BYTES, OUTSIDE_KEPT, AuditEntry, AuditLog
from forkd.daemon.tokens import TokenStore


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_outsiders_ask_is_apart_from_what_was_done(tmp_path: Path) -> None:
    with made_home(tmp_path / "home") as home:
        token = TokenStore(home.tokens).create("somebody")
        with served(home, "--bind", "127.0.0.1:0") as daemon:
            _, tcp = daemon.places
            assert Client(tcp, token).get("/version").status == 200
            for _ in range(30):
                assert Client(tcp).get("/" + "x" * 30_000).status == 401
                assert Client(tcp).get("/healthz", headers={"User-Agent": "y" * 20_000}).status == 200
        [done] = read(home.root / "audit.log")
        assert (done["path"], done["token"], done["status"]) == ("/version", "somebody", 200)
        outside = home.root / "audit.log.refused"
        assert [entry["status"] for entry in read(outside)] == [401, 200] * 30
        assert max(map(len, outside.read_text().splitlines())) < 1_000
        assert outside.stat().st_mode & 0o777 == 0o600


def test_outsiders_push_out_only_each_other(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log")

    def write(path: str, allowed: bool) -> None:
        entry = AuditEntry("2026-01-01T00:00:00.000Z", "id", "peer", None, "GET", path, 200, 1, [], "\x80" * 9_000)
        log.write(entry, allowed=allowed)

    write("/done", True)
    for _ in range(5_000):
        write("/" + "\x80" * 9_000, False)
    log.close()
    assert [entry["path"] for entry in read(tmp_path / "audit.log")] == ["/done"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["audit.log", "audit.log.refused", "audit.log.refused.1"]
    outside = [path for path in tmp_path.iterdir() if "refused" in path.name]
    assert sum(path.stat().st_size for path in outside) <= OUTSIDE_BYTES * (1 + OUTSIDE_KEPT)
