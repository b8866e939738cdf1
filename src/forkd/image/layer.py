"""More on top of a root: Python packages installed, commands run, files copied; then packed for VMs.

Commands of the image run in a root of their own, without network and with few rights (`host/enter_root.py`).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import BuildFailed
from forkd.host import enter_root
from forkd.host.tools import check_namespaces, remove_tree, run_namespaced, run_tool, tool_environment
from forkd.image import copy_in
from forkd.image.directory import changed_meanwhile, scan_copied
from forkd.image.pack import PACK_HERE, pack_variables, render_mkfs, render_untar
from forkd.image.root import MOUNTED_OVER, get_interpreter, parse_listing
from forkd.image.spec import Progress
from forkd.image.steps import Copy, Run, Step
from forkd.image.wheels import Wheel, find_pip

_STEP_DEADLINE_S = 1800.0
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    # Files get another time when the root is packed; what was compiled before would then be compiled at every import.
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PIP_ENVIRONMENT = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_COLOR": "1",
    "PIP_NO_INPUT": "1",
    # The image is its maker's, and pip's packages go where Debian's do not: below /usr/local.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
# A package may bring files that do not compile.
_COMPILE = "import compileall, sysconfig\nfor name in ('purelib', 'platlib'):\n    "
_COMPILE += "compileall.compile_dir(sysconfig.get_path(name), quiet=2, legacy=False)"
# -newer: what the base brought keeps its time.
_SETTLE = 'find . -xdev -newer "$FORKD_WORK/pack.sh" -exec touch --no-dereference --date=@$FORKD_EPOCH {} +'
_PACK = f"""\
set -eu
cd "$FORKD_WORK/root"
# A step may have put links there, which lead to the host from here.
for name in {" ".join(MOUNTED_OVER)}; do
  [ -d "$name" ] && [ ! -L "$name" ] || {{ rm -rf "$name"; mkdir "$name"; }}
done
chmod 1777 tmp
{PACK_HERE}"""


@dataclass(frozen=True)
class Layer:
    """`tree` is the archive of the root to begin with, `python` the path of its Python. `wheels` are in `wheels_dir`;
    `digests` are those of the sources of the steps that copy, in their order."""

    tree: Path
    python: str
    wheels_dir: Path
    wheels: Sequence[Wheel]
    steps: Sequence[Step]
    digests: Sequence[str]


def build_layer(layer: Layer, out: Path, work: Path, progress: Progress) -> dict[str, Any]:
    """Make out/root.erofs; returns what is in it. `work` is a directory that the caller removes."""
    pack = render_mkfs(out, work / "root")
    check_namespaces()
    # Older than all that is done to the root.
    (work / "pack.sh").write_text(_PACK)
    root = _Root(work, layer.python, pack, progress)
    try:
        root.extract(layer.tree)
        if layer.wheels:
            root.install(layer.wheels_dir, layer.wheels)
        digests = iter(layer.digests)
        for number, step in enumerate(layer.steps, start=1):
            progress.stage(f"Step {number} of {len(layer.steps)}: {step.render()}")
            if isinstance(step, Run):
                root.run(step)
            else:
                root.copy(step, next(digests))
        if layer.wheels:
            root.compile()
        root.pack()
    finally:
        remove_tree(work / "root")
    return {"python": get_interpreter(parse_listing((work / "listing").read_bytes()))}


class _Root:
    """A root while it is being made, in `work`."""

    def __init__(self, work: Path, python: str, pack: list[str], progress: Progress) -> None:
        self._work = work
        self._python = python
        self._progress = progress
        self._variables = {"FORKD_WORK": str(work), **pack_variables(pack)}

    def extract(self, tree: Path) -> None:
        root = self._work / "root"
        root.mkdir(mode=0o755)
        self._progress.stage("Unpacking the base")
        self._namespaced(render_untar(tree, root), "Unpacking the base")

    def install(self, wheels_dir: Path, wheels: Sequence[Wheel]) -> None:
        self._progress.stage(f"Installing {' '.join(f'{wheel.name}=={wheel.version}' for wheel in wheels)}")
        with self._run_directory() as run:
            # The image needs no pip of its own for this, and keeps none.
            self._stage(find_pip().package, run / "pip", "Copying pip")
            # Copies, so that what runs in the image cannot write to ours.
            self._stage(wheels_dir, run / "wheels", "Copying the wheels")
            (run / "locked.txt").write_text("".join(f"{wheel.locked}\n" for wheel in wheels))
            argv = [
                *(self._python, "-I", "/run/pip", "install", "--no-index", "--find-links=/run/wheels"),
                *("--require-hashes", "--requirement=/run/locked.txt", "--no-cache-dir", "--no-compile"),
                # A package that Debian installed stays; pip's is found first.
                *("--ignore-installed", "--no-warn-script-location", "--progress-bar=off"),
            ]
            self._enter(argv, run, "Installing the Python packages", _PIP_ENVIRONMENT)

    def run(self, step: Run) -> None:
        with self._run_directory() as run:
            self._enter(["/bin/sh", "-c", step.command], run, step.render())

    def copy(self, step: Copy, digest: str) -> None:
        with self._run_directory() as run:
            self._stage(step.source.resolve(), run / "source", step.render())
            if scan_copied(run / "source") != digest:
                raise changed_meanwhile(step.source)
            shutil.copyfile(copy_in.__file__, run / "copy_in.py")
            argv = [self._python, "-I", "/run/copy_in.py", "/run/source", step.destination, step.source.name]
            self._enter(argv, run, step.render())

    def compile(self) -> None:
        self._progress.stage("Compiling the Python packages")
        settle = f'cd "$FORKD_WORK/root" && {_SETTLE}'
        self._namespaced(["sh", "-c", settle], "Setting the times of files")
        with self._run_directory() as run:
            self._enter([self._python, "-I", "-c", _COMPILE], run, "Compiling the Python packages")

    def pack(self) -> None:
        self._progress.stage("Packing the image")
        self._namespaced(["sh", str(self._work / "pack.sh")], "Packing the image")

    def _stage(self, source: Path, target: Path, doing: str) -> None:
        """Copy what a step will find, without following links."""
        run_tool(
            ["cp", "-R", "-P", "--preserve=mode,timestamps", "--", source, target],
            doing=doing,
            failure=BuildFailed,
            deadline_s=_STEP_DEADLINE_S,
            disk=self._work,
        )

    def _enter(self, argv: list[str], run: Path, doing: str, extra: dict[str, str] | None = None) -> None:
        env = {**_ENVIRONMENT, **(extra or {})}
        plan = {"root": str(self._work / "root"), "run": str(run), "argv": argv, "env": env}
        self._namespaced([sys.executable, "-I", "-S", enter_root.__file__, json.dumps(plan)], doing)

    def _namespaced(self, argv: list[str], doing: str) -> None:
        run_namespaced(
            argv,
            doing=doing,
            deadline_s=_STEP_DEADLINE_S,
            on_line=self._progress.line,
            env=tool_environment(**self._variables),
            disk=self._work,
        )

    @contextmanager
    def _run_directory(self) -> Iterator[Path]:
        """What a step finds in /run. A new one for each: a step may leave links in its own."""
        run = self._work / "run"
        run.mkdir(mode=0o755)
        try:
            yield run
        finally:
            remove_tree(run)
