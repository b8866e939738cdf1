"""Requests as values: what is sent, what may be sent twice, and in what order."""

from collections.abc import Iterator
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd import BranchMode, Controller, Sandbox
from forkd.client.arguments import background_limit, check_lifetime, choose_tag, foreground_limit, guest_path
from forkd.client.call import SLACK_S, Again, Call, choose_stream_timeout, choose_timeout, render_body, render_target
from forkd.client.endpoint import Endpoint
from forkd.client.files import Files
from forkd.client.processes import MAX_STDIN_BYTES, Commands
from forkd.client.renewal import Renewal
from forkd.errors import ForkdError, InvalidInput, NotFound, NotRunning

INFO = {"id": "s", "snapshot_tag": "t", "state": "running", "deadline_unix": None}


class Asked:
    """A transport that notes each call and answers in turn; an error among the answers is raised."""

    def __init__(self, *answers: Any) -> None:
        self.endpoint = self.place = Endpoint("http://localhost")
        self.calls: list[Call[Any]] = []
        self._answers = list(answers)

    def send(self, call: Call[Any]) -> Any:
        self.calls.append(call)
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def renewing(self, renewal: Renewal) -> "Asked":
        return self

    def output(self, call: Call[Any]) -> Iterator[Any]:
        self.calls.append(call)
        return iter(())

    def exchange(self, call: Call[Any]) -> httpx.Response:
        self.calls.append(call)
        return httpx.Response(200)


def controlled(*answers: Any) -> tuple[Controller, list[Call[Any]]]:
    controller = Controller.at(Endpoint("http://localhost"))
    controller.transport = asked = Asked(*answers)  # type: ignore[assignment]
    return controller, asked.calls


def call_of(method: str, *args: Any, **named: Any) -> Call[Any]:
    controller, calls = controlled()
    getattr(controller, method)(*args, **named)
    (call,) = calls
    return call


@given(st.text(min_size=1))
def test_no_name_leaves_its_place_in_the_path(name: str) -> None:
    try:
        target = render_target(call_of("ping_sandbox", name))
    except InvalidInput:
        assert any(0xD800 <= ord(char) < 0xDC80 or 0xDD00 <= ord(char) < 0xE000 for char in name)
        return
    sent = httpx.Request("POST", "http://localhost" + target).url.raw_path.decode()
    assert sent == target and urlsplit(sent).path == sent
    parts = sent.split("/")
    assert parts[1:3] == ["v1", "sandboxes"] and parts[4:] == ["ping"]
    assert unquote_to_bytes(parts[3]).decode("utf-8", "surrogateescape") == name


def test_dots_are_names_like_others_and_an_empty_name_is_refused() -> None:
    assert render_target(call_of("delete_snapshot", "..")) == "/v1/snapshots/%2E%2E"
    for wrong, why in (("", "empty"), (None, "must be text")):
        with pytest.raises(InvalidInput, match=why):
            render_target(call_of("get_sandbox", wrong))


@given(st.binary(min_size=1))
def test_paths_of_files_reach_the_daemon_byte_by_byte(raw: bytes) -> None:
    target = render_target(call_of("read_file", "sb-1", raw.decode("utf-8", "surrogateescape")))
    sent = httpx.Request("GET", "http://localhost" + target).url.raw_path
    assert unquote_to_bytes(sent.partition(b"?path=")[2]) == raw


def test_a_cpu_template_and_a_rehearsal_go_along_only_when_they_are_asked_for() -> None:
    for asked in ({}, {"cpu_template": "T2", "rehearse": "numpy.zeros(5)"}):
        body = call_of("create_snapshot", "t", "image", **asked).body or {}
        assert {name: body[name] for name in ("cpu_template", "rehearse") if name in body} == asked


def test_a_spawn_says_what_is_set_and_no_more() -> None:
    assert call_of("spawn_sandboxes", "t").body == {"snapshot_tag": "t", "n": 1, "per_child_netns": False}
    rest = {
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
    call = call_of("spawn_sandboxes", "t", 2, True, 64, True, True, True, **rest, idempotency_key="key")
    assert call.body == rest | {
        "snapshot_tag": "t",
        "n": 2,
        "per_child_netns": True,
        "memory_limit_mib": 64,
        "prewarm": True,
        "live_fork": True,
        "hugepages": True,
    }
    assert call.headers == {"Idempotency-Key": "key"} and call.again is Again.SAFE
    with pytest.raises(TypeError, match="cpu_limits"):
        call_of("spawn_sandboxes", "t", cpu_limits=1)


@pytest.mark.parametrize("key", ["", "ä", "a\nb", "x" * 201, " a"])
def test_a_key_that_cannot_be_sent_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="idempotency key"):
        call_of("spawn_sandboxes", "t", idempotency_key=key)


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
    assert call_of("branch_sandbox", "sb-1", *given).body == sent


