"""Write requirements/server.txt and requirements/dev.txt: every package that tools/setup installs, by version and hash.

pip resolves what pyproject.toml asks for, as it is configured on this machine; the hashes are those of all files of a
release that can be installed on x86_64 Linux. Nothing in the files says where packages come from.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).parent.parent
EXTRAS = ("server", "dev")
PYTHONS = ("3.11", "3.12", "3.13")
# hatchling asks for it, to install in editable form.
EDITABLE = "editables"
_FETCH_S = 120
_LINK = re.compile(r'href="[^"#]*?([^"/#]+)#sha256=([0-9a-f]{64})"')


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    requires: tuple[str, ...]


def lock_path(extra: str) -> Path:
    return ROOT / "requirements" / f"{extra}.txt"


def read_wanted(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for, with what builds the project itself."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, found = document["project"], [*document["build-system"]["requires"], EDITABLE]
    found += project["dependencies"]
    waiting = [extra]
    while waiting:
        for text in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(text)
            if requirement.name == project["name"]:
                waiting += requirement.extras
            else:
                found.append(text)
    return [Requirement(text) for text in found]


def parse_lock(text: str) -> dict[str, tuple[str, list[str]]]:
    """By name: the version and the hashes."""
    found: dict[str, tuple[str, list[str]]] = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if entry and not entry.startswith("#"):
            pinned, *options = entry.split()
            name, _, version = pinned.partition("==")
            found[name] = version, [option.removeprefix("--hash=sha256:") for option in options]
    return found


def render_lock(extra: str, packages: Iterable[tuple[Package, list[str]]]) -> str:
    lines = [f"# What tools/setup {extra} installs. Made by: make lock"]
    for package, hashes in packages:
        options = (f"    --hash=sha256:{one}" for one in hashes)
        lines.append(" \\\n".join([f"{package.name}=={package.version}", *options]))
    return "\n".join(lines) + "\n"


def find_needed(wanted: Iterable[Requirement], packages: Mapping[str, Package]) -> list[Package]:
    """All that these need, on any of PYTHONS."""
    needed: dict[str, Package] = {}
    waiting = [(requirement, frozenset[str]()) for requirement in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, extras = waiting.pop()
        if not applies(requirement, extras):
            continue
        name = canonicalize_name(requirement.name)
        if name not in packages:
            raise SystemExit(
                f"lock: {requirement} is needed on one of Python {', '.join(PYTHONS)}, and pip left it out"
            )
        asked = frozenset(requirement.extras)
        if (name, asked) not in seen:
            seen.add((name, asked))
            needed[name] = packages[name]
            waiting += [(Requirement(text), asked) for text in packages[name].requires]
    return [needed[name] for name in sorted(needed)]


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    places = [{"python_version": short, "python_full_version": f"{short}.0"} for short in PYTHONS]
    return any(requirement.marker.evaluate({**place, "extra": extra}) for place in places for extra in extras or {""})


def resolve(wanted: Iterable[Requirement]) -> dict[str, Package]:
    """As pip would install them now, on the Python that runs this."""
    with tempfile.NamedTemporaryFile() as report:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", report.name, *map(str, wanted)], check=True)
        entries = json.loads(Path(report.name).read_text())["install"]
    packages = {}
    for entry in entries:
        metadata = entry["metadata"]
        name = canonicalize_name(metadata["name"])
        packages[name] = Package(name, metadata["version"], tuple(metadata.get("requires_dist", ())))
    return packages


def find_index() -> str:
    """Where pip looks. Its own default has no other name than this."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    if done.returncode == 0:
        return done.stdout.strip().rstrip("/")
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url).rstrip("/")


def fetch_hashes(index: str, package: Package) -> list[str]:
    with urllib.request.urlopen(f"{index}/{package.name}/", timeout=_FETCH_S) as answer:
        page = answer.read().decode()
    found = {digest for name, digest in _LINK.findall(page) if is_usable(name.replace("%2B", "+"), package)}
    if not found:
        raise SystemExit(f"lock: the index has no hashes of {package.name} {package.version}")
    return sorted(found)


def is_usable(file_name: str, package: Package) -> bool:
    """Whether it is this release, and could be installed on x86_64 Linux by one of PYTHONS or a later one."""
    try:
        if not file_name.endswith(".whl"):
            name, version = parse_sdist_filename(file_name)
            return (name, str(version)) == (package.name, package.version)
        name, version, _, tags = parse_wheel_filename(file_name)
    except ValueError:
        return False
    return (name, str(version)) == (package.name, package.version) and any(
        (tag.platform == "any" or ("linux" in tag.platform and tag.platform.endswith("x86_64")))
        and is_new_enough(tag.interpreter, tag.abi)
        for tag in tags
    )


def is_new_enough(interpreter: str, abi: str) -> bool:
    number = interpreter.removeprefix("cp3")
    if interpreter.startswith("cp3") and number.isdigit() and abi != "abi3":
        return int(number) >= int(PYTHONS[0].partition(".")[2]) and not abi.endswith("t")
    return interpreter.startswith(("py", "cp3")) and not interpreter.startswith("pypy")


def main() -> None:
    packages = resolve(read_wanted("dev"))
    index = find_index()
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(
            zip(packages, pool.map(lambda package: fetch_hashes(index, package), packages.values()), strict=True)
        )
    for extra in EXTRAS:
        path = lock_path(extra)
        path.parent.mkdir(exist_ok=True)
        needed = find_needed(read_wanted(extra), packages)
        path.write_text(render_lock(extra, [(package, hashes[package.name]) for package in needed]))
        print(f"{path.relative_to(ROOT)}: {len(needed)} packages")


if __name__ == "__main__":
    main()
