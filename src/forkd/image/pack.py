"""How a root is packed: as EROFS for VMs, or as a tar archive that more can be put on later."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from forkd.host.tools import find_tool
from forkd.image.root import MOUNTED_OVER

ROOT_FILE = "root.erofs"
TREE_FILE = "tree.tar"
# Fixed, so that the same content gives the same bytes.
_UUID = "8f6d3c52-6f1e-4f0b-9d0a-666f726b6401"
# Not given to the installation as SOURCE_DATE_EPOCH: Python would then compile to .pyc files that are checked
# against a hash of their source at every import.
EPOCH_S = 946684800

# The end of a shell script that stands in the root: makes $FORKD_WORK/listing and what $FORKD_PACK makes.
PACK_HERE = """\
find . -xdev -mindepth 1 -printf '%y %m %P\\0%l\\0' > "$FORKD_WORK/listing"

# What a package brought keeps its time; what this build made gets one that is always the same.
find . -xdev -newer "$FORKD_WORK/pack.sh" -exec touch --no-dereference --date=@$FORKD_EPOCH {} +
export SOURCE_DATE_EPOCH=$(find . -xdev -printf '%Ts\\n' | sort -n | tail -n 1)
cd /
eval "$FORKD_PACK"
"""


def pack_variables(command: list[str]) -> dict[str, str]:
    """What PACK_HERE finds in its environment, besides FORKD_WORK."""
    return {"FORKD_EPOCH": str(EPOCH_S), "FORKD_PACK": shlex.join(command)}


# From the directory for the result and the root; `plain` leaves extended attributes out, `all_root` gives root all.
Render = Callable[[Path, Path, bool, bool], list[str]]


def render_mkfs(out: Path, root: Path, plain: bool = False, all_root: bool = False) -> list[str]:
    """No compression: a guest under emulation unpacks slower than the host reads.

    Times are kept: Python compiles a .py file again at every boot when its time is not the one in its .pyc.
    """
    excluded = f"^({'|'.join(MOUNTED_OVER)})/.+"
    return [
        str(find_tool("mkfs.erofs")),
        "--quiet",
        "--preserve-mtime",
        f"-U{_UUID}",
        f"--exclude-regex={excluded}",
        *(["-x-1"] if plain else []),
        *(["--all-root"] if all_root else []),
        str(out / ROOT_FILE),
        str(root),
    ]


def render_tar(out: Path, root: Path, plain: bool = False, all_root: bool = False) -> list[str]:
    """With everything that fsck.erofs loses when it extracts: set-user-id bits, hard links, attributes."""
    return [
        str(find_tool("tar")),
        *("--create", f"--file={out / TREE_FILE}", f"--directory={root}"),
        *("--sort=name", "--numeric-owner", "--format=posix", "--pax-option=delete=atime,delete=ctime"),
        *("--one-file-system", "--anchored", *(f"--exclude=./{name}/?*" for name in MOUNTED_OVER)),
        *([] if plain else ["--xattrs", "--xattrs-include=*"]),
        *(["--owner=0", "--group=0"] if all_root else []),
        ".",
    ]


def render_untar(tree: Path, root: Path) -> list[str]:
    return [
        str(find_tool("tar")),
        *("--extract", f"--file={tree}", f"--directory={root}"),
        *("--numeric-owner", "--same-owner", "--same-permissions", "--delay-directory-restore"),
        *("--xattrs", "--xattrs-include=*"),
    ]
