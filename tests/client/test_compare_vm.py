"""What real VMs have written: listed, compared, merged and copied between them."""

import hashlib
from collections.abc import Iterator

import pytest
from support_daemon import served

from forkd.client import Controller, MergeConflicts, MergeIncomplete, Sandbox
from forkd.client.comparing import compare_sandboxes, forked, read_changes
from forkd.client.copying import copy
from forkd.client.merging import merge
from forkd.client.written import Changes
from forkd.errors import InvalidInput
from forkd.host.paths import Home

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def daemon(vm_home: Home) -> Iterator[Controller]:
    with served(vm_home, "--on-stop", "kill", "--bind", "none", engine="auto") as started:
        with started.controller() as controller:
            yield controller
            for info in controller.list_sandboxes():
                controller.kill_sandbox(info["id"])


def fork(controller: Controller, count: int = 1) -> list[str]:
    return [info["id"] for info in controller.spawn_sandboxes("warm", count)]


def run(controller: Controller, sandbox_id: str, script: str) -> str:
    done = controller.exec_command(sandbox_id, ["sh", "-ec", script])
    assert done["exit_code"] == 0, done
    return done["stdout"]


def call(controller: Controller, sandbox_id: str, words: str) -> None:
    """Of the C library: the image has no program for it."""
    done = controller.eval_code(sandbox_id, f"import ctypes; ctypes.CDLL(None).{words}")
    assert done["result"] == "0", done


def kinds(controller: Controller, before: str, after: str) -> dict[str, str]:
    return {each.path: each.kind for each in compare_sandboxes(controller, before, after).differences}


def state(changes: Changes, path: str) -> str | None:
    file = changes.entries[path].file
    return None if file is None else file.type


def test_what_a_vm_has_written_is_listed_as_the_overlay_has_it(daemon: Controller) -> None:
    [one] = fork(daemon)
    assert "upper" not in run(daemon, one, "cut -d' ' -f2 /proc/mounts; ls / /run/forkd")
    assert {"/", "/etc", "/tmp"} >= {each.path for each in read_changes(daemon, one)}
    image = run(daemon, one, "ls -A /usr/share/doc | head -2; ls -A /etc/default | wc -l").split()
    run(
        daemon,
        one,
        f"""
        printf new > /root/new; chmod 751 /root/new; ln -s new /root/link; mkdir -p /srv/a/b; chown 7:8 /srv/a/b
        rm /etc/passwd; rm -r /usr/share/doc/{image[0]}
        rm -r /etc/default; mkdir /etc/default; echo x > /etc/default/mine
        echo more >> /etc/group; chmod 604 /etc/shadow
        mv /usr/share/doc/{image[1]} /usr/share/doc/moved
        echo t > /tmp/t; mkfifo /tmp/pipe; echo r > /run/r
        printf bytes > "$(printf '/root/\\377 \\n.')"
        """,
    )
    seen = read_changes(daemon, one, sha256=True)
    new = seen.entries["/root/new"]
    assert new.base is None and new.file is not None
    assert (new.file.type, new.file.size, new.file.mode, new.file.uid) == ("file", 3, 0o751, 0)
    assert new.file.sha256 == hashlib.sha256(b"new").hexdigest()
    link, made = seen.entries["/root/link"].file, seen.entries["/srv/a/b"].file
    assert link is not None and link.target == "new"
    assert made is not None and (made.type, made.uid, made.gid) == ("dir", 7, 8)
    assert state(seen, "/etc/passwd") is None
    assert state(seen, f"/usr/share/doc/{image[0]}") is None
    # Renamed by copying, as the overlay has no redirects: the old name is gone and what is below the new one is whole.
    assert state(seen, f"/usr/share/doc/{image[1]}") is None
    moved = {each.path for each in seen if each.path.startswith("/usr/share/doc/moved/")}
    assert moved == set(run(daemon, one, "find /usr/share/doc/moved -mindepth 1").split())
    # Removed and made again: what the image has in it is gone too, each by name.
    gone = [each for each in seen if each.path.startswith("/etc/default/") and each.removed]
    assert len(gone) == int(image[2]) > 0
    assert state(seen, "/etc/default/mine") == "file"
    group = seen.entries["/etc/group"]
    assert group.base is not None and group.file is not None and group.file.size == group.base.size + 5
    # A change of the mode alone copies the content too, as there is no metacopy.
    shadow = seen.entries["/etc/shadow"]
    assert shadow.base is not None and shadow.file is not None and shadow.file.mode == 0o604
    assert shadow.file.sha256 == shadow.base.sha256 is not None and shadow.file.size > 0
    assert state(seen, "/tmp/t") == "file" and state(seen, "/tmp/pipe") == "fifo"
    assert state(seen, "/root/\udcff \n.") == "file"
    assert not any(path.startswith(("/run", "/proc", "/dev", "/sys")) for path in seen.entries)
    assert not {"/etc/hostname", "/etc/machine-id"} & seen.entries.keys()
    later = seen.clocks.now_ns
    run(daemon, one, "echo later > /root/later")
    assert {each.path for each in read_changes(daemon, one, since_ns=later)} == {"/root", "/root/later"}
    assert seen.clocks.began_ns > 0 and seen.clocks.born_ns < later
    assert seen.clocks.host_before_ns <= seen.clocks.host_after_ns


