"""A daemon with a snapshot called `python`, for the SDK."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support_daemon import served
from support_images import make_image

from forkd.host.paths import Home

TAG = "python"


@contextmanager
def serving(root: Path, *flags: str) -> Iterator[dict[str, str]]:
    """The environment its clients need; `flags` go to `forkd serve`."""
    with tempfile.TemporaryDirectory(prefix="sdk-", dir="/tmp") as runtime:
        home = Home(root / "home", Path(runtime))
        make_image(home)
        with served(home, "--on-stop", "kill", *flags) as daemon:
            with daemon.controller() as controller:
                controller.create_snapshot(TAG, "small", memory_mib=128, warm="warmed = 41", wait=True)
            ours = {"FORKD_HOME": str(home.root), "FORKD_RUNTIME_DIR": runtime, "FORKD_ENGINE": "fake"}
            yield ours | ({"TCP_URL": daemon.tcp_urls[0]} if daemon.tcp_urls else {})
