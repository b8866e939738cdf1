"""A daemon with a snapshot called `python`, for the SDK."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support_daemon import Served, served
from support_images import made_home, make_image

TAG = "python"


@contextmanager
def serving(root: Path, *flags: str) -> Iterator[Served]:
    with made_home(root / "home") as home:
        make_image(home)
        with served(home, "--on-stop", "kill", *flags) as daemon:
            with daemon.controller() as controller:
                controller.create_snapshot(TAG, "small", memory_mib=128, warm="warmed = 41", wait=True)
            yield daemon
