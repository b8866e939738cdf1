"""Names people choose: of images, snapshots, workspaces, tokens. One rule for all."""

from __future__ import annotations

import re
from typing import NewType

from forkd.errors import InvalidInput

ImageName = NewType("ImageName", str)
SnapshotTag = NewType("SnapshotTag", str)

# What the forkd API allows in a tag; also a safe file name on every file system.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_HINT = "Use 1 to 64 letters, digits, '-' or '_'"


def parse_image_name(text: str) -> ImageName:
    return ImageName(parse_name(text, "image name"))


def parse_tag(text: str) -> SnapshotTag:
    return SnapshotTag(parse_name(text, "snapshot tag"))


def parse_name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None or text.startswith("-"):
        shown = ascii(text if len(text) <= 70 else text[:67] + "...")
        raise InvalidInput(f"{shown} is not a legal {what}", hint=_HINT + ", not starting with '-'")
    return text
