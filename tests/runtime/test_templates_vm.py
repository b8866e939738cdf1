"""Templates of real VMs: they are made, forked and ended, and a child has nothing of their rehearsal."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from runtime_cases import DEADLINE_S, evaluate, make, opened, tags, template_places, until, until_ready
from support_daemon import served
from support_images import made_home

from forkd.engines.base import Engine, Opening, Way
from forkd.errors import GuestDied
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.host.system import start_time_ticks
from forkd.image import Image
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.doctor import open_engine
from forkd.runtime.origin import TemplatePolicy
from forkd.runtime.runtime import Runtime

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

TAG = parse_tag("warm")
SPEC = SandboxSpec(TAG)
OTHER = SandboxSpec(parse_tag("hooked"))

# Counts how often it was run, and draws what siblings must not have in common.
HOOKED = """
import forkd, os, random
runs, drawn, generator = 0, "", random.Random(1)

@forkd.on_fork
def reseed():
    global runs, drawn
    runs += 1
    drawn = os.urandom(16).hex()
    generator.seed(drawn)
"""
POWER_OFF = "open('/proc/sysrq-trigger', 'w').write('o')\ntime.sleep(60)"
# What a child can see of who was there before it.
LOOK = """
import glob, os, socket

def processes():
    found = []
    for place in glob.glob("/proc/[0-9]*"):
        state, parent = open(place + "/stat").read().rpartition(")")[2].split()[:2]
        if parent not in ("0", "2") or place == "/proc/1":  # none of the kernel's
            found.append((open(place + "/cmdline").read(), state))
    return sorted(found)

{
    "hostname": socket.gethostname(),
    "machine-id": open("/etc/machine-id").read().strip(),
    "files": [sorted(os.listdir(place)) for place in ("/tmp", "/root", "/run")],
    "environment": dict(os.environ),
    "processes": [command for command, state in processes()],
    "zombies": [command for command, state in processes() if state == "Z"],
    "names": sorted(name for name in dir() if not name.startswith("_")),
}
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    found = open_engine("qemu", Opening(outlive=True))
    if (why := found.why_no_live_forks()) is not None:
        pytest.skip(f"no live forks: {why}")
    return found


@pytest.fixture(scope="module")
def made(
    engine: Engine, python_image: Image, built_home: Home, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Home]:
    """A home with the snapshots `warm` and `hooked`, made once."""

    async def prepare(home: Home) -> None:
        async with asyncio.timeout(DEADLINE_S), Runtime.opened(home, engine) as runtime:
            await make(runtime, "warm", "x = 41", rehearsal="x + 1")
            await make(runtime, "hooked", HOOKED, rehearsal="generator.random()")

    with made_home(tmp_path_factory.mktemp("templates"), built_home.images) as home:
        asyncio.run(prepare(home))
        yield home


@pytest.fixture
def home(made: Home) -> Iterator[Home]:
    yield made
    assert find_marked(made.runtime) == {} and list(made.vms.iterdir()) == []


@pytest.fixture
async def runtime(home: Home, engine: Engine) -> AsyncIterator[Runtime]:
    async with opened(home, engine, make_warm=False) as runtime:
        yield runtime


def is_gone(pid: int) -> bool:
    return start_time_ticks(pid) is None


async def test_the_first_fork_is_started_and_the_next_ones_are_forked(runtime: Runtime) -> None:
    first = await runtime.spawn(SandboxSpec(TAG, n=2))
    assert first.ways == (Way.START, Way.START)
    view = await until_ready(runtime, "warm")
    forks = await runtime.spawn(SandboxSpec(TAG, n=5))
    assert forks.ways == (Way.FORK,) * 5
    [after] = runtime.templates.views()
    assert (after.pid, after.forks) == (view.pid, 5) and after.memory_bytes > 2**20
    records = (*first.records, *forks.records)
    for one in records:
        assert await evaluate(runtime, one.id, "x += 1\nx") == 42
        async with runtime.sandboxes.use(one.id) as live:
            assert (await live.agent.run(["hostname"])).stdout.decode().strip() == one.id


async def test_forks_differ_and_have_nothing_of_the_rehearsal(runtime: Runtime) -> None:
    started = (await runtime.spawn(OTHER)).records[0]
    await runtime.snapshots.warm("hooked")
    spec = SandboxSpec(OTHER.snapshot_tag, n=4, env={"MINE": "1"})
    forks = await runtime.spawn(spec)
    assert set(forks.ways) == {Way.FORK}
    drawn, looks = [], []
    for record in forks.records:
        assert await evaluate(runtime, record.id, "runs") == 3  # two rehearsals, and its own
        drawn.append(await evaluate(runtime, record.id, "[drawn, generator.random(), os.urandom(8).hex()]"))
        looks.append(await evaluate(runtime, record.id, LOOK))
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(column), "siblings repeat each other"
    assert await evaluate(runtime, started.id, "runs") == 1
    seen = await evaluate(runtime, started.id, LOOK)
    assert seen["files"][0] == [] and seen["zombies"] == []
    for record, look in zip(forks.records, looks, strict=True):
        assert look["hostname"] == record.id
        assert look["environment"] == {**seen["environment"], "MINE": "1"}
        for same in ("files", "processes", "zombies", "names"):
            assert look[same] == seen[same], same
        assert "rehearsal" not in repr(look)
    assert len({look["machine-id"] for look in (*looks, seen)}) == len(looks) + 1
    async with runtime.sandboxes.use(forks.records[0].id) as live:
        found = await live.agent.run("grep -rlsE 'rehearsal-[01]' /etc /tmp /run /root /proc/sys/kernel")
        assert found.stdout == b""


