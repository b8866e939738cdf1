"""What `import forkd` offers to code in the guest's warmed interpreter.

The image builder installs this file as the guest's `forkd/__init__.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, TypeVar

    Hook = TypeVar("Hook", bound=Callable[[], object])

_hooks: List[Callable[[], object]] = []
_identity: Dict[str, str] = {}


def on_fork(hook: Hook) -> Hook:
    """Call `hook()` in every fork, after it has its own entropy and names, before it is reported running.

    For what the agent cannot know of: generators of random numbers you hold, connections to reopen, caches of
    identity. A hook that raises fails the fork. Usable as a decorator.
    """
    _hooks.append(hook)
    return hook


def identity() -> Dict[str, str]:
    """`sandbox_id`, `hostname` and `machine_id` of this fork; empty in a VM that was never forked."""
    return dict(_identity)
