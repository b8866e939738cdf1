"""Which layers lie over which snapshots, and what that means for removing them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forkd.errors import Conflict
from forkd.model.names import SnapshotTag
from forkd.store.manifest import Parent

Children = Mapping[SnapshotTag, tuple[SnapshotTag, ...]]

_MAX_NAMED = 8


def find_children(
    hashes: Mapping[SnapshotTag, str | None], parents: Mapping[SnapshotTag, Parent]
) -> dict[SnapshotTag, tuple[SnapshotTag, ...]]:
    """By tag, the layers directly over it, from the hashes of all manifests (None: unreadable) and what they name.

    A layer whose parent was replaced lies over nothing. A manifest that cannot be read may be that of the parent.
    """
    children: dict[SnapshotTag, tuple[SnapshotTag, ...]] = {}
    for tag, parent in parents.items():
        if parent.tag in hashes and hashes[parent.tag] in (None, parent.hash):
            children[parent.tag] = (*children.get(parent.tag, ()), tag)
    return children


def find_subtree(tag: SnapshotTag, children: Children) -> tuple[SnapshotTag, ...]:
    """It, and all layers over it, each after what it lies over."""
    found = {tag: None}
    todo = [tag]
    for one in todo:
        new = [child for child in children.get(one, ()) if child not in found]
        found.update(dict.fromkeys(new))
        todo += new
    return tuple(found)


def leaves_first(tags: Iterable[SnapshotTag], children: Children) -> list[SnapshotTag]:
    """The order to remove them in: a crash half-way leaves no layer without what it lies over."""
    left, ordered = set(tags), list[SnapshotTag]()
    while left:
        leaves = sorted(tag for tag in left if not left.intersection(children.get(tag, ())))
        ordered += leaves or sorted(left)  # of a cycle, which only damage can make, any
        left.difference_update(ordered)
    return ordered


def refuse_removal(layers: Mapping[SnapshotTag, Sequence[SnapshotTag]]) -> Conflict:
    """Of what others need, given with the layers over it."""
    said = [f"{_render_layers(over)} over {tag}" for tag, over in layers.items() if over]
    return Conflict(
        f"Cannot remove: {'; '.join(said)}",
        hint="Remove the layers too with --cascade, or make them unusable with --force",
    )


def refuse_replacement(tag: SnapshotTag, layers: Sequence[SnapshotTag]) -> Conflict:
    return Conflict(
        f"Snapshot {tag} cannot be replaced: {_render_layers(layers)} over it",
        hint=f"Choose another tag, or remove all of them first: forkd snapshot rm --cascade {tag}",
    )


def _render_layers(tags: Sequence[SnapshotTag]) -> str:
    if len(tags) == 1:
        return f"{tags[0]} is a layer"
    more = f" and {len(tags) - _MAX_NAMED} more" if len(tags) > _MAX_NAMED else ""
    return f"{', '.join(tags[:_MAX_NAMED])}{more} are layers"
