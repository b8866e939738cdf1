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
import sqlite3
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forkd.errors import HostLacks
from forkd.model.machine import Limits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_BUSY_MS = 5000


class Database:
    def __init__(self, path: Path, steps: Sequence[str]) -> None:
        """`steps` lead from an empty database to the schema of today, one for each version."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_MS / 1000)
            self._db.row_factory = sqlite3.Row
            self._open(path, steps)
        except sqlite3.Error as error:
            raise HostLacks(
                f"The registry {path} cannot be used: {error}",
                hint="Move it away to start with an empty one; VMs that run will then be ended",
            ) from error

    def _open(self, path: Path, steps: Sequence[str]) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(steps):
            raise HostLacks(
                f"The registry {path} has version {version}, this forkd reads version {len(steps)}",
                hint="Use the forkd that wrote it, or move it away",
            )
        if version < len(steps):
            missing = "".join(steps[version:])
            self._db.executescript(f"BEGIN; {missing} PRAGMA user_version = {len(steps)}; COMMIT;")
        path.chmod(0o600)

    def close(self) -> None:
        self._db.close()

    def insert(
        self, table: str, record: DataclassInstance, *, replace: bool = False, without: str | None = None
    ) -> int:
        """Returns the row's number. `without`: a column that the database fills."""
        row = {column: value for column, value in flatten(record).items() if column != without}
        values = [json.dumps(value) if isinstance(value, dict) else value for value in row.values()]
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        marks = ",".join("?" * len(row))
        done = self._db.execute(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks})", values)
        return done.lastrowid or 0

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


# Where Limits go in a row, and in the API: a column for each of its fields.
_LIMITS = {"memory_mib": "memory_limit_mib", "cpus": "cpu_limit", "pids": "pids_limit", "io_mib_s": "io_limit_mib_s"}


def flatten(record: DataclassInstance) -> dict[str, Any]:
    """A record's fields as plain values by column: enums by value, limits one by one."""
    flat: dict[str, Any] = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Limits):
            flat |= {column: getattr(value, name) for name, column in _LIMITS.items()}
        else:
            flat[each.name] = dict(value) if isinstance(value, Mapping) else plain(value)
    return flat


def plain(value: Any) -> Any:
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
    if typing.get_origin(hint) in (Mapping, dict):
        return lambda row: json.loads(row[name])
    if isinstance(hint, enum.EnumType):
        return lambda row: None if row[name] is None else hint(row[name])
    return lambda row: row[name]