def test_a_command_is_args_or_shell() -> None:
    assert call_of("exec_command", "s", ["a"], 3).body == {"args": ["a"], "timeout_secs": 3}
    started = call_of("start_process", "s", shell="a", stdin=True, pty=(3, 4)).body
    assert started == {"shell": "a", "stdin": True, "pty": {"rows": 3, "cols": 4}}
    for wrong in ({}, {"args": ["a"], "shell": "a"}, {"args": "ls -l"}):
        with pytest.raises(InvalidInput):
            call_of("exec_command", "s", **wrong)
    with pytest.raises(InvalidInput, match="background"):
        Commands(controlled()[0], "s").run("cat", stdin=True)


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("exec_command", (["a"],)),
        ("exec_stream", (["a"],)),
        ("eval_code", ("1", 1)),
        ("eval_stream", ("1", 1)),
        ("start_process", (["a"],)),
        ("write_stdin", (1, b"x", False)),
        ("signal_process", (1, 9)),
        ("write_file", ("/f", b"x", None, True)),
        ("write_file", ("/f", iter([b"x"]), None, False)),
        ("rename_file", ("/a", "/b")),
        ("make_dir", ("/a", False)),
        ("branch_sandbox", ()),
        ("create_checkpoint", ()),
        ("rewind_sandbox", ()),
        ("promote_sandbox", ("child",)),
        ("derive_snapshot", ("new",)),
        ("compact_snapshot", ("new",)),
        ("create_workspace", ("t",)),
        ("resume_workspace", ()),
    ],
)
def test_what_is_not_the_same_twice_is_not_sent_twice(method: str, args: tuple[Any, ...]) -> None:
    call = call_of(method, "s", *args)
    assert call.again is Again.UNSENT and not call.gone_is_done


def test_all_reads_may_be_repeated_and_only_deletes_may_find_it_done() -> None:
    reads = [
        call_of("version"),
        call_of("get_snapshot", "t"),
        call_of("read_file", "s", "/f"),
        call_of("process_output", "s", 1),
        call_of("list_templates"),
        call_of("warm_snapshot", "t"),  # made once, and then the one there is
    ]
    deletes = [call_of("kill_sandbox", "s"), call_of("remove_file", "s", "/f", True), call_of("delete_workspace", "w")]
    assert all(call.again is Again.SAFE for call in reads + deletes)
    assert not any(call.gone_is_done for call in reads) and all(call.gone_is_done for call in deletes)


def test_what_json_has_not_is_refused_before_it_is_sent() -> None:
    for value in (float("nan"), object()):
        with pytest.raises(InvalidInput, match="JSON"):
            render_body(call_of("set_sandbox_timeout", "s", value))


def test_the_answer_is_waited_for_longer_than_the_command_may_take() -> None:
    long = choose_timeout(call_of("exec_command", "s", ["a"], 500), 60)
    assert long.read == 500 + SLACK_S and long.connect == 10
    assert choose_timeout(call_of("version"), 60).read == 60
    assert choose_timeout(call_of("healthy"), 60).read == 5
    assert (choose_stream_timeout(5).read or 0) > 15  # the daemon breaks the silence every 15 s


def test_a_file_is_missing_only_where_its_sandbox_is_not() -> None:
    def exists(*answers: Any) -> bool:
        return Files(controlled(*answers)[0], "s").exists("/f")

    assert exists({"type": "file"}) is True
    assert exists(NotFound("file"), INFO) is False
    with pytest.raises(NotFound, match="sandbox"):
        exists(NotFound("file"), NotFound("sandbox"))
    not_dir = ForkdError("below a file")
    not_dir.code = "not_dir"
    assert exists(not_dir, INFO) is False
    with pytest.raises(NotRunning):
        exists(NotRunning("paused"))


def test_killing_what_is_gone_is_false_and_what_is_paused_an_error() -> None:
    sandbox = Sandbox.connect("s", controller=controlled(INFO, None, NotFound("s"))[0])
    assert (sandbox.kill(), sandbox.kill()) == (True, False)
    commands = Commands(controlled(NotFound("1"), NotRunning("paused"))[0], "s")
    assert commands.kill(1) is False
    with pytest.raises(NotRunning):
        commands.kill(1)


