"""The snapshot that the examples fork: the first argument, else FORKD_TAG, else one called `examples`."""

import os
import sys

from forkd import Controller, NotFound

IMAGE = "python"


def find_tag() -> str:
    """Its tag. When there is no such snapshot it is made, from the image that `forkd image build` builds."""
    tag = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG") or "examples"
    with Controller() as controller:
        try:
            controller.get_snapshot(tag)
        except NotFound:
            print(f"Making the snapshot {tag} from the image {IMAGE}, once")
            controller.create_snapshot(tag, IMAGE, memory_mib=256, wait=True)
    return tag
