"""What should exist: the rows about sandboxes, spawns, workspaces, snapshots in the making, and events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forkd.errors import Conflict, NotFound
from forkd.model.limits import Limits
from forkd.model.names import SnapshotTag
from forkd.model.sandbox import TRANSITIONS, OnTimeout, SandboxRecord, State, Way
from forkd.runtime.database import Database

_LIMITS = "memory_limit_mib, cpu_limit, pids_limit, io_limit_mib_s"
_WORKSPACE = "name, id, source_snapshot_tag, created_at_unix, last_active_unix"
_CHANGEABLE = frozenset({"pid", "deadline_unix", "on_timeout", "cause", "agent_port", "ended_at_unix", "way"})


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


@dataclass(frozen=True)
class SnapshotJob:
    """A snapshot that is being made (`writing`) or could not be (`failed`, with why)."""

    tag: SnapshotTag
    status: str
    begun_at_unix: float
    warning: str | None = None
    code: str | None = None


class Registry(Database):
    # Sandboxes

    def insert_sandboxes(self, records: Iterable[SandboxRecord]) -> None:
        """Their `number` is given here."""
        with self.transaction():
            self._db.executemany(
                "INSERT INTO sandboxes (id, snapshot_tag, state, created_at_unix, engine, isolation, agent_port,"
                f" on_timeout, labels, metadata, workspace, {_LIMITS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                [_render_row(record) for record in records],
            )

    def get_sandbox(self, sandbox_id: str) -> SandboxRecord:
        row = self._db.execute("SELECT * FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone()
        if row is None:
            raise absent(sandbox_id)
        return _parse_row(row)

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
        rows = self._db.execute(f"SELECT * FROM sandboxes WHERE {' AND '.join(where)} ORDER BY number{limit}", values)
        return [_parse_row(row) for row in rows]

    def move(
        self, sandbox_ids: Sequence[str], to: State, changes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Guarded: each goes `to` from a state it may follow, with its changes, or none does and Conflict is raised."""
        allowed = [state.value for state, following in TRANSITIONS.items() if to in following]
        marks = ",".join("?" * len(allowed))
        with self.transaction():
            for sandbox_id in sandbox_ids:
                fields = dict((changes or {}).get(sandbox_id, {}))
                assert fields.keys() <= _CHANGEABLE
                sets = "".join(f", {name} = ?" for name in fields)
                done = self._db.execute(
                    f"UPDATE sandboxes SET state = ?{sets} WHERE id = ? AND state IN ({marks})",
                    (to.value, *fields.values(), sandbox_id, *allowed),
                )
                if done.rowcount != 1:
                    state = self.get_sandbox(sandbox_id).state
                    raise Conflict(f"Sandbox {sandbox_id} is {state.value}, and cannot become {to.value}")

    def change(self, sandbox_id: str, **fields: Any) -> None:
        """Without a change of state."""
        assert fields.keys() <= _CHANGEABLE
        sets = ", ".join(f"{name} = ?" for name in fields)
        self._db.execute(f"UPDATE sandboxes SET {sets} WHERE id = ?", (*fields.values(), sandbox_id))

    def remove_sandboxes(self, sandbox_ids: Iterable[str]) -> None:
        with self.transaction():
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", [(one,) for one in sandbox_ids])

    def list_due(self, now_unix: float) -> list[SandboxRecord]:
        rows = self._db.execute(
            "SELECT * FROM sandboxes WHERE deadline_unix <= ? AND state IN ('running', 'paused')", (now_unix,)
        )
        return [_parse_row(row) for row in rows]

    def list_ended_before(self, unix: float) -> list[str]:
        rows = self._db.execute("SELECT id FROM sandboxes WHERE state = 'dead' AND ended_at_unix < ?", (unix,))
        return [row["id"] for row in rows]

    def count_states(self) -> dict[State, int]:
        rows = self._db.execute("SELECT state, count(*) AS n FROM sandboxes GROUP BY state")
        counted = {State(row["state"]): row["n"] for row in rows}
        return {state: counted.get(state, 0) for state in State}

    # Spawns

    def record_spawn(self, key: IdempotencyKey, ids: Sequence[str], now_unix: float) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO spawns VALUES (?,?,?,?,?)",
            (key.owner, key.key, key.digest, json.dumps(list(ids)), now_unix),
        )

    def find_spawn(self, key: IdempotencyKey) -> tuple[str, ...] | None:
        """The ids made under that key; raises Conflict when it was for another request."""
        row = self._db.execute(
            "SELECT digest, ids FROM spawns WHERE owner = ? AND key = ?", (key.owner, key.key)
        ).fetchone()
        if row is None:
            return None
        check_same_request(row["digest"], key)
        return tuple(json.loads(row["ids"]))

    def forget_spawn(self, key: IdempotencyKey) -> None:
        self._db.execute("DELETE FROM spawns WHERE owner = ? AND key = ?", (key.owner, key.key))

    def forget_spawns_before(self, unix: float) -> None:
        self._db.execute("DELETE FROM spawns WHERE created_at_unix < ?", (unix,))

    def forget_lost_spawns(self) -> None:
        """Keys whose sandboxes are all gone, after the spawns under way were rolled back."""
        self._db.execute(
            "DELETE FROM spawns WHERE NOT EXISTS (SELECT 1 FROM json_each(spawns.ids) AS made"
            " JOIN sandboxes ON sandboxes.id = made.value)"
        )

    # Workspaces

    def insert_workspace(self, row: WorkspaceRow) -> None:
        try:
            self._db.execute(
                f"INSERT INTO workspaces ({_WORKSPACE}, {_LIMITS}) VALUES (?,?,?,?,?,?,?,?,?)",
                (
                    row.name,
                    row.id,
                    row.source_snapshot_tag,
                    row.created_at_unix,
                    row.last_active_unix,
                    *_render_limits(row.limits),
                ),
            )
        except sqlite3.IntegrityError:
            raise Conflict(f"Workspace {row.name} exists already", hint="Choose another name or remove it") from None

    def find_workspace(self, name: str) -> WorkspaceRow | None:
        row = self._db.execute("SELECT * FROM workspaces WHERE name = ?", (name,)).fetchone()
        return None if row is None else _parse_workspace(row)

    def list_workspaces(self) -> list[WorkspaceRow]:
        return [_parse_workspace(row) for row in self._db.execute("SELECT * FROM workspaces ORDER BY name")]

    def touch_workspace(self, name: str, now_unix: float) -> None:
        self._db.execute("UPDATE workspaces SET last_active_unix = ? WHERE name = ?", (now_unix, name))

    def remove_workspace(self, name: str) -> None:
        self._db.execute("DELETE FROM workspaces WHERE name = ?", (name,))

    def find_in_workspace(self, name: str) -> SandboxRecord | None:
        """The newest: one that was replaced may still be on its way out."""
        row = self._db.execute(
            "SELECT * FROM sandboxes WHERE workspace = ? ORDER BY number DESC LIMIT 1", (name,)
        ).fetchone()
        return None if row is None else _parse_row(row)

    # Snapshots in the making

    def record_job(self, job: SnapshotJob) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO snapshot_jobs VALUES (?,?,?,?,?)",
            (job.tag, job.status, job.begun_at_unix, job.warning, job.code),
        )

    def list_jobs(self) -> list[SnapshotJob]:
        return [SnapshotJob(**dict(row)) for row in self._db.execute("SELECT * FROM snapshot_jobs ORDER BY tag")]

    def find_job(self, tag: str) -> SnapshotJob | None:
        row = self._db.execute("SELECT * FROM snapshot_jobs WHERE tag = ?", (tag,)).fetchone()
        return None if row is None else SnapshotJob(**dict(row))

    def remove_job(self, tag: str) -> None:
        self._db.execute("DELETE FROM snapshot_jobs WHERE tag = ?", (tag,))

    # Events

    def insert_event(
        self, ts_unix: float, kind: str, sandbox_id: str | None, snapshot_tag: str | None, data: Mapping[str, Any]
    ) -> int:
        done = self._db.execute(
            "INSERT INTO events (ts_unix, type, sandbox_id, snapshot_tag, data) VALUES (?,?,?,?,?)",
            (ts_unix, kind, sandbox_id, snapshot_tag, json.dumps(dict(data))),
        )
        assert done.lastrowid is not None
        return done.lastrowid

    def list_events(self, since: int, kind: str | None, sandbox_id: str | None, limit: int) -> list[sqlite3.Row]:
        where: list[str] = ["id > ?"]
        values: list[str | int] = [since]
        for column, value in (("type", kind), ("sandbox_id", sandbox_id)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        statement = f"SELECT * FROM events WHERE {' AND '.join(where)} ORDER BY id LIMIT ?"
        return self._db.execute(statement, (*values, limit)).fetchall()

    def last_event_id(self) -> int:
        found = self._db.execute("SELECT max(id) FROM events").fetchone()[0]
        return int(found or 0)

    def forget_events_through(self, event_id: int) -> None:
        self._db.execute("DELETE FROM events WHERE id <= ?", (event_id,))


def check_same_request(digest: str, key: IdempotencyKey) -> None:
    if digest != key.digest:
        raise Conflict(
            "This idempotency key was used for another request", hint="Use a new key for each different request"
        )


def absent(sandbox_id: str) -> NotFound:
    return NotFound(f"There is no sandbox {ascii(sandbox_id[:70])[1:-1]}", hint="List them with: forkd ls")


def _render_row(record: SandboxRecord) -> tuple[Any, ...]:
    return (
        record.id,
        record.snapshot_tag,
        record.state.value,
        record.created_at_unix,
        record.engine,
        record.isolation,
        record.agent_port,
        record.on_timeout.value,
        json.dumps(dict(record.labels)),
        json.dumps(dict(record.metadata)),
        record.workspace,
        *_render_limits(record.limits),
    )


def _parse_row(row: sqlite3.Row) -> SandboxRecord:
    return SandboxRecord(
        number=row["number"],
        id=row["id"],
        snapshot_tag=SnapshotTag(row["snapshot_tag"]),
        state=State(row["state"]),
        created_at_unix=row["created_at_unix"],
        engine=row["engine"],
        isolation=row["isolation"],
        agent_port=row["agent_port"],
        pid=row["pid"],
        limits=_parse_limits(row),
        deadline_unix=row["deadline_unix"],
        on_timeout=OnTimeout(row["on_timeout"]),
        labels=json.loads(row["labels"]),
        metadata=json.loads(row["metadata"]),
        workspace=row["workspace"],
        cause=row["cause"],
        way=None if row["way"] is None else Way(row["way"]),
    )


def _parse_workspace(row: sqlite3.Row) -> WorkspaceRow:
    return WorkspaceRow(
        name=row["name"],
        id=row["id"],
        source_snapshot_tag=SnapshotTag(row["source_snapshot_tag"]),
        limits=_parse_limits(row),
        created_at_unix=row["created_at_unix"],
        last_active_unix=row["last_active_unix"],
    )


def _render_limits(limits: Limits) -> tuple[Any, ...]:
    return (limits.memory_mib, limits.cpus, limits.pids, limits.io_mib_s)


def _parse_limits(row: sqlite3.Row) -> Limits:
    return Limits(row["memory_limit_mib"], row["cpu_limit"], row["pids_limit"], row["io_limit_mib_s"])
