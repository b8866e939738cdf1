"""All engines of forkd, the best first. To add one: a module with an ENTRY, by the rules of base.py, and a row."""

from __future__ import annotations

from importlib import import_module

from forkd.engines.base import Entry

_MODULES = {
    "firecracker": "forkd.engines.firecracker",
    "qemu": "forkd.engines.qemu",
    "fake": "forkd.engines.fake",
}
ENGINES = tuple(_MODULES)


def get_entry(name: str) -> Entry:
    """Imported when asked for: to list the engines costs nothing."""
    entry = import_module(_MODULES[name]).ENTRY
    assert isinstance(entry, Entry)
    return entry
