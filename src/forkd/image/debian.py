"""A root file system from Debian packages, by mmdebstrap.

The file system is packed by a hook, inside mmdebstrap's namespaces, where files have the owners they get in the
image; the directory it was packed from is gone when mmdebstrap ends.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed, InvalidInput
from forkd.host.tools import check_namespaces, find_tool, remove_tree, run_namespaced, tool_environment
from forkd.image.root import MOUNTED_OVER, ROOT_FILE, get_interpreter, parse_listing, render_mkfs
from forkd.image.spec import DebianSource, Progress

_BUILD_DEADLINE_S = 3600.0

# They stay in the image, for packages a sandbox installs later.
_DPKG_OPTIONS = (
    # Neither a build that is thrown away when it fails nor a root in memory needs every file synced.
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/bug/*",
)
# Not given to the installation as SOURCE_DATE_EPOCH: Python would then compile to .pyc files that are checked
# against a hash of their source at every import.
_EPOCH_S = 946684800

_PACK = f"""\
set -eu
umask 022
view=$FORKD_WORK/view
mkdir "$view"
# Not recursive: what the build has mounted on /proc, /sys and /dev stays out of sight.
mount --bind "$1" "$view"
cd "$view"

# mmdebstrap undoes these only after its hooks.
[ ! -e sbin/start-stop-daemon.REAL ] || mv sbin/start-stop-daemon.REAL sbin/start-stop-daemon
rm -f usr/sbin/policy-rc.d

# Nothing of this host, nothing that only the installation needed.
rm -rf etc/resolv.conf etc/hostname etc/machine-id var/lib/dbus/machine-id var/cache/ldconfig/aux-cache
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/lib/dpkg/*-old
find var/log -type f -delete
: > etc/machine-id
: > etc/resolv.conf
echo localhost > etc/hostname
[ -s etc/hosts ] || printf '127.0.0.1 localhost\\n::1 localhost\\n' > etc/hosts
[ ! -e etc/shadow ] || sed -i 's/^\\([^:]*:[^:]*:\\)[0-9]\\{{1,\\}}:/\\1{_EPOCH_S // 86400}:/' etc/shadow
rm -f etc/shadow- etc/passwd- etc/group- etc/gshadow-
mkdir -p {" ".join(MOUNTED_OVER)}
chmod 1777 tmp

dpkg-query --admindir="$view/var/lib/dpkg" -W -f '${{Package}}\\t${{Version}}\\n' > "$FORKD_WORK/packages"
find . -xdev -mindepth 1 -printf '%y %m %P\\0%l\\0' > "$FORKD_WORK/listing"

# What a package brought keeps its time; what this build made gets one that is always the same.
find . -xdev -newer "$FORKD_WORK/pack.sh" -exec touch --no-dereference --date=@$FORKD_EPOCH {{}} +
export SOURCE_DATE_EPOCH=$(find . -xdev -printf '%Ts\\n' | sort -n | tail -n 1)
cd /
eval "$FORKD_MKFS"
umount "$view"
rmdir "$view"
"""


def run_mmdebstrap(
    argv: Sequence[str], *, work: Path, doing: str, deadline_s: float, progress: Progress, **variables: str
) -> None:
    """Run it with its temporary files in `work`; its hooks see FORKD_WORK and `variables` in their environment."""
    # In this mode it keeps real ids when root runs it, and we are root of our namespaces in any case.
    command = [str(find_tool("mmdebstrap")), "--mode=unshare", *argv]
    check_namespaces()
    temporary = work / "tmp"
    temporary.mkdir()
    env = tool_environment(TMPDIR=str(temporary), FORKD_WORK=str(work), **variables)
    try:
        run_namespaced(command, doing=doing, deadline_s=deadline_s, on_line=progress.line, env=env, disk=work)
    finally:
        remove_tree(temporary)


def render_mmdebstrap(source: DebianSource, hook: Path, merged_usr: Path | None) -> list[str]:
    include, check = [], []
    if source.packages:
        include = [f"--include={','.join(source.packages)}"]
        # Find out whether these packages exist long before mmdebstrap would install them.
        asked = f"apt-get --simulate --yes install {' '.join(source.packages)} > /dev/null"
        check = [f'--extract-hook=APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" {asked}']
    return [
        "--variant=apt",
        "--format=null",
        *include,
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
        *([f"--hook-dir={merged_usr}"] if merged_usr is not None else []),
        *check,
        f'--customize-hook=sh {shlex.quote(str(hook))} "$1"',
        source.suite,
        "-",
        *([source.mirror] if source.mirror is not None else []),
    ]


def build_debian_root(source: DebianSource, out: Path, work: Path, progress: Progress) -> dict[str, Any]:
    """Make out/root.erofs; returns what is in it. `work` is a directory that the caller removes."""
    merged_usr, mkfs = _find_merged_usr(find_tool("mmdebstrap")), find_tool("mkfs.erofs")
    progress.stage(f"Installing Debian {source.suite} with {' '.join(source.packages) or 'nothing more'}")
    hook = work / "pack.sh"
    hook.write_text(_PACK)
    run_mmdebstrap(
        render_mmdebstrap(source, hook, merged_usr),
        work=work,
        doing="Installing the image's packages",
        deadline_s=_BUILD_DEADLINE_S,
        progress=progress,
        FORKD_EPOCH=str(_EPOCH_S),
        FORKD_MKFS=shlex.join(render_mkfs(mkfs, out / ROOT_FILE, work / "view")),
    )
    return _facts(work)


def _find_merged_usr(mmdebstrap: Path) -> Path | None:
    """mmdebstrap's own hooks for a merged /usr: without them a package does it that needs all of Perl, 50 MB."""
    hooks = mmdebstrap.resolve().parent.parent / "share/mmdebstrap/hooks/maybe-merged-usr"
    return hooks if hooks.is_dir() else None


def _facts(work: Path) -> dict[str, Any]:
    try:
        python = get_interpreter(parse_listing((work / "listing").read_bytes()))
        lines = (work / "packages").read_text().splitlines()
    except OSError as error:
        raise BuildFailed("mmdebstrap ended without packing the image") from error
    except InvalidInput as error:
        raise InvalidInput(error.message, hint="Add python3 to the packages") from error
    return {"python": python, "packages": dict(line.split("\t", 1) for line in lines)}
