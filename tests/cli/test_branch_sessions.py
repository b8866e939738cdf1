"""Branches and chains as people use them, command after command, through a daemon."""

import json
import signal
import time

import pytest
from cli_cases import DEADLINE_S, Cli, check

pytestmark = pytest.mark.usefixtures("nothing_left")


def value(cli: Cli, sandbox: str, name: str) -> str:
    done = cli.ask("eval", sandbox, name)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_sandbox_is_forked_one_fork_is_promoted_and_the_others_are_gone(warm: Cli, sandbox: str) -> None:
    warm.ask("eval", sandbox, "x = 1")
    done = warm.ask("fork", "--from", sandbox, "-n", "3", "-l", "try=7")
    assert done.returncode == 0 and done.stdout.splitlines()[0].split()[:3] == ["ID", "SNAPSHOT", "PARENT"]
    forks = warm.ask("ls", "-l", "try=7", "-q").stdout.split()
    warm.ask("eval", forks[2], "x = 2")
    assert [value(warm, each, "x") for each in (sandbox, *forks)] == ["1", "1", "1", "2"]
    drawn = [line.partition("  running")[0] for line in warm.ask("tree").stdout.splitlines() if "  running" in line]
    assert [line.split()[-1] for line in drawn] == [sandbox, *forks]
    assert [line.index("sb-") for line in drawn] == [3, 6, 6, 6]
    check(warm.ask("promote", sandbox), 2, "was not forked from a sandbox")
    assert warm.ask("promote", forks[2]).returncode == 0
    assert warm.ids() == [sandbox] and value(warm, sandbox, "x") == "2"


def test_a_sandbox_is_remembered_and_goes_back(warm: Cli, sandbox: str) -> None:
    warm.ask("rename", sandbox, "web")
    assert "forkd checkpoint" in warm.ask("checkpoint", "web", "--ls").stderr
    check(warm.ask("rewind", "web"), 3, "has no checkpoint", "forkd checkpoint")
    warm.ask("eval", "web", "x = 1")
    assert warm.ask("checkpoint", "web", "one").stdout.startswith("one  paused ")
    warm.ask("eval", "web", "x = 2")
    assert warm.json("checkpoint", "web")["name"] == "c1"
    warm.ask("eval", "web", "x = 3")
    assert warm.ask("rewind", "web").returncode == 0
    assert value(warm, "web", "x") == "2"
    assert "@one" in warm.ask("tree").stdout
    assert warm.json("rewind", "web", "one", "--discard")["id"] == sandbox
    assert value(warm, "web", "x") == "1"
    assert [each["name"] for each in warm.json("checkpoint", "web", "--ls")] == ["c1"]
    assert warm.ask("checkpoint", "web", "c1", "--rm").returncode == 0
    check(warm.ask("rewind", "web", "c1"), 3, "no checkpoint c1", "--ls")
    check(warm.ask("checkpoint", "web", "a/b"), 2)


def test_a_branch_is_a_snapshot_that_can_be_forked(warm: Cli, sandbox: str) -> None:
    warm.ask("eval", sandbox, "x = 7")
    assert warm.ask("branch", sandbox, "--tag", "kept").stdout.startswith("kept  paused ")
    check(warm.ask("branch", sandbox, "--tag", "kept"), 4)
    made = warm.json("branch", sandbox, "--no-wait")
    assert made["usable"] and made["tag"].startswith(f"branch-{sandbox}-")
    [info] = warm.json("fork", "kept")
    assert value(warm, info["id"], "x") == "7"
    check(warm.ask("branch", "nothing"), 3, "There is no sandbox nothing")


def test_a_chain_grows_is_checked_made_flat_and_removed(warm: Cli) -> None:
    assert warm.ask("snapshot", "derive", "warm", "--tag", "more", "--code", "more = x + 1").returncode == 0
    done = warm.ask("snapshot-diff", "--from", "more", "--tag", "most", "--exec", "true")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()][:3] == ["tag", "dir", "parent_tag"]
    shown = warm.json("snapshot", "inspect", "most")
    assert (shown["ancestors"], shown["chain_depth"]) == (["warm", "more"], 2)
    assert "warm > more > most" in warm.ask("snapshot", "inspect", "most").stdout
    assert "most  good: " in warm.ask("snapshot", "verify", "most").stdout
    assert warm.ask("snapshot", "compact", "most", "--to", "flat").returncode == 0
    check(warm.ask("snapshot", "rm", "more"), 4, "most", "--cascade", "--force")
    assert warm.ask("snapshot", "rm", "more", "--cascade").returncode == 0
    assert warm.tags() == ["flat", "warm"]
    [info] = warm.json("fork", "flat")
    assert value(warm, info["id"], "more") == "42"


def test_what_a_derived_snapshot_runs_has_to_go_well(warm: Cli) -> None:
    done = warm.ask("snapshot", "derive", "warm", "--tag", "bad", "--json", "--", "false")
    assert done.returncode != 0 and json.loads(done.stdout)["code"]
    check(warm.ask("snapshot", "derive", "wram", "--tag", "bad", "--", "true"), 3, "Did you mean warm?")
    assert "bad" not in [info["tag"] for info in warm.json("snapshot", "ls") if info["status"] == "ready"]


def test_old_branches_are_pruned_after_a_look(warm: Cli, sandbox: str) -> None:
    for _ in range(2):
        assert warm.ask("branch", sandbox).returncode == 0
    assert warm.ask("branch", sandbox, "--tag", "chosen").returncode == 0
    looked = warm.ask("snapshot", "prune", "--keep-tagged", "--max-age", "0", "--dry-run")
    assert looked.returncode == 0 and "would remove 2 snapshots" in looked.stderr
    assert len(warm.tags()) == 4
    assert len(warm.json("snapshot", "prune", "--keep-tagged", "--max-age", "0")["removed"]) == 2
    assert warm.tags() == ["chosen", "warm"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_derived_snapshot_that_is_interrupted_leaves_nothing(warm: Cli, number: int) -> None:
    running = warm.start("snapshot", "derive", "warm", "--tag", "cut", "--", "sleep", "50")
    deadline = time.monotonic() + DEADLINE_S
    while not warm.ids():
        assert time.monotonic() < deadline
    running.finish(number)
    assert running.returncode == 128 + number
    while warm.ids() or "cut" in warm.tags():
        assert time.monotonic() < deadline


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fork_of_a_sandbox_that_is_interrupted_leaves_nothing_or_all(warm: Cli, sandbox: str, number: int) -> None:
    running = warm.start("fork", "--from", sandbox, "-n", "3")
    time.sleep(0.3)
    running.finish(number)
    assert len(warm.ids()) == (4 if running.returncode == 0 else 1)
