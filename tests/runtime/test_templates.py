"""Templates: when one is made, used and ended, and that without it everything works."""

import asyncio
import logging
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runtime_cases import LiveFakeEngine, evaluate, make, opened, tags, template_places, until, until_ready

from forkd.engines.base import Way
from forkd.errors import (
    Conflict,
    ContractBroken,
    EngineFailed,
    ForkdError,
    GuestDied,
    NoCapacity,
    NotForkable,
    NotFound,
    Unsupported,
    WarmupFailed,
)
from forkd.host.paths import Home
from forkd.model.machine import Limits
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec
from forkd.runtime import freeze as rehearsal
from forkd.runtime import templates as module
from forkd.runtime.origin import (
    EXPECTED_MIB,
    MAX_FAILURES,
    Key,
    Template,
    TemplatePolicy,
    choose_to_end,
    find_key,
    fits,
)
from forkd.runtime.runtime import Runtime

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG = parse_tag("warm")
SPEC = SandboxSpec(TAG)
MIB = 2**20


@pytest.fixture(autouse=True)
def no_kernel_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake guest's is ours."""
    monkeypatch.setattr(rehearsal, "SETTLE_S", 0.0)


# Who has to go: pure


def template(tag: str, used_at: float, memory_mib: int = 100, *, busy: bool = False) -> Template:
    key = Key(Path(tag), 1, 1)
    alive = cast(Any, SimpleNamespace(death=SimpleNamespace(done=lambda: False)))
    made = Template(key, tag, alive, cast(Any, None), memory_mib * MIB, 0.5, used_at=used_at)
    made._spawns = int(busy)
    return made


def chosen(templates: list[Template], policy: TemplatePolicy, **more: float) -> list[str]:
    return [each.tag for each in choose_to_end(templates, policy, **more)]


def test_nobody_has_to_go_as_long_as_one_more_fits() -> None:
    assert chosen([], TemplatePolicy(1, EXPECTED_MIB)) == []
    assert chosen([template("a", 1.0), template("b", 2.0)], TemplatePolicy(3, 1024)) == []


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    three = [template("b", 2.0), template("c", 3.0), template("a", 1.0)]
    assert chosen(three, TemplatePolicy(3, 9999)) == ["a"]
    assert chosen(three, TemplatePolicy(2, 9999)) == ["a", "b"]
    assert chosen(three, TemplatePolicy(1, 9999)) == ["a", "b", "c"]


def test_memory_is_room_too() -> None:
    two = [template("a", 1.0, 300), template("b", 2.0, 100)]
    assert chosen(two, TemplatePolicy(9, 400 + EXPECTED_MIB)) == []
    assert chosen(two, TemplatePolicy(9, 400 + EXPECTED_MIB - 1)) == ["a"]
    assert chosen(two, TemplatePolicy(9, 400), need_mib=301) == ["a", "b"]
    assert chosen(two, TemplatePolicy(9, 400), need_mib=300) == ["a"]


def test_one_that_is_in_use_is_never_ended() -> None:
    two = [template("a", 1.0, busy=True), template("b", 2.0)]
    assert chosen(two, TemplatePolicy(2, 9999)) == ["b"]
    assert chosen([template("a", 1.0, busy=True)], TemplatePolicy(1, 9999)) == []


def test_nobody_goes_in_vain() -> None:
    two = [template("a", 1.0, 900, busy=True), template("b", 2.0)]
    assert chosen(two, TemplatePolicy(9, 1000)) == []
    assert chosen([template("a", 1.0)], TemplatePolicy(4, 1024), need_mib=1025) == []
    assert not fits([], TemplatePolicy(0, 1024), 1)


def test_one_is_busy_while_a_spawn_uses_it() -> None:
    one = template("a", 1.0)
    with one.in_use():
        assert one.busy
    assert not one.busy and one.used_at > 1.0


def test_a_snapshot_is_the_same_when_its_files_were_verified_and_another_when_it_was_made_again(tmp_path: Path) -> None:
    directory = tmp_path / "warm"
    directory.mkdir()
    assert find_key(directory) is None
    (directory / "manifest.json").write_text("{}")
    key = find_key(directory)
    (directory / ".verified").write_text("{}")
    os.utime(directory, (1, 1))
    assert key is not None and find_key(directory) == key
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "manifest.json").write_text("{}")
    os.utime(directory / "manifest.json", (1, 1))
    assert find_key(directory) != key


