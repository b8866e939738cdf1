"""A root file system: the Python in it that the agent will run on, found without running it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forkd.errors import InvalidInput

# The guest mounts its own over these; the directories themselves stay as mount points.
MOUNTED_OVER = ("dev", "proc", "run", "sys", "tmp")
_MAX_LINKS = 40

MINIMUM = (3, 8)
# In the order a guest's PATH has them.
_PREFIXES = ("usr/local", "usr")
_MAX_MINOR = 99
_BINARY = re.compile(r"python3\.(\d{1,2})")
# The agent needs it, and the smallest installations leave it out.
_TELLING_MODULE = "json/__init__.py"
_HINT = "Add the package python3, or have Python 3.8 or newer with its library below /usr or /usr/local"


@dataclass(frozen=True)
class Node:
    """`kind` as find prints it: f file, d directory, l link; `mode` the permission bits."""

    kind: str
    mode: int
    target: str = ""

    @property
    def executable(self) -> bool:
        return self.kind == "f" and bool(self.mode & 0o111)


# Paths relative to the root, without a leading slash.
Tree = Mapping[str, Node]


def resolve(tree: Tree, path: str) -> str | None:
    """Where `path` leads inside the root, with links followed as the guest would; None where it does not exist."""
    todo = [part for part in reversed(path.split("/")) if part]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == ".":
            continue
        if part == "..":
            # The root's parent is the root, so no link leads out.
            del done[-1:]
            continue
        node = tree.get("/".join((*done, part)))
        if node is None:
            return None
        if node.kind != "l":
            done.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        if posixpath.isabs(node.target):
            done = []
        todo += [part for part in reversed(node.target.split("/")) if part]
    return "/".join(done)


def parse_listing(listing: bytes) -> dict[str, Node]:
    """The output of `find -printf '%y %m %P\\0%l\\0'`."""
    fields = listing.decode(errors="surrogateescape").split("\0")
    tree = {}
    for head, target in zip(fields[0::2], fields[1::2], strict=False):
        kind, mode, path = head.split(" ", 2)
        tree[path] = Node(kind, int(mode, 8), target)
    return tree


@dataclass(frozen=True)
class _Candidate:
    path: str
    minor: int
    whole: bool


@dataclass(frozen=True)
class Python:
    """`path` as the guest sees it; the version is 3.`minor`."""

    path: str
    minor: int


def get_interpreter(tree: Tree) -> str:
    return get_python(tree).path


def get_python(tree: Tree) -> Python:
    """A Python the agent can use.

    Nothing of the image is executed: the version is in the name of the program or of its library's directory.
    """
    refused = []
    for candidate in _candidates(tree):
        if (3, candidate.minor) < MINIMUM:
            refused.append(f"{candidate.path} is 3.{candidate.minor}")
        elif not candidate.whole:
            refused.append(f"{candidate.path} lacks parts of its library, as python3-minimal does")
        else:
            return Python(candidate.path, candidate.minor)
    reasons = f": {'; '.join(refused)}" if refused else " in /usr/bin or /usr/local/bin"
    raise InvalidInput(f"The image has no Python the guest agent can use{reasons}", hint=_HINT)


def _candidates(tree: Tree) -> Iterator[_Candidate]:
    """`python3` first, which the image's maker chose; then the versioned ones, newest first."""
    for prefix in _PREFIXES:
        for name in ("python3", *(f"python3.{minor}" for minor in range(_MAX_MINOR, -1, -1))):
            candidate = _find_candidate(tree, f"{prefix}/bin/{name}")
            if candidate is not None:
                yield candidate


def _find_candidate(tree: Tree, path: str) -> _Candidate | None:
    found = resolve(tree, path)
    node = tree.get(found) if found else None
    if found is None or node is None or not node.executable:
        return None
    home, _, program = found.rpartition("/bin/")
    libraries = [minor for minor in range(_MAX_MINOR, -1, -1) if _has_module(tree, home, minor, "os.py")]
    match = _BINARY.fullmatch(program)
    minor = int(match[1]) if match is not None else next(iter(libraries), None)
    if minor is None or minor not in libraries:
        return None
    return _Candidate(f"/{path}", minor, _has_module(tree, home, minor, _TELLING_MODULE))


def _has_module(tree: Tree, home: str, minor: int, module: str) -> bool:
    return any(resolve(tree, f"{home}/{lib}/python3.{minor}/{module}") for lib in ("lib", "lib64"))
