"""Branches, forks, checkpoints, attempts and promotion: what is asked of the daemon, and when."""

from typing import Any

import pytest
from support_recording import Recorder, Reply, Seen, answering, recording

from forkd import AsyncSandbox, Controller, NotFound, Sandbox
from forkd.client.call import Again, Call, render_target
from forkd.errors import Conflict, InvalidInput

INFO = {"id": "sb-0", "snapshot_tag": "t", "state": "running", "deadline_unix": None}
CHILDREN = [INFO | {"id": f"sb-{number}", "parent_id": "sb-0"} for number in (1, 2)]
FORK = "/v1/sandboxes/sb-0/fork"


def asked(server: Recorder) -> list[tuple[str, str]]:
    return [(seen.method, seen.target) for seen in server.seen]


def sent(method: str, *args: Any, **named: Any) -> Call[Any]:
    """What a call of the controller puts on the line."""
    calls: list[Call[Any]] = []

    class Noted(Controller):
        def _send(self, call: Call[Any]) -> Any:
            calls.append(call)

    with Noted("http://localhost") as controller:
        getattr(controller, method)(*args, **named)
    return calls[0]


def test_a_fork_of_a_sandbox_is_one_request_with_a_key() -> None:
    call = sent("fork_sandbox", "s", 5)
    assert (render_target(call), call.body, call.again) == ("/v1/sandboxes/s/fork", {"count": 5}, Again.SAFE)
    assert call.headers["Idempotency-Key"].startswith("sdk-")
    rest: dict[str, Any] = {"tag": "kept", "memory_limit_mib": 64, "timeout_secs": 9, "on_timeout": "pause"}
    rest |= {"env": {"A": "b"}, "labels": {"l": "m"}, "metadata": {"m": "n"}, "cpu_limit": 0.5}
    assert sent("fork_sandbox", "s", 2, idempotency_key="mine", **rest).body == {"count": 2, **rest}
    assert sent("fork_sandbox", "s", 2, idempotency_key="mine").headers == {"Idempotency-Key": "mine"}
    for wrong in ("allow_partial", "agent_port"):
        with pytest.raises(TypeError, match=wrong):
            sent("fork_sandbox", "s", **{wrong: 1})


def test_every_other_call_says_what_is_set_and_no_more() -> None:
    expected: list[tuple[Call[Any], str, Any]] = [
        (sent("create_checkpoint", "s"), "/v1/sandboxes/s/checkpoints", {}),
        (sent("create_checkpoint", "s", "a"), "/v1/sandboxes/s/checkpoints", {"name": "a"}),
        (sent("list_checkpoints", "s"), "/v1/sandboxes/s/checkpoints", None),
        (sent("delete_checkpoint", "s", "a/b"), "/v1/sandboxes/s/checkpoints/a%2Fb", None),
        (sent("rewind_sandbox", "s"), "/v1/sandboxes/s/rewind", {}),
        (sent("rewind_sandbox", "s", "a", discard=True), "/v1/sandboxes/s/rewind", {"to": "a", "discard": True}),
        (sent("promote_sandbox", "s", "c"), "/v1/sandboxes/s/promote", {"child": "c"}),
        (
            sent("derive_snapshot", "t", "new", ["pip", "install"], code="x = 1", timeout_secs=9),
            "/v1/snapshots/t/derive",
            {"tag": "new", "args": ["pip", "install"], "code": "x = 1", "timeout_secs": 9},
        ),
        (sent("compact_snapshot", "t", "flat"), "/v1/snapshots/t/compact", {"to": "flat"}),
        (sent("verify_snapshot", "t"), "/v1/snapshots/t/verify", None),
        (sent("prune_snapshots", keep_last=3), "/v1/snapshots/prune", {"keep_last": 3}),
        (
            sent("prune_snapshots", keep_tagged=True, max_age_secs=60, max_bytes=0, dry_run=True),
            "/v1/snapshots/prune",
            {"keep_tagged": True, "max_age_secs": 60, "max_bytes": 0, "dry_run": True},
        ),
        (sent("delete_snapshot", "t"), "/v1/snapshots/t", None),
        (sent("delete_snapshot", "t", cascade=True), "/v1/snapshots/t?cascade=true", None),
        (sent("delete_snapshot", "t", force=True), "/v1/snapshots/t?force=true", None),
    ]
    for call, target, body in expected:
        assert (render_target(call), call.body) == (target, body)
    with pytest.raises(InvalidInput, match="list of texts"):
        sent("derive_snapshot", "t", "new", "pip install")


