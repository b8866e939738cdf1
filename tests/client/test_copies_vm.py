"""Directories into a real VM and out of it."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from support_daemon import served
from support_trees import describe, make_tree

from forkd.client.copying import download, upload
from forkd.errors import ForkdError
from forkd.host.paths import Home

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

# What the guest itself sees: the sum of sizes, a mode, a time, a link.
_LOOK = """
import json, os
sizes = [os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk('/srv/tree') for name in names
         if not os.path.islink(os.path.join(at, name))]
one = os.stat('/srv/tree/d7/deep/file-7')
print(json.dumps([len(sizes), sum(sizes), one.st_mode, one.st_mtime_ns, os.readlink('/srv/tree/d1/to-dir')]))
"""


def test_a_thousand_files_go_into_a_vm_and_come_back_the_same(vm_home: Home, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    one = (tmp_path / "tree/d7/deep/file-7").stat()
    (tmp_path / "large").mkdir()
    (tmp_path / "large/a").write_bytes(b"a")
    (tmp_path / "large/b").write_bytes(bytes(400 << 20))
    with served(vm_home, "--on-stop", "kill", "--bind", "none", engine="auto") as daemon:
        with daemon.controller() as controller:
            [info] = controller.spawn_sandboxes("warm")
            sent = upload(controller, info["id"], tmp_path / "tree", "/srv/tree")
            seen = controller.exec_command(info["id"], ["python3", "-c", _LOOK])
            assert json.loads(seen["stdout"]) == [1001, sent.bytes, one.st_mode, one.st_mtime_ns, "../d2"]
            assert download(controller, info["id"], "/srv/tree", tmp_path / "back") == sent
            assert describe(tmp_path / "back") == describe(tmp_path / "tree")
            # Of a whole root the kernel's views are left empty: /proc has files without an end.
            with closing(controller.read_archive(info["id"], "/")) as pieces:
                begin = next(pieces)
            assert b"dev/" in begin and b"etc/" in begin and b"dev/null" not in begin
            # Its files are in its memory, of which it has less.
            with pytest.raises(ForkdError, match="/srv/large/b: No space left") as caught:
                upload(controller, info["id"], tmp_path / "large", "/srv/large")
            assert caught.value.code == "no_space"
            assert [each["name"] for each in controller.list_files(info["id"], "/srv/large")["entries"]] == ["a"]
            controller.kill_sandbox(info["id"])
