"""A program: the host's pip, choosing packages for another Python than the one it runs on.

    pip_for_guest.py '{"python_version": "3.11", ...}' download ...

`pip download --python-version` picks wheels for that version, but still asks this Python whether a requirement such
as `tomli; python_version < "3.11"` applies. Where pip's insides have changed, that stays so; the guest's own Python
checks the set again when it installs it.
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any


def main() -> None:
    wanted = json.loads(sys.argv[1])
    # This file's directory, which is no place to import from.
    del sys.path[0]
    try:
        from pip._vendor.packaging import markers

        here = markers.default_environment
    except (ImportError, AttributeError):
        pass
    else:

        def there() -> Any:
            return {**here(), **wanted}

        markers.default_environment = there
    sys.argv = ["pip", *sys.argv[2:]]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
