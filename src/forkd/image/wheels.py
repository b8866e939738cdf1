"""Python packages for an image: chosen and fetched by the host's pip, as wheels that fit the image's Python.

Nothing of a package is run here: only wheels are taken. The image's own Python installs them (`layer.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import BuildFailed, HostLacks
from forkd.host.files import FileSum
from forkd.host.tools import ask, find_program, run_tool, tool_environment
from forkd.image.spec import Progress
from forkd.image.target import Target

_DEADLINE_S = 1800.0
_PROGRAM = Path(__file__).with_name("pip_for_guest.py")
# Besides PIP_*, what pip reads to find its configuration, its cache and the certificates it trusts.
_PIP_READS = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NETRC")
_WHEEL = re.compile(r"([A-Za-z0-9_.]+)-([A-Za-z0-9_.+!]+)(?:-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl", re.ASCII)
_MAX_NOTED = 50
_MAX_SHOWN = 300
_VERSIONS_SHOWN = 5

_NOT_FOUND = re.compile(
    r"ERROR: Could not find a version that satisfies the requirement (.+?)(?: \(from .*?\))? \(from versions: (.*)\)$"
)
_CONFLICT = re.compile(r"ERROR: (Cannot install .+ because these package versions have conflicting dependencies)")
_RETRYING = "Retrying (Retry("


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    file: str
    sha256: str

    @property
    def locked(self) -> str:
        """As a line of a requirements file that fits this wheel alone."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Pip:
    """A Python of the host that has pip, and where pip is."""

    python: str
    package: Path


def find_pip() -> Pip:
    """This Python's, or that of the `python3` in PATH; raises HostLacks."""
    found = importlib.util.find_spec("pip")
    if found is not None and found.origin is not None:
        return Pip(sys.executable, Path(found.origin).parent)
    python = find_program("python3")
    origin = ask(python, "-c", "import pip; print(pip.__file__)").strip() if python else ""
    if python is None or not origin.endswith("__init__.py"):
        raise HostLacks("pip is not installed", hint="Install it: apt install python3-pip")
    return Pip(python, Path(origin).parent)


def build_wheels(requirements: Sequence[str], target: Target, out: Path, work: Path, progress: Progress) -> None:
    """Fetch the packages and all that they need into `out`."""
    pip = find_pip()
    listed = work / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in requirements))
    progress.stage(f"Fetching Python packages for Python {target.version}: {' '.join(map(_name, requirements))}")
    noted = _Noted(progress)
    try:
        run_tool(
            render_download(pip, target, listed, out),
            doing="Fetching Python packages",
            failure=BuildFailed,
            deadline_s=_DEADLINE_S,
            on_line=noted.line,
            env=_pip_environment(os.environ),
            disk=out,
        )
    except BuildFailed as error:
        explained = explain(noted.lines, target)
        raise explained or BuildFailed(error.message, hint=error.hint, details="\n".join(noted.lines)) from error


def render_download(pip: Pip, target: Target, requirements: Path, out: Path) -> list[str]:
    return [
        *(pip.python, str(_PROGRAM), json.dumps(target.markers())),
        *("download", "--no-input", "--no-color", "--progress-bar=off", "--disable-pip-version-check"),
        *(f"--dest={out}", f"--requirement={requirements}", "--only-binary=:all:"),
        *(f"--python-version={target.version}", "--implementation=cp"),
        *(f"--platform={platform}" for platform in target.platforms),
    ]


def parse_wheels(files: Mapping[str, FileSum]) -> tuple[Wheel, ...]:
    """Sorted by name."""
    wheels = []
    for file, total in files.items():
        match = _WHEEL.fullmatch(file)
        if match is None:
            raise BuildFailed(f"pip fetched {file!a}, which is not named as a wheel is")
        wheels.append(Wheel(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2], file, total.sha256))
    return tuple(sorted(wheels, key=lambda wheel: wheel.name))


def explain(lines: Sequence[str], target: Target) -> BuildFailed | None:
    """What pip's lines mean, in one; None where they must speak for themselves."""
    if any(_RETRYING in line for line in lines):
        return BuildFailed(
            "The Python package index does not answer", hint="See pip config list for the index that pip uses here"
        )
    for line in lines:
        if (match := _NOT_FOUND.match(line)) is not None:
            wanted, versions = match.groups()
            newest = versions.split(", ")[-_VERSIONS_SHOWN:]
            there = "" if versions == "none" else f"; the newest it has: {', '.join(newest)}"
            return BuildFailed(
                f"The package index has no wheel of {wanted} for Python {target.version}{there}",
                hint="Check its name and version; a package without a wheel must be built elsewhere and copied in",
            )
        if (match := _CONFLICT.match(line)) is not None:
            return BuildFailed(_shortened(match[1]), hint="Ask for other versions, or leave them open")
    return None


class _Noted:
    """Passes pip's lines on, and keeps what it says of errors. Where packages come from is nobody's business."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        if text.startswith(("Looking in ", "WARNING: Location")):
            return
        self._progress.line(text)
        if text.startswith(("ERROR:", "WARNING: Retrying")) and len(self.lines) < _MAX_NOTED:
            self.lines.append(text)


def _pip_environment(environ: Mapping[str, str]) -> dict[str, str]:
    passed = {key: value for key, value in environ.items() if key.startswith("PIP_") or key in _PIP_READS}
    return tool_environment(**{**passed, "PIP_REQUIRE_VIRTUALENV": "0"})


def _name(requirement: str) -> str:
    return requirement.partition(" --hash")[0]


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
