"""The SQLite database of a home: its schema, and transactions. One writer.

The event loop uses it directly: a transaction takes some 50 µs, because in WAL mode with synchronous=NORMAL only a
checkpoint waits for the disk. A killed daemon loses nothing by that; a power failure may take the last rows with it,
and takes every VM they were about too.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from forkd.errors import HostLacks

_BUSY_MS = 5000

_FIRST = """
CREATE TABLE sandboxes (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    snapshot_tag TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at_unix REAL NOT NULL,
    ended_at_unix REAL,
    engine TEXT NOT NULL,
    isolation TEXT NOT NULL,
    agent_port INTEGER NOT NULL,
    pid INTEGER,
    memory_limit_mib INTEGER,
    deadline_unix REAL,
    on_timeout TEXT NOT NULL,
    labels TEXT NOT NULL,
    metadata TEXT NOT NULL,
    workspace TEXT,
    cause TEXT
) STRICT;
CREATE INDEX sandboxes_by_workspace ON sandboxes (workspace) WHERE workspace IS NOT NULL;
CREATE TABLE spawns (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    digest TEXT NOT NULL,
    ids TEXT NOT NULL,
    created_at_unix REAL NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT;
CREATE TABLE workspaces (
    name TEXT PRIMARY KEY,
    id TEXT NOT NULL,
    source_snapshot_tag TEXT NOT NULL,
    memory_limit_mib INTEGER,
    created_at_unix REAL NOT NULL,
    last_active_unix REAL NOT NULL
) STRICT;
CREATE TABLE snapshot_jobs (
    tag TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    begun_at_unix REAL NOT NULL,
    warning TEXT,
    code TEXT
) STRICT;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    ts_unix REAL NOT NULL,
    type TEXT NOT NULL,
    sandbox_id TEXT,
    snapshot_tag TEXT,
    data TEXT NOT NULL
) STRICT;
"""
# The limits of sandboxes from before were watched, not enforced, by a daemon that is gone: they have none.
_MORE_LIMITS = """
ALTER TABLE sandboxes ADD COLUMN cpu_limit REAL;
ALTER TABLE sandboxes ADD COLUMN pids_limit INTEGER;
ALTER TABLE sandboxes ADD COLUMN io_limit_mib_s INTEGER;
ALTER TABLE workspaces ADD COLUMN cpu_limit REAL;
ALTER TABLE workspaces ADD COLUMN pids_limit INTEGER;
ALTER TABLE workspaces ADD COLUMN io_limit_mib_s INTEGER;
UPDATE sandboxes SET memory_limit_mib = NULL;
"""
# Sandboxes from before were all started.
_WAYS = """
ALTER TABLE sandboxes ADD COLUMN way TEXT;
UPDATE sandboxes SET way = 'start' WHERE state != 'starting';
"""
# One for each version, in their order; never changed, only added to.
_STEPS = (_FIRST, _MORE_LIMITS, _WAYS)


class Database:
    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
            self._db.row_factory = sqlite3.Row
            self._open(path)
        except sqlite3.Error as error:
            raise HostLacks(
                f"The registry {path} cannot be used: {error}",
                hint="Move it away to start with an empty one; VMs that run will then be ended",
            ) from error

    def _open(self, path: Path) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_STEPS):
            raise HostLacks(
                f"The registry {path} has version {version}, this forkd reads version {len(_STEPS)}",
                hint="Use the forkd that wrote it, or move it away",
            )
        if version < len(_STEPS):
            steps = "".join(_STEPS[version:])
            self._db.executescript(f"BEGIN; {steps} PRAGMA user_version = {len(_STEPS)}; COMMIT;")
        path.chmod(0o600)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing. Inside another one it is a part of that."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
