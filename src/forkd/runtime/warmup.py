"""From a kernel to a warmed VM: boot, wait for the agent, run the warm-up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import BootSpec, Engine, Machine
from forkd.errors import ForkdError, GuestTimeout, InvalidInput, WarmupFailed
from forkd.guest.calls import Agent
from forkd.runtime.admission import admit_boot, disk_mib, look
from forkd.runtime.sandbox import raise_explained

# An emulated boot takes about 5 s; a host that is busy with others may need many times that.
BOOT_DEADLINE_S = 180.0
MAX_WARM_BYTES = 512 * 1024
MAX_WARM_SECONDS = 24 * 3600.0


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
            raise InvalidInput(f"{self.timeout_s} s is no time limit", hint="Use 1 to 86400 seconds")

    def describe(self) -> str:
        return "; ".join(text for text in (self.code, self.command and f"$ {self.command}") if text)


def _encode(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"The {what} is not UTF-8 text", hint="Put it into a script saved as UTF-8") from error


@asynccontextmanager
async def booted(
    engine: Engine, spec: BootSpec, directory: Path, memory_in: Path
) -> AsyncIterator[tuple[Machine, Agent]]:
    """A VM whose agent answers; killed when the block ends."""
    admit_boot(spec.machine.memory_mib, look(), disk_mib(memory_in))
    machine = await engine.boot(spec, directory, memory_in)
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
