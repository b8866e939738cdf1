"""A VM made ready to be forked: a parent boots, warms up and is frozen into a snapshot; a template rehearses.

The rehearsal does once what every child will do first, so that its forks find all of it warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import BootSpec, Engine, Frozen, Machine, Nic
from forkd.errors import CommandNotStarted, ForkdError, GuestDied, GuestTimeout, InvalidInput, WarmupFailed
from forkd.guest.agent import Agent
from forkd.guest.identity import become
from forkd.host.faults import fault_point
from forkd.host.threads import in_thread, offloaded
from forkd.image import Image, Progress
from forkd.model.machine import MachineSpec
from forkd.model.names import Identity, SnapshotTag, new_identity
from forkd.model.network import NO_NETWORK, Network
from forkd.runtime.admission import admit_boot, disk_mib, look
from forkd.runtime.child import raise_explained
from forkd.runtime.contract import keep_contract
from forkd.store.manifest import Manifest
from forkd.store.snapshots import Snapshot, SnapshotStore

# An emulated boot takes about 5 s; a host that is busy with others may need many times that.
BOOT_DEADLINE_S = 180.0
MAX_WARM_BYTES = 512 * 1024
MAX_WARM_SECONDS = 24 * 3600.0
# The first round translates the code, the second one runs it as a child will.
ROUNDS = 2
_SCRAP = "/tmp/.forkd-rehearsal"
REHEARSAL_S = 60.0
# The guest's kernel puts work off: freed memory, statistics, write-back. Done here once, it is not done in every fork,
# where it would take 6 ms and 1.7 MiB (measured: the last of it comes 2.2 s after the rehearsal).
SETTLE_S = 3.0
_RUN_S = 30.0


@dataclass(frozen=True)
class Warmup:
    """What runs in the parent before it is frozen: Python in the interpreter, then a shell command.

    `rehearsal` is Python that only templates of the snapshot evaluate: an example of what their forks will do first.
    """

    code: str | None = None
    command: str | None = None
    timeout_s: float = 300.0
    rehearsal: str | None = None

    def __post_init__(self) -> None:
        for what, text in (("warm-up", self.code), ("warm-up", self.command), ("rehearsal", self.rehearsal)):
            if text is not None and len(_encode(text, what)) > MAX_WARM_BYTES:
                raise InvalidInput(
                    f"The {what} is larger than {MAX_WARM_BYTES} bytes",
                    hint="Put the code into the image and import it",
                )
        if not 0 < self.timeout_s <= MAX_WARM_SECONDS:
            raise InvalidInput(
                f"The warm-up timeout must be above 0 and at most 86400 seconds, got {self.timeout_s}",
                hint="Use 1 to 86400 seconds",
            )

    def describe(self) -> str:
        return "; ".join(text for text in (self.code, self.command and f"$ {self.command}") if text)


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"The {what} is not UTF-8 text", hint="Put it into a script saved as UTF-8") from error


@asynccontextmanager
async def booted(
    engine: Engine, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None
) -> AsyncIterator[tuple[Machine, Agent]]:
    """A VM whose agent answers; killed when the block ends."""
    admit_boot(spec.machine.memory_mib, look(), disk_mib(memory_in))
    machine = await engine.boot(spec, directory, memory_in, nic)
    try:
        try:
            agent = Agent.attach(await machine.connect())
            try:
                await agent.hello(deadline_s=BOOT_DEADLINE_S)
                yield machine, agent
            finally:
                agent.close()
        except ForkdError as error:
            await raise_explained(_with_console(error, machine), machine, "the parent was prepared")
    finally:
        await machine.kill()


async def warm_up(agent: Agent, warmup: Warmup) -> None:
    """Raises WarmupFailed with the traceback or the output, when it fails or hangs."""
    try:
        if warmup.code is not None:
            await _warm_code(agent, warmup.code, warmup.timeout_s)
        if warmup.command is not None:
            await _warm_command(agent, warmup.command, warmup.timeout_s)
    except GuestTimeout as error:
        raise _hung(warmup.timeout_s) from error


async def _warm_code(agent: Agent, code: str, timeout_s: float) -> None:
    result = await agent.eval(code, timeout_s=timeout_s)
    if result.timed_out:
        raise _hung(timeout_s)
    if result.error is not None:
        raise WarmupFailed(
            f"The warm-up raised {result.error.type}: {result.error.message}", details=result.error.traceback
        )


async def _warm_command(agent: Agent, command: str, timeout_s: float) -> None:
    result = await agent.run(command, timeout_s=timeout_s)
    if result.timed_out:
        raise _hung(timeout_s)
    if result.exit_code != 0:
        output = (result.stdout + result.stderr).decode("utf-8", "replace")[-4096:]
        how = f"exited with {result.exit_code}" if result.signal is None else f"was killed by signal {result.signal}"
        raise WarmupFailed(f"The warm-up command {how}", details=output)


def _hung(timeout_s: float) -> WarmupFailed:
    return WarmupFailed(
        f"The warm-up did not finish within {timeout_s:g} s", hint="Give it more time with --warm-timeout"
    )


def _with_console(error: ForkdError, machine: Machine) -> ForkdError:
    if isinstance(error, GuestTimeout) and error.details is None:
        error.details = machine.console_tail().strip() or None
    return error


async def create_snapshot(
    engine: Engine,
    store: SnapshotStore,
    image: Image,
    tag: SnapshotTag,
    machine: MachineSpec,
    warmup: Warmup,
    directory: Path,
    *,
    replace: bool = False,
    progress: Progress,
    fill: Callable[[Agent], Awaitable[None]] | None = None,
    network: Network = NO_NETWORK,
    nic: Nic | None = None,
) -> Snapshot:
    """`fill` puts into the parent, before its warm-up, what is not in its image.

    `network` is what its forks get unless they ask for another; through `nic` its warm-up has it, too.
    """
    boot = boot_spec(image, machine)
    async with offloaded(store.created(tag, replace_existing=replace)) as (staging, seal):
        progress.stage("booting the parent")
        async with booted(engine, boot, directory / "parent", staging, nic) as (vm, agent):
            fault_point("snapshot.booted")
            if fill is not None:
                progress.stage("filling the parent")
                await fill(agent)
            progress.stage("warming up")
            if nic is not None:
                await agent.set_network(True)
            await warm_up(agent, warmup)
            if nic is not None:
                await agent.set_network(False)  # a fork may have none
            progress.stage("freezing")
            await agent.prepare_freeze()
            platform = await engine.freeze(vm, staging)
        fault_point("snapshot.frozen")
        progress.stage("writing and checksumming")
        manifest = Manifest(
            tag=tag,
            created_at_unix=int(time.time()),
            engine=engine.name,
            image_id=image.id,
            machine=machine,
            warm=warmup.describe(),
            platform=platform,
            files={},
            rehearsal=warmup.rehearsal,
            network=network,
        )
        await in_thread(lambda: seal(manifest))
        fault_point("snapshot.sealed")
    fault_point("snapshot.published")
    return store.get(tag)


def boot_spec(image: Image, machine: MachineSpec) -> BootSpec:
    return BootSpec(machine, image.kernel, image.initrd, image.root)


def frozen_of(snapshot: Snapshot, image: Image) -> Frozen:
    """A stored snapshot as its engine sees it."""
    manifest = snapshot.manifest
    return Frozen(
        snapshot.directory,
        boot_spec(image, manifest.machine),
        manifest.platform,
        manifest.rehearsal,
        snapshot.root_memory,
        snapshot.runs,
        manifest.settled,
    )


_log = logging.getLogger(__name__)


@asynccontextmanager
async def rehearsed(engine: Engine, frozen: Frozen, directory: Path) -> AsyncIterator[tuple[Machine, Agent | None]]:
    """A VM that has rehearsed, is prepared for a freeze again and stands still. Killed when the block fails."""
    machine = await engine.template(frozen, directory)
    agent: Agent | None = None
    try:
        fault_point("template.started")
        try:
            agent, _ = await keep_contract(machine, _new_name(0))
            await rehearse(agent, frozen.rehearsal)
            await machine.running()
            await asyncio.sleep(SETTLE_S)
            await agent.prepare_freeze()
        except ForkdError as error:
            await raise_explained(error, machine, "it rehearsed")
        fault_point("template.rehearsed")
        await machine.pause()
        if machine.death.done():
            raise GuestDied("The template ended while it was made")
        if engine.learns:
            await _teach(engine, machine, frozen.rehearsal)
        yield machine, agent
    except BaseException:
        if agent is not None:
            agent.close()
        await machine.kill()
        raise


async def _teach(engine: Engine, template: Machine, code: str | None) -> None:
    """One fork does what all do first, and ends."""
    directory = template.directory.with_name(f"{template.directory.name}-first")
    fork = await engine.fork_live(template, directory, settled=True)
    try:
        try:
            agent, _ = await keep_contract(fork, new_identity("first"))
            with contextlib.closing(agent):
                await agent.eval(code or "None", timeout_s=REHEARSAL_S)
        except ForkdError as error:
            await raise_explained(error, fork, "it was the first of its template")
        await template.learn_from(fork)
    finally:
        await fork.kill()


@asynccontextmanager
async def loaded(engine: Engine, frozen: Frozen, directory: Path) -> AsyncIterator[tuple[Machine, Agent | None]]:
    """A VM of a snapshot that was branched off a running one: it stands still where that was, and never ran.

    A rehearsal would move it on. Killed when the block fails.
    """
    machine = await engine.template(frozen, directory, run=False)
    try:
        fault_point("template.started")
        await machine.running()
        yield machine, None
    except BaseException:
        await machine.kill()
        raise


def _new_name(number: int) -> Identity:
    return new_identity(f"rehearsal-{number}")


async def rehearse(agent: Agent, code: str | None) -> None:
    """The contract under a name that no sandbox will have, an evaluation, a command, a file; nothing of it is left.

    The first contract is kept already. What the code raises its forks will see themselves. An interpreter that ended
    has lost what the warm-up left in it: raises WarmupFailed, for no fork may come from that.
    """
    for number in range(ROUNDS):
        if number:
            await become(agent, _new_name(number))
        result = await agent.eval(code or "None", timeout_s=REHEARSAL_S)
        if result.timed_out:
            raise WarmupFailed(
                f"The rehearsal did not finish within {REHEARSAL_S:g} s",
                hint="Rehearse less: forkd snapshot create --rehearse",
            )
        if result.interpreter_restarted:
            raise WarmupFailed("The rehearsal ended the interpreter", hint="Rehearse code that returns")
        if result.error is not None and number == 0:
            _log.warning("A rehearsal raised %s", result.error.type)
        with contextlib.suppress(CommandNotStarted):  # an image need have no more than a Python
            await agent.run(["true"], timeout_s=_RUN_S)
        scrap = f"{_SCRAP}-{secrets.token_hex(6)}"  # guests of the fake engine share a file system
        await agent.write_file(scrap, b"x")
        await agent.remove(scrap)
