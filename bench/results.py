"""The file of results: a part that is measured again replaces that part, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.containers import PART as CONTAINERS
from bench.fork_report import PARTS as FORK_PARTS
from bench.lab_report import PART as LAB
from bench.service_report import PARTS
from forkd.errors import InvalidInput
from forkd.host.files import write_atomic

# Parts that are a section each.
SECTIONS = (*FORK_PARTS, *PARTS, LAB, CONTAINERS)

_HINT = "Remove it, or write to another with --out"


def read_results(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidInput(f"{path} holds no results: {error}", hint=_HINT) from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} holds no results", hint=_HINT)
    return found


def merge_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` has sections by name, and the keys of the engine's report when that was measured. Pure."""
    if "figures" in new:
        return {**{part: old[part] for part in SECTIONS if part in old}, **new}
    return {**old, **new}


def write_results(path: Path, new: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds now."""
    merged = merge_results(read_results(path), new)
    # Sections last, whatever came first: the file is read by people too.
    ordered = {key: merged[key] for key in sorted(merged, key=lambda key: key in SECTIONS)}
    write_atomic(path, json.dumps(ordered, indent=1).encode() + b"\n")
    return ordered
