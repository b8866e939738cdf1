"""Which Python of an image the guest agent will run on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from forkd.errors import InvalidInput
from forkd.image.tree import Tree, resolve

MINIMUM = (3, 8)
# In the order a guest's PATH has them.
_PREFIXES = ("usr/local", "usr")
_MAX_MINOR = 99
_BINARY = re.compile(r"python3\.(\d{1,2})")
# One the smallest installations leave out, and the agent needs.
_TELLING_MODULE = "json/__init__.py"
_HINT = "Add the package python3, or have Python 3.8 or newer with its library below /usr or /usr/local"


@dataclass(frozen=True)
class _Candidate:
    path: str
    minor: int
    whole: bool


def get_interpreter(tree: Tree) -> str:
    """The path of a Python we can use, as the guest sees it.

    Nothing of the image is executed: the version is in the name of the program or of its library's directory.
    """
    refused = []
    for candidate in _candidates(tree):
        if (3, candidate.minor) < MINIMUM:
            refused.append(f"{candidate.path} is 3.{candidate.minor}")
        elif not candidate.whole:
            refused.append(f"{candidate.path} lacks parts of its library, as python3-minimal does")
        else:
            return candidate.path
    reasons = f": {'; '.join(refused)}" if refused else " in /usr/bin or /usr/local/bin"
    raise InvalidInput(f"The image has no Python the guest agent can use{reasons}", hint=_HINT)


def _candidates(tree: Tree) -> Iterator[_Candidate]:
    """`python3` first: it is what the image's maker chose; then the versioned ones, newest first."""
    for prefix in _PREFIXES:
        for name in ("python3", *(f"python3.{minor}" for minor in range(_MAX_MINOR, -1, -1))):
            candidate = _find_candidate(tree, f"{prefix}/bin/{name}")
            if candidate is not None:
                yield candidate


def _find_candidate(tree: Tree, path: str) -> _Candidate | None:
    found = resolve(tree, path)
    node = tree.get(found) if found else None
    if found is None or node is None or not node.executable:
        return None
    home, _, program = found.rpartition("/bin/")
    libraries = [minor for minor in range(_MAX_MINOR, -1, -1) if _has_module(tree, home, minor, "os.py")]
    match = _BINARY.fullmatch(program)
    minor = int(match[1]) if match is not None else next(iter(libraries), None)
    if minor is None or minor not in libraries:
        return None
    return _Candidate(f"/{path}", minor, _has_module(tree, home, minor, _TELLING_MODULE))


def _has_module(tree: Tree, home: str, minor: int, module: str) -> bool:
    return any(resolve(tree, f"{home}/{lib}/python3.{minor}/{module}") for lib in ("lib", "lib64"))
