"""forkd: fork warmed virtual machines, copy-on-write."""

from forkd.errors import ForkdError

__version__ = "0.1.0.dev0"

__all__ = ["ForkdError", "__version__"]
