"""What real clients fetch: an index for pip, a repository for git, one for apt. Plain files, for any web server."""

import gzip
import hashlib
import importlib.metadata
import subprocess
import zipfile
from pathlib import Path

PACKAGE, PACKAGE_VERSION = "forkd-hello", "1.0"
GREETING = "hello from a package"


def make_index(directory: Path, *installed: str) -> None:
    """For pip: /simple/<name>/, with wheels of distributions that are installed here."""
    for name in installed:
        place = directory / "simple" / name
        place.mkdir(parents=True)
        wheel = make_wheel(place, name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (place / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')


def make_wheel(directory: Path, name: str) -> Path:
    """An installed distribution as the wheel that it was installed from."""
    found = importlib.metadata.distribution(name)
    tags = [line.split()[1] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    wheel = directory / f"{name.replace('-', '_')}-{found.version}-{_joined(tags)}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in found.files or []:
            path = Path(str(file.locate()))
            if path.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                archive.write(path, str(file))
    return wheel


def _joined(tags: list[str]) -> str:
    """`py3-none-a` and `py3-none-b` are one tag `py3-none-a.b`."""
    parts = [sorted({tag.split("-")[place] for tag in tags}) for place in range(3)]
    return "-".join(".".join(part) for part in parts)


def make_git(directory: Path) -> str:
    """A bare repository `project.git` with one commit, as any web server can serve it. The commit's id."""
    work, bare = directory / "work", directory / "project.git"
    _git("init", "--quiet", "--initial-branch=main", str(work))
    (work / "README").write_text("cloned\n")
    _git("-C", str(work), "add", "README")
    _git("-C", str(work), "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "-m", "first")
    _git("clone", "--quiet", "--bare", str(work), str(bare))
    _git("-C", str(bare), "update-server-info")
    return _git("-C", str(bare), "rev-parse", "main").strip()


def _git(*arguments: str) -> str:
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True, env=env, timeout=60).stdout


def make_apt(directory: Path) -> None:
    """A flat repository with one package, which installs a program of its name."""
    root = directory / "build"
    program = root / "usr/bin" / PACKAGE
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {GREETING}\n")
    program.chmod(0o755)
    control = (
        f"Package: {PACKAGE}\nVersion: {PACKAGE_VERSION}\nArchitecture: all\n"
        "Maintainer: t <t@example.com>\nDescription: a greeting\n"
    )
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN/control").write_text(control)
    package = directory / f"{PACKAGE}_{PACKAGE_VERSION}_all.deb"
    build = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(package)]
    subprocess.run(build, check=True, capture_output=True, timeout=60)
    data = package.read_bytes()
    entry = f"{control}Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n\n"
    (directory / "Packages").write_text(entry)
    (directory / "Packages.gz").write_bytes(gzip.compress(entry.encode()))
