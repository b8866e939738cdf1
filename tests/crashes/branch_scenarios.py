"""What the daemon is killed in the middle of: each is prepared, done, and looked at by the next daemon, done again."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from agreement import check_values, read_value, write_value

from forkd.client.controller import Controller
from forkd.errors import NotFound

TAG = "warm"
KEPT, LATER = "kept", "later"


class Scenario(ABC):
    """`begin` in one daemon, `act` in the one that dies, `check` and `again` in the one after it."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def act(self) -> None: ...

    @abstractmethod
    def check(self, live: list[str], done: bool) -> None:
        """`done`: it was past the point from which it holds."""

    @abstractmethod
    def again(self) -> None:
        """The same request works."""

    def spawn(self, tag: str = TAG, value: str = KEPT) -> str:
        [made] = self.controller.spawn_sandboxes(tag)
        write_value(self.controller, made["id"], value)
        return str(made["id"])

    def read(self, sandbox_id: str) -> str | None:
        return read_value(self.controller, sandbox_id)

    def status(self, tag: str) -> str | None:
        try:
            return self.controller.get_snapshot(tag)["status"]
        except NotFound:
            return None

    def tags(self) -> set[str]:
        return {view["tag"] for view in self.controller.list_snapshots() if view["status"] == "ready"}


class Branching(Scenario):
    mode = "live"

    def begin(self) -> None:
        self.source = self.spawn()

    def act(self) -> None:
        self.controller.branch_sandbox(self.source, "next", mode=self.mode)

    def check(self, live: list[str], done: bool) -> None:
        assert live == [self.source] and self.read(self.source) == KEPT
        assert self.status("next") == ("ready" if done else "failed")
        write_value(self.controller, self.source, LATER)
        check_values(self.controller, {TAG: None, "next": KEPT})

    def again(self) -> None:
        if self.status("next") == "ready":
            self.controller.delete_snapshot("next")
        self.controller.branch_sandbox(self.source, "next", mode=self.mode)
        check_values(self.controller, {TAG: None, "next": LATER})


class BranchingWhole(Branching):
    mode = "full"


class Forking(Scenario):
    """No tag is left of it."""

    def begin(self) -> None:
        self.source = self.spawn()

    def act(self) -> None:
        self.controller.fork_sandbox(self.source, 2)

    def check(self, live: list[str], done: bool) -> None:
        assert self.source in live and len(live) == (3 if done else 1)
        assert [self.read(each) for each in live] == [KEPT] * len(live)
        if not done:
            assert {view["tag"] for view in self.controller.list_snapshots()} == {TAG}

    def again(self) -> None:
        made = self.controller.fork_sandbox(self.source, 2)
        assert [self.read(each["id"]) for each in made] == [KEPT] * 2


class Rewinding(Scenario):
    def begin(self) -> None:
        self.source = self.spawn()
        self.tag = self.controller.create_checkpoint(self.source, "safe")["tag"]
        self.address = self.controller.get_sandbox(self.source)["guest_addr"]

    def act(self) -> None:
        write_value(self.controller, self.source, LATER)
        self.controller.rewind_sandbox(self.source, "safe")

    def check(self, live: list[str], done: bool) -> None:
        assert live == [self.source] and self.read(self.source) == (KEPT if done else LATER)
        assert self.controller.get_sandbox(self.source)["guest_addr"] == self.address
        assert [each["name"] for each in self.controller.list_checkpoints(self.source)] == ["safe"]
        check_values(self.controller, {TAG: None, self.tag: KEPT})

    def again(self) -> None:
        write_value(self.controller, self.source, "much later")
        self.controller.rewind_sandbox(self.source)
        assert self.read(self.source) == KEPT


class Promoting(Scenario):
    def begin(self) -> None:
        self.source = self.spawn(value=LATER)
        self.children = [row["id"] for row in self.controller.fork_sandbox(self.source, 3)]
        for child in self.children:
            write_value(self.controller, child, KEPT if child == self.children[1] else "worse")

    def act(self) -> None:
        self.controller.promote_sandbox(self.source, self.children[1])

    def check(self, live: list[str], done: bool) -> None:
        assert self.source in live and self.read(self.source) == (KEPT if done else LATER)
        if not done:
            assert set(live) == {self.source, *self.children}

    def again(self) -> None:
        """With a child that is left, or one that is new."""
        left = [row["id"] for row in self.controller.list_sandboxes() if row["parent_id"] == self.source]
        child = self.children[1] if self.children[1] in left else self.controller.fork_sandbox(self.source)[0]["id"]
        self.controller.promote_sandbox(self.source, child)
        assert self.read(self.source) == KEPT
        assert [row["id"] for row in self.controller.list_sandboxes()] == [self.source]


