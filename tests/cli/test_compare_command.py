"""`forkd diff` and `forkd merge`, as people see them."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import DEADLINE_S, Cli, check
from support_daemon import served as serving

from forkd.cli.compare import render_line, render_patch
from forkd.client.written import Difference, Facts
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")

FILE = Facts("file", 3, 0o644, 0, 0, 0)


def test_a_line_says_what_differs_besides_the_content() -> None:
    link = Facts("symlink", 1, 0o777, 0, 0, 0, target="a")
    moved = Facts("symlink", 1, 0o777, 0, 0, 0, target="b")
    other = Facts("file", 3, 0o755, 7, 8, 0)
    directory = Facts("dir", 0, 0o755, 0, 0, 0)
    for before, after, line in [
        (None, directory, "added    /x/"),
        (directory, None, "removed  /x/"),
        (FILE, FILE, "changed  /x"),
        (FILE, other, "changed  /x  (mode 644 -> 755, owner 0:0 -> 7:8)"),
        (link, moved, "changed  /x  (a -> b)"),
        (FILE, directory, "changed  /x/  (file -> dir, mode 644 -> 755)"),
    ]:
        assert render_line(Difference("/x", before, after)) == line


def test_a_patch_is_one_that_other_tools_read(tmp_path: Path) -> None:
    old, new = b"one\ntwo\rx\nthree\n", b"one\nTWO\rx\nthree\nfour"
    (tmp_path / "root").mkdir()
    (tmp_path / "root/f").write_bytes(old)
    lines = list(render_patch(Difference("/root/f", FILE, FILE), old, new))
    assert lines[:2] == ["--- a/root/f", "+++ b/root/f"] and lines[-1] == "\\ No newline at end of file"
    text = "\n".join(lines).encode() + b"\n"
    subprocess.run(["git", "apply", "-p1"], cwd=tmp_path, input=text, check=True, capture_output=True)
    assert (tmp_path / "root/f").read_bytes() == new
    assert list(render_patch(Difference("/x", None, FILE), b"", b"new\n"))[:2] == ["--- /dev/null", "+++ b/x"]
    for data in (b"\0", b"\xff"):
        assert list(render_patch(Difference("/x", FILE, FILE), b"", data)) == ["changed  /x  (binary)"]
    assert list(render_patch(Difference("/x", FILE, FILE), b"same", b"same")) == ["changed  /x"]


def test_an_engine_without_an_overlay_is_refused_and_no_fork_stays(warm: Cli, sandbox: str) -> None:
    check(warm.ask("diff", sandbox, "warm"), 17, "has no disk of its own")
    assert warm.ids() == [sandbox]
    check(warm.ask("diff", sandbox, "nothing"), 3, "no sandbox and no snapshot nothing")
    check(warm.ask("merge", sandbox), 2, "was not forked from another sandbox", "--into")
    check(warm.ask("merge", sandbox, "--into", sandbox), 2, "into itself")
    other = warm.fork()
    check(warm.ask("merge", other, "--into", sandbox), 17)
    assert sorted(warm.ids()) == sorted([sandbox, other])


@pytest.fixture
def real(vm_home: Home) -> Iterator[Cli]:
    with serving(vm_home, "--on-stop", "kill", "--bind", "none", engine="auto"):
        cli = Cli(vm_home, real=True)
        yield cli
        cli.stop()
        assert cli.ask("rm", "--all").returncode == 0


def run(cli: Cli, sandbox: str, script: str) -> None:
    done = cli.ask("exec", sandbox, "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.vm
def test_a_winner_is_compared_and_merged(real: Cli) -> None:
    parent, child = real.fork(), real.fork()
    assert real.ask("rename", child, "winner").returncode == 0
    same = real.ask("diff", parent, "winner")
    assert (same.returncode, same.stdout, same.stderr) == (0, "", "")
    run(real, child, "printf 'a\\nb\\n' > /root/f; mkdir /root/d; rm /etc/passwd")
    run(real, child, "printf '\\033[2J' > /root/$(printf 'evil\\033')")
    done = real.ask("diff", parent, "winner")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "removed  /etc/passwd",
        "added    /root/d/",
        "added    /root/evil\\x1b",
        "added    /root/f",
    ]
    assert real.ask("diff", "warm", "winner", "--name-only").stdout.split() == [
        *("/etc/passwd", "/root/d", "/root/evil\\x1b", "/root/f")
    ]
    found = json.loads(real.ask("diff", "winner", parent, "--json").stdout)
    assert [(each["kind"], each["path"]) for each in found][-1] == ("removed", "/root/f")
    assert found[-1]["before"]["size"] == 4 and found[-1]["after"] is None
    patch = real.ask("diff", parent, "winner", "--patch").stdout
    assert "--- /dev/null\n+++ b/root/f\n@@ -0,0 +1,2 @@\n+a\n+b\n" in patch and "removed" not in patch
    assert "--- a/etc/passwd\n+++ /dev/null\n" in patch
    # On a terminal with colours, and without the guest's control characters.
    shown = in_terminal(real, "diff", parent, "winner", "--patch")
    assert b"\x1b[32m+a\x1b[0m" in shown and b"\x1b[2J" not in shown
    dry = real.json("merge", "winner", "--into", parent, "--dry-run")
    assert dry["written"] == ["/root/d", "/root/evil\x1b", "/root/f"] and dry["removed"] == ["/etc/passwd"]
    assert real.ask("diff", parent, "winner").returncode == 1
    run(real, parent, "echo other > /root/f; echo >> /etc/passwd")
    done = real.ask("merge", "winner", "--into", parent)
    check(done, 4, "2 conflicts; nothing was written")
    assert "/etc/passwd: removed in the child, changed in the parent" in done.stderr
    assert "/root/f: changed in both" in done.stderr
    assert real.ask("merge", "winner", "--into", parent, "--dry-run").returncode == 4
    done = real.ask("merge", "winner", "--into", parent, "--force")
    assert done.returncode == 0
    assert done.stdout.split()[-2:] == ["written", "/root/f"] and "conflict: /root/f" in done.stderr
    assert real.ask("diff", parent, "winner").returncode == 0
    assert real.ask("merge", "winner", "--into", parent).stderr == "There is nothing to merge\n"
    assert len(real.ids()) == 2


def in_terminal(cli: Cli, *words: str) -> bytes:
    ours, theirs = pty.openpty()
    with subprocess.Popen(cli.command(*words), env=cli.env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 65536):
                shown += data
        except OSError:
            pass  # the end of a terminal
        process.wait(DEADLINE_S)
    os.close(ours)
    return shown


@pytest.mark.vm
def test_an_interrupted_diff_leaves_no_fork_of_a_snapshot(real: Cli) -> None:
    sandbox = real.fork()
    run(real, sandbox, "head -c 60000000 /dev/urandom > /srv/big; cp /srv/big /srv/too")
    process = real.start("diff", "warm", sandbox, "--patch")
    while len(real.ids()) < 2 and process.poll() is None:
        pass
    process.finish(signal.SIGINT, times=2)
    assert process.returncode in (130, 1)  # or it was done already
    assert real.ids() == [sandbox]
