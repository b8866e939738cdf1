"""Making a snapshot, over the fake engine: it is there whole, or the reason is told and nothing is."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from support_images import make_image

from forkd.engines.fake import FakeEngine
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NoCapacity, WarmupFailed
from forkd.host.paths import Home
from forkd.image import Image
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime import freeze as warming
from forkd.runtime.admission import Capacity
from forkd.runtime.fork import fork_one, new_identities
from forkd.runtime.freeze import MAX_WARM_BYTES, Warmup, create_snapshot, frozen_of
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


@dataclass(frozen=True)
class Bench:
    """A store, an image, and a place to run."""

    store: SnapshotStore
    image: Image
    run: Path

    async def create(self, warmup: Warmup, *, replace: bool = False, progress: Stages | None = None) -> Snapshot:
        return await create_snapshot(
            FakeEngine(),
            self.store,
            self.image,
            TAG,
            MACHINE,
            warmup,
            self.run,
            replace=replace,
            progress=progress or Stages(),
        )

    async def refuse(self, warmup: Warmup, kind: type[ForkdError] = WarmupFailed) -> ForkdError:
        """The error; and nothing is half made."""
        with pytest.raises(ForkdError) as caught:
            await self.create(warmup)
        assert list(self.store.root.iterdir()) == []
        assert isinstance(caught.value, kind)
        return caught.value


@pytest.fixture
def bench(tmp_path: Path, run_directory: Path) -> Bench:
    image = make_image(Home(tmp_path / "home", tmp_path / "run"))
    return Bench(SnapshotStore(tmp_path / "home/snapshots"), image, run_directory)


async def test_a_warmed_parent_becomes_a_snapshot_that_can_be_forked(bench: Bench) -> None:
    manifest = (await bench.create(Warmup("past = 41\n", "echo warm > /dev/null"))).manifest
    assert (manifest.tag, manifest.image_id, manifest.engine) == (TAG, bench.image.id, "fake")
    assert manifest.machine == MACHINE
    assert manifest.warm == "past = 41\n; $ echo warm > /dev/null"
    with bench.store.held(TAG) as held:
        child = await fork_one(FakeEngine(), frozen_of(held, bench.image), new_identities(1)[0], bench.run)
        assert (await child.agent.eval("past + 1")).value == 42
        await child.kill()


async def test_a_warm_up_that_raises_is_shown_with_its_traceback(bench: Bench) -> None:
    error = await bench.refuse(Warmup("def load():\n    return {}['model']\nload()\n"))
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
async def test_a_warm_up_that_fails_otherwise_is_named(bench: Bench, code: str, said: str) -> None:
    assert said in (await bench.refuse(Warmup(code))).message


@pytest.mark.parametrize(
    "warmup",
    [
        Warmup("while True: pass", timeout_s=0.3),
        Warmup("import time; time.sleep(60)", timeout_s=0.3),
        Warmup(command="sleep 60", timeout_s=0.3),
    ],
    ids=["busy", "asleep", "command"],
)
async def test_a_warm_up_that_hangs_is_stopped(bench: Bench, warmup: Warmup) -> None:
    error = await bench.refuse(warmup)
    assert "did not finish within 0.3 s" in error.message
    assert error.hint is not None and "--warm-timeout" in error.hint


@pytest.mark.parametrize(
    ("command", "message", "details"),
    [
        ("echo nearly; echo there >&2; exit 4", "The warm-up command exited with 4", "nearly\nthere\n"),
        ("kill -9 $$", "The warm-up command was killed by signal 9", None),
    ],
    ids=["exited", "killed"],
)
async def test_a_warm_command_that_fails_is_shown_with_its_end_and_its_output(
    bench: Bench, command: str, message: str, details: str | None
) -> None:
    error = await bench.refuse(Warmup(command=command))
    assert error.message == message
    assert details is None or error.details == details


async def test_a_guest_that_dies_while_it_is_warmed_is_explained(bench: Bench) -> None:
    error = await bench.refuse(Warmup("import os; os.kill(os.getppid(), 9)"), GuestDied)
    assert "while the parent was prepared: crashed (killed by SIGKILL)" in error.message


async def test_a_boot_that_does_not_fit_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "look", lambda: Capacity(600, 2))
    await bench.refuse(Warmup(), NoCapacity)


async def test_a_failed_replacement_keeps_the_old_snapshot(bench: Bench) -> None:
    await bench.create(Warmup("past = 1"))
    with pytest.raises(Conflict):
        await bench.create(Warmup("past = 2"))
    with pytest.raises(WarmupFailed):
        await bench.create(Warmup("1 / 0"), replace=True)
    assert bench.store.get(TAG).manifest.warm == "past = 1"
    await bench.create(Warmup("past = 2"), replace=True)
    assert bench.store.get(TAG).manifest.warm == "past = 2"
    assert [path.name for path in bench.store.root.iterdir()] == ["warm"]


async def test_a_cancelled_warm_up_leaves_nothing(bench: Bench) -> None:
    stages = Stages()
    task = asyncio.create_task(bench.create(Warmup("import time; time.sleep(60)"), progress=stages))
    while "warming up" not in stages.seen:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(bench.store.root.iterdir()) == []


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 86401])
def test_a_timeout_out_of_range_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidInput, match="warm-up timeout must be above 0 and at most 86400 seconds, got"):
        Warmup("1", timeout_s=timeout_s)


def test_a_warm_up_too_large_or_not_text_is_refused() -> None:
    Warmup("#" * MAX_WARM_BYTES)
    with pytest.raises(InvalidInput, match="larger than"):
        Warmup("#" * (MAX_WARM_BYTES + 1))
    with pytest.raises(InvalidInput, match="larger than"):
        Warmup(command="ü" * (MAX_WARM_BYTES // 2 + 1))
    with pytest.raises(InvalidInput, match="not UTF-8"):
        Warmup("x = '\udcff'")