# Their life, over the fake engine


@pytest.fixture
def engine() -> LiveFakeEngine:
    return LiveFakeEngine()


async def ways(runtime: Runtime, n: int = 1, **more: Any) -> list[Way]:
    spawned = await runtime.spawn(SandboxSpec(TAG, n=n, **more))
    assert [record.way for record in spawned.records] == list(spawned.ways)
    assert [runtime.sandboxes.get(record.id).way for record in spawned.records] == list(spawned.ways)
    return list(spawned.ways)


async def test_the_first_fork_is_started_and_has_a_template_made_for_the_next(runtime: Runtime) -> None:
    assert runtime.templates.views() == []
    assert await ways(runtime, 2) == [Way.START] * 2
    view = await until_ready(runtime, "warm")
    assert (view.tag, view.forks) == ("warm", 0)
    assert view.memory_bytes > 0 and view.made_in_s > 0
    assert await ways(runtime, 3) == [Way.FORK] * 3
    [after] = runtime.templates.views()
    assert (after.pid, after.forks) == (view.pid, 3)
    assert (runtime.templates.made, runtime.templates.failed) == (1, 0)


async def test_a_template_is_made_ahead_and_once_however_often_it_is_asked_for(runtime: Runtime) -> None:
    views = await asyncio.gather(*(runtime.snapshots.warm("warm") for _ in range(3)))
    assert len({view.pid for view in views}) == 1
    assert (await runtime.snapshots.warm("warm")).pid == views[0].pid
    assert runtime.templates.made == 1
    assert await ways(runtime) == [Way.FORK]
    with pytest.raises(NotFound):
        await runtime.snapshots.warm("nothing")


async def test_without_templates_every_fork_is_started(fake_home: Home, engine: LiveFakeEngine) -> None:
    async with opened(fake_home, engine, templates=TemplatePolicy(count=0)) as runtime:
        assert await ways(runtime, 2) == [Way.START] * 2
        assert await ways(runtime) == [Way.START]
        with pytest.raises(Unsupported, match="templates = 0") as caught:
            await runtime.snapshots.warm("warm")
        assert caught.value.hint is not None and "forkd doctor" in caught.value.hint
        assert tags(runtime) == [] and engine.most_at_once == 0


async def test_with_too_little_memory_for_one_there_are_none(fake_home: Home, engine: LiveFakeEngine) -> None:
    async with opened(fake_home, engine, templates=TemplatePolicy(memory_mib=EXPECTED_MIB - 1)) as runtime:
        assert await ways(runtime) == [Way.START]
        with pytest.raises(Unsupported, match="template_memory_mib = 127"):
            await runtime.snapshots.warm("warm")
        assert engine.most_at_once == 0


async def test_an_engine_that_cannot_fork_live_vms_has_none(fake_home: Home) -> None:
    async with opened(fake_home) as runtime:
        assert await ways(runtime) == [Way.START]
        with pytest.raises(Unsupported, match="the engine fake cannot do it yet"):
            await runtime.snapshots.warm("warm")


async def test_when_there_are_too_many_the_least_recently_used_ends(fake_home: Home, engine: LiveFakeEngine) -> None:
    async with opened(fake_home, engine, templates=TemplatePolicy(count=2)) as runtime:
        await make(runtime, "second")
        await make(runtime, "third")
        for tag in ("warm", "second"):
            await runtime.snapshots.warm(tag)
        assert await ways(runtime) == [Way.FORK]  # warm is used last
        await runtime.snapshots.warm("third")
        assert tags(runtime) == ["third", "warm"]
        assert len(template_places(runtime.home)) == 2


async def test_they_are_made_one_at_a_time_and_never_more_than_allowed(fake_home: Home, engine: LiveFakeEngine) -> None:
    async with opened(fake_home, engine, templates=TemplatePolicy(count=2)) as runtime:
        await make(runtime, "second")
        await make(runtime, "third")
        await asyncio.gather(*(runtime.snapshots.warm(tag) for tag in ("warm", "second", "third")))
        assert engine.most_at_once == 1
        assert len(tags(runtime)) == len(template_places(runtime.home)) == 2


