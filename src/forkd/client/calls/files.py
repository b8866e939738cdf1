"""Files in a sandbox."""

from __future__ import annotations

from forkd.client.call import Again, Call, Content, as_bytes, as_json, as_nothing, query_of
from forkd.client.values import FileWritten
from forkd.wire.api import FileInfo, FileListing


def read_file(sandbox_id: str, path: str) -> Call[bytes]:
    return Call("GET", _at(sandbox_id), as_bytes, query=query_of(path=path), again=Again.SAFE)


def write_file(sandbox_id: str, path: str, content: Content, mode: int | str | None, append: bool) -> Call[FileWritten]:
    """A file appears when complete, so bytes may be sent again; an iterator is empty then, an append done twice."""
    digits = f"{mode:o}" if isinstance(mode, int) else mode
    query = query_of(path=path, mode=digits, append="true" if append else None)
    repeatable = isinstance(content, bytes) and not append
    again = Again.SAFE if repeatable else Again.UNSENT
    return Call("PUT", _at(sandbox_id), as_json, query=query, content=content, again=again)


def remove_file(sandbox_id: str, path: str, recursive: bool) -> Call[None]:
    query = query_of(path=path, recursive="true" if recursive else None)
    return Call("DELETE", _at(sandbox_id), as_nothing, query=query, again=Again.SAFE, gone_is_done=True)


def stat_file(sandbox_id: str, path: str) -> Call[FileInfo]:
    return Call("GET", _at(sandbox_id, "stat"), as_json, query=query_of(path=path), again=Again.SAFE)


def list_files(sandbox_id: str, path: str) -> Call[FileListing]:
    return Call("GET", _at(sandbox_id, "list"), as_json, query=query_of(path=path), again=Again.SAFE)


def make_dir(sandbox_id: str, path: str, parents: bool) -> Call[None]:
    again = Again.SAFE if parents else Again.UNSENT
    return Call("POST", _at(sandbox_id, "mkdir"), as_nothing, body={"path": path, "parents": parents}, again=again)


def rename_file(sandbox_id: str, path: str, to: str) -> Call[None]:
    return Call("POST", _at(sandbox_id, "rename"), as_nothing, body={"path": path, "to": to})


def _at(sandbox_id: str, *rest: str) -> tuple[str, ...]:
    return ("v1", "sandboxes", sandbox_id, "files", *rest)