async def test_a_template_ahead_and_the_oldest_goes_when_there_are_too_many(home: Home, engine: Engine) -> None:
    async with opened(home, engine, make_warm=False, templates=TemplatePolicy(count=1)) as runtime:
        warm = await runtime.snapshots.warm("warm")
        assert (await runtime.spawn(SPEC)).ways == (Way.FORK,)
        hooked = await runtime.snapshots.warm("hooked")
        assert tags(runtime) == ["hooked"] and is_gone(warm.pid)
        assert (await runtime.spawn(OTHER)).ways == (Way.FORK,)
        assert (await runtime.spawn(SPEC)).ways == (Way.START,)
        await until_ready(runtime, "warm")
        assert tags(runtime) == ["warm"] and is_gone(hooked.pid)
        assert len(template_places(home)) == 1


async def test_forks_outlive_their_template_and_it_ends_with_its_snapshot(runtime: Runtime, home: Home) -> None:
    await make(runtime, "short", "y = 1")
    short = SandboxSpec(parse_tag("short"))
    view = await runtime.snapshots.warm("short")
    (record,) = (await runtime.spawn(short)).records
    await make(runtime, "short", "y = 2", replace=True)
    await until(lambda: is_gone(view.pid), "the end of what was replaced")
    spawned = await runtime.spawn(short)
    assert spawned.ways == (Way.START,)
    assert await evaluate(runtime, spawned.records[0].id, "y") == 2
    view = await until_ready(runtime, "short")
    await runtime.snapshots.remove("short")
    assert is_gone(view.pid) and template_places(home) == []
    assert record.way is Way.FORK and await evaluate(runtime, record.id, "y") == 1


async def test_a_template_that_is_killed_is_noticed_and_made_again(runtime: Runtime, home: Home) -> None:
    view = await runtime.snapshots.warm("warm")
    (record,) = (await runtime.spawn(SPEC)).records
    os.kill(view.pid, signal.SIGKILL)
    await until(lambda: tags(runtime) == [], "its death")
    assert (await runtime.spawn(SPEC)).ways == (Way.START,)
    assert (await until_ready(runtime, "warm")).pid != view.pid
    assert (await runtime.spawn(SPEC)).ways == (Way.FORK,)
    assert len(template_places(home)) == 1
    assert await evaluate(runtime, record.id, "x") == 41


async def test_a_template_that_is_killed_while_it_is_forked_costs_no_sandbox(runtime: Runtime) -> None:
    for _ in range(3):
        view = await runtime.snapshots.warm("warm")
        spawning = asyncio.create_task(runtime.spawn(SandboxSpec(TAG, n=12)))
        await until(lambda: any(each.forks >= 3 for each in runtime.templates.views()), "some forks")
        os.kill(view.pid, signal.SIGKILL)
        spawned = await spawning
        assert Way.FORK in spawned.ways
        for record in spawned.records:
            assert await evaluate(runtime, record.id, "x") == 41
        await runtime.sandboxes.kill_all()


async def test_a_rehearsal_that_ends_the_guest_is_told_and_forks_are_started(
    runtime: Runtime, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    await make(runtime, "deadly", "import time", rehearsal=POWER_OFF)
    spec = SandboxSpec(parse_tag("deadly"))
    assert (await runtime.spawn(spec)).ways == (Way.START,)
    await until(lambda: runtime.templates.failed, "its failure")
    assert (await runtime.spawn(spec)).ways == (Way.START,)
    with pytest.raises(GuestDied, match="while it rehearsed"):
        await runtime.snapshots.warm("deadly")
    assert template_places(home) == []
    await runtime.sandboxes.kill_all()
    await runtime.snapshots.remove("deadly")
    assert "No template for snapshot deadly: The VM ended while it rehearsed" in caplog.text


async def test_no_template_is_left_by_a_daemon_that_stops_and_its_forks_are_adopted(home: Home, engine: Engine) -> None:
    async with asyncio.timeout(DEADLINE_S), Runtime.opened(home, engine) as runtime:
        view = await runtime.snapshots.warm("warm")
        (record,) = (await runtime.spawn(SPEC)).records
    assert is_gone(view.pid)
    assert [path.name for path in home.vms.iterdir()] == [record.id]
    async with opened(home, engine, make_warm=False) as runtime:
        adopted = runtime.sandboxes.get(record.id)
        assert (adopted.state, adopted.way) == (State.RUNNING, Way.FORK)
        assert await evaluate(runtime, record.id, "x") == 41
        assert (await runtime.spawn(SPEC)).ways == (Way.START,)


def test_a_template_dies_with_a_daemon_that_is_killed_and_the_next_one_sweeps_its_directory(home: Home) -> None:
    with served(home, "--bind", "none", engine="qemu") as daemon, daemon.controller() as controller:
        view = controller.warm_snapshot("warm")
        before = controller.spawn_sandboxes("warm", n=2)
        assert [info["way"] for info in before] == ["fork", "fork"]
        daemon.kill()
    asyncio.run(until(lambda: is_gone(view["pid"]), "the template to die with its daemon"))
    assert len(template_places(home)) == 1, "its directory is what is left"
    with (
        served(home, "--bind", "none", "--on-stop", "kill", engine="qemu") as daemon,
        daemon.controller() as controller,
    ):
        assert template_places(home) == [] and controller.list_templates() == []
        for info in before:
            assert controller.get_sandbox(info["id"])["way"] == "fork"
            assert controller.eval_code(info["id"], "x + 1")["value"] == 42
        assert controller.warm_snapshot("warm")["forks"] == 0
        assert controller.spawn_sandboxes("warm")[0]["way"] == "fork"
        assert [info["forks"] for info in controller.list_templates()] == [1]
        text = controller.metrics()
        assert 'forkd_forks_total{way="fork"} 1.0' in text and "forkd_templates_made_total 1.0" in text
