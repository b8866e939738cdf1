"""What the host asks of a fork, and what it believes."""

import copy
import hashlib
import socket
from typing import Any

import pytest

from forkd.errors import ContractBroken, InvalidInput, ProtocolError
from forkd.guest.agent import Agent
from forkd.guest.identity import REQUIRED_STEPS, become, render_request, verify
from forkd.model.names import Identity, check_env, derive_hostname, new_identity
from forkd.wire.agent import CLOCK, encode, unpack_become, unpack_timeout_ms

NOW = 1_700_000_000_000_000_000
IDENTITY = new_identity("sb-1", env={"A": "1"})
NONCE = "00" * 16


def good_answer() -> dict[str, Any]:
    digest = hashlib.sha256((NONCE + IDENTITY.hostname + IDENTITY.machine_id).encode()).hexdigest()
    return {
        "steps": {
            "entropy": {"ok": True, "bits": 512},
            "hostname": {"ok": True, "value": IDENTITY.hostname},
            "machine_id": {"ok": True, "value": IDENTITY.machine_id},
            "environment": {"ok": True, "count": 1},
            "interpreter": {"ok": True, "urandom": "a" * 64, "random": "b" * 64, "numpy": None, "hooks": 2},
            "scripts": {"ok": True, "ran": 0},
            "clock": {"ok": True, "realtime_ns": NOW, "rtt_ns": 1000},
        },
        "proof": {"nonce": NONCE, "digest": digest},
    }


def check(answer: dict[str, Any]) -> Any:
    return verify(answer, IDENTITY, NONCE, NOW - 1000, NOW + 1000)


def test_a_whole_proof_is_believed() -> None:
    proof = check(good_answer())
    assert (proof.hostname, proof.hooks, proof.numpy) == ("sb-1", 2, None)


@pytest.mark.parametrize("step", REQUIRED_STEPS)
def test_a_step_that_is_missing_or_failed_is_named(step: str) -> None:
    answer = good_answer()
    good = answer["steps"].pop(step)
    with pytest.raises(ContractBroken, match=f"step {step}"):
        check(answer)
    for wrong in ({"ok": False, "error": "because"}, {**good, "ok": 1}, []):
        answer["steps"][step] = wrong
        with pytest.raises(ContractBroken, match=f"step {step}"):
            check(answer)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("steps",), None),
        (("steps", "hostname", "value"), "another"),
        (("steps", "machine_id", "value"), "0" * 32),
        (("steps", "environment", "count"), True),
        (("steps", "entropy", "bits"), 0),
        (("steps", "interpreter", "urandom"), "short"),
        (("steps", "interpreter", "random"), None),
        (("steps", "interpreter", "numpy"), 5),
        (("steps", "interpreter", "hooks"), "2"),
        (("steps", "clock", "realtime_ns"), NOW - 5_000_000_000),
        (("steps", "clock", "realtime_ns"), NOW + 5_000_000_000),
        (("steps", "clock", "realtime_ns"), float(NOW)),
        (("proof",), None),
        (("proof", "digest"), "0" * 64),
        (("proof", "nonce"), "11" * 16),
    ],
)
def test_evidence_that_does_not_fit_is_not_believed(where: tuple[str, ...], value: object) -> None:
    answer = copy.deepcopy(good_answer())
    inner = answer
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(ContractBroken):
        check(answer)


def test_why_a_hook_failed_is_passed_on_and_bounded() -> None:
    answer = good_answer()
    answer["steps"]["interpreter"] = {"ok": False, "error": "x" * 100_000 + "the end"}
    with pytest.raises(ContractBroken) as caught:
        check(answer)
    assert caught.value.details is not None
    assert caught.value.details.endswith("the end") and len(caught.value.details) < 10_000


async def test_a_guest_that_only_asks_for_the_time_is_not_answered_for_ever() -> None:
    ours, theirs = socket.socketpair()
    agent = Agent.attach(ours)
    theirs.send(b"".join(encode(CLOCK, agent.channel._next_number) for _ in range(50)))
    with pytest.raises(ProtocolError):
        await become(agent, IDENTITY)
    agent.close()
    theirs.close()