def test_forks_live_as_those_of_create_many_do_and_are_removed_together() -> None:
    replies = [Reply(200, INFO), Reply(201, CHILDREN), Reply(200, {"removed": ["sb-1", "sb-2"]})]
    with recording(*replies) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        with sandbox.fork(2, labels={"try": "7"}) as children:
            assert [child.id for child in children] == ["sb-1", "sb-2"]
            assert all(isinstance(child, Sandbox) for child in children)
    assert asked(server)[1:] == [("POST", FORK), ("DELETE", "/v1/spawns")]
    assert server.seen[1].json == {"count": 2, "timeout_secs": 300, "labels": {"try": "7"}}
    assert server.seen[1].headers["Idempotency-Key"] == server.seen[2].headers["Idempotency-Key"]


def test_a_fork_that_is_refused_leaves_nothing_to_undo() -> None:
    refused = Reply(409, {"error": "Too deep", "code": "conflict", "hint": None})
    with recording(Reply(200, INFO), refused) as server, Controller(server.url) as controller:
        with pytest.raises(Conflict, match="Too deep"):
            Sandbox.connect("sb-0", None, controller=controller).fork(2, None)
    assert asked(server) == [("GET", "/v1/sandboxes/sb-0"), ("POST", FORK)]


def test_a_branch_is_live_unless_another_mode_is_asked_for() -> None:
    made = Reply(201, {"tag": "b", "status": "ready", "usable": True})
    with recording(Reply(200, INFO), made, made) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        assert sandbox.branch()["tag"] == "b"
        sandbox.branch("b", "full", wait=False)
    assert [seen.json for seen in server.seen[1:]] == [{"mode": "live"}, {"tag": "b", "mode": "full", "wait": False}]


class Guest:
    """A daemon with one sandbox, which counts up with each exec and goes back to where it was with each rewind."""

    def __init__(self, *, rewinds: bool = True) -> None:
        self.count = 0
        self.kept: dict[str, int] = {}
        self.rewinds = rewinds

    def __call__(self, seen: Seen) -> Reply:
        *_, last = seen.target.split("/")
        if seen.target.endswith("/exec"):
            self.count += 1
            return Reply(200, {"stdout": str(self.count), "stderr": "", "exit_code": 0, "truncated": False})
        if last == "checkpoints":
            self.kept[seen.json["name"]] = self.count
            return Reply(201, {"name": seen.json["name"]})
        if last == "rewind":
            if not self.rewinds:
                return Reply(500, {"error": "It would not", "code": "engine_failed", "hint": None})
            self.count = self.kept[seen.json["to"]]
            if seen.json.get("discard"):
                del self.kept[seen.json["to"]]
        if seen.method == "DELETE":
            del self.kept[last]
            return Reply(204)
        return Reply(200, INFO)


def test_an_attempt_that_ends_well_stays() -> None:
    guest = Guest()
    with answering(guest) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        with sandbox.attempt() as trial:
            sandbox.commands.run("x")
            assert trial.sandbox is sandbox and list(guest.kept) == [trial.checkpoint]
    assert (guest.count, guest.kept) == (1, {})


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt()])
def test_an_attempt_that_raises_is_undone_and_raises(error: BaseException) -> None:
    guest = Guest()
    with answering(guest) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        sandbox.commands.run("x")
        with pytest.raises(type(error)):
            with sandbox.attempt():
                sandbox.commands.run("x")
                raise error
    assert (guest.count, guest.kept) == (1, {})


