"""The daemon is killed at every step of unpack: what is visible afterwards is complete, and the rest is gone."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agreement import check_agreement
from support_daemon import served
from support_images import made_home
from support_packs import add_chain, files_of, made, pack, store_of

from forkd.errors import ForkdError
from forkd.host.faults import POINTS
from forkd.host.paths import Home
from forkd.image import ImageStore
from forkd.model.names import parse_tag

pytestmark = pytest.mark.usefixtures("nothing_left")

OF_UNPACK = [point for point in POINTS if point.startswith("unpack.")]
CHAIN = ("root", "middle", "head")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with made(tmp_path_factory.mktemp("source") / "home") as home:
        add_chain(home, *CHAIN)
        yield home


@pytest.mark.parametrize("fault", [*OF_UNPACK, "unpack.published@2", "unpack.published@3"])
def test_a_daemon_killed_at(fault: str, source: Home, tmp_path: Path) -> None:
    data = pack(source, "head")
    with made_home(tmp_path / "home") as home:
        with (
            served(home, "--bind", "none", env={"FORKD_FAULT": fault}) as daemon,
            daemon.controller() as controller,
        ):
            with pytest.raises(ForkdError):
                controller.unpack_snapshot(data, trust=True)
            assert daemon.process.wait(10) == -signal.SIGKILL
        point, _, times = fault.partition("@")
        seen = CHAIN[: int(times or 1)] if point == "unpack.published" else ()
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            assert check_agreement(home, controller) == []
            assert sorted(info["tag"] for info in controller.list_snapshots()) == sorted(seen)
            for tag in seen:
                assert store_of(home).verify(parse_tag(tag)).tag == tag
            # Nothing unlisted takes space: no image of a pack whose snapshots did not come.
            assert len(ImageStore(home).list()) == bool(seen)
            assert len(list(home.images.glob("pieces/*"))) == bool(seen)
            done = controller.unpack_snapshot(data, trust=True)
            assert (done["made"], done["reused"]) == (list(CHAIN[len(seen) :]), list(seen))
            daemon.stop()
        assert files_of(home) == files_of(source)
