"""Many sandboxes with one request."""

import pytest
from sdk_daemon import TAG
from support_recording import Reply, recording

from forkd import AsyncSandbox, Controller, NotFound, Sandbox

INFOS = [{"id": f"sb-{number}", "snapshot_tag": "t", "state": "running"} for number in range(3)]


def test_many_are_forked_together_and_killed_at_the_end_of_their_block(daemon: Controller) -> None:
    with Sandbox.create_many(TAG, 3, labels={"batch": "7"}) as sandboxes:
        assert len(sandboxes) == len(daemon.list_sandboxes(labels={"batch": "7"})) == 3
        assert len({sandbox.commands.run("cat /proc/self/stat").stdout for sandbox in sandboxes}) == 3
        assert [sandbox.eval("warmed + 1") for sandbox in sandboxes] == ["42"] * 3
        assert sandboxes[1].kill() is True
    assert daemon.list_sandboxes() == [] and sandboxes.kill() == 0


def test_a_block_of_many_that_raises_kills_them_too(daemon: Controller) -> None:
    with pytest.raises(KeyError):
        with Sandbox.create_many(TAG, 2):
            raise KeyError
    assert daemon.list_sandboxes() == []


def test_many_without_a_block_stay_until_they_are_killed(daemon: Controller) -> None:
    sandboxes = Sandbox.create_many(TAG, 2)
    assert all(sandbox.is_running() for sandbox in sandboxes)
    assert sandboxes.kill() == 2


def test_of_many_that_cannot_all_be_forked_there_is_none(daemon: Controller) -> None:
    with pytest.raises(NotFound):
        Sandbox.create_many("nothing", 2)
    assert daemon.list_sandboxes() == []


async def test_many_with_asyncio(daemon: Controller) -> None:
    async with await AsyncSandbox.create_many(TAG, 3) as sandboxes:
        assert [await sandbox.eval("warmed") for sandbox in sandboxes] == ["41"] * 3
    assert daemon.list_sandboxes() == []


def test_many_are_one_request_and_one_more_to_remove_them() -> None:
    gone = Reply(200, {"removed": [info["id"] for info in INFOS]})
    with recording(Reply(201, INFOS), gone) as server, Controller(server.url) as controller:
        with Sandbox.create_many("t", 3, controller=controller) as sandboxes:
            assert [sandbox.id for sandbox in sandboxes] == ["sb-0", "sb-1", "sb-2"]
    assert [(seen.method, seen.target) for seen in server.seen] == [
        ("POST", "/v1/sandboxes"),
        ("DELETE", "/v1/spawns"),
    ]
    assert server.seen[0].json["n"] == 3 and server.seen[0].json["timeout_secs"] == 300


def test_those_whose_key_the_daemon_has_forgotten_are_killed_one_by_one() -> None:
    with recording(Reply(201, INFOS), Reply(200, {"removed": []}), *[Reply(204)] * 3) as server:
        with Controller(server.url) as controller:
            assert Sandbox.create_many("t", 3, controller=controller).kill() == 3
    assert [seen.target for seen in server.seen[2:]] == [f"/v1/sandboxes/sb-{number}" for number in range(3)]
