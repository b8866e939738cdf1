"""Which user a fork becomes: the maps of its user namespace, and who writes them.

A forked VMM is a process without rights, and nobody can change its user but itself. So it makes a user namespace, where
it may; as which users of the host it can act there, others say, in the namespace's maps: user 0 there is the fork's own
user. The rest of the range follows, for forks of the fork, whose namespaces are inside this one:

    inside 0               the fork's own user
    inside 1 + n           the n-th user of the range, unless that is the fork's own

A map is written from the namespace above. That is ours for a fork of a process in our namespace. For a fork of a fork
it is its source's: a helper (`map_ids.py`) goes in there for us.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import NotForkable

_HELPER = Path(__file__).with_name("map_ids.py")
_MAPS = ("uid_map", "gid_map")
_NO_HINT = "Fork its snapshot instead"


@dataclass(frozen=True)
class UserRange:
    """User and group ids that VMs, and nobody else, run as."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def __contains__(self, user: object) -> bool:
        return isinstance(user, int) and self.first <= user < self.end


def render_id_map(users: UserRange, user: int, above: Sequence[int] = ()) -> str:
    """The map of a namespace whose first user is `user`. Pure.

    `above`: the first users of the namespaces above, the innermost last; none: the one above is ours. Each line must
    lie within one line of the map above, which is cut at those.
    """
    outer = above[-1] if above else None
    lines = [(0, _seen_from(users, user, outer), 1)]
    own = {cut for each in (user, *above) for cut in (each, each + 1)}
    for begin, end in itertools.pairwise(sorted({users.first, users.end, *own})):
        if begin != user:
            lines.append((1 + begin - users.first, _seen_from(users, begin, outer), end - begin))
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in lines)


def _seen_from(users: UserRange, user: int, outer: int | None) -> int:
    """What a user is called in the namespace above."""
    if outer is None:
        return user
    return 0 if user == outer else 1 + user - users.first


def write_maps(pid: int, text: str) -> None:
    """Of a process whose namespace is in ours. Raises OSError."""
    for name in _MAPS:
        Path(f"/proc/{pid}/{name}").write_text(text)


class MapHelper:
    """A process of ours that writes maps of forks of one source, in the source's namespace. It ends with us."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._process: subprocess.Popen[str] | None = None

    def write_maps(self, pid: int, text: str) -> None:
        """Raises NotForkable."""
        answer = self._enter()
        if answer == "ok":
            answer = self._ask(json.dumps({"pid": pid, "maps": dict.fromkeys(_MAPS, text)}))
        if answer != "ok":
            self.close()
            raise NotForkable(f"A fork could not be given a user of its own: {answer}", hint=_NO_HINT)

    def _enter(self) -> str:
        if self._process is not None and self._process.poll() is None:
            return "ok"
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_HELPER), str(self._source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._read_answer()

    def _ask(self, request: str) -> str:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except OSError as error:
            return f"its helper ended: {error.strerror}"
        return self._read_answer()

    def _read_answer(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.readline().strip() or "its helper ended"

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with contextlib.suppress(OSError), process:
                process.kill()
