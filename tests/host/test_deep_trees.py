import os
import subprocess
from pathlib import Path

import pytest
from support_depth import make_deep

from forkd.host.files import scratch_directory, sweep_staging
from forkd.host.tools import remove_tree
from forkd.host.trees import descended, remove_directory


@pytest.mark.parametrize("remove", [remove_directory, remove_tree])
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, remove: object) -> None:
    assert callable(remove)
    make_deep(tmp_path / "deep")
    (tmp_path / "deep/link").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("stays")
    remove(tmp_path / "deep")
    assert os.listdir(tmp_path) == ["other"]
    assert (tmp_path / "other/file").read_text() == "stays"


def test_a_scratch_directory_goes_however_deep_it_became(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as scratch:
        make_deep(scratch / "deep")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_build_left_is_swept_however_deep_it_is(tmp_path: Path) -> None:
    left = tmp_path / ".staging-killed"
    left.mkdir()
    make_deep(left / "deep")
    assert sweep_staging(tmp_path) == [left]
    assert os.listdir(tmp_path) == []


def test_what_is_not_a_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "absent"):
        remove_directory(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_directory_that_is_moved_while_it_is_walked_ends_the_walk(tmp_path: Path) -> None:
    (tmp_path / "one/inner").mkdir(parents=True)
    with descended(tmp_path / "one") as descent:
        descent.enter("inner")
        (tmp_path / "one/inner").rename(tmp_path / "moved")
        with pytest.raises(OSError, match="moved"):
            descent.leave()


def test_a_link_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    with descended(tmp_path) as descent, pytest.raises(OSError):
        descent.enter("link")


def test_a_walk_holds_one_descriptor_at_a_time(tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 40)
    before = len(os.listdir("/proc/self/fd"))
    with descended(tmp_path / "deep") as descent:
        for _ in range(40):
            descent.enter("directory")
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
    subprocess.run(["rm", "-rf", str(tmp_path / "deep")], check=True)
