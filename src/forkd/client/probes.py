"""Questions whose answer is yes or no, whatever is wrong with the daemon."""

from __future__ import annotations

from forkd.client.call import Call, Plan
from forkd.client.calls import service
from forkd.errors import ForkdError


def is_healthy() -> Plan[bool]:
    return _whether(service.healthy())


def is_ready() -> Plan[bool]:
    return _whether(service.ready())


def _whether(call: Call[bool]) -> Plan[bool]:
    try:
        answer: bool = yield call
    except ForkdError:
        return False
    return answer
