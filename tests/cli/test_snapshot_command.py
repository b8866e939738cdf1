"""`forkd snapshot` through a daemon: make, list, look, replace, remove, and what goes wrong."""

import json
from pathlib import Path

import pytest
from cli_cases import Cli, check

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_snapshot_is_created_listed_inspected_replaced_and_removed(warm: Cli, tmp_path: Path) -> None:
    script = tmp_path / "warm.py"
    script.write_text("past = 'äöü'\n")
    made = warm.create("other", "--warm-script", str(script), "--memory", "300", "--json")
    assert made.returncode == 0, made.stdout
    assert made.stderr == ""
    facts = json.loads(made.stdout)
    assert (facts["tag"], facts["status"], facts["memory_mib"]) == ("other", "ready", 300)
    assert (facts["engine"], facts["warm"]) == ("fake", "past = 'äöü'\n")
    listed = warm.ask("snapshot", "ls").stdout.splitlines()
    assert listed[0].split() == ["TAG", "STATUS", "CREATED", "MEMORY", "VCPUS", "ENGINE", "IMAGE", "WARM"]
    assert [line.split()[0] for line in listed[1:]] == ["other", "warm"]
    assert warm.ask("snapshot", "ls", "-q").stdout == "other\nwarm\n"
    assert warm.json("snapshot", "inspect", "other") == facts
    assert facts["image_id"] in warm.ask("snapshot", "inspect", "other").stdout
    check(warm.create("other"), 4, "exists already")
    done = warm.create("other", "--warm", "new = 1", "--replace")
    assert done.returncode == 0
    assert done.stdout.startswith("other  ") and done.stdout.endswith(" MiB on disk\n")
    assert warm.json("snapshot", "inspect", "other")["warm"] == "new = 1"
    check(warm.ask("image", "rm", "small"), 4, "in use")
    assert warm.json("snapshot", "rm", "other") == {"removed": ["other"]}
    assert warm.tags() == ["warm"]


def test_a_rehearsal_is_shown_with_its_snapshot(warm: Cli) -> None:
    made = warm.create("other", "--rehearse", "sum(range(9))", "--json")
    assert made.returncode == 0, made.stdout
    assert json.loads(made.stdout)["rehearsal"] == "sum(range(9))"
    assert "sum(range(9))" in warm.ask("snapshot", "inspect", "other").stdout


def test_an_engine_without_templates_refuses_to_warm_a_snapshot(warm: Cli) -> None:
    check(warm.ask("snapshot", "warm", "warm"), 17, "Templates are not available: the engine fake", "forkd doctor")
    check(warm.ask("snapshot", "warm", "nothing"), 3, "There is no snapshot nothing", "forkd snapshot ls")
    check(warm.ask("snapshot", "warm", "a/b"), 2, "is not a legal snapshot tag")
    assert json.loads(warm.ask("snapshot", "warm", "warm", "--json").stdout)["code"] == "unsupported"


def test_what_is_unknown_is_not_found_and_how_to_find_it_is_told(warm: Cli) -> None:
    check(warm.ask("snapshot", "inspect", "nothing"), 3, "There is no snapshot nothing", "forkd snapshot ls")
    check(warm.ask("snapshot", "rm", "nothing"), 3, "There is no snapshot nothing")
    check(warm.ask("snapshot", "create", "--tag", "x", "--image", "nothing"), 3, "There is no image nothing")
    assert json.loads(warm.ask("snapshot", "rm", "nothing", "--json").stdout)["code"] == "not_found"
    assert warm.tags() == ["warm"]


def test_a_traceback_of_the_warm_up_is_in_the_error(warm: Cli) -> None:
    done = warm.create("bad", "--warm", "1 / 0")
    assert done.returncode == 13
    assert "error: The warm-up raised ZeroDivisionError: division by zero\n" in done.stderr
    assert "  | Traceback" in done.stderr
    shown = warm.create("bad", "--warm", "1 / 0", "--json")
    assert "ZeroDivisionError" in json.loads(shown.stdout)["details"]
    # The attempt is remembered, as a failure, until it is removed or made again.
    listed = warm.ask("snapshot", "ls")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["TAG", "warm"]
    assert "warning: bad: The warm-up raised" in listed.stderr and "forkd snapshot rm bad" in listed.stderr
    assert warm.create("bad", "--warm", "1").returncode == 0
    assert "warning" not in warm.ask("snapshot", "ls").stderr


def test_a_cpu_template_is_refused_by_an_engine_that_has_none(warm: Cli) -> None:
    check(warm.create("bad", "--cpu-template", "T2"), 17, "The engine fake has no CPU template T2", "firecracker")
    assert warm.ask("snapshot", "rm", "bad").returncode == 0


def test_a_warm_up_that_cannot_be_is_refused(warm: Cli) -> None:
    check(warm.create("bad", "--warm-timeout", "0"), 2)
    check(warm.create("bad", "--warm-script", "/dev/zero"), 2, "larger than")
    assert warm.tags() == ["warm"]


def test_a_long_tag_is_not_folded_for_who_reads_a_pipe(warm: Cli) -> None:
    tag = "t" * 64
    assert warm.create(tag, "--warm", "x = 'a rather long piece of code'").returncode == 0
    lines = warm.ask("snapshot", "ls").stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(tag + " ")


def test_several_snapshots_are_removed_together_or_not_at_all(warm: Cli) -> None:
    for tag in ("a", "b"):
        assert warm.create(tag).returncode == 0
    check(warm.ask("snapshot", "rm", "a", "nothing", "b"), 3, "There is no snapshot nothing")
    check(warm.ask("snapshot", "rm", "a", "b/c"), 2, "not a legal snapshot tag")
    assert warm.tags() == ["a", "b", "warm"]
    assert warm.ask("snapshot", "rm", "b", "a", "b").returncode == 0
    assert warm.tags() == ["warm"]


def test_a_damaged_snapshot_is_listed_as_such_beside_the_others_and_can_be_removed(warm: Cli) -> None:
    assert warm.create("hurt").returncode == 0
    (warm.snapshots / "hurt/manifest.json").write_text("{")
    done = warm.ask("snapshot", "ls")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["TAG", "warm"]
    assert "warning: hurt: The manifest of snapshot hurt is damaged" in done.stderr
    assert "hint: Remove it with: forkd snapshot rm hurt" in done.stderr
    [hurt] = [info for info in warm.json("snapshot", "ls") if info["tag"] == "hurt"]
    assert (hurt["status"], hurt["code"]) == ("failed", "snapshot_damaged")
    check(warm.ask("snapshot", "inspect", "hurt"), 8, "damaged", "forkd snapshot rm hurt")
    check(warm.ask("fork", "hurt"), 8, "The manifest of snapshot hurt is damaged")
    assert warm.ask("snapshot", "rm", "hurt").returncode == 0
    assert warm.tags() == ["warm"]
