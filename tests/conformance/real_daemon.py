"""A real `forkd serve` in a process of its own, with an engine, a snapshot called `warm`, and perhaps a token."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from support_client import Client
from support_daemon import served

from forkd.host.paths import Home

TAG = "warm"
IMAGE = "python"
# What every sandbox can be asked about its past.
WARM = "past = {'answer': 42}"


class Daemon(Client):
    """Asked as no SDK does it."""

    def __init__(self, url: str, home: Home, engine: str, token: str | None) -> None:
        super().__init__(url, token)
        self.home = home
        self.engine = engine

    @property
    def client_env(self) -> dict[str, str]:
        """The environment of a client: nothing of ours but where the daemon is, and its token."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORKD_", "PYTHON"))}
        return kept | {"FORKD_URL": self.place} | ({"FORKD_TOKEN": self.token} if self.token is not None else {})

    def make_snapshot(self, tag: str) -> None:
        made = self.post("/v1/snapshots", {"tag": tag, "image": IMAGE, "memory_mib": 256, "warm": WARM, "wait": True})
        assert made.status == 201, made.content

    def live(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.get("/v1/sandboxes").body
        return listed


@contextlib.contextmanager
def running_daemon(home: Home, engine: str, token: str | None) -> Iterator[Daemon]:
    # forkd's MCP server always asks for a memory limit, and has to work where there is none.
    flags = ["--bind", "127.0.0.1:0", "--on-stop", "kill", "--unenforced-limits", "drop"]
    if token is not None:
        path = home.root / "token"
        path.touch(0o600)
        path.write_text(token + "\n")
        flags += ["--token-file", str(path)]
    with served(home, *flags, engine=engine) as started:
        daemon = Daemon(started.places[1], home, engine, token)
        if daemon.get(f"/v1/snapshots/{TAG}").status == 404:
            daemon.make_snapshot(TAG)
        # Now, so that no test finds a template that was not there before.
        assert daemon.post(f"/v1/snapshots/{TAG}/warm").status in (200, 501)
        yield daemon
