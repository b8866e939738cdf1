"""How long the long tests run: small in `make test`, full in `make test-long`."""

import os


def sized(small: int, full: int) -> int:
    return full if os.environ.get("FORKD_TEST_SIZE") == "full" else small
