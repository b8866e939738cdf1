"""A real VM goes from one home to another in a pack, and its forks there are what they were."""

from pathlib import Path

import pytest
from support_daemon import served
from support_images import made_home
from support_packs import files_of

from forkd.host.paths import Home
from forkd.image import ImageStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]


def test_a_snapshot_is_packed_removed_unpacked_elsewhere_and_forked(vm_home: Home, tmp_path: Path) -> None:
    flags = ("--bind", "none", "--on-stop", "kill")
    path = tmp_path / "warm.pack"
    before = files_of(vm_home)
    with served(vm_home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
        with path.open("wb") as file:
            for piece in controller.pack_snapshot("warm"):
                file.write(piece)
        controller.delete_snapshot("warm")
    assert path.stat().st_size < sum(map(len, before.values()))
    with made_home(tmp_path / "elsewhere") as home:
        with served(home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
            with path.open("rb") as file:
                done = controller.unpack_snapshot(file, trust=True)
            assert (done["made"], done["warning"], done["image_reused"]) == (["warm"], None, False)
            assert files_of(home) == before
            made = controller.spawn_sandboxes("warm", n=2)
            for info in made:
                answer = controller.eval_code(info["id"], "[x + 1, past, int(numpy.arange(5).sum())]")
                assert answer["result"] == "[42, {'answer': 42}, 10]"
            for info in made:
                controller.kill_sandbox(info["id"])
        assert len(ImageStore(home).list()) == 1


def test_a_branch_is_packed_with_what_it_lies_over(vm_home: Home, tmp_path: Path) -> None:
    """The value is in no file but the layer, and the rest of the interpreter in no file but the root."""
    flags = ("--bind", "none", "--on-stop", "kill")
    with served(vm_home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
        [source] = controller.spawn_sandboxes("warm")
        controller.eval_code(source["id"], "later = x * 1000")
        controller.branch_sandbox(source["id"], tag="branch", mode="diff")
        data = b"".join(controller.pack_snapshot("branch"))
        before = files_of(vm_home)
    with made_home(tmp_path / "elsewhere") as home:
        with served(home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
            done = controller.unpack_snapshot(data, trust=True)
            assert done["made"] == ["warm", "branch"]
            assert files_of(home) == before
            [info] = controller.spawn_sandboxes("branch")
            assert controller.eval_code(info["id"], "[later + 1, past]")["result"] == "[41001, {'answer': 42}]"
            controller.kill_sandbox(info["id"])
