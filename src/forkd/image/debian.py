"""A root file system from Debian packages, by mmdebstrap.

The file system is packed by a hook, inside mmdebstrap's namespaces, where files have the owners they get in the
image; the directory it was packed from is gone when mmdebstrap ends.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed, InvalidInput
from forkd.host.tools import check_namespaces, find_tool, remove_tree, run_namespaced, tool_environment
from forkd.image.pack import EPOCH_S, PACK_HERE, Render, pack_variables
from forkd.image.root import MOUNTED_OVER, get_python, parse_listing
from forkd.image.spec import DebianSource, Progress
from forkd.image.target import debian_target

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
_MISSING = re.compile(r"E: (?:Unable to locate package (\S+)|Package '([^']+)' has no installation candidate)")

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
[ ! -e etc/shadow ] || sed -i 's/^\\([^:]*:[^:]*:\\)[0-9]\\{{1,\\}}:/\\1{EPOCH_S // 86400}:/' etc/shadow
rm -f etc/shadow- etc/passwd- etc/group- etc/gshadow-
mkdir -p {" ".join(MOUNTED_OVER)}
chmod 1777 tmp

dpkg-query --admindir="$view/var/lib/dpkg" -W -f '${{Package}}\\t${{Version}}\\n' > "$FORKD_WORK/packages"
{PACK_HERE}umount "$view"
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


def build_debian_root(
    source: DebianSource, render: Render, out: Path, work: Path, progress: Progress
) -> dict[str, Any]:
    """Pack a root into `out`; returns what is in it. `work` is a directory that the caller removes."""
    merged_usr = _find_merged_usr(find_tool("mmdebstrap"))
    pack = render(out, work / "view", False, False)
    progress.stage(f"Installing Debian {source.suite} with {' '.join(source.packages) or 'nothing more'}")
    hook = work / "pack.sh"
    hook.write_text(_PACK)
    heard = _Missing(progress)
    try:
        run_mmdebstrap(
            render_mmdebstrap(source, hook, merged_usr),
            work=work,
            doing="Installing the image's packages",
            deadline_s=_BUILD_DEADLINE_S,
            progress=heard,
            **pack_variables(pack),
        )
    except BuildFailed as error:
        if not heard.packages:
            raise
        # The tool's two dozen lines say no more than this.
        raise BuildFailed(
            f"Debian {source.suite} has no package {' and no package '.join(heard.packages)}",
            hint="Look for its name with apt-cache search, or choose a release with --suite; Python packages: --pip",
        ) from error
    return _facts(work)


class _Missing:
    """A progress that also notes which packages the archive does not have."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.packages: list[str] = []

    def stage(self, text: str) -> None:
        self._progress.stage(text)

    def line(self, text: str) -> None:
        self._progress.line(text)
        if (match := _MISSING.search(text)) is not None:
            package = match[1] or match[2]
            self.packages += [package] if package not in self.packages else []


def _find_merged_usr(mmdebstrap: Path) -> Path | None:
    """mmdebstrap's own hooks for a merged /usr: without them a package does it that needs all of Perl, 50 MB."""
    hooks = mmdebstrap.resolve().parent.parent / "share/mmdebstrap/hooks/maybe-merged-usr"
    return hooks if hooks.is_dir() else None


def _facts(work: Path) -> dict[str, Any]:
    try:
        python = get_python(parse_listing((work / "listing").read_bytes()))
        lines = (work / "packages").read_text().splitlines()
    except OSError as error:
        raise BuildFailed("mmdebstrap ended without packing the image") from error
    except InvalidInput as error:
        raise InvalidInput(error.message, hint="Add python3 to the packages") from error
    packages = dict(line.split("\t", 1) for line in lines)
    target = debian_target(python.minor, packages.get("libc6", ""))
    return {"python": python.path, "packages": packages, "target": target.as_json()}
