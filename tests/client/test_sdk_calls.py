"""Requests as values: what is sent, and what may be sent twice."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.client import plans
from forkd.client.call import Again, Answer, Call, render_body, render_target
from forkd.client.calls import commands, files, sandboxes, service, snapshots, workspaces
from forkd.client.calls.commands import Command
from forkd.client.calls.sandboxes import Spawn
from forkd.client.exchange import SLACK_S, choose_stream_timeout, choose_timeout
from forkd.client.values import BranchMode
from forkd.errors import ForkdError, InvalidInput, NotFound, NotRunning, Unsupported


def body_of(call: Call[Any]) -> Any:
    return call.body


@given(st.text(min_size=1))
def test_no_name_leaves_its_place_in_the_path(name: str) -> None:
    try:
        target = render_target(sandboxes.ping_sandbox(name))
    except InvalidInput:
        assert any(0xD800 <= ord(char) < 0xDC80 or 0xDD00 <= ord(char) < 0xE000 for char in name)
        return
    sent = httpx.Request("POST", "http://localhost" + target).url.raw_path.decode()
    assert sent == target and urlsplit(sent).path == sent
    parts = sent.split("/")
    assert parts[1:3] == ["v1", "sandboxes"] and parts[4:] == ["ping"]
    assert unquote_to_bytes(parts[3]).decode("utf-8", "surrogateescape") == name


def test_dots_are_names_like_others_and_nothing_is_no_name() -> None:
    assert render_target(snapshots.delete_snapshot("..")) == "/v1/snapshots/%2E%2E"
    with pytest.raises(InvalidInput, match="empty"):
        render_target(sandboxes.get_sandbox(""))
    with pytest.raises(InvalidInput, match="no text"):
        render_target(sandboxes.get_sandbox(None))  # type: ignore[arg-type]


@given(st.binary(min_size=1))
def test_paths_of_files_reach_the_daemon_byte_by_byte(raw: bytes) -> None:
    target = render_target(files.read_file("sb-1", raw.decode("utf-8", "surrogateescape")))
    sent = httpx.Request("GET", "http://localhost" + target).url.raw_path
    assert unquote_to_bytes(sent.partition(b"?path=")[2]) == raw


def test_a_cpu_template_and_a_rehearsal_go_along_only_when_they_are_asked_for() -> None:
    for template, rehearsal in ((None, None), ("T2", "numpy.zeros(5)")):
        call = snapshots.create_snapshot(
            "t",
            "image",
            memory_mib=512,
            vcpus=1,
            cpu_template=template,
            warm=None,
            warm_command=None,
            warm_timeout_secs=300,
            rehearse=rehearsal,
            replace=False,
            wait=False,
        )
        assert (body_of(call).get("cpu_template"), body_of(call).get("rehearse")) == (template, rehearsal)
        assert ("cpu_template" in body_of(call)) == ("rehearse" in body_of(call)) == (template is not None)


def test_a_spawn_says_what_is_set_and_no_more() -> None:
    assert body_of(sandboxes.spawn_sandboxes(Spawn("t"))) == {"snapshot_tag": "t", "n": 1, "per_child_netns": False}
    limits = (0.5, 40, 8)
    pairs = ({"A": "b"}, {"l": "m"}, {"m": "n"})
    full = Spawn("t", 2, True, 64, True, True, True, *limits, 9, "pause", *pairs, True, 8080, "key")
    call = sandboxes.spawn_sandboxes(full)
    assert body_of(call) == {
        "snapshot_tag": "t",
        "n": 2,
        "per_child_netns": True,
        "memory_limit_mib": 64,
        "prewarm": True,
        "live_fork": True,
        "hugepages": True,
        "cpu_limit": 0.5,
        "pids_limit": 40,
        "io_limit_mib_s": 8,
        "timeout_secs": 9,
        "on_timeout": "pause",
        "env": {"A": "b"},
        "labels": {"l": "m"},
        "metadata": {"m": "n"},
        "allow_partial": True,
        "agent_port": 8080,
    }
    assert call.headers == {"Idempotency-Key": "key"}


@pytest.mark.parametrize("key", ["", "ä", "a\nb", "x" * 201, " a"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="idempotency key"):
        sandboxes.spawn_sandboxes(Spawn("t", idempotency_key=key))


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ((None, False, False, None, True), {}),
        (("t", True, False, None, True), {"tag": "t", "diff": True}),
        ((None, True, False, "live", False), {"mode": "live", "wait": False}),
        ((None, False, True, BranchMode.FULL, True), {"mode": "full", "measure_diff": True}),
    ],
)
def test_a_branch_sends_what_the_forkd_sdk_sends(given: tuple[Any, ...], sent: dict[str, Any]) -> None:
    assert body_of(sandboxes.branch_sandbox("sb-1", *given)) == sent


def test_a_command_is_args_or_shell() -> None:
    assert body_of(commands.exec_command("sb-1", Command(["a"], timeout_secs=3))) == {"args": ["a"], "timeout_secs": 3}
    assert body_of(commands.start_process("sb-1", Command(shell="a", stdin=True, pty=(3, 4)))) == {
        "shell": "a",
        "stdin": True,
        "pty": {"rows": 3, "cols": 4},
    }
    for wrong in (Command(), Command(["a"], "a"), Command("ls -l")):
        with pytest.raises(InvalidInput):
            commands.render_command(wrong)


@pytest.mark.parametrize(
    "call",
    [
        commands.exec_command("s", Command(["a"])),
        commands.exec_stream("s", Command(["a"])),
        commands.eval_code("s", "1", 1),
        commands.eval_stream("s", "1", 1),
        commands.start_process("s", Command(["a"])),
        commands.write_stdin("s", 1, b"x", False),
        commands.signal_process("s", 1, 9),
        files.write_file("s", "/f", b"x", None, True),
        files.write_file("s", "/f", iter([b"x"]), None, False),
        files.rename_file("s", "/a", "/b"),
        files.make_dir("s", "/a", False),
        sandboxes.branch_sandbox("s", None, False, False, None, True),
        workspaces.create_workspace("w", "t", False, None),
        workspaces.resume_workspace("w"),
    ],
    ids=lambda call: f"{call.method} {render_target(call)}",
)
def test_what_is_not_the_same_twice_is_not_sent_twice(call: Call[Any]) -> None:
    assert call.again is Again.UNSENT and not call.gone_is_done


def test_all_reads_may_be_repeated_and_only_deletes_may_find_it_done() -> None:
    reads = [
        service.version(),
        snapshots.get_snapshot("t"),
        files.read_file("s", "/f"),
        commands.process_output("s", 1),
        snapshots.list_templates(),
        snapshots.warm_snapshot("t"),  # made once, and then the one there is
    ]
    deletes = [sandboxes.kill_sandbox("s"), files.remove_file("s", "/f", True), workspaces.delete_workspace("w")]
    assert all(call.again is Again.SAFE for call in reads + deletes)
    assert not any(call.gone_is_done for call in reads) and all(call.gone_is_done for call in deletes)


def test_what_json_has_not_is_refused_before_it_is_sent() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(InvalidInput, match="JSON"):
            render_body(sandboxes.set_sandbox_timeout("s", value, None))  # type: ignore[arg-type]


def test_the_answer_is_waited_for_longer_than_the_command_may_take() -> None:
    long = choose_timeout(commands.exec_command("s", Command(["a"], timeout_secs=500)), 60)
    assert long.read == 500 + SLACK_S and long.connect == 10
    assert choose_timeout(service.version(), 60).read == 60
    assert choose_timeout(service.healthy(), 60).read == 5
    assert (choose_stream_timeout(5).read or 0) > 15  # the daemon breaks the silence every 15 s


def drive(plan: Any, *answers: Any) -> tuple[list[Call[Any]], Any]:
    """Its calls, each answered in turn, and what it comes to."""
    asked: list[Call[Any]] = []
    try:
        call = next(plan)
        for answer in answers:
            asked.append(call)
            call = plan.throw(answer) if isinstance(answer, Exception) else plan.send(answer)
    except StopIteration as stop:
        return asked, stop.value
    raise AssertionError(f"one more call: {call}")


def test_a_file_is_missing_only_where_its_sandbox_is_not() -> None:
    assert drive(plans.find_file("s", "/f"), {"type": "file"})[1] == {"type": "file"}
    assert drive(plans.find_file("s", "/f"), NotFound("file"), {"id": "s"})[1] is None
    with pytest.raises(NotFound, match="sandbox"):
        drive(plans.find_file("s", "/f"), NotFound("file"), NotFound("sandbox"))
    not_dir = ForkdError("below a file")
    not_dir.code = "not_dir"
    assert drive(plans.find_file("s", "/f"), not_dir, {"id": "s"})[1] is None
    with pytest.raises(NotRunning):
        drive(plans.find_file("s", "/f"), NotRunning("paused"))


def test_killing_what_is_gone_is_false_and_what_is_paused_an_error() -> None:
    assert drive(plans.kill("s"), None)[1] is True
    assert drive(plans.kill("s"), NotFound("s"))[1] is False
    assert drive(plans.kill_process("s", 1), NotFound("1"))[1] is False
    with pytest.raises(NotRunning):
        drive(plans.kill_process("s", 1), NotRunning("paused"))


def test_a_fork_is_a_branch_and_a_spawn_and_leaves_no_branch_without_children() -> None:
    asked, made = drive(plans.fork("s", 3), {"tag": "b"}, [{"id": "1"}])
    assert [call.method for call in asked] == ["POST", "POST"] and made == [{"id": "1"}]
    assert body_of(asked[1])["snapshot_tag"] == "b" and body_of(asked[1])["n"] == 3
    with pytest.raises(Unsupported):
        drive(plans.fork("s", 3), Unsupported("no"))
    plan = plans.fork("s", 3)
    next(plan)
    plan.send({"tag": "b"})
    assert render_target(plan.throw(NotFound("full"))) == "/v1/snapshots/b"
    with pytest.raises(NotFound, match="full"):
        plan.send(None)


def test_connecting_to_a_paused_one_resumes_it() -> None:
    asked, info = drive(plans.connect("s", 5), {"state": "paused"}, {"state": "running"}, {"deadline": 5})
    assert [call.parts[-1] for call in asked] == ["s", "resume", "timeout"] and info == {"deadline": 5}


def test_input_is_written_in_pieces_the_daemon_takes() -> None:
    asked, _ = drive(plans.write_stdin("s", 1, b"x" * (plans.MAX_STDIN_BYTES + 1)), None, None)
    assert [len(call.content) for call in asked] == [plans.MAX_STDIN_BYTES, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "full"),
    [("a", "/root/a"), ("/a", "/a"), ("~/a", "/root/a"), ("~", "/root/"), (".", "/root/."), ("~a", "/root/~a")],
)
def test_relative_paths_start_at_the_home_of_root(path: str, full: str) -> None:
    assert plans.guest_path(path) == full


@pytest.mark.parametrize(
    ("timeout", "background", "limit"),
    [(None, False, 60), (None, True, None), (0, False, 86400), (0, True, None), (5, True, 5)],
)
def test_timeouts_of_commands(timeout: float | None, background: bool, limit: float | None) -> None:
    named: dict[str, Any] = {"cwd": None, "envs": None, "user": None, "stdin": None}
    assert plans.command_of("x", timeout=timeout, background=background, **named).timeout_secs == limit


def test_a_flag_where_seconds_belong_is_refused() -> None:
    with pytest.raises(InvalidInput, match="seconds"):
        plans.command_of("x", timeout=True, background=False, cwd=None, envs=None, user=None, stdin=None)


def test_the_tag_comes_from_argument_environment_or_custom() -> None:
    assert plans.choose_tag("a", {"FORKD_TAG": "b"}) == "a"
    assert plans.choose_tag(None, {"FORKD_TAG": "b"}) == "b"
    assert plans.choose_tag(None, {}) == "pyagent"


@pytest.mark.parametrize("target", ["10.42.0.2:8888", "127.0.0.1", "127.0.0.1:x", ":1"])
def test_a_sandbox_is_not_put_at_an_address_of_elsewhere(target: str) -> None:
    with pytest.raises(InvalidInput):
        plans.open_sandbox("t", target, True)


def test_an_answer_is_read_whatever_the_case_of_its_headers() -> None:
    headers = httpx.Headers({"X-Next-Token": "7"})
    page = sandboxes.page_of_sandboxes((), None).read(Answer(200, b"[]", headers, "u"))
    assert page == sandboxes.Page([], "7")
