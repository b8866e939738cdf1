"""The guest's kernel: Debian's stock cloud kernel with all its modules, taken out of its package."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed
from forkd.host.tools import find_tool
from forkd.image.modules import ModuleIndex, index_modules
from forkd.image.namespace import check_namespaces, run_mmdebstrap
from forkd.image.progress import Progress

KERNEL_PACKAGE = "linux-image-cloud-amd64"
KERNEL_FILE = "vmlinuz"
MODULES_FILE = "modules.tar"
INDEX_FILE = "modules.json"
_DEADLINE_S = 1800.0

# The named package only depends on the real one, which carries the version in its name.
_FETCH = """\
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
depends=$(apt-cache depends --important "$FORKD_PACKAGE")
real=$(echo "$depends" | sed -n 's/^ *Depends: \\(linux-image-[0-9].*\\)$/\\1/p' | head -n 1)
[ -n "$real" ] || { echo "E: $FORKD_PACKAGE depends on no kernel package"; exit 1; }
mkdir "$1/kernel"
cd "$1/kernel"
apt-get download "$real"
dpkg-deb -x ./*.deb .
rm ./*.deb
[ -d lib/modules ] || mv usr/lib lib
set -- lib/modules/*
version=${1##*/}
cp "boot/vmlinuz-$version" "$FORKD_OUT/vmlinuz"
tar --create --file="$FORKD_OUT/modules.tar" --directory="lib/modules/$version" \\
  --sort=name --owner=0 --group=0 --numeric-owner --format=gnu \\
  --exclude=./build --exclude=./source --transform='s,^\\./,,' .
echo "$version" > "$FORKD_WORK/version"
"""


def render_fetch(mmdebstrap: Path, hook: Path, suite: str, mirror: str | None) -> list[str]:
    return [
        str(mmdebstrap),
        "--mode=unshare",
        # Nothing is installed: mmdebstrap gives us a trusted package index of the suite.
        "--variant=custom",
        "--format=null",
        '--aptopt=Acquire::Languages "none"',
        f'--customize-hook=sh {shlex.quote(str(hook))} "$1"',
        suite,
        "-",
        *([mirror] if mirror is not None else []),
    ]


def build_kernel(suite: str, mirror: str | None, out: Path, work: Path, progress: Progress) -> dict[str, Any]:
    """Make vmlinuz and the modules' archive and index in `out`; returns the kernel's version."""
    mmdebstrap = find_tool("mmdebstrap")
    check_namespaces()
    progress.stage(f"Fetching the kernel {KERNEL_PACKAGE} of Debian {suite}")
    hook = work / "fetch.sh"
    hook.write_text(_FETCH)
    run_mmdebstrap(
        render_fetch(mmdebstrap, hook, suite, mirror),
        work=work,
        doing="Fetching the kernel",
        deadline_s=_DEADLINE_S,
        progress=progress,
        FORKD_OUT=str(out),
        FORKD_PACKAGE=KERNEL_PACKAGE,
    )
    version = _read_version(work)
    index_kernel(out)
    return {"kernel_version": version}


def read_index(directory: Path) -> ModuleIndex:
    return ModuleIndex.from_json(json.loads((directory / INDEX_FILE).read_text()))


def index_kernel(out: Path) -> None:
    index = index_modules(out / MODULES_FILE)
    (out / INDEX_FILE).write_text(json.dumps(index.as_json(), indent=1))


def _read_version(work: Path) -> str:
    try:
        return (work / "version").read_text().strip()
    except OSError as error:
        raise BuildFailed("mmdebstrap ended without the kernel") from error
