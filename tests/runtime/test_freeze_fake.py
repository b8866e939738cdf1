"""Making a snapshot, over the fake engine: it is there whole, or the reason is told and nothing is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support_images import make_image

from forkd.engines.fake import FakeEngine
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NoCapacity, WarmupFailed
from forkd.host.paths import Home
from forkd.image import Image
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime import warmup as warming
from forkd.runtime.admission import Capacity
from forkd.runtime.freeze import create_snapshot, frozen_of
from forkd.runtime.spawn import fork_one, new_identities
from forkd.runtime.warmup import MAX_WARM_BYTES, Warmup
from forkd.store.snapshots import Snapshot, SnapshotStore

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG = parse_tag("warm")
MACHINE = MachineSpec(256)


class Stages:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def stage(self, text: str) -> None:
        self.seen.append(text)

    def line(self, text: str) -> None:
        pass


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return make_image(Home(tmp_path / "home", tmp_path / "run"))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "home/snapshots")


def create(store: SnapshotStore, image: Image, run: Path, warmup: Warmup, *, replace: bool = False) -> Snapshot:
    work = create_snapshot(FakeEngine(), store, image, TAG, MACHINE, warmup, run, replace=replace, progress=Stages())
    return asyncio.run(work)


def refuse(store: SnapshotStore, image: Image, run: Path, warmup: Warmup) -> ForkdError:
    """The error; and nothing is half made."""
    with pytest.raises(ForkdError) as caught:
        create(store, image, run, warmup)
    assert list(store.root.iterdir()) == []
    return caught.value


def test_a_warmed_parent_becomes_a_snapshot_that_can_be_forked(
    store: SnapshotStore, image: Image, run_directory: Path
) -> None:
    warmup = Warmup("past = 41\n", "echo warm > /dev/null")
    snapshot = create(store, image, run_directory, warmup)
    manifest = snapshot.manifest
    assert (manifest.tag, manifest.image_id, manifest.engine, manifest.machine) == (TAG, image.id, "fake", MACHINE)
    assert manifest.warm == "past = 41\n; $ echo warm > /dev/null"

    async def body() -> None:
        with store.held(TAG) as held:
            child = await fork_one(FakeEngine(), frozen_of(held, image), new_identities(1)[0], run_directory)
            assert (await child.agent.eval("past + 1")).value == 42
            await child.kill()

    asyncio.run(body())


def test_a_warm_up_that_raises_is_shown_with_its_traceback(
    store: SnapshotStore, image: Image, run_directory: Path
) -> None:
    error = refuse(store, image, run_directory, Warmup("def load():\n    return {}['model']\nload()\n"))
    assert isinstance(error, WarmupFailed)
    assert error.message == "The warm-up raised KeyError: 'model'"
    assert "in load" in (error.details or "") and "line 2" in (error.details or "")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("this is no python", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("import os; os._exit(3)", "InterpreterDied"),
    ],
)
def test_a_warm_up_that_fails_otherwise_is_named(
    store: SnapshotStore, image: Image, run_directory: Path, code: str, said: str
) -> None:
    error = refuse(store, image, run_directory, Warmup(code))
    assert isinstance(error, WarmupFailed)
    assert said in error.message


@pytest.mark.parametrize(
    "warmup",
    [
        Warmup("while True: pass", timeout_s=0.3),
        Warmup("import time; time.sleep(60)", timeout_s=0.3),
        Warmup(command="sleep 60", timeout_s=0.3),
    ],
    ids=["busy", "asleep", "command"],
)
def test_a_warm_up_that_hangs_is_stopped(
    store: SnapshotStore, image: Image, run_directory: Path, warmup: Warmup
) -> None:
    error = refuse(store, image, run_directory, warmup)
    assert isinstance(error, WarmupFailed)
    assert "did not finish within 0.3 s" in error.message
    assert error.hint is not None and "--warm-timeout" in error.hint


def test_a_warm_command_that_fails_is_shown_with_its_output(
    store: SnapshotStore, image: Image, run_directory: Path
) -> None:
    error = refuse(store, image, run_directory, Warmup(command="echo nearly; echo there >&2; exit 4"))
    assert isinstance(error, WarmupFailed)
    assert error.message == "The warm-up command exited with 4"
    assert error.details == "nearly\nthere\n"


def test_a_warm_command_that_is_killed_is_shown_with_the_signal(
    store: SnapshotStore, image: Image, run_directory: Path
) -> None:
    error = refuse(store, image, run_directory, Warmup(command="kill -9 $$"))
    assert isinstance(error, WarmupFailed)
    assert error.message == "The warm-up command was killed by signal 9"


def test_a_guest_that_dies_while_it_is_warmed_is_explained(
    store: SnapshotStore, image: Image, run_directory: Path
) -> None:
    error = refuse(store, image, run_directory, Warmup("import os; os.kill(os.getppid(), 9)"))
    assert isinstance(error, GuestDied)
    assert "while the parent was prepared: crashed (killed by SIGKILL)" in error.message


def test_a_boot_that_does_not_fit_is_refused(
    store: SnapshotStore, image: Image, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "look", lambda: Capacity(600, 2))
    assert isinstance(refuse(store, image, run_directory, Warmup()), NoCapacity)


def test_a_failed_replacement_keeps_the_old_snapshot(store: SnapshotStore, image: Image, run_directory: Path) -> None:
    create(store, image, run_directory, Warmup("past = 1"))
    with pytest.raises(Conflict):
        create(store, image, run_directory, Warmup("past = 2"))
    with pytest.raises(WarmupFailed):
        create(store, image, run_directory, Warmup("1 / 0"), replace=True)
    assert store.get(TAG).manifest.warm == "past = 1"
    create(store, image, run_directory, Warmup("past = 2"), replace=True)
    assert store.get(TAG).manifest.warm == "past = 2"
    assert [path.name for path in store.root.iterdir()] == ["warm"]


def test_a_cancelled_warm_up_leaves_nothing(store: SnapshotStore, image: Image, run_directory: Path) -> None:
    stages = Stages()

    async def body() -> None:
        warmup = Warmup("import time; time.sleep(60)")
        work = create_snapshot(FakeEngine(), store, image, TAG, MACHINE, warmup, run_directory, progress=stages)
        task = asyncio.create_task(work)
        while "warming up" not in stages.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 86401])
def test_a_time_limit_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidInput, match="no time limit"):
        Warmup("1", timeout_s=timeout_s)


def test_a_warm_up_too_large_or_not_text_is_refused() -> None:
    Warmup("#" * MAX_WARM_BYTES)
    with pytest.raises(InvalidInput, match="larger than"):
        Warmup("#" * (MAX_WARM_BYTES + 1))
    with pytest.raises(InvalidInput, match="larger than"):
        Warmup(command="ü" * (MAX_WARM_BYTES // 2 + 1))
    with pytest.raises(InvalidInput, match="not UTF-8"):
        Warmup("x = '\udcff'")