def test_an_attempt_can_be_begun_again_without_an_exception() -> None:
    guest = Guest()
    with answering(guest) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        with sandbox.attempt() as trial:
            for _ in range(3):
                sandbox.commands.run("x")
                trial.rewind()
            sandbox.commands.run("x")
    assert (guest.count, guest.kept) == (1, {})


def test_an_attempt_that_cannot_be_undone_says_so_and_keeps_its_checkpoint() -> None:
    guest = Guest(rewinds=False)
    with answering(guest) as server, Controller(server.url) as controller:
        with pytest.raises(KeyError) as caught:
            with Sandbox.connect("sb-0", None, controller=controller).attempt():
                raise KeyError
    (name,) = guest.kept
    assert caught.value.__notes__ == [f"sb-0 could not be rewound to its checkpoint {name}: It would not"]


async def test_an_attempt_with_asyncio() -> None:
    guest = Guest()
    with answering(guest) as server:
        from forkd import AsyncController

        async with AsyncController(server.url) as controller:
            sandbox = await AsyncSandbox.connect("sb-0", None, controller=controller)
            async with sandbox.attempt():
                await sandbox.commands.run("x")
            with pytest.raises(KeyError):
                async with sandbox.attempt() as trial:
                    await sandbox.commands.run("x")
                    await trial.rewind()
                    raise KeyError
    assert (guest.count, guest.kept) == (1, {})


def test_after_a_promotion_the_sandbox_has_its_childs_snapshot_and_the_children_are_let_go() -> None:
    gone = Reply(404, {"error": "gone", "code": "not_found", "hint": None})
    promoted = Reply(200, INFO | {"snapshot_tag": "b"})
    replies = [Reply(200, INFO), Reply(201, CHILDREN), promoted, Reply(200, {"removed": []}), gone, gone]
    with recording(*replies) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        with sandbox.fork(2, None) as children:
            assert sandbox.promote(children[1])["id"] == "sb-0"
        assert (sandbox.id, sandbox.tag) == ("sb-0", "b")
    assert asked(server)[2] == ("POST", "/v1/sandboxes/sb-0/promote")
    assert server.seen[2].json == {"child": "sb-2"}


def test_checkpoints_are_named_listed_and_deleted() -> None:
    point = {"name": "a", "tag": "c-1", "created_at_unix": 1, "status": "ready", "pause_ms": 3}
    replies = [Reply(200, INFO), Reply(201, point), Reply(200, [point]), Reply(200, INFO), Reply(204), Reply(204)]
    with recording(*replies) as server, Controller(server.url) as controller:
        sandbox = Sandbox.connect("sb-0", None, controller=controller)
        assert sandbox.checkpoint("a") == point and sandbox.checkpoints() == [point]
        sandbox.rewind()
        sandbox.delete_checkpoint("a")
        assert sandbox.kill()
    assert asked(server)[1:5] == [
        ("POST", "/v1/sandboxes/sb-0/checkpoints"),
        ("GET", "/v1/sandboxes/sb-0/checkpoints"),
        ("POST", "/v1/sandboxes/sb-0/rewind"),
        ("DELETE", "/v1/sandboxes/sb-0/checkpoints/a"),
    ]
    assert server.seen[3].json == {}


def test_what_is_gone_cannot_be_rewound() -> None:
    gone = Reply(404, {"error": "There is no checkpoint x", "code": "not_found", "hint": None})
    with recording(Reply(200, INFO), gone) as server, Controller(server.url) as controller:
        with pytest.raises(NotFound, match="no checkpoint x"):
            Sandbox.connect("sb-0", None, controller=controller).rewind("x")
