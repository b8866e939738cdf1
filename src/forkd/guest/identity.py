"""The fork contract, host side: give a clone its identity, and believe only what it can prove."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

from forkd.errors import ContractBroken, ProtocolError
from forkd.guest.agent import CLOCK_TOLERANCE_NS, Agent
from forkd.guest.channel import Channel
from forkd.guest.exchange import Exchange, get_int, get_text
from forkd.model.names import Identity
from forkd.wire.agent import BECOME, CLOCK, encode_clock, pack_become

# In the order the guest takes them.
REQUIRED_STEPS = ("entropy", "hostname", "machine_id", "environment", "interpreter", "scripts", "clock")
NETWORK_STEP = "network"  # older agents have none: it is only missed where a network was asked for
HOOKS_S = 10.0
BECOME_S = 30.0
_MAX_CLOCK_QUESTIONS = 4
_WHY_LIMIT = 8_000
_ADDRESS_CHARS = 45


@dataclass(frozen=True)
class ForkProof:
    """What the fork showed. Fingerprints are SHA-256 of samples: equal ones among siblings mean equal randomness."""

    hostname: str
    machine_id: str
    realtime_ns: int
    clock_rtt_ns: int
    urandom: str
    random: str
    numpy: str | None
    hooks: int
    scripts: int
    network: bool = False
    connections_reset: int = 0  # which the fork would have had in common with where it comes from


async def become(
    agent: Agent,
    identity: Identity,
    network: bool = False,
    *,
    hooks_s: float = HOOKS_S,
    deadline_s: float = BECOME_S,
) -> ForkProof:
    """Raises ContractBroken, or any error of the channel: in all cases the clone must not live.

    `network`: whether it is to have one. Its connections of before are reset.
    """
    nonce = secrets.token_hex(16)
    request = render_request(identity, agent.session, nonce, hooks_s, network)
    exchange = _Becoming(agent.channel, request, deadline_s)
    answer = await exchange.answer_json()
    return verify(answer, identity, nonce, exchange.asked_ns, time.time_ns(), network)


def render_request(identity: Identity, session: str, nonce: str, hooks_s: float, network: bool = False) -> bytes:
    fields = {
        "session": session,
        "sandbox_id": identity.sandbox_id,
        "hostname": identity.hostname,
        "machine_id": identity.machine_id,
        "entropy": identity.entropy.hex(),
        "nonce": nonce,
    }
    return pack_become(fields, dict(identity.env), round(hooks_s * 1000), network)


def verify(
    answer: dict[str, Any], identity: Identity, nonce: str, asked_ns: int, now_ns: int, network: bool = False
) -> ForkProof:
    """Every required step, with evidence that fits. `asked_ns`: when the guest last asked for the time."""
    reset = _check_network(answer, network)
    steps = _get_steps(answer)
    entropy, interpreter, clock = steps["entropy"], steps["interpreter"], steps["clock"]
    _require_equal("hostname", steps["hostname"].get("value"), identity.hostname)
    _require_equal("machine_id", steps["machine_id"].get("value"), identity.machine_id)
    _require_equal("environment", steps["environment"].get("count"), len(identity.env))
    _require_equal("entropy", entropy.get("bits"), len(identity.entropy) * 8)
    try:
        proof = ForkProof(
            hostname=identity.hostname,
            machine_id=identity.machine_id,
            realtime_ns=get_int(clock, "realtime_ns"),
            clock_rtt_ns=get_int(clock, "rtt_ns"),
            urandom=_get_fingerprint(interpreter, "urandom"),
            random=_get_fingerprint(interpreter, "random"),
            numpy=None if interpreter.get("numpy") is None else _get_fingerprint(interpreter, "numpy"),
            hooks=get_int(interpreter, "hooks"),
            scripts=get_int(steps["scripts"], "ran"),
            network=network,
            connections_reset=reset,
        )
    except ProtocolError as error:
        raise ContractBroken("A fork gave evidence that cannot be read") from error
    if not asked_ns - CLOCK_TOLERANCE_NS <= proof.realtime_ns <= now_ns + CLOCK_TOLERANCE_NS:
        raise ContractBroken("A fork broke the contract at step clock: its clock is not the host's")
    expected = hashlib.sha256((nonce + identity.hostname + identity.machine_id).encode()).hexdigest()
    _require_equal("proof", answer.get("proof"), {"nonce": nonce, "digest": expected})
    return proof


def _get_steps(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    reported = answer.get("steps")
    if not isinstance(reported, dict):
        raise ContractBroken("A fork did not say what it did")
    steps: dict[str, dict[str, Any]] = {}
    for name in REQUIRED_STEPS:
        step = reported.get(name)
        if not isinstance(step, dict):
            raise ContractBroken(f"A fork broke the contract at step {name}: it is missing")
        if step.get("ok") is not True:
            why = step.get("error")
            if isinstance(why, dict):
                why = why.get("message")
            raise ContractBroken(
                f"A fork broke the contract at step {name}: it failed",
                details=why[-_WHY_LIMIT:] if isinstance(why, str) else None,
            )
        steps[name] = step
    return steps


def _check_network(answer: dict[str, Any], wanted: bool) -> int:
    """How many connections were reset. First of all: an older agent fails in other steps, too."""
    steps = answer.get("steps")
    step = steps.get(NETWORK_STEP) if isinstance(steps, dict) else None
    if step is None and not wanted:
        return 0
    if not isinstance(step, dict) or step.get("ok") is not True:
        why = step.get("error") if isinstance(step, dict) else None
        raise ContractBroken(
            "A fork broke the contract at step network: it has no network interface that it could use",
            hint="Make the image and the snapshot again: forkd image build, forkd snapshot create",
            details=why[-_WHY_LIMIT:] if isinstance(why, str) else None,
        )
    _require_equal(NETWORK_STEP, step.get("up"), wanted)
    try:
        if wanted:
            get_text(step, "address", _ADDRESS_CHARS)
        return get_int(step, "reset")
    except ProtocolError as error:
        raise ContractBroken("A fork gave evidence that cannot be read") from error


def _require_equal(step: str, seen: object, wanted: object) -> None:
    if type(seen) is not type(wanted) or seen != wanted:
        raise ContractBroken(f"A fork broke the contract at step {step}: it did not become what it was told to")


def _get_fingerprint(step: dict[str, Any], key: str) -> str:
    text = get_text(step, key, 64)
    if len(text) != 64 or not text.isalnum():
        raise ProtocolError(f"{key} is not a fingerprint")
    return text


class _Becoming(Exchange):
    """The exchange in which the guest asks for the time, when it is ready to set its clock."""

    def __init__(self, channel: Channel, payload: bytes, deadline_s: float) -> None:
        self.asked_ns = 0
        self._questions = 0
        super().__init__(channel, "take a new identity", BECOME, payload, deadline_s)

    def on_other(self, kind: int, payload: bytes) -> None:
        self._questions += 1
        if kind != CLOCK or payload or self._questions > _MAX_CLOCK_QUESTIONS:
            super().on_other(kind, payload)
        self.asked_ns = time.time_ns()
        self._channel.send(encode_clock(self.number, self.asked_ns))
