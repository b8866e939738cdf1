"""A SQLite database with one writer: the steps of its schema, transactions, and rows as dataclasses.

The event loop uses it directly: a transaction takes some 50 µs, because in WAL mode with synchronous=NORMAL only a
checkpoint waits for the disk. A killed daemon loses nothing by that; a power failure may take the last rows with it,
and takes every VM they were about too.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import logging
import os
import re
import sqlite3
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forkd.errors import HostLacks, NoCapacity
from forkd.model.machine import Limits
from forkd.model.network import Network, parse_network

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Values = Sequence[Any]

_log = logging.getLogger(__name__)

_BUSY_MS = 1000
_LOG_BYTES = 4 << 20
# What the disk is to blame for, or another program that holds the database.
_DISK_TROUBLE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
}


class Database:
    """What cannot be written to the disk is kept in memory until it can, unless it has to be durable.

    Then tables of the connection's own temporary database, which is in memory, stand in front of those on the disk:
    SQLite looks for a name there first. `land` brings their rows back.
    """

    def __init__(self, path: Path, steps: Sequence[str]) -> None:
        """`steps` lead from an empty database to the schema of today, one for each version."""
        self.adrift = False
        self._path = path
        self._written: list[tuple[str, Values]] | None = None  # by the transaction under way
        self._durable = False
        try:
            _make_private(path)
            try:
                self._open(path, steps)
            except sqlite3.OperationalError as error:
                if not _is_disk_trouble(error):
                    raise
                # Its index, in a file that processes share, needs room on the disk; without others it needs none.
                self._open(path, steps, alone=True)
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise self._unwritable(error) from error
            raise HostLacks(
                f"The registry {path} cannot be used: {error}",
                hint="Move it away to start with an empty one; VMs that run will then be ended",
            ) from error

    def _open(self, path: Path, steps: Sequence[str], *, alone: bool = False) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
        try:
            self._db.row_factory = sqlite3.Row
            self._prepare(path, steps, alone=alone)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, path: Path, steps: Sequence[str], *, alone: bool) -> None:
        if alone:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA temp_store = MEMORY")
        # By `checkpoint` alone: when SQLite's own fails after a commit, the commit looks as if it had failed.
        self._db.execute("PRAGMA wal_autocheckpoint = 0")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(steps):
            raise HostLacks(
                f"The registry {path} has version {version}, this forkd reads version {len(steps)}",
                hint="Use the forkd that wrote it, or move it away",
            )
        if version < len(steps):
            missing = "".join(steps[version:])
            self._db.executescript(f"BEGIN; {missing} PRAGMA user_version = {len(steps)}; COMMIT;")

    def close(self) -> None:
        if not self.land():
            _log.error("The registry %s lacks the last changes: it could not be written", self._path)
        self._db.close()

    def read(self, statement: str, values: Values = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise HostLacks(f"The registry {self._path} cannot be read: {error}", hint="Is its disk well?") from error

    def write(self, statement: str, values: Values = ()) -> sqlite3.Cursor:
        with self.transaction():
            assert self._written is not None
            self._written.append((statement, values))
            try:
                return self._db.execute(statement, values)
            except sqlite3.OperationalError as error:
                return self._written_again(error)

    def insert(
        self, table: str, record: DataclassInstance, *, replace: bool = False, without: str | None = None
    ) -> int:
        """Returns the row's number. `without`: a column that the database fills."""
        row = {column: value for column, value in flatten(record).items() if column != without}
        values = [json.dumps(value) if isinstance(value, dict) else value for value in row.values()]
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        marks = ",".join("?" * len(row))
        done = self.write(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks})", values)
        return done.lastrowid or 0

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """All of the block or nothing. Inside another one it is a part of that.

        `durable`: on the disk, or NoCapacity is raised. Others go on in memory while the disk takes nothing.
        """
        if self._written is not None:
            yield
            return
        if durable and not self.land():
            raise self._unwritable()
        self._written, self._durable = [], durable
        try:
            self._begin()
            yield
            try:
                self._db.execute("COMMIT")
            except sqlite3.OperationalError as error:
                self._written_again(error)
                self._db.execute("COMMIT")
        finally:
            self._written = None
            self._undo()

    def _begin(self) -> None:
        try:
            self._db.execute("BEGIN" if self.adrift else "BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            self._written_again(error)

    def _undo(self) -> None:
        # SQLite has done it itself after some errors.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _written_again(self, error: sqlite3.OperationalError) -> sqlite3.Cursor:
        """All that the transaction under way wrote, in memory, after the disk refused it."""
        if self.adrift or not _is_disk_trouble(error):
            raise error
        self._undo()
        if self._durable:
            raise self._unwritable(error) from error
        self._leave_disk()
        _log.error("The registry %s cannot be written, changes are kept in memory: %s", self._path, error)
        done = self._db.execute("BEGIN")
        for statement, values in self._written or ():
            done = self._db.execute(statement, values)
        return done

    def _leave_disk(self) -> None:
        self._db.execute("BEGIN")
        for kind in ("table", "index"):
            for schema in self._schemas(kind):
                self._db.execute(_in_memory(schema))
        for table in self._tables():
            self._db.execute(f"INSERT INTO temp.{table} SELECT * FROM main.{table}")
        # Numbers that were given are not given again, though their rows are gone.
        self._db.execute("DELETE FROM temp.sqlite_sequence")
        self._db.execute("INSERT INTO temp.sqlite_sequence SELECT * FROM main.sqlite_sequence")
        self._db.execute("COMMIT")
        self.adrift = True

    def land(self) -> bool:
        """Write what was kept in memory to the disk, if there is any. False: it is still impossible."""
        if not self.adrift:
            return True
        try:
            self._db.execute("PRAGMA busy_timeout = 0")
            self._db.execute("BEGIN IMMEDIATE")
            for table in self._tables():
                self._bring_back(table)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError:
            self._undo()
            return False
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        for table in self._tables():
            self._db.execute(f"DROP TABLE temp.{table}")
        self.adrift = False
        _log.warning("The registry %s can be written again, and has what was kept in memory", self._path)
        return True

    def _bring_back(self, table: str) -> None:
        """Only what differs: there may be little room."""
        columns = self._db.execute(f"PRAGMA main.table_info({table})")
        keys = ", ".join(column["name"] for column in columns if column["pk"])
        self._db.execute(f"DELETE FROM main.{table} WHERE ({keys}) NOT IN (SELECT {keys} FROM temp.{table})")
        changed = f"SELECT * FROM temp.{table} EXCEPT SELECT * FROM main.{table}"
        self._db.execute(f"INSERT OR REPLACE INTO main.{table} SELECT * FROM ({changed})")

    def checkpoint(self) -> None:
        """Now and then: what was committed goes from the log into the database, and the log begins anew."""
        try:
            if self._path.with_name(f"{self._path.name}-wal").stat().st_size > _LOG_BYTES:
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except (OSError, sqlite3.OperationalError):
            pass  # it can wait

    def _tables(self) -> list[str]:
        rows = self._db.execute("SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        return [row["name"] for row in rows.fetchall()]

    def _schemas(self, kind: str) -> list[str]:
        where = "type = ? AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        return [row["sql"] for row in self._db.execute(f"SELECT sql FROM main.sqlite_schema WHERE {where}", (kind,))]

    def _unwritable(self, error: Exception | None = None) -> NoCapacity:
        why = f": {error}" if error else ""
        return NoCapacity(
            f"The registry {self._path} cannot be written{why}",
            hint="Free some space on its disk. Sandboxes can be ended meanwhile",
        )


def _is_disk_trouble(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in _DISK_TROUBLE  # the rest is which kind of it


def _make_private(path: Path) -> None:
    """Before SQLite opens it: its log and its index get the permissions of the database."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def _in_memory(schema: str) -> str:
    """The statement that makes the same table or index in the temporary database."""
    return re.sub(r"\b(TABLE|INDEX) ", r"\1 temp.", schema, count=1)


# Where Limits go in a row, and in the API: a column for each of its fields.
_LIMITS = {"memory_mib": "memory_limit_mib", "cpus": "cpu_limit", "pids": "pids_limit", "io_mib_s": "io_limit_mib_s"}


def flatten(record: DataclassInstance) -> dict[str, Any]:
    """A record's fields as plain values by column: enums by value, limits one by one."""
    flat: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Limits):
            flat |= {column: getattr(value, name) for name, column in _LIMITS.items()}
        elif isinstance(value, Network):
            flat[each.name] = value.as_json()
        else:
            flat[each.name] = dict(value) if isinstance(value, Mapping) else plain(value)
    return flat


def plain(value: Any) -> Any:
    if isinstance(value, Network):
        return json.dumps(value.as_json())
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return value.value if isinstance(value, enum.Enum) else value


def parse_row(kind: type[T], row: sqlite3.Row) -> T:
    """The dataclass of a row; the types of its fields say how each is read."""
    return kind(**{name: read(row) for name, read in _readers(kind).items()})


@functools.cache
def _readers(kind: type[T]) -> dict[str, Callable[[sqlite3.Row], Any]]:
    return {name: _reader(name, hint) for name, hint in typing.get_type_hints(kind).items()}


def _reader(name: str, hint: Any) -> Callable[[sqlite3.Row], Any]:
    if hint is Limits:
        return lambda row: Limits(**{each: row[column] for each, column in _LIMITS.items()})
    if typing.get_origin(hint) is types.UnionType:  # with None
        hint = typing.get_args(hint)[0]
    if hint is Network:
        return lambda row: None if row[name] is None else parse_network(json.loads(row[name]))
    if typing.get_origin(hint) in (Mapping, dict):
        return lambda row: json.loads(row[name])
    if isinstance(hint, enum.EnumType):
        return lambda row: None if row[name] is None else hint(row[name])
    return lambda row: row[name]
