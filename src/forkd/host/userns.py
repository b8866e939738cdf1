"""Can this user have the namespaces images are built in? Tried for real, by a child that ends at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from forkd.host.finding import Finding, Status
from forkd.host.programs import find_program

_TRY_S = 5.0


def probe_image_building() -> Finding:
    as_root = os.geteuid() == 0
    unshare = find_program("unshare")
    if unshare is None:
        return Finding("namespaces", Status.FAIL, "unshare is not installed", "Install it: apt install util-linux")
    if not as_root and find_program("newuidmap") is None:
        return Finding("namespaces", Status.FAIL, "newuidmap is not installed", "Install it: apt install uidmap")
    return judge_attempt(_attempt(render_attempt(unshare, as_root=as_root)), as_root=as_root)


def render_namespaced(argv: Sequence[str], *, unshare: str, as_root: bool) -> list[str]:
    """`argv` in fresh mount and pid namespaces.

    A user other than root also needs a range of ids, so that files get the owners they have in the image.
    """
    user = [] if as_root else ["--user", "--map-root-user", "--map-auto"]
    return [unshare, *user, "--mount", "--pid", "--fork", "--kill-child=KILL", "--", *argv]


def render_attempt(unshare: str, *, as_root: bool) -> list[str]:
    return render_namespaced(["true"], unshare=unshare, as_root=as_root)


def judge_attempt(complaint: str | None, *, as_root: bool) -> Finding:
    """`complaint` is what went wrong, None when nothing did."""
    if complaint is None:
        found = "images are built as root" if as_root else "images are built in a user namespace"
        return Finding("namespaces", Status.OK, found)
    found = f"Namespaces for building images are refused: {complaint}"
    remedy = "Start the container with CAP_SYS_ADMIN"
    if not as_root:
        remedy = "Allow user namespaces, give this user a range in /etc/subuid and /etc/subgid, or run as root"
    return Finding("namespaces", Status.FAIL, found, remedy)


def _attempt(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TRY_S,
            check=False,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TRY_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("unshare: ") if lines else f"exit status {done.returncode}"
