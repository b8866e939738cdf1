"""A parent frozen without a store, and the boot of one that has no image."""

import tempfile
from pathlib import Path

from forkd.engines.base import BootSpec, Engine, Frozen
from forkd.model.machine import MachineSpec
from forkd.runtime.freeze import Warmup, booted, warm_up

NOWHERE = Path("/nonexistent")
# The fake engine looks at no file of an image.
NO_IMAGE = BootSpec(MachineSpec(256), NOWHERE, NOWHERE, NOWHERE)


async def freeze(engine: Engine, spec: BootSpec, into: Path, code: str) -> Frozen:
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as run:
        async with booted(engine, spec, Path(run) / "parent", into) as (machine, agent):
            await warm_up(agent, Warmup(code))
            await agent.prepare_freeze()
            platform = await engine.freeze(machine, into)
    return Frozen(into, spec, platform)
