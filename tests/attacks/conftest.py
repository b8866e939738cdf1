"""What attacks are made on: a home of its own, with an image that the fake engine takes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support_images import made_home, make_image

from forkd.host.paths import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with made_home(tmp_path / "home") as made:
        make_image(made)
        yield made
