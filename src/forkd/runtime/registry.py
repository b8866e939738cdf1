"""What should exist: the rows about sandboxes, spawns, workspaces, snapshots in the making, and events.

A stored field is declared here: a step of the schema, and a field of its record.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkd.errors import Conflict, NotFound
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import SnapshotTag
from forkd.model.network import NO_NETWORK, Network
from forkd.model.sandbox import TRANSITIONS, OnTimeout, State, Way
from forkd.runtime.database import Database, parse_row, plain

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
_NAMES = """
ALTER TABLE sandboxes ADD COLUMN name TEXT;
CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (name) WHERE name IS NOT NULL;
"""
# A sandbox may move to another VM, whose directory is `vm`; from before, each has the one of its own id.
_BRANCHES = """
ALTER TABLE sandboxes ADD COLUMN vm TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN parent_id TEXT;
ALTER TABLE sandboxes ADD COLUMN lineage TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN depth INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN forked_at_unix REAL;
ALTER TABLE sandboxes ADD COLUMN branch_count INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN owner TEXT;
ALTER TABLE sandboxes ADD COLUMN made_of TEXT NOT NULL DEFAULT '{}';
UPDATE sandboxes SET vm = id, lineage = id;
ALTER TABLE workspaces ADD COLUMN current_state_tag TEXT;
"""
# Sandboxes from before have no network. A workspace without one has that of its snapshot.
_NETWORKS = """
ALTER TABLE sandboxes ADD COLUMN network TEXT NOT NULL DEFAULT '{"mode": "none"}';
ALTER TABLE sandboxes ADD COLUMN ports TEXT NOT NULL DEFAULT '{}';
ALTER TABLE workspaces ADD COLUMN network TEXT;
"""
# One for each version, in their order; never changed, only added to.
_STEPS = (_FIRST, _MORE_LIMITS, _WAYS, _NAMES, _BRANCHES, _NETWORKS)


@dataclass(frozen=True)
class SandboxRecord:
    """One row of the registry. `number` rises with every sandbox and orders them."""

    number: int
    id: str
    snapshot_tag: SnapshotTag
    state: State
    created_at_unix: float
    engine: str
    isolation: str
    agent_port: int  # guest_addr is 127.0.0.1:<agent_port>
    pid: int | None = None
    limits: Limits = NO_LIMITS
    deadline_unix: float | None = None
    on_timeout: OnTimeout = OnTimeout.KILL
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    workspace: str | None = None
    cause: str | None = None
    way: Way | None = None  # not known before it runs
    name: str | None = None  # unique; never looks like an id
    vm: str = ""  # the directory of its VM: its id, until it is rewound
    parent_id: str | None = None  # the sandbox that it was forked from
    lineage: str = ""  # the sandbox that its line began with
    depth: int = 0  # how many forks of sandboxes lie between
    forked_at_unix: float | None = None
    branch_count: int = 0
    owner: str | None = None  # the name of the token that asked for it
    made_of: Mapping[str, str] = field(default_factory=dict)  # image and shape: its snapshot may be gone
    network: Network = NO_NETWORK
    # What is exposed: by port of the guest, where, and to whom.
    ports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vm", self.vm or self.id)
        object.__setattr__(self, "lineage", self.lineage or self.id)


@dataclass(frozen=True)
class SandboxQuery:
    states: frozenset[State] = frozenset()
    snapshot_tag: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    after: int = 0
    limit: int | None = None


EVERY = SandboxQuery()


@dataclass(frozen=True)
class IdempotencyKey:
    """`owner` chose `key` for a request whose body has `digest`."""

    key: str
    owner: str
    digest: str


@dataclass(frozen=True)
class WorkspaceRow:
    name: str
    id: str
    source_snapshot_tag: SnapshotTag
    limits: Limits
    created_at_unix: float
    last_active_unix: float
    current_state_tag: SnapshotTag | None = None
    network: Network | None = None  # as it was asked for


@dataclass(frozen=True)
class SnapshotJob:
    """A snapshot that is being made (`writing`) or could not be (`failed`, with why)."""

    tag: SnapshotTag
    status: str
    begun_at_unix: float
    warning: str | None = None
    code: str | None = None


@dataclass(frozen=True)
class EventRecord:
    id: int
    ts_unix: float
    type: str
    sandbox_id: str | None
    snapshot_tag: str | None
    data: dict[str, Any]


class Registry(Database):
    def __init__(self, path: Path) -> None:
        super().__init__(path, _STEPS)

    # Sandboxes

    def insert_sandboxes(self, records: Iterable[SandboxRecord]) -> None:
        """Their `number` is given here."""
        with self.transaction():
            for record in records:
                self.insert("sandboxes", record, without="number")

    def get_sandbox(self, sandbox_id: str) -> SandboxRecord:
        """By its id or its name."""
        row = self.read("SELECT * FROM sandboxes WHERE id = ?1 OR name = ?1", (sandbox_id,)).fetchone()
        if row is None:
            raise absent(sandbox_id)
        return parse_row(SandboxRecord, row)

    def list_sandboxes(self, query: SandboxQuery = EVERY) -> list[SandboxRecord]:
        where: list[str] = ["number > ?"]
        values: list[str | int] = [query.after]
        if query.snapshot_tag is not None:
            where.append("snapshot_tag = ?")
            values.append(query.snapshot_tag)
        for column, pairs in (("labels", query.labels), ("metadata", query.metadata)):
            for name, value in pairs.items():
                where.append(
                    f"EXISTS (SELECT 1 FROM json_each({column}) AS pair WHERE pair.key = ? AND pair.value = ?)"
                )
                values += [name, value]
        if query.states:
            where.append(f"state IN ({','.join('?' * len(query.states))})")
            values += [state.value for state in query.states]
        limit = "" if query.limit is None else f" LIMIT {int(query.limit)}"
        rows = self.read(f"SELECT * FROM sandboxes WHERE {' AND '.join(where)} ORDER BY number{limit}", values)
        return [parse_row(SandboxRecord, row) for row in rows]

    def move(
        self, sandbox_ids: Sequence[str], to: State, changes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Guarded: each goes `to` from a state it may follow, with its changes, or none does and Conflict is raised."""
        allowed = [state.value for state, following in TRANSITIONS.items() if to in following]
        marks = ",".join("?" * len(allowed))
        with self.transaction():
            for sandbox_id in sandbox_ids:
                fields = (changes or {}).get(sandbox_id, {})
                sets = "".join(f", {name} = ?" for name in fields)
                done = self.write(
                    f"UPDATE sandboxes SET state = ?{sets} WHERE id = ? AND state IN ({marks})",
                    (to.value, *map(plain, fields.values()), sandbox_id, *allowed),
                )
                if done.rowcount != 1:
                    state = self.get_sandbox(sandbox_id).state
                    raise Conflict(f"Sandbox {sandbox_id} is {state.value}, and cannot become {to.value}")

    def change(self, sandbox_id: str, **fields: Any) -> None:
        """Without a change of state."""
        sets = ", ".join(f"{name} = ?" for name in fields)
        self.write(f"UPDATE sandboxes SET {sets} WHERE id = ?", (*map(plain, fields.values()), sandbox_id))

    def rename(self, sandbox_id: str, name: str | None) -> None:
        try:
            self.change(sandbox_id, name=name)
        except sqlite3.IntegrityError:
            hint = f"Choose another name, or take it away with: forkd rename {name}"
            raise Conflict(f"Another sandbox is named {name}", hint=hint) from None

    def count_branch(self, sandbox_id: str) -> None:
        self.write("UPDATE sandboxes SET branch_count = branch_count + 1 WHERE id = ?", (sandbox_id,))

    def remove_sandboxes(self, sandbox_ids: Iterable[str]) -> None:
        with self.transaction():
            for sandbox_id in sandbox_ids:
                self.write("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def shift_times(self, jump_s: float) -> None:
        """Of what is kept for a while, after a jump of the wall clock."""
        self.write("UPDATE sandboxes SET ended_at_unix = ended_at_unix + ?", (jump_s,))
        self.write("UPDATE spawns SET created_at_unix = created_at_unix + ?", (jump_s,))

    def list_ended_before(self, unix: float) -> list[str]:
        rows = self.read("SELECT id FROM sandboxes WHERE state = 'dead' AND ended_at_unix < ?", (unix,))
        return [row["id"] for row in rows]

    def count_states(self) -> dict[State, int]:
        rows = self.read("SELECT state, count(*) AS n FROM sandboxes GROUP BY state")
        counted = {State(row["state"]): row["n"] for row in rows}
        return {state: counted.get(state, 0) for state in State}

    # Spawns

    def record_spawn(self, key: IdempotencyKey, ids: Sequence[str], now_unix: float) -> None:
        self.write(
            "INSERT OR REPLACE INTO spawns VALUES (?,?,?,?,?)",
            (key.owner, key.key, key.digest, json.dumps(list(ids)), now_unix),
        )

    def find_spawn(self, key: IdempotencyKey) -> tuple[str, ...] | None:
        """The ids made under that key; raises Conflict when it was for another request."""
        row = self.read("SELECT digest, ids FROM spawns WHERE owner = ? AND key = ?", (key.owner, key.key)).fetchone()
        if row is None:
            return None
        check_same_request(row["digest"], key)
        return tuple(json.loads(row["ids"]))

    def list_spawned(self, owner: str, key: str) -> tuple[str, ...]:
        """The ids made under that key, for whatever request it was."""
        row = self._db.execute("SELECT ids FROM spawns WHERE owner = ? AND key = ?", (owner, key)).fetchone()
        return () if row is None else tuple(json.loads(row["ids"]))

    def forget_spawn(self, key: IdempotencyKey) -> None:
        self.write("DELETE FROM spawns WHERE owner = ? AND key = ?", (key.owner, key.key))

    def forget_spawns_before(self, unix: float) -> None:
        self.write("DELETE FROM spawns WHERE created_at_unix < ?", (unix,))

    def forget_unfinished_spawns(self) -> None:
        """The keys of sandboxes that are starting: nobody was told of them, and the request may be sent again.

        Others are kept though their sandboxes may be gone: the same request must not make more.
        """
        self.write(
            "DELETE FROM spawns WHERE EXISTS (SELECT 1 FROM json_each(spawns.ids) AS made"
            " JOIN sandboxes ON sandboxes.id = made.value WHERE sandboxes.state = 'starting')"
        )

    # Workspaces

    def insert_workspace(self, row: WorkspaceRow) -> None:
        try:
            with self.transaction(durable=True):
                self.insert("workspaces", row)
        except sqlite3.IntegrityError:
            raise Conflict(f"Workspace {row.name} exists already", hint="Choose another name or remove it") from None

    def find_workspace(self, name: str) -> WorkspaceRow | None:
        row = self.read("SELECT * FROM workspaces WHERE name = ?", (name,)).fetchone()
        return None if row is None else parse_row(WorkspaceRow, row)

    def list_workspaces(self) -> list[WorkspaceRow]:
        return [parse_row(WorkspaceRow, row) for row in self.read("SELECT * FROM workspaces ORDER BY name")]

    def touch_workspace(self, name: str, now_unix: float) -> None:
        self.write("UPDATE workspaces SET last_active_unix = ? WHERE name = ?", (now_unix, name))

    def set_workspace_state(self, name: str, tag: str | None) -> None:
        with self.transaction(durable=True):
            self.write("UPDATE workspaces SET current_state_tag = ? WHERE name = ?", (tag, name))

    def remove_workspace(self, name: str) -> None:
        self.write("DELETE FROM workspaces WHERE name = ?", (name,))

    def list_in_workspace(self, name: str) -> list[SandboxRecord]:
        """The newest first: one that was replaced may still be on its way out."""
        rows = self.read("SELECT * FROM sandboxes WHERE workspace = ? ORDER BY number DESC", (name,))
        return [parse_row(SandboxRecord, row) for row in rows]

    # Snapshots in the making

    def record_job(self, job: SnapshotJob) -> None:
        self.insert("snapshot_jobs", job, replace=True)

    def list_jobs(self) -> list[SnapshotJob]:
        return [parse_row(SnapshotJob, row) for row in self.read("SELECT * FROM snapshot_jobs ORDER BY tag")]

    def find_job(self, tag: str) -> SnapshotJob | None:
        row = self.read("SELECT * FROM snapshot_jobs WHERE tag = ?", (tag,)).fetchone()
        return None if row is None else parse_row(SnapshotJob, row)

    def remove_job(self, tag: str) -> None:
        self.write("DELETE FROM snapshot_jobs WHERE tag = ?", (tag,))

    # Events

    def insert_event(self, event: EventRecord) -> int:
        """Returns its id, which is given here."""
        return self.insert("events", event, without="id")

    def list_events(self, since: int, kind: str | None, sandbox_id: str | None, limit: int) -> list[EventRecord]:
        where: list[str] = ["id > ?"]
        values: list[str | int] = [since]
        if kind is not None:
            where.append("type = ?")
            values.append(kind)
        if sandbox_id is not None:
            where.append("sandbox_id = coalesce((SELECT id FROM sandboxes WHERE name = ?), ?)")
            values += [sandbox_id, sandbox_id]
        statement = f"SELECT * FROM events WHERE {' AND '.join(where)} ORDER BY id LIMIT ?"
        return [parse_row(EventRecord, row) for row in self.read(statement, (*values, limit))]

    def last_event_id(self) -> int:
        found = self.read("SELECT max(id) FROM events").fetchone()[0]
        return int(found or 0)

    def forget_events_through(self, event_id: int) -> None:
        self.write("DELETE FROM events WHERE id <= ?", (event_id,))


def check_same_request(digest: str, key: IdempotencyKey) -> None:
    if digest != key.digest:
        raise Conflict(
            "This idempotency key was used for another request", hint="Use a new key for each different request"
        )


def absent(sandbox_id: str) -> NotFound:
    return NotFound(f"There is no sandbox {ascii(sandbox_id[:70])[1:-1]}", hint="List them with: forkd ls")