async def test_one_that_takes_more_than_expected_ends_others_and_one_that_takes_too_much_is_not_kept(
    fake_home: Home, engine: LiveFakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([200, 520, 1100])
    monkeypatch.setattr(module, "_measure", lambda _: next(sizes) * MIB)
    async with opened(fake_home, engine, templates=TemplatePolicy(memory_mib=650)) as runtime:
        await make(runtime, "second")
        await make(runtime, "third")
        await runtime.snapshots.warm("warm")
        await runtime.snapshots.warm("second")
        assert tags(runtime) == ["second"]
        with pytest.raises(NoCapacity, match="no room for a template of 1100 MiB"):
            await runtime.snapshots.warm("third")
        assert tags(runtime) == ["second"]
        assert len(template_places(runtime.home)) == 1


async def test_one_that_a_spawn_uses_is_not_ended_for_another(fake_home: Home, engine: LiveFakeEngine) -> None:
    async with opened(fake_home, engine, templates=TemplatePolicy(count=1)) as runtime:
        await make(runtime, "second")
        await runtime.snapshots.warm("warm")
        engine.may_fork.clear()
        spawning = asyncio.create_task(ways(runtime, 2))
        await until(lambda: engine.forking, "the fork")
        with pytest.raises(NoCapacity, match="in use") as caught:
            await runtime.snapshots.warm("second")
        assert caught.value.hint is not None and "templates" in caught.value.hint
        engine.may_fork.set()
        assert await spawning == [Way.FORK] * 2
        assert (await runtime.snapshots.warm("second")).tag == "second"
        assert tags(runtime) == ["second"]


async def test_a_template_ends_with_its_snapshot(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    await until_ready(runtime, "warm")
    (forked,) = (await runtime.spawn(SPEC)).records
    await runtime.snapshots.remove("warm")
    assert template_places(runtime.home) == []
    for one in (record, forked):
        assert await evaluate(runtime, one.id, "x") == 41


async def test_a_template_that_is_being_made_ends_with_its_snapshot(runtime: Runtime, engine: LiveFakeEngine) -> None:
    engine.may_make.clear()
    await runtime.spawn(SPEC)
    await until(lambda: engine.making, "the template")
    await runtime.snapshots.remove("warm")
    assert engine.making == 0
    engine.may_make.set()
    await make(runtime, "warm")
    assert await ways(runtime) == [Way.START]
    await until_ready(runtime, "warm")


async def test_a_snapshot_that_is_in_use_keeps_its_template(runtime: Runtime) -> None:
    pid = (await runtime.snapshots.warm("warm")).pid
    async with runtime.snapshots.held(TAG):
        with pytest.raises(Conflict):
            await runtime.snapshots.remove("warm")
    assert [view.pid for view in runtime.templates.views()] == [pid]


async def test_the_template_of_what_was_replaced_ends_and_no_fork_comes_from_it(runtime: Runtime) -> None:
    old = await runtime.snapshots.warm("warm")
    await make(runtime, "warm", "x = 1", replace=True)
    spawned = await runtime.spawn(SPEC)
    assert spawned.ways == (Way.START,)
    assert await evaluate(runtime, spawned.records[0].id, "x") == 1
    new = await until_ready(runtime, "warm")
    assert new.pid != old.pid
    await until(lambda: len(template_places(runtime.home)) == 1, "the end of the old one")
    (record,) = (await runtime.spawn(SPEC)).records
    assert record.way is Way.FORK
    assert await evaluate(runtime, record.id, "x") == 1


async def test_one_of_the_snapshot_that_is_there_is_not_dropped_with_that_of_the_one_before(runtime: Runtime) -> None:
    pid = (await runtime.snapshots.warm("warm")).pid
    await runtime.templates.drop(runtime.snapshots.store.root / "warm")
    assert [view.pid for view in runtime.templates.views()] == [pid]


async def test_a_template_that_is_killed_is_noticed_and_made_again(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    killed = await runtime.snapshots.warm("warm")
    os.kill(killed.pid, signal.SIGKILL)
    await until(lambda: tags(runtime) == [], "its death")
    assert await ways(runtime) == [Way.START]
    assert (await until_ready(runtime, "warm")).pid != killed.pid
    assert await ways(runtime) == [Way.FORK]
    assert len(template_places(runtime.home)) == 1
    assert "The template of snapshot warm ended" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"), [(EngineFailed("no"), logging.WARNING), (GuestDied("no"), logging.WARNING)], ids=repr
)
async def test_one_that_cannot_be_made_is_told_in_the_log_and_not_tried_again_at_once(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture, error: ForkdError, level: int
) -> None:
    engine.template_errors = [error]
    assert await ways(runtime) == [Way.START]
    await until(lambda: runtime.templates.failed, "its failure")
    assert await ways(runtime, 2) == [Way.START] * 2
    await asyncio.sleep(0.05)
    assert engine.making == 0 and tags(runtime) == []
    # Who asks for it gets it.
    await runtime.snapshots.warm("warm")
    assert await ways(runtime) == [Way.FORK]
    [record] = [record for record in caplog.records if "No template for snapshot warm: no" in record.message]
    assert record.levelno == level


async def test_one_that_could_not_be_made_is_tried_again_after_a_while(
    runtime: Runtime, engine: LiveFakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    engine.template_errors = [EngineFailed("no")]
    await runtime.spawn(SPEC)
    await until(lambda: runtime.templates.failed, "its failure")
    await runtime.spawn(SPEC)
    await until_ready(runtime, "warm")


async def test_who_asks_for_one_that_cannot_be_made_is_told_and_the_log_is_not(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.template_errors = [EngineFailed("no"), ZeroDivisionError("a mistake of ours")]
    with pytest.raises(EngineFailed, match="no"):
        await runtime.snapshots.warm("warm")
    with pytest.raises(ZeroDivisionError):
        await runtime.snapshots.warm("warm")
    assert template_places(runtime.home) == []
    assert "No template" not in caplog.text and "failed" not in caplog.text


async def test_a_mistake_while_one_is_made_costs_no_spawn_and_is_in_the_log(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.template_errors = [ZeroDivisionError("a mistake of ours")]
    assert await ways(runtime) == [Way.START]
    await until(lambda: runtime.templates.failed, "its failure")
    assert "Making a template for snapshot warm failed" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_without_memory_for_one_forks_are_started(
    runtime: Runtime, engine: LiveFakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_mib", lambda: 512 + EXPECTED_MIB - 1)
    with pytest.raises(NoCapacity, match="A template needs about 128 MiB"):
        await runtime.snapshots.warm("warm")
    assert await ways(runtime) == [Way.START]
    assert engine.most_at_once == 0


@pytest.mark.parametrize(
    "error", [NotForkable("busy"), EngineFailed("its process is gone"), ProcessLookupError("no such process")], ids=repr
)
async def test_a_fork_that_fails_is_started_instead(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    await runtime.snapshots.warm("warm")
    engine.fork_errors = [error]
    assert sorted(await ways(runtime, 2), key=lambda way: way.value) == [Way.FORK, Way.START]
    assert await ways(runtime) == [Way.FORK]  # one failure is no reason to give it up
    assert caplog.text.count("is started the slower way") == 1


async def test_one_whose_forks_fail_again_and_again_is_ended(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await runtime.snapshots.warm("warm")
    engine.fork_errors = [NotForkable("busy") for _ in range(9)]
    assert await ways(runtime, 9) == [Way.START] * 9
    assert await ways(runtime) == [Way.START]
    await until(lambda: template_places(runtime.home) == [], "its end")
    assert runtime.templates.failed == 1
    assert "The template of snapshot warm is ended: its forks failed" in caplog.text


async def test_one_whose_forks_prove_nothing_is_ended_and_forks_are_started(
    runtime: Runtime, engine: LiveFakeEngine
) -> None:
    await runtime.snapshots.warm("warm")
    engine.broken = True
    for _ in range(MAX_FAILURES):
        with pytest.raises(GuestDied):
            await runtime.spawn(SPEC)
    assert await ways(runtime) == [Way.START]
    assert tags(runtime) == []


def test_what_a_limited_fork_fails_of_is_not_the_templates_fault() -> None:
    one = template("a", 1.0)
    for limits in (Limits(memory_mib=1), Limits(cpus=0.01)):
        for _ in range(MAX_FAILURES):
            with pytest.raises(ContractBroken), one.judged(limits):
                raise ContractBroken("too slow")
    assert one.usable


async def test_nothing_is_made_once_the_daemon_stops(runtime: Runtime, engine: LiveFakeEngine) -> None:
    engine.may_make.clear()
    asked = asyncio.create_task(runtime.snapshots.warm("warm"))
    await until(lambda: engine.making, "the template")
    await runtime.templates.close()
    with pytest.raises(Conflict, match="given up"):
        await asked
    engine.may_make.set()
    assert await ways(runtime) == [Way.START]
    assert engine.making == 0 and tags(runtime) == []
    with pytest.raises(NoCapacity, match="stopping"):
        await runtime.snapshots.warm("warm")


async def test_a_spawn_under_way_is_finished_without_a_template_that_is_ended(
    runtime: Runtime, engine: LiveFakeEngine
) -> None:
    await runtime.snapshots.warm("warm")
    engine.may_fork.clear()
    spawning = asyncio.create_task(ways(runtime, 6))
    await until(lambda: engine.forking, "the first forks")
    begun = engine.forking
    closing = asyncio.create_task(runtime.templates.close())
    await asyncio.sleep(0.05)
    assert not closing.done(), "it ends when no fork is under way"
    engine.may_fork.set()
    await closing
    made = await spawning
    assert made.count(Way.FORK) == begun and made.count(Way.START) == 6 - begun


async def test_who_goes_away_while_one_is_made_does_not_undo_it(runtime: Runtime, engine: LiveFakeEngine) -> None:
    engine.may_make.clear()
    asked = asyncio.create_task(runtime.snapshots.warm("warm"))
    await until(lambda: engine.making, "the template")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    engine.may_make.set()
    await until_ready(runtime, "warm")


async def test_a_failure_that_nobody_waits_for_any_more_is_in_the_log(
    runtime: Runtime, engine: LiveFakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.may_make.clear()
    engine.template_errors = [EngineFailed("no")]
    asked = asyncio.create_task(runtime.snapshots.warm("warm"))
    await until(lambda: engine.making, "the template")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    engine.may_make.set()
    await until(lambda: runtime.templates.failed, "its failure")
    assert "No template for snapshot warm: no" in caplog.text


async def test_a_snapshot_that_vanishes_has_no_template(runtime: Runtime, engine: LiveFakeEngine) -> None:
    async with runtime.snapshots.held(TAG) as origin:
        frozen = origin.frozen
        assert frozen is not None
        shutil.rmtree(frozen.directory)
        assert runtime.templates.find(frozen) is None
        runtime.templates.want(frozen, TAG)
        with pytest.raises(NotFound):
            await runtime.templates.warm(frozen, TAG)
    assert engine.most_at_once == 0


async def test_one_that_dies_while_it_is_measured_is_an_error_and_leaves_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(pid: int) -> None:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(module, "memory_use", gone)
    with pytest.raises(GuestDied, match="ended while it was made"):
        await runtime.snapshots.warm("warm")
    assert template_places(runtime.home) == []


# The rehearsal


async def rehearsed(runtime: Runtime, code: str) -> None:
    await make(runtime, "second", "past = 41", rehearsal=code)
    await runtime.snapshots.warm("second")


async def test_what_a_rehearsal_raises_is_no_reason_to_do_without(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    await rehearsed(runtime, "1 / 0")
    assert tags(runtime) == ["second"]
    assert caplog.text.count("A rehearsal raised ZeroDivisionError") == 1


async def test_no_fork_comes_from_an_interpreter_that_lost_its_past(runtime: Runtime) -> None:
    with pytest.raises(WarmupFailed, match="ended the interpreter"):
        await rehearsed(runtime, "import os; os._exit(3)")
    assert tags(runtime) == [] and template_places(runtime.home) == []
    spawned = await runtime.spawn(SandboxSpec(parse_tag("second")))
    assert await evaluate(runtime, spawned.records[0].id, "past") == 41


async def test_a_rehearsal_that_does_not_end_is_an_error(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "REHEARSAL_S", 0.2)
    with pytest.raises(WarmupFailed, match=r"did not finish within 0\.2 s"):
        await rehearsed(runtime, "import time; time.sleep(60)")
    assert template_places(runtime.home) == []


async def test_a_rehearsal_is_kept_with_its_snapshot(runtime: Runtime) -> None:
    await make(runtime, "second", rehearsal="past + 1")
    async with runtime.snapshots.held(parse_tag("second")) as origin:
        assert origin.frozen is not None and origin.frozen.rehearsal == "past + 1"
    manifest = runtime.snapshots.get("second").manifest
    assert manifest is not None and manifest.rehearsal == "past + 1"
