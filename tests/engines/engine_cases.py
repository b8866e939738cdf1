"""What a contract test is given, and VMs whose owner was killed."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Engine, Frozen
from forkd.host.cgroup import remove_groups
from forkd.host.marked import kill_marked

_READY_S = 60

_OWNER = """
import asyncio, pickle, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from live_fork_cases import fork_live
from forkd.runtime.engines import FakeEngine, FirecrackerEngine, QemuEngine
from forkd.runtime.spawn import fork_one, new_identities
run = Path(sys.argv[1])
isolation, frozen, outlive, code, pause, boot, live = pickle.loads(sys.stdin.buffer.read())
ENGINES = {
    "none": lambda: FakeEngine(outlive=outlive),
    "qemu-tcg": lambda: QemuEngine("tcg", outlive=outlive),
    "qemu-kvm": lambda: QemuEngine("kvm", outlive=outlive),
    "firecracker-jailed": lambda: FirecrackerEngine(outlive=outlive),
}
async def main():
    engine = ENGINES[isolation]()
    if boot:
        (run / "memory").mkdir()
        await (await engine.boot(frozen.boot, run / "parent", run / "memory")).running()
        print("parent", flush=True)
        await asyncio.sleep(60)
    child = await fork_one(engine, frozen, new_identities(1)[0], run)
    if code:
        await child.agent.eval(code)
    if live:
        child = await fork_live(engine, child.machine, run)
    if pause:
        await child.machine.pause()
    print(child.id, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@dataclass(frozen=True)
class Case:
    """An engine and a parent frozen by it."""

    engine: Engine
    frozen: Frozen


@contextmanager
def left_behind(
    case: Case,
    run: Path,
    *,
    outlive: bool = True,
    code: str = "",
    pause: bool = False,
    boot: bool = False,
    live: bool = False,
) -> Iterator[Path]:
    """The directory of a fork (or a booted parent) whose owner was killed with SIGKILL; all is gone at the end.

    `live`: of the fork of a live VM, which is left behind too.
    """
    command = [sys.executable, "-c", _OWNER, str(run), str(Path(__file__).parent)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write(pickle.dumps((case.engine.isolation, case.frozen, outlive, code, pause, boot, live)))
        owner.stdin.close()
        directory = run / owner.stdout.readline().decode().strip()
        assert directory != run, "the owner failed"
        owner.kill()
        owner.wait(_READY_S)
        owner.stdout.close()
        yield directory
    finally:
        owner.kill()
        owner.wait(_READY_S)
        kill_marked(run)
        remove_groups(run)
        for left in run.iterdir():
            shutil.rmtree(left)