def test_two_vms_are_compared_by_what_they_have_written(daemon: Controller) -> None:
    one, two = fork(daemon, 2)
    assert kinds(daemon, one, two) == {}
    run(daemon, one, "echo 1 > /root/same; echo 1 > /root/differs; echo only > /root/one; rm /etc/passwd; mkdir /srv/d")
    run(daemon, two, "echo 1 > /root/same; echo 2 > /root/differs; cp -p /etc/group /root/g; cat /root/g > /etc/group")
    assert kinds(daemon, one, two) == {
        "/root/differs": "changed",
        "/root/one": "removed",
        "/etc/passwd": "added",
        "/srv/d": "removed",
        "/root/g": "added",
    }
    with forked(daemon, "warm") as fresh:
        assert kinds(daemon, fresh, two) == {"/root/differs": "added", "/root/g": "added", "/root/same": "added"}
    with pytest.raises(InvalidInput, match="stop"), forked(daemon, "warm"):
        raise InvalidInput("stop")
    assert {info["id"] for info in daemon.list_sandboxes()} == {one, two}


def test_a_vm_is_merged_into_another_and_conflicts_leave_it_as_it_was(daemon: Controller) -> None:
    parent, child = fork(daemon, 2)
    run(daemon, parent, "echo p > /root/mine; echo p > /root/both; rm /etc/passwd; mkdir /srv/kind; chmod 700 /mnt")
    run(
        daemon,
        child,
        """
        mkdir -p /srv/new/deep; chown 7:8 /srv/new/deep; chmod 1750 /srv/new
        printf result > /srv/new/deep/file; chmod 4755 /srv/new/deep/file; ln -s deep/file /srv/new/link
        rm /etc/group; rm -r /usr/share/doc; chmod 600 /etc/shadow; mkfifo /srv/new/pipe
        rm -r /etc/default; echo was a directory > /etc/default
        """,
    )
    plan = merge(daemon, child, parent, dry_run=True)
    assert kinds(daemon, child, parent)["/root/mine"] == "added"
    done = merge(daemon, child, parent)
    assert done == plan
    assert {each.path for each in done.remove} == {"/etc/group", "/usr/share/doc"}
    assert [(each.path, each.why) for each in done.skipped] == [("/srv/new/pipe", "it is a fifo")]
    look = "stat -c '%n %F %a %u:%g' /srv/new /srv/new/deep /srv/new/deep/file; cat /srv/new/link /etc/default"
    assert run(daemon, parent, look) == run(daemon, child, look)
    assert (
        run(daemon, parent, "ls /root; ls -d /usr/share/doc /etc/group 2>&1 | grep -c 'No such'") == "both\nmine\n2\n"
    )
    assert merge(daemon, child, parent).empty
    run(daemon, child, "echo c > /root/both; echo c > /srv/kind; echo >> /etc/passwd; echo new > /root/new")
    with pytest.raises(MergeConflicts) as caught:
        merge(daemon, child, parent)
    assert {each.path: each.why for each in caught.value.plan.conflicts} == {
        "/root/both": "changed in both",
        "/srv/kind": "a file in the child, a directory in the parent",
        "/etc/passwd": "changed in the child, removed in the parent",
    }
    assert run(daemon, parent, "ls /root; cat /root/both") == "both\nmine\np\n"
    merge(daemon, child, parent, force=True)
    assert run(daemon, parent, "cat /root/both /srv/kind /root/new; tail -n1 /etc/passwd; cat /root/mine") == (
        "c\nc\nnew\n\np\n"
    )


