"""The fork contract, with a real agent that rehearses."""

import asyncio
import time
from pathlib import Path

import pytest
from rehearsed import Guest
from support_processes import until

from forkd.errors import ContractBroken
from forkd.guest.agent import Agent
from forkd.guest.identity import become
from forkd.model.names import new_identity

_NUMPY = "import random, tempfile, ssl\ntry:\n    import numpy\nexcept ImportError:\n    numpy = None\nrandom.seed(1)"


async def test_a_fork_becomes_somebody_and_shows_it(agent: Agent, guest: Guest) -> None:
    await agent.eval(_NUMPY)
    await agent.prepare_freeze()
    identity = new_identity("sb-One.1", env={"TOKEN": "é", "PATH": "/bin:/usr/bin"})
    proof = await become(agent, identity)
    assert proof.hostname == "sb-one-1" and proof.machine_id == identity.machine_id
    assert abs(proof.realtime_ns - time.time_ns()) < 1_000_000_000
    assert (proof.hooks, proof.scripts) == (0, 0)
    assert (await agent.run("echo $TOKEN $PATH")).stdout.decode() == "é /bin:/usr/bin\n"
    assert (await agent.eval("import os; os.environ['TOKEN']")).value == "é"
    assert (await agent.eval("import forkd; forkd.identity()['sandbox_id']")).value == "sb-One.1"
    assert (guest.root / "etc/hostname").read_text() == "sb-one-1\n"
    assert len((guest.root / "etc/machine-id").read_text()) == 33


async def test_two_forks_of_one_state_have_different_randomness(agent: Agent) -> None:
    assert (await agent.eval(_NUMPY)).ok
    has_numpy = (await agent.eval("numpy is not None")).value
    proofs, samples = [], []
    for n in range(2):
        await agent.eval("random.seed(1)\nif numpy: numpy.random.seed(1)")
        proofs.append(await become(agent, new_identity(f"sb-{n}")))
        sample = "[random.random(), next(tempfile._get_candidate_names()), numpy and numpy.random.rand()]"
        samples.append((await agent.eval(sample)).value)
    assert (proofs[0].numpy is not None) == has_numpy
    for name in ("urandom", "random", "machine_id") + (("numpy",) if has_numpy else ()):
        assert getattr(proofs[0], name) != getattr(proofs[1], name)
    assert all(a != b for a, b in zip(*samples, strict=True) if a is not None)


async def test_the_first_words_on_a_channel_may_be_become(guest: Guest) -> None:
    fork = Agent.attach(guest.sock.dup())
    try:
        proof = await become(fork, new_identity("sb-2", env={f"V{n}": "x" * 1000 for n in range(100)}))
        assert proof.hostname == "sb-2"
        assert (await fork.eval("len(__import__('os').environ['V99'])")).value == 1000
    finally:
        fork.close()


async def test_hooks_run_in_order_and_see_the_new_identity(agent: Agent) -> None:
    await agent.eval(
        "import forkd\nseen = []\n"
        "@forkd.on_fork\ndef first(): seen.append(forkd.identity()['hostname'])\n"
        "forkd.on_fork(lambda: seen.append('second'))\nprint(first)"
    )
    proof = await become(agent, new_identity("abc"))
    assert proof.hooks == 2
    assert (await agent.eval("seen")).value == ["abc", "second"]


@pytest.mark.parametrize(
    "hook",
    [
        "def hook(): raise ValueError('not today')",
        "def hook(): raise SystemExit",
        "def hook():\n    import time; time.sleep(60)",
        "def hook():\n    import os; os._exit(0)",
        "def hook():\n    import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)",
    ],
)
async def test_a_hook_that_fails_breaks_the_contract(agent: Agent, hook: str) -> None:
    await agent.eval(f"import forkd\n@forkd.on_fork\n{hook}")
    with pytest.raises(ContractBroken, match="step interpreter") as caught:
        await become(agent, new_identity("abc"), hooks_s=0.5)
    if "not today" in hook:
        assert "not today" in (caught.value.details or "")


def write_script(guest: Guest, name: str, text: str) -> None:
    directory = guest.root / "etc/forkd/on-fork.d"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


async def test_scripts_run_by_name_with_the_new_environment(agent: Agent, guest: Guest, tmp_path: Path) -> None:
    for name in ("20-second", "10-first"):
        write_script(guest, name, f"echo {name} $WHO >> {tmp_path}/seen")
    (guest.root / "etc/forkd/on-fork.d/README").write_text("not executable")
    proof = await become(agent, new_identity("abc", env={"WHO": "me"}))
    assert proof.scripts == 2
    assert (tmp_path / "seen").read_text() == "10-first me\n20-second me\n"


@pytest.mark.parametrize("script", ["exit 3", "sleep 60", "kill -9 $$"])
async def test_a_script_that_fails_breaks_the_contract(agent: Agent, guest: Guest, script: str) -> None:
    write_script(guest, "10-bad", script)
    write_script(guest, "20-never", "touch $HOME/never")
    with pytest.raises(ContractBroken, match="step scripts"):
        await become(agent, new_identity("abc"), hooks_s=0.5)
    assert not (guest.root / "never").exists()


async def test_the_names_survive_being_replaced_by_user_code(agent: Agent, guest: Guest) -> None:
    await agent.prepare_freeze()
    etc = str(guest.root / "etc")
    await agent.write_file(etc + "/hostname", b"a-much-longer-name-than-before\n")
    proof = await become(agent, new_identity("x"))
    assert proof.hostname == "x"
    assert await agent.read_file(etc + "/hostname") == b"x\n"


async def test_commands_live_on_in_a_fork_and_only_lose_their_listener(agent: Agent) -> None:
    process = await agent.start("sleep 0.4; echo unheard; touch $HOME/lived")
    fork = Agent(agent.channel, "another session")
    await become(fork, new_identity("abc"))
    assert (await fork.ping()).streams == 0
    await fork.run("while ! [ -e $HOME/lived ]; do sleep 0.05; done", timeout_s=5)
    process.abandon()


async def test_preparing_for_the_freeze_waits_for_what_is_under_way(agent: Agent, tmp_path: Path) -> None:
    code = f"import time; open('{tmp_path}/runs', 'w').close(); time.sleep(0.3)"
    running = asyncio.create_task(agent.eval(code))
    await until((tmp_path / "runs").exists)
    await agent.prepare_freeze()
    assert running.done() or await asyncio.wait_for(running, 1)
    assert (await agent.eval("import gc; gc.get_freeze_count() > 1000")).value is True
