"""What a fork asks of the kernel, call by call: to do something at each of its steps."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forkd.host.procfork import ptrace


@contextmanager
def counted_calls(at: int = 0, do: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """The names of the functions of ptrace.py that were called, in turn; before call number `at`, `do` something."""
    names: list[str] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **more: Any) -> Any:
            names.append(name)
            if len(names) == at:
                do()
            return function(*args, **more)

        return wrapped

    functions = {
        name: each for name, each in vars(ptrace).items() if getattr(each, "__module__", "") == ptrace.__name__
    }
    functions = {name: each for name, each in functions.items() if not isinstance(each, type)}
    try:
        for name, function in functions.items():
            setattr(ptrace, name, wrap(name, function))
        yield names
    finally:
        for name, function in functions.items():
            setattr(ptrace, name, function)