def test_the_request_carries_the_session_and_everything_the_fork_becomes() -> None:
    request = render_request(IDENTITY, "session", NONCE, 2.5)
    assert unpack_timeout_ms(request) == 2500
    fields, env, network = unpack_become(request)
    entropy = IDENTITY.entropy.hex()
    assert fields == ["session", "sb-1", "sb-1", IDENTITY.machine_id, entropy, NONCE]
    assert env == ["A=1"] and not network


def test_the_network_is_shown_where_it_was_asked_for() -> None:
    answer = good_answer()
    answer["steps"]["network"] = {"ok": True, "up": True, "address": "192.0.0.2", "reset": 3}
    proof = verify(answer, IDENTITY, NONCE, NOW - 1000, NOW + 1000, network=True)
    assert proof.network and proof.connections_reset == 3
    with pytest.raises(ContractBroken, match="step network"):
        check(answer)


@pytest.mark.parametrize(
    "step",
    [
        None,
        [],
        {"ok": False, "error": "there is no interface"},
        {"ok": True, "up": False, "address": None, "reset": 0},
        {"ok": True, "up": 1, "address": "192.0.0.2", "reset": 0},
        {"ok": True, "up": True, "address": None, "reset": 0},
        {"ok": True, "up": True, "address": "192.0.0.2", "reset": "all"},
        {"ok": True, "up": True, "address": "1" * 100, "reset": 0},
    ],
)
def test_a_fork_that_does_not_show_its_network_breaks_the_contract(step: object) -> None:
    answer = good_answer()
    if step is not None:
        answer["steps"]["network"] = step
    with pytest.raises(ContractBroken):
        verify(answer, IDENTITY, NONCE, NOW - 1000, NOW + 1000, network=True)


def test_an_agent_that_knows_no_network_is_believed_where_none_was_asked_for() -> None:
    proof = check(good_answer())
    assert not proof.network and proof.connections_reset == 0


def test_identities_are_fresh_and_do_not_show_their_secrets() -> None:
    first, second = new_identity("a"), new_identity("a")
    assert first.entropy != second.entropy and first.machine_id != second.machine_id
    shown = repr(new_identity("a", env={"SECRET": "hunter2"}))
    assert "hunter2" not in shown and first.entropy.hex() not in shown
    with pytest.raises(TypeError):
        first.env["A"] = "b"  # type: ignore[index]


@pytest.mark.parametrize(
    ("change"),
    [
        {"sandbox_id": ""},
        {"sandbox_id": "a/b"},
        {"sandbox_id": "x" * 129},
        {"hostname": ""},
        {"hostname": "Upper"},
        {"hostname": "-a"},
        {"hostname": "a-"},
        {"hostname": "a" * 64},
        {"hostname": "a.b"},
        {"hostname": "a\n"},
        {"machine_id": "AB" * 16},
        {"machine_id": "ab" * 15},
        {"machine_id": "00" * 16},
        {"entropy": b"short"},
        {"entropy": "x" * 64},
        {"env": {"A=B": "1"}},
        {"env": {"": "1"}},
        {"env": {"A\n": "1"}},
        {"env": {"A": "nul\0"}},
        {"env": {"A": 5}},
        {"env": {"A": "x" * 200_000}},
        {"env": {f"V{n}": "" for n in range(2000)}},
    ],
)
def test_identities_that_can_not_work_are_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "sandbox_id": "sb",
        "hostname": "sb",
        "machine_id": "ab" * 16,
        "entropy": bytes(64),
        "env": {},
    }
    assert Identity(**fields)
    with pytest.raises(InvalidInput):
        Identity(**{**fields, **change})


@pytest.mark.parametrize(
    ("sandbox_id", "hostname"),
    [("sb-1", "sb-1"), ("Sb_1.x", "sb-1-x"), ("___", "sandbox"), ("a" * 100, "a" * 63), ("a" * 62 + "_b", "a" * 62)],
)
def test_a_hostname_follows_from_the_id(sandbox_id: str, hostname: str) -> None:
    assert derive_hostname(sandbox_id) == hostname


def test_an_environment_is_copied() -> None:
    env = {"A": "1"}
    checked = check_env(env)
    env["A"] = "2"
    assert checked == {"A": "1"}
