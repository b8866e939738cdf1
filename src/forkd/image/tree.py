"""What a root file system consists of, as names and kinds: enough to find an interpreter without running it."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

_MAX_LINKS = 40


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
    """Where `path` leads inside the root, links followed as the guest would; None when nowhere."""
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
