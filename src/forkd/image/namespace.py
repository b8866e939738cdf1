"""Tools that need root or a root of their own: run in fresh mount and pid namespaces.

Mounts made there never show on the host, and the pid namespace takes every process with it when it ends, also
those that left the process group. For a user other than root, a user namespace makes them root of their
subordinate ids, so that files get the owners they are to have in the image.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forkd.errors import BuildFailed, ForkdError, HostLacks
from forkd.host.tools import find_tool, run_tool, tool_environment
from forkd.host.userns import render_namespaced
from forkd.image.progress import Progress

_PROBE_DEADLINE_S = 20.0
_CLEAN_DEADLINE_S = 120.0


def run_namespaced(
    argv: Sequence[str | Path],
    *,
    doing: str,
    deadline_s: float,
    failure: type[ForkdError] = BuildFailed,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
    disk: Path | None = None,
) -> None:
    unshare = str(find_tool("unshare"))
    command = render_namespaced([str(word) for word in argv], unshare=unshare, as_root=os.geteuid() == 0)
    run_tool(command, doing=doing, failure=failure, deadline_s=deadline_s, on_line=on_line, env=env, disk=disk)


def run_mmdebstrap(
    argv: Sequence[str | Path], *, work: Path, doing: str, deadline_s: float, progress: Progress, **variables: str
) -> None:
    """Run it with its temporary files in `work`; its hooks see FORKD_WORK and `variables` in their environment."""
    temporary = work / "tmp"
    temporary.mkdir()
    env = tool_environment(TMPDIR=str(temporary), FORKD_WORK=str(work), **variables)
    try:
        run_namespaced(argv, doing=doing, deadline_s=deadline_s, on_line=progress.line, env=env, disk=work)
    finally:
        # Without root, a killed mmdebstrap leaves files of our subordinate ids: only a namespace can remove them.
        remove_tree(temporary)


def check_namespaces() -> None:
    """Raise HostLacks where this user cannot have the namespaces."""
    if os.geteuid() != 0:
        find_tool("newuidmap")
    try:
        run_namespaced(["true"], doing="Making namespaces", deadline_s=_PROBE_DEADLINE_S, failure=HostLacks)
    except HostLacks as error:
        hint = "Allow user namespaces and give this user a range in /etc/subuid and /etc/subgid, or run as root"
        if os.geteuid() == 0:
            hint = "Root needs CAP_SYS_ADMIN here; start the container with it"
        raise HostLacks(
            "Images are built in namespaces, and this user may not make them",
            hint=hint,
            details=error.details,
        ) from error


def remove_tree(path: Path) -> None:
    """Remove a directory whose files may belong to our subordinate ids."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        run_namespaced(["rm", "-rf", "--", path], doing=f"Removing {path}", deadline_s=_CLEAN_DEADLINE_S)