def test_connecting_to_a_paused_one_resumes_it() -> None:
    mortal = INFO | {"deadline_unix": 1.0}
    controller, calls = controlled(mortal | {"state": "paused"}, mortal, mortal | {"snapshot_tag": "last"})
    sandbox = Sandbox.connect("s", 5, controller=controller)
    assert [call.parts[-1] for call in calls] == ["s", "resume", "timeout"] and sandbox.tag == "last"
    assert calls[-1].body == {"timeout_secs": 5, "extend": True}


def test_input_is_written_in_pieces_the_daemon_takes() -> None:
    controller, calls = controlled()
    Commands(controller, "s").send_stdin(1, b"x" * (MAX_STDIN_BYTES + 1))
    assert [call.content for call in calls] == [b"x" * MAX_STDIN_BYTES, b"x"]


@pytest.mark.parametrize(
    ("path", "full"),
    [("a", "/root/a"), ("/a", "/a"), ("~/a", "/root/a"), ("~", "/root/"), (".", "/root/."), ("~a", "/root/~a")],
)
def test_relative_paths_start_at_the_home_of_root(path: str, full: str) -> None:
    assert guest_path(path) == full


@pytest.mark.parametrize("path", [Path("/srv/a b"), PurePosixPath("/srv/a b"), PureWindowsPath("/srv/a b")])
def test_paths_of_pathlib_are_taken_wherever_a_path_is(path: PurePath) -> None:
    controller, calls = controlled(*[{"path": "x", "size": 1}] * 20)
    files = Files(controller, "s")
    files.write(path, "x")
    files.read(path, format="bytes")
    files.remove(path)
    files._find(path)
    controller.make_dir("s", path)
    controller.rename_file("s", path, path)
    assert [dict(call.query).get("path") for call in calls[:4]] == ["/srv/a b"] * 4
    assert [call.body for call in calls[4:]] == [
        {"path": "/srv/a b", "parents": True},
        {"path": "/srv/a b", "to": "/srv/a b"},
    ]
    assert (call_of("exec_command", "s", ["a"], cwd=path).body or {})["cwd"] == "/srv/a b"
    with pytest.raises(InvalidInput, match="pathlib"):
        guest_path(b"/srv")  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{"a": 1}, {"a", "b"}, {}.keys(), 3, None, object()])
def test_what_is_not_the_content_of_a_file_is_refused_before_anything_is_sent(data: Any) -> None:
    controller, calls = controlled()
    with pytest.raises(InvalidInput, match=f"A {type(data).__name__} cannot be written"):
        Files(controller, "s").write("/f", data)
    assert calls == []


def test_timeouts_of_commands() -> None:
    assert [foreground_limit(timeout) for timeout in (None, 0, 5)] == [60, 86400, 5]
    assert [background_limit(timeout) for timeout in (None, 0, 5)] == [None, None, 5]
    for limit in (foreground_limit, background_limit, check_lifetime):
        for wrong in (True, -3, 1e9, float("nan"), "5"):
            with pytest.raises(InvalidInput, match=r"^timeout must be .* seconds, got"):
                limit(wrong)  # type: ignore[arg-type]
    assert [check_lifetime(timeout) for timeout in (None, 5)] == [None, 5]
    with pytest.raises(InvalidInput, match="above 0"):
        check_lifetime(0)


def test_the_tag_comes_from_argument_environment_or_custom() -> None:
    assert choose_tag("a", {"FORKD_TAG": "b"}) == "a"
    assert choose_tag(None, {"FORKD_TAG": "b"}) == "b"
    assert choose_tag(None, {}) == "pyagent"


def test_wrong_values_are_named_as_the_sdk_names_them() -> None:
    controller, calls = controlled()
    with pytest.raises(InvalidInput, match=r"^tag must be the name of a snapshot, got 7$"):
        Sandbox.create(7, controller=controller)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^envs must have text values, got 'A': int$"):
        Sandbox.create("t", envs={"A": 1}, controller=controller)  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match=r"^envs must have text values"):
        Commands(controller, "s").run("true", envs={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match=r"^timeout must be above 0"):
        Sandbox.create("t", timeout=-1, controller=controller)
    with pytest.raises(InvalidInput, match=r"^timeout must be between 0 and 86400 seconds, got -1$"):
        Commands(controller, "s").run("true", timeout=-1)
    assert calls == []


@pytest.mark.parametrize("target", ["10.42.0.2:8888", "127.0.0.1", "127.0.0.1:x", ":1"])
def test_a_sandbox_is_not_put_at_an_address_of_elsewhere(target: str) -> None:
    with pytest.raises(InvalidInput):
        Sandbox("t", target, controller=controlled()[0])
