"""The daemon is killed at random moments under load, again and again."""

import contextlib
import random
import threading
import time

import pytest
from agreement import check_agreement, end_all
from support_daemon import Served, served
from support_sizes import sized

from forkd.client.controller import Controller
from forkd.errors import ForkdError
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")

ROUNDS = sized(8, full=50)
MAX_SANDBOXES = 12


def _one_act(controller: Controller, dice: random.Random, name: str) -> None:
    rows = controller.list_sandboxes()
    ids = [row["id"] for row in rows]
    act = dice.choice(["spawn", "spawn", "exec", "eval", "kill", "pause", "resume", "snapshot"])
    if act == "spawn" and len(ids) < MAX_SANDBOXES:
        controller.spawn_sandboxes("warm", n=dice.randint(1, 3), timeout_secs=dice.choice([None, 600]))
    elif act == "snapshot":
        controller.create_snapshot(f"made-{name}", "python", memory_mib=128, replace=True, wait=True)
    elif ids:
        one = dice.choice(ids)
        calls = {
            "exec": lambda: controller.exec_command(one, ["true"], timeout_secs=10),
            "eval": lambda: controller.eval_code(one, "x + 1", timeout_secs=10),
            "pause": lambda: controller.pause_sandbox(one),
            "resume": lambda: controller.resume_sandbox(one),
        }
        calls.get(act, lambda: controller.kill_sandbox(one))()


def _load(home: Home, stop: threading.Event, seed: int, done: list[int]) -> None:
    dice = random.Random(seed)
    with Controller(f"unix://{home.runtime}/forkd.sock", timeout=20) as controller:
        while not stop.is_set():
            # Errors are what a killed daemon's clients get; what counts is what is left afterwards.
            with contextlib.suppress(ForkdError):
                _one_act(controller, dice, str(seed))
                done.append(seed)
            time.sleep(0.005)


@pytest.mark.timeout(600)
def test_kills_under_load_leave_registry_processes_and_files_in_agreement(fake_home: Home) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    with served(fake_home, "--bind", "none") as daemon, daemon.controller() as controller:
        controller.create_snapshot("warm", "python", memory_mib=128, warm="x = 41", wait=True)
        daemon.stop()
    stop = threading.Event()
    done: list[int] = []
    clients = [threading.Thread(target=_load, args=(fake_home, stop, seed + number, done)) for number in range(3)]
    for client in clients:
        client.start()
    try:
        for _ in range(ROUNDS):
            daemon = Served(fake_home, "--bind", "none")
            # From before it listens to well into its work: recovery itself is killed too.
            if dice.random() < 0.7:
                daemon.wait_ready()
                time.sleep(dice.uniform(0.0, 0.6))
            else:
                time.sleep(dice.uniform(0.0, 1.2))
            daemon.kill()
    finally:
        stop.set()
        for client in clients:
            client.join(60)
    assert len(done) > ROUNDS, "there was no load to speak of"
    with served(fake_home, "--bind", "none") as daemon, daemon.controller() as controller:
        check_agreement(fake_home, controller)
        end_all(fake_home, controller)
        daemon.stop()
