"""Operations on files that fit into one answer: a request in, an answer out, or OSError or Refused."""

from __future__ import annotations

import os
import stat

from forkd.agent.stream import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List

MAX_PATH_BYTES = 4095
MAX_ENTRIES = 5000
_MAX_LISTING_BYTES = 1024 * 1024  # as JSON, where a byte of a name takes up to 6
_ENTRY_BYTES = 160

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def get_path(request: Dict[str, Any], key: str = "path") -> str:
    """An absolute path that fits; bytes that are no UTF-8 come as surrogate escapes."""
    path = request.get(key)
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise Refused("invalid", "A path must be absolute and without NUL")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise Refused("invalid", "A path has characters that are no file name") from None
    if size > MAX_PATH_BYTES:
        raise Refused("invalid", "A path is longer than %d bytes" % MAX_PATH_BYTES)
    return path


def find(request: Dict[str, Any]) -> Dict[str, Any]:
    """stat, of the link itself when there is one."""
    path = get_path(request)
    answer = render_stat(os.lstat(path))
    if answer["type"] == "symlink":
        answer["target"] = os.readlink(path)
    return answer


def list_directory(request: Dict[str, Any]) -> Dict[str, Any]:
    """The first entries in directory order; `truncated` when there are more."""
    limit = request.get("limit", MAX_ENTRIES)
    if not isinstance(limit, int) or not 0 < limit <= MAX_ENTRIES:
        raise Refused("invalid", "A listing has 1 to %d entries" % MAX_ENTRIES)
    entries: List[Dict[str, Any]] = []
    truncated = False
    size = 0
    with os.scandir(get_path(request)) as found:
        for entry in found:
            target = _find_target(entry)
            size += _ENTRY_BYTES + 6 * (len(entry.name) + len(target))
            if len(entries) == limit or size > _MAX_LISTING_BYTES:
                truncated = True
                break
            try:
                entries.append(dict(render_stat(entry.stat(follow_symlinks=False)), name=entry.name))
            except FileNotFoundError:
                continue  # gone since the directory was read
            if target:
                entries[-1]["target"] = target
    return {"entries": entries, "truncated": truncated}


def _find_target(entry: os.DirEntry[str]) -> str:
    """Empty for what is no link."""
    try:
        return os.readlink(entry.path) if entry.is_symlink() else ""
    except OSError:  # replaced since the directory was read
        return ""


def remove(request: Dict[str, Any]) -> Dict[str, Any]:
    path = get_path(request)
    if path.strip("/") == "":
        raise Refused("invalid", "The root directory cannot be removed")
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
    elif request.get("recursive") is True:
        _remove_tree(path)
    else:
        os.rmdir(path)
    return {}


def rename(request: Dict[str, Any]) -> Dict[str, Any]:
    os.rename(get_path(request), get_path(request, "to"))
    return {}


def make_directory(request: Dict[str, Any]) -> Dict[str, Any]:
    path = get_path(request)
    mode = get_mode(request, 0o755)
    if request.get("parents") is True:
        os.makedirs(path, mode, exist_ok=True)
    else:
        os.mkdir(path, mode)
    return {}


OPERATIONS: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "stat": find,
    "list": list_directory,
    "remove": remove,
    "rename": rename,
    "mkdir": make_directory,
}


def get_mode(request: Dict[str, Any], default: int) -> int:
    mode = request.get("mode", default)
    if not isinstance(mode, int) or not 0 <= mode <= 0o7777:
        raise Refused("invalid", "A file mode is a number from 0 to 0o7777")
    return mode


def render_stat(found: os.stat_result) -> Dict[str, Any]:
    return {
        "type": _TYPES.get(stat.S_IFMT(found.st_mode), "unknown"),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime_ns": found.st_mtime_ns,
    }


def _remove_tree(path: str) -> None:
    """Bottom up, never following a link. By descriptor, so that a directory swapped for a link leads nowhere."""
    for _directory, names, files, fd in os.fwalk(path, topdown=False, onerror=_raise):
        for name in files:
            os.unlink(name, dir_fd=fd)
        for name in names:
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
            else:
                os.rmdir(name, dir_fd=fd)
    os.rmdir(path)


def _raise(error: OSError) -> None:
    raise error
