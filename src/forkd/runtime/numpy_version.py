"""Which numpy a guest has, as forkd's ping tells it."""

from __future__ import annotations

from forkd.errors import GuestTimeout
from forkd.guest.calls import Agent
from forkd.wire.forkd_agent import NOT_INSTALLED

UNKNOWN = "unknown"
ASK_S = 2.0

# Without importing it: that can take seconds, and would be ours, not the user's.
_CODE = f"""\
__import__('sys').modules['numpy'].__version__ if 'numpy' in __import__('sys').modules else next(
    (name[6:].rpartition('.')[0]
     for entry in __import__('sys').path if __import__('os').path.isdir(entry)
     for name in __import__('os').listdir(entry)
     if name.startswith('numpy-') and name.endswith(('.dist-info', '.egg-info'))),
    {NOT_INSTALLED!r})"""


class NumpyVersion:
    """Asked for once; again, when the guest's interpreter was too busy to say."""

    def __init__(self) -> None:
        self._known: str | None = None

    async def ask(self, agent: Agent) -> str:
        if self._known is None:
            self._known = await _find(agent)
        return self._known or UNKNOWN


async def _find(agent: Agent) -> str | None:
    try:
        result = await agent.eval(_CODE, timeout_s=ASK_S, max_output_bytes=0)
    except GuestTimeout:
        return None
    version = result.value
    return version if isinstance(version, str) and len(version) < 100 else None
