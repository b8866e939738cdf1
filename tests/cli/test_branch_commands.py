"""The commands for branches and chains: what each asks of the daemon, and what it prints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cli_cases import Cli as _Cli
from cli_cases import Done, check
from support_recording import Recorder, Reply, Seen, answering

from forkd.cli.arguments import parse_size
from forkd.cli.snapshot import layers_first
from forkd.host.paths import Home

SANDBOX = "sb-0123456789"
CHILD = "sb-1111111111"
NOTHING = {"name": None, "state": "running", "created_at_unix": 0, "guest_addr": "a", "deadline_unix": None}
INFO: dict[str, Any] = {"id": SANDBOX, "snapshot_tag": "warm", "parent_id": None, "on_timeout": "kill", **NOTHING}
INFO |= {"workspace": None, "labels": {}, "cause": None}
BRANCH = {"tag": "b-1", "dir": "/d", "status": "ready", "usable": True, "parent_tag": "warm", "pause_ms": 4}
BRANCH |= {"diff_physical_bytes": 3 << 20, "created_at_unix": 0}
POINT = {"name": "safe", "tag": "cp", "created_at_unix": 0, "status": "ready", "pause_ms": 3, "bytes_dirty": 1 << 20}
PRUNED = {"removed": [{"tag": "old", "bytes": 2 << 20, "why": "older than 7 days"}], "kept": 2, "dry_run": False}
DETAIL = {"tag": "b-1", "dir": "/d", "ancestors": ["root", "warm"], "dependents": ["x", "y"], "chain_depth": 2}
DETAIL |= {"unique_bytes": 1 << 20, "memory_physical_bytes": 5 << 20, "vmstate_bytes": 4096}


def answer(seen: Seen) -> Reply:
    path = seen.target.partition("?")[0]
    last = path.rpartition("/")[2]
    if seen.method == "DELETE":
        return Reply(204)
    if path.startswith("/v1/snapshots"):
        verified = {"tag": "b-1", "files": 3, "bytes": 7 << 20, "chain": ["warm", "b-1"]}
        known = {"info": DETAIL, "prune": PRUNED, "verify": verified}
        return Reply(200, known.get(last, BRANCH | {"tag": last} if seen.method == "GET" else BRANCH))
    children = [INFO | {"id": CHILD, "parent_id": SANDBOX}]
    posts = {"branch": BRANCH, "checkpoints": POINT, "fork": children}
    if seen.method == "POST":
        return Reply(200, posts.get(last, INFO))
    return Reply(200, {"checkpoints": [POINT], CHILD: children[0]}.get(last, INFO))


class Cli:
    """forkd, with a daemon that knows every answer."""

    def __init__(self, cli: _Cli, server: Recorder) -> None:
        self._cli, self._server = cli, server

    def __call__(self, *words: str) -> Done:
        self._server.seen.clear()
        return self._cli.ask(*words, FORKD_URL=self._server.url)

    def asked(self) -> tuple[str, str, Any]:
        """The call that changes something, or the last one."""
        changing = [seen for seen in self._server.seen if seen.method != "GET"] or self._server.seen
        seen = changing[-1]
        return seen.method, seen.target, json.loads(seen.body) if seen.body else None


@pytest.fixture
def cli(home: Home) -> Iterator[Cli]:
    with _answering() as server:
        yield Cli(_Cli(home), server)


@contextmanager
def _answering() -> Iterator[Recorder]:
    with answering(answer) as server:
        yield server


@pytest.mark.parametrize(
    ("words", "target", "body"),
    [
        (f"branch {SANDBOX}", "sandboxes/{}/branch", {"mode": "live"}),
        (
            f"branch {SANDBOX} --tag t --no-wait",
            "sandboxes/{}/branch",
            {"tag": "t", "mode": "live", "wait": False},
        ),
        (f"branch {SANDBOX} --mode full", "sandboxes/{}/branch", {"mode": "full"}),
        (f"checkpoint {SANDBOX}", "sandboxes/{}/checkpoints", {}),
        (f"checkpoint {SANDBOX} safe", "sandboxes/{}/checkpoints", {"name": "safe"}),
        (f"rewind {SANDBOX}", "sandboxes/{}/rewind", {}),
        (f"rewind {SANDBOX} safe --discard", "sandboxes/{}/rewind", {"to": "safe", "discard": True}),
        (f"promote {CHILD}", "sandboxes/{}/promote", {"child": CHILD}),
        (f"promote {CHILD} --into {SANDBOX}", "sandboxes/{}/promote", {"child": CHILD}),
        (f"fork --from {SANDBOX} -n 5", "sandboxes/{}/fork", {"count": 5}),
        (
            f"fork --from {SANDBOX} --tag kept --timeout 5m -e A=b -l c=d",
            "sandboxes/{}/fork",
            {"count": 1, "tag": "kept", "timeout_secs": 300.0, "env": {"A": "b"}, "labels": {"c": "d"}},
        ),
        (
            "snapshot derive warm --tag n --timeout 9 -- pip install -q x",
            "snapshots/warm/derive",
            {"tag": "n", "args": ["pip", "install", "-q", "x"], "timeout_secs": 9.0},
        ),
        (
            "snapshot derive warm --tag n --code x=1",
            "snapshots/warm/derive",
            {"tag": "n", "code": "x=1", "timeout_secs": 600.0},
        ),
        ("snapshot compact warm --to flat", "snapshots/warm/compact", {"to": "flat"}),
        ("snapshot verify warm", "snapshots/warm/verify", None),
        (
            "snapshot prune --keep-last 3 --keep-tagged --max-age 7d --max-bytes 10G --dry-run",
            "snapshots/prune",
            {
                "keep_last": 3,
                "keep_tagged": True,
                "max_age_secs": 604800.0,
                "max_bytes": 10 << 30,
                "dry_run": True,
            },
        ),
    ],
)
def test_a_command_asks_for_what_it_says(cli: Cli, words: str, target: str, body: Any) -> None:
    done = cli(*words.split())
    assert (done.returncode, done.stderr.partition("error")[1]) == (0, ""), done.stderr
    assert cli.asked() == ("POST", f"/v1/{target.format(SANDBOX)}", body)
    assert json.loads(
        cli(*words.replace(" -- ", " --json -- ").split(), *([] if " -- " in words else ["--json"])).stdout
    )


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (f"branch {SANDBOX}", "b-1  paused 4 ms  3.0 MiB on disk\n"),
        (f"checkpoint {SANDBOX}", "safe  paused 3 ms\n"),
        ("snapshot derive warm --tag n -- true", "n  3.0 MiB on disk, a layer of warm\n"),
        ("snapshot compact warm --to flat", "flat  5.0 MiB on disk\n"),
        ("snapshot verify warm", "b-1  good: 3 files, 7.0 MiB, warm > b-1\n"),
        ("snapshot prune --max-age 7d", "TAG  SIZE     WHY\nold  2.0 MiB  older than 7 days\n"),
    ],
)
def test_a_command_says_what_came_of_it(cli: Cli, words: str, printed: str) -> None:
    assert cli(*words.split()).stdout == printed


def test_forkds_own_word_prints_forkds_lines(cli: Cli) -> None:
    done = cli("snapshot-diff", "--from", "warm", "--tag", "n", "--exec", "sh -c 'pip install x'")
    assert cli.asked()[2] == {"tag": "n", "args": ["sh", "-c", "pip install x"], "timeout_secs": 600.0}
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines == [
        ["tag:", "n"],
        ["dir:", "/d"],
        ["parent_tag:", "warm"],
        ["pause_ms:", "4"],
        ["diff_physical_bytes:", str(3 << 20)],
    ]


def test_checkpoints_are_listed_and_deleted(cli: Cli) -> None:
    listed = cli("checkpoint", SANDBOX, "--ls").stdout.splitlines()
    assert listed[0].split() == ["NAME", "STATUS", "CREATED", "PAUSED", "DIRTY"]
    assert listed[1].split()[:2] == ["safe", "ready"] and listed[1].endswith("3 ms    1.0 MiB")
    assert cli("checkpoint", SANDBOX, "safe", "--rm", "--json").stdout == '{\n  "removed": [\n    "safe"\n  ]\n}\n'
    assert cli.asked() == ("DELETE", f"/v1/sandboxes/{SANDBOX}/checkpoints/safe", None)


def test_a_snapshot_is_shown_with_its_chain(cli: Cli) -> None:
    shown = dict(line.split(maxsplit=1) for line in cli("snapshot", "inspect", "b-1").stdout.splitlines())
    assert (shown["ancestors"], shown["dependents"]) == ("root > warm > b-1", "x, y")
    assert shown["unique_bytes"] == f"{1 << 20} (1.0 MiB)"


def test_a_snapshot_is_removed_with_its_layers_or_without_asking_after_them(cli: Cli) -> None:
    for words, query in (((), ""), (("--cascade",), "?cascade=true"), (("--force",), "?force=true")):
        assert cli("rmi", "base", *words).returncode == 0
        assert cli.asked()[:2] == ("DELETE", f"/v1/snapshots/base{query}")


def test_of_several_snapshots_layers_are_removed_before_what_they_are_layers_of() -> None:
    found: Any = {"b": {"parent_tag": "a"}, "a": {}, "other": {"parent_tag": "gone"}, "c": {"parent_tag": "b"}}
    assert layers_first(found) == ["c", "b", "a", "other"]
    circle: Any = {"a": {"parent_tag": "b"}, "b": {"parent_tag": "a"}}
    assert sorted(layers_first(circle)) == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"branch {SANDBOX} --mode full --no-wait", "--no-wait cannot be combined with --mode full"),
        (f"branch {SANDBOX} --mode fast", "--mode must be one of live, diff, full"),
        (f"checkpoint {SANDBOX} --rm", "--rm needs a checkpoint"),
        (f"checkpoint {SANDBOX} safe --ls", "--ls takes a sandbox and nothing else"),
        (f"promote {SANDBOX}", "was not forked from a sandbox"),
        (f"fork warm --from {SANDBOX}", "got both"),
        (f"fork --from {SANDBOX} --prewarm", "--from and --prewarm cannot be combined"),
        ("snapshot derive warm --tag n", "needs a command or --code"),
        ("snapshot derive warm -- true", "needs --tag"),
        ("snapshot derive", "needs TAG"),
        ("snapshot prune --dry-run", "needs --keep-last, --keep-tagged, --max-age or --max-bytes"),
        ("snapshot prune --max-bytes 10x", "--max-bytes takes bytes, or a size such as 512M"),
        ("snapshot rm a --cascade --force", "cannot be combined"),
        ("snapshot-diff --from warm --tag n --exec 'a", "--exec cannot be split"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Cli, words: str, said: str) -> None:
    check(cli(*words.split()), 2, said)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("7", "2k", "1.5G", "3MiB", "1t", "5b")] == [
        7,
        2048,
        3 << 29,
        3 << 20,
        1 << 40,
        5,
    ]