class _Chain(Scenario):
    """warm, next over it, third over that."""

    def begin(self) -> None:
        for tag, over in (("next", TAG), ("third", "next")):
            source = self.spawn(over, value=tag)
            self.controller.branch_sandbox(source, tag, mode="diff")
            self.controller.kill_sandbox(source)


class Compacting(_Chain):
    def act(self) -> None:
        self.controller.compact_snapshot("third", "flat")

    def check(self, live: list[str], done: bool) -> None:
        assert live == [] and self.status("flat") == ("ready" if done else None)
        check_values(self.controller, {TAG: None, "next": "next", "third": "third", "flat": "third"})

    def again(self) -> None:
        self.controller.compact_snapshot("third", "flatter")
        self.controller.delete_snapshot(TAG, cascade=True)
        assert self.tags() <= {"flat", "flatter"}
        check_values(self.controller, {"flat": "third", "flatter": "third"})


class Removing(_Chain):
    def act(self) -> None:
        self.controller.delete_snapshot(TAG, cascade=True)

    def check(self, live: list[str], done: bool) -> None:
        """What is left stands on what is left."""
        assert self.tags() in ({TAG, "next"}, {TAG}, set())
        assert all(view["status"] == "ready" for view in self.controller.list_snapshots())
        check_values(self.controller, {TAG: None, "next": "next"})

    def again(self) -> None:
        if self.tags():
            self.controller.delete_snapshot(TAG, cascade=True)
        assert self.controller.list_snapshots() == []


class Deriving(Scenario):
    def begin(self) -> None:
        pass

    def act(self) -> None:
        self.controller.derive_snapshot(TAG, "next", code=f"y = {KEPT!r}")

    def check(self, live: list[str], done: bool) -> None:
        assert live == [], "what it ran in is nobody's"
        assert self.status("next") in (("ready",) if done else (None, "failed"))
        check_values(self.controller, {TAG: None, "next": KEPT})

    def again(self) -> None:
        if self.status("next") == "ready":
            self.controller.delete_snapshot("next")
        self.act()
        check_values(self.controller, {TAG: None, "next": KEPT})


class _Desk(Scenario):
    """A workspace that has been suspended before, so that there is a state to be replaced."""

    def begin(self) -> None:
        self.controller.create_workspace("desk", TAG)
        self.write("old")
        self.controller.suspend_workspace("desk")
        self.controller.resume_workspace("desk")
        self.write(KEPT)

    def write(self, value: str) -> None:
        write_value(self.controller, str(self.controller.get_workspace("desk")["live_sandbox_id"]), value)

    def read_desk(self) -> str | None:
        desk = self.controller.get_workspace("desk")
        if desk["status"] != "running":
            desk = self.controller.resume_workspace("desk")
        return self.read(str(desk["live_sandbox_id"]))

    def again(self) -> None:
        assert self.read_desk() == KEPT
        self.controller.suspend_workspace("desk")
        assert self.controller.list_sandboxes() == []
        [state] = self.tags() - {TAG}
        check_values(self.controller, {TAG: None, state: KEPT})
        assert self.read_desk() == KEPT
        self.controller.delete_workspace("desk")
        assert self.tags() == {TAG}


class Suspending(_Desk):
    def act(self) -> None:
        self.controller.suspend_workspace("desk")

    def check(self, live: list[str], done: bool) -> None:
        [state] = {view["tag"] for view in self.controller.list_snapshots()} - {TAG}
        check_values(self.controller, {TAG: None, state: KEPT if done else "old"})
        assert len(live) <= 1


class Resuming(_Desk):
    def begin(self) -> None:
        super().begin()
        self.controller.suspend_workspace("desk")

    def act(self) -> None:
        self.controller.resume_workspace("desk")

    def check(self, live: list[str], done: bool) -> None:
        [state] = self.tags() - {TAG}
        check_values(self.controller, {TAG: None, state: KEPT})
        assert len(live) == (1 if done else 0)


class Unpacking(_Chain):
    """Into a home that has nothing, not even the image."""

    pack: Path
    again_in: Callable[[], Controller]

    def act(self) -> None:
        with self.pack.open("rb") as file:
            self.controller.unpack_snapshot(file, trust=True)

    def check(self, live: list[str], done: bool) -> None:
        """Whatever is visible is complete."""
        assert live == []
        check_values(self.controller, {TAG: None, "next": "next", "third": "third"})

    def again(self) -> None:
        self.act()
        assert self.tags() == {TAG, "next", "third"}
        check_values(self.controller, {TAG: None, "next": "next", "third": "third"})