@pytest.mark.parametrize("tag", ["kept", None])
def test_a_fork_of_a_running_vm_is_merged_into_it(daemon: Controller, tag: str | None) -> None:
    """With the moment of the fork kept as a snapshot, and without: then clocks tell what was changed since."""
    parent = Sandbox.connect(fork(daemon)[0], controller=daemon)
    run(daemon, parent.id, "cd /srv; mkdir d busy; echo old | tee d/edited d/dropped both own")
    # What was written right before the fork is in doubt, where clocks have to do.
    run(daemon, parent.id, "sleep 2")
    [child] = parent.fork(tag=tag)
    assert [each.kind for each in parent.diff(child)] == []
    script = "cd /srv; echo new > d/edited; rm d/dropped /etc/passwd; mkdir n; echo n > n/f; echo >> /etc/group"
    run(daemon, child.id, script)
    run(daemon, parent.id, "echo parent > /srv/own; echo parent > /srv/busy/mine")
    plan = parent.merge(child)
    assert [each.path for each in (*plan.remove, *plan.write)] == [
        *("/etc/passwd", "/srv/d/dropped", "/etc/group", "/srv/d/edited", "/srv/n", "/srv/n/f")
    ]
    look = "cd /srv; cat d/edited n/f own busy/mine; ls d; ls /etc/passwd || true"
    assert run(daemon, parent.id, look) == "new\nn\nparent\nparent\nedited\n"
    run(daemon, child.id, "echo child > /srv/both; echo child > /srv/busy/new; rm /srv/own")
    run(daemon, parent.id, "echo parent > /srv/both")
    with pytest.raises(MergeConflicts) as caught:
        parent.merge(child)
    # Whether the other one had a file in busy at the fork, and has removed it, is known only if that moment was kept.
    found = [each.path for each in caught.value.plan.conflicts]
    assert found == ["/srv/both", *([] if tag else ["/srv/busy/mine", "/srv/busy/new"]), "/srv/own"]
    assert run(daemon, parent.id, "cat /srv/both /srv/own; ls /srv/busy") == "parent\nparent\nmine\n"
    assert len(daemon.list_sandboxes()) == 2
    with pytest.raises(InvalidInput, match="neither a fork of"):
        Sandbox.connect(fork(daemon)[0], controller=daemon).merge(child)


def test_a_merge_that_fails_half_way_says_what_is_left(daemon: Controller) -> None:
    parent, child = fork(daemon, 2)
    run(daemon, parent, "mkdir /srv/d")
    call(daemon, parent, "mount(b'none', b'/srv/d', b'tmpfs', 0, b'size=64k')")
    script = "rm /etc/passwd; mkdir /srv/d; echo a > /srv/a; head -c 1000000 /dev/urandom > /srv/d/b; echo c > /srv/e"
    run(daemon, child, script)
    with pytest.raises(MergeIncomplete, match=r"/srv/d/b: No space left.*2 of 4 changes were made") as caught:
        merge(daemon, child, parent)
    assert (caught.value.applied, caught.value.left) == (["/etc/passwd", "/srv/a"], ["/srv/d/b", "/srv/e"])
    call(daemon, parent, "umount2(b'/srv/d', 0)")
    assert [each.path for each in merge(daemon, child, parent).write] == ["/srv/d/b", "/srv/e"]
    assert kinds(daemon, parent, child) == {}


def test_files_go_from_one_vm_to_another(daemon: Controller) -> None:
    one, two = fork(daemon, 2)
    script = "mkdir -p /srv/t/d; head -c 3000000 /dev/urandom > /srv/t/d/f; ln -s /etc /srv/t/l; chmod 700 /srv/t/d"
    run(daemon, one, script)
    copied = copy(daemon, one, "/srv/t", two, "/srv/copy")
    assert (copied.files, copied.bytes, copied.skipped) == (1, 3_000_000, [])
    assert copy(daemon, one, "/srv/t/d/f", two, "/srv/single").bytes == 3_000_000
    sums = run(daemon, two, "sha256sum < /srv/copy/d/f; sha256sum < /srv/single; stat -c %a /srv/copy/d").split()
    assert sums[0] == sums[2] == run(daemon, one, "sha256sum < /srv/t/d/f").split()[0]
    assert sums[4] == "700" and run(daemon, two, "readlink /srv/copy/l") == "/etc\n"
