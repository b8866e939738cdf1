"""Templates: when one is made, used and ended, and that without it everything works."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from template_cases import DEADLINE_S, LiveFakeEngine, make, tags, template_places, until, until_ready

from forkd.engines.base import Frozen, Way
from forkd.engines.fake import FakeEngine
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
from forkd.model.limits import Limits
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec
from forkd.runtime import rehearsal
from forkd.runtime import templates as module
from forkd.runtime.fleet import Fleet, FleetOptions
from forkd.runtime.templates import (
    EXPECTED_MIB,
    MAX_FAILURES,
    Key,
    Template,
    TemplatePolicy,
    choose_to_end,
    find_key,
    fits,
)

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


def run(
    home: Home,
    work: Callable[[Fleet, LiveFakeEngine], Awaitable[None]],
    policy: TemplatePolicy = module.DEFAULT_POLICY,
) -> None:
    """`work` over a fleet with the snapshot `warm`. However it ends, no template is left."""

    async def inside() -> None:
        engine = LiveFakeEngine()
        options = FleetOptions(on_stop="kill", templates=policy)
        async with asyncio.timeout(DEADLINE_S), Fleet.opened(home, engine, options) as fleet:
            await make(fleet, "warm")
            await work(fleet, engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(inside())
    assert list(home.vms.iterdir()) == []


async def ways(fleet: Fleet, n: int = 1, **more: Any) -> list[Way]:
    spawned = await fleet.spawn(SandboxSpec(TAG, n=n, **more))
    assert [record.way for record in spawned.records] == list(spawned.ways)
    assert [fleet.get(record.id).way for record in spawned.records] == list(spawned.ways)
    return list(spawned.ways)


def test_the_first_fork_is_started_and_has_a_template_made_for_the_next(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        assert fleet.templates.views() == []
        assert await ways(fleet, 2) == [Way.START] * 2
        view = await until_ready(fleet, "warm")
        assert (view.tag, view.forks) == ("warm", 0)
        assert view.memory_bytes > 0 and view.made_in_s > 0
        assert await ways(fleet, 3) == [Way.FORK] * 3
        [after] = fleet.templates.views()
        assert (after.pid, after.forks) == (view.pid, 3)
        assert (fleet.templates.made, fleet.templates.failed) == (1, 0)

    run(fake_home, work)


def test_a_template_is_made_ahead_and_once_however_often_it_is_asked_for(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        views = await asyncio.gather(*(fleet.warm("warm") for _ in range(3)))
        assert len({view.pid for view in views}) == 1
        assert (await fleet.warm("warm")).pid == views[0].pid
        assert fleet.templates.made == 1
        assert await ways(fleet) == [Way.FORK]
        with pytest.raises(NotFound):
            await fleet.warm("nothing")

    run(fake_home, work)


def test_without_templates_every_fork_is_started(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        assert await ways(fleet, 2) == [Way.START] * 2
        assert await ways(fleet) == [Way.START]
        with pytest.raises(Unsupported, match="templates = 0") as caught:
            await fleet.warm("warm")
        assert caught.value.hint is not None and "forkd doctor" in caught.value.hint
        assert tags(fleet) == [] and engine.most_at_once == 0

    run(fake_home, work, TemplatePolicy(count=0))


def test_with_too_little_memory_for_one_there_are_none(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        assert await ways(fleet) == [Way.START]
        with pytest.raises(Unsupported, match="template_memory_mib = 127"):
            await fleet.warm("warm")
        assert engine.most_at_once == 0

    run(fake_home, work, TemplatePolicy(memory_mib=EXPECTED_MIB - 1))


def test_an_engine_that_cannot_fork_live_vms_has_none(fake_home: Home) -> None:
    async def inside() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            Fleet.opened(fake_home, FakeEngine(outlive=True), FleetOptions(on_stop="kill")) as fleet,
        ):
            await make(fleet, "warm")
            assert await ways(fleet) == [Way.START]
            with pytest.raises(Unsupported, match="the engine fake cannot do it yet"):
                await fleet.warm("warm")

    asyncio.run(inside())


def test_when_there_are_too_many_the_least_recently_used_ends(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await make(fleet, "second")
        await make(fleet, "third")
        for tag in ("warm", "second"):
            await fleet.warm(tag)
        assert await ways(fleet) == [Way.FORK]  # warm is used last
        await fleet.warm("third")
        assert tags(fleet) == ["third", "warm"]
        assert len(template_places(fleet.home)) == 2

    run(fake_home, work, TemplatePolicy(count=2))


def test_they_are_made_one_at_a_time_and_never_more_than_allowed(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await make(fleet, "second")
        await make(fleet, "third")
        await asyncio.gather(*(fleet.warm(tag) for tag in ("warm", "second", "third")))
        assert engine.most_at_once == 1
        assert len(tags(fleet)) == len(template_places(fleet.home)) == 2

    run(fake_home, work, TemplatePolicy(count=2))


def test_one_that_takes_more_than_expected_ends_others_and_one_that_takes_too_much_is_not_kept(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([200, 520, 1100])
    monkeypatch.setattr(module, "_measure", lambda _: next(sizes) * MIB)

    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await make(fleet, "second")
        await make(fleet, "third")
        await fleet.warm("warm")
        await fleet.warm("second")
        assert tags(fleet) == ["second"]
        with pytest.raises(NoCapacity, match="no room for a template of 1100 MiB"):
            await fleet.warm("third")
        assert tags(fleet) == ["second"]
        assert len(template_places(fleet.home)) == 1

    run(fake_home, work, TemplatePolicy(memory_mib=650))


def test_one_that_a_spawn_uses_is_not_ended_for_another(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await make(fleet, "second")
        await fleet.warm("warm")
        engine.may_fork.clear()
        spawning = asyncio.create_task(ways(fleet, 2))
        await until(lambda: engine.forking, "the fork")
        with pytest.raises(NoCapacity, match="in use") as caught:
            await fleet.warm("second")
        assert caught.value.hint is not None and "templates" in caught.value.hint
        engine.may_fork.set()
        assert await spawning == [Way.FORK] * 2
        assert (await fleet.warm("second")).tag == "second"
        assert tags(fleet) == ["second"]

    run(fake_home, work, TemplatePolicy(count=1))


def test_a_template_ends_with_its_snapshot(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        await until_ready(fleet, "warm")
        (forked,) = (await fleet.spawn(SPEC)).records
        await fleet.snapshots.remove("warm")
        assert template_places(fleet.home) == []
        for one in (record, forked):
            async with fleet.use(one.id) as live:
                assert (await live.agent.eval("x")).value == 41

    run(fake_home, work)


def test_a_template_that_is_being_made_ends_with_its_snapshot(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.may_make.clear()
        await fleet.spawn(SPEC)
        await until(lambda: engine.making, "the template")
        await fleet.snapshots.remove("warm")
        assert engine.making == 0
        engine.may_make.set()
        await make(fleet, "warm")
        assert await ways(fleet) == [Way.START]
        await until_ready(fleet, "warm")

    run(fake_home, work)


def test_a_snapshot_that_is_in_use_keeps_its_template(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        pid = (await fleet.warm("warm")).pid
        async with fleet.snapshots.held(TAG):
            with pytest.raises(Conflict):
                await fleet.snapshots.remove("warm")
        assert [view.pid for view in fleet.templates.views()] == [pid]

    run(fake_home, work)


def test_the_template_of_what_was_replaced_ends_and_no_fork_comes_from_it(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        old = await fleet.warm("warm")
        await make(fleet, "warm", "x = 1", replace=True)
        spawned = await fleet.spawn(SPEC)
        assert spawned.ways == (Way.START,)
        async with fleet.use(spawned.records[0].id) as live:
            assert (await live.agent.eval("x")).value == 1
        new = await until_ready(fleet, "warm")
        assert new.pid != old.pid
        await until(lambda: len(template_places(fleet.home)) == 1, "the end of the old one")
        (record,) = (await fleet.spawn(SPEC)).records
        assert record.way is Way.FORK
        async with fleet.use(record.id) as live:
            assert (await live.agent.eval("x")).value == 1

    run(fake_home, work)


def test_one_of_the_snapshot_that_is_there_is_not_dropped_with_that_of_the_one_before(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        pid = (await fleet.warm("warm")).pid
        await fleet.templates.drop(fleet.snapshots.store.root / "warm")
        assert [view.pid for view in fleet.templates.views()] == [pid]

    run(fake_home, work)


def test_a_template_that_is_killed_is_noticed_and_made_again(fake_home: Home, caplog: pytest.LogCaptureFixture) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        killed = await fleet.warm("warm")
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: tags(fleet) == [], "its death")
        assert await ways(fleet) == [Way.START]
        assert (await until_ready(fleet, "warm")).pid != killed.pid
        assert await ways(fleet) == [Way.FORK]
        assert len(template_places(fleet.home)) == 1

    run(fake_home, work)
    assert "The template of snapshot warm ended" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"), [(EngineFailed("no"), logging.WARNING), (GuestDied("no"), logging.WARNING)], ids=repr
)
def test_one_that_cannot_be_made_is_told_in_the_log_and_not_tried_again_at_once(
    fake_home: Home, caplog: pytest.LogCaptureFixture, error: ForkdError, level: int
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.template_errors = [error]
        assert await ways(fleet) == [Way.START]
        await until(lambda: fleet.templates.failed, "its failure")
        assert await ways(fleet, 2) == [Way.START] * 2
        await asyncio.sleep(0.05)
        assert engine.making == 0 and tags(fleet) == []
        # Who asks for it gets it.
        await fleet.warm("warm")
        assert await ways(fleet) == [Way.FORK]

    run(fake_home, work)
    [record] = [record for record in caplog.records if "No template for snapshot warm: no" in record.message]
    assert record.levelno == level


def test_one_that_could_not_be_made_is_tried_again_after_a_while(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.template_errors = [EngineFailed("no")]
        await fleet.spawn(SPEC)
        await until(lambda: fleet.templates.failed, "its failure")
        await fleet.spawn(SPEC)
        await until_ready(fleet, "warm")

    run(fake_home, work)


def test_who_asks_for_one_that_cannot_be_made_is_told_and_the_log_is_not(
    fake_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.template_errors = [EngineFailed("no"), ZeroDivisionError("a mistake of ours")]
        with pytest.raises(EngineFailed, match="no"):
            await fleet.warm("warm")
        with pytest.raises(ZeroDivisionError):
            await fleet.warm("warm")
        assert template_places(fleet.home) == []

    run(fake_home, work)
    assert "No template" not in caplog.text and "failed" not in caplog.text


def test_a_mistake_while_one_is_made_costs_no_spawn_and_is_in_the_log(
    fake_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.template_errors = [ZeroDivisionError("a mistake of ours")]
        assert await ways(fleet) == [Way.START]
        await until(lambda: fleet.templates.failed, "its failure")

    run(fake_home, work)
    assert "Making a template for snapshot warm failed" in caplog.text and "ZeroDivisionError" in caplog.text


def test_without_memory_for_one_forks_are_started(fake_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_mib", lambda: 512 + EXPECTED_MIB - 1)

    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        with pytest.raises(NoCapacity, match="A template needs about 128 MiB"):
            await fleet.warm("warm")
        assert await ways(fleet) == [Way.START]
        assert engine.most_at_once == 0

    run(fake_home, work)


@pytest.mark.parametrize(
    "error", [NotForkable("busy"), EngineFailed("its process is gone"), ProcessLookupError("no such process")], ids=repr
)
def test_a_fork_that_fails_is_started_instead(
    fake_home: Home, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await fleet.warm("warm")
        engine.fork_errors = [error]
        assert sorted(await ways(fleet, 2), key=lambda way: way.value) == [Way.FORK, Way.START]
        assert await ways(fleet) == [Way.FORK]  # one failure is no reason to give it up

    run(fake_home, work)
    assert caplog.text.count("is started the slower way") == 1


def test_one_whose_forks_fail_again_and_again_is_ended(fake_home: Home, caplog: pytest.LogCaptureFixture) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await fleet.warm("warm")
        engine.fork_errors = [NotForkable("busy") for _ in range(9)]
        assert await ways(fleet, 9) == [Way.START] * 9
        assert await ways(fleet) == [Way.START]
        await until(lambda: template_places(fleet.home) == [], "its end")
        assert fleet.templates.failed == 1

    run(fake_home, work)
    assert "The template of snapshot warm is ended: its forks failed" in caplog.text


def test_one_whose_forks_prove_nothing_is_ended_and_forks_are_started(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await fleet.warm("warm")
        engine.broken = True
        for _ in range(MAX_FAILURES):
            with pytest.raises(GuestDied):
                await fleet.spawn(SPEC)
        assert await ways(fleet) == [Way.START]
        assert tags(fleet) == []

    run(fake_home, work)


def test_what_a_limited_fork_fails_of_is_not_the_templates_fault() -> None:
    one = template("a", 1.0)
    for limits in (Limits(memory_mib=1), Limits(cpus=0.01)):
        for _ in range(MAX_FAILURES):
            with pytest.raises(ContractBroken), one.judged(limits):
                raise ContractBroken("too slow")
    assert one.usable


def test_nothing_is_made_once_the_daemon_stops(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.may_make.clear()
        asked = asyncio.create_task(fleet.warm("warm"))
        await until(lambda: engine.making, "the template")
        await fleet.templates.close()
        with pytest.raises(Conflict, match="given up"):
            await asked
        engine.may_make.set()
        assert await ways(fleet) == [Way.START]
        assert engine.making == 0 and tags(fleet) == []
        with pytest.raises(NoCapacity, match="stopping"):
            await fleet.warm("warm")

    run(fake_home, work)


def test_a_spawn_under_way_is_finished_without_a_template_that_is_ended(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await fleet.warm("warm")
        engine.may_fork.clear()
        spawning = asyncio.create_task(ways(fleet, 6))
        await until(lambda: engine.forking, "the first forks")
        begun = engine.forking
        closing = asyncio.create_task(fleet.templates.close())
        await asyncio.sleep(0.05)
        assert not closing.done(), "it ends when no fork is under way"
        engine.may_fork.set()
        await closing
        made = await spawning
        assert made.count(Way.FORK) == begun and made.count(Way.START) == 6 - begun

    run(fake_home, work)


def test_who_goes_away_while_one_is_made_does_not_undo_it(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.may_make.clear()
        asked = asyncio.create_task(fleet.warm("warm"))
        await until(lambda: engine.making, "the template")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        engine.may_make.set()
        await until_ready(fleet, "warm")

    run(fake_home, work)


def test_a_failure_that_nobody_waits_for_any_more_is_in_the_log(
    fake_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        engine.may_make.clear()
        engine.template_errors = [EngineFailed("no")]
        asked = asyncio.create_task(fleet.warm("warm"))
        await until(lambda: engine.making, "the template")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        engine.may_make.set()
        await until(lambda: fleet.templates.failed, "its failure")

    run(fake_home, work)
    assert "No template for snapshot warm: no" in caplog.text


def test_a_snapshot_that_vanishes_has_no_template(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        async with fleet.snapshots.held(TAG) as frozen:
            shutil.rmtree(frozen.directory)
            assert fleet.templates.find(frozen) is None
            fleet.templates.want(frozen, TAG)
            with pytest.raises(NotFound):
                await fleet.templates.warm(frozen, TAG)
        assert engine.most_at_once == 0

    run(fake_home, work)


def test_one_that_dies_while_it_is_measured_is_an_error_and_leaves_nothing(
    fake_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        def gone(pid: int) -> None:
            raise ProcessLookupError(pid)

        monkeypatch.setattr(module, "memory_use", gone)
        with pytest.raises(GuestDied, match="ended while it was made"):
            await fleet.warm("warm")
        assert template_places(fleet.home) == []

    run(fake_home, work)


# The rehearsal


async def rehearsed(fleet: Fleet, code: str) -> None:
    await make(fleet, "second", "past = 41", rehearsal=code)
    await fleet.warm("second")


def test_what_a_rehearsal_raises_is_no_reason_to_do_without(fake_home: Home, caplog: pytest.LogCaptureFixture) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await rehearsed(fleet, "1 / 0")
        assert tags(fleet) == ["second"]

    run(fake_home, work)
    assert caplog.text.count("A rehearsal raised ZeroDivisionError") == 1


def test_no_fork_comes_from_an_interpreter_that_lost_its_past(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        with pytest.raises(WarmupFailed, match="ended the interpreter"):
            await rehearsed(fleet, "import os; os._exit(3)")
        assert tags(fleet) == [] and template_places(fleet.home) == []
        spawned = await fleet.spawn(SandboxSpec(parse_tag("second")))
        async with fleet.use(spawned.records[0].id) as live:
            assert (await live.agent.eval("past")).value == 41

    run(fake_home, work)


def test_a_rehearsal_that_does_not_end_is_an_error(fake_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "EVAL_S", 0.2)

    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        with pytest.raises(WarmupFailed, match=r"did not finish within 0\.2 s"):
            await rehearsed(fleet, "import time; time.sleep(60)")
        assert template_places(fleet.home) == []

    run(fake_home, work)


def test_a_rehearsal_is_kept_with_its_snapshot(fake_home: Home) -> None:
    async def work(fleet: Fleet, engine: LiveFakeEngine) -> None:
        await make(fleet, "second", rehearsal="past + 1")
        seen: list[Frozen] = []
        async with fleet.snapshots.held(parse_tag("second")) as frozen:
            seen.append(frozen)
        assert seen[0].rehearsal == "past + 1"
        manifest = fleet.snapshots.get("second").manifest
        assert manifest is not None and manifest.rehearsal == "past + 1"

    run(fake_home, work)
