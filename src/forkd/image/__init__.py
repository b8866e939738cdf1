"""Images: a read-only root file system with the kernel and the initramfs it boots with."""

from forkd.image.manifest import Image
from forkd.image.spec import ImageSpec, Progress, debian_spec, directory_spec, get_recipe, recipe_names
from forkd.image.steps import Copy, Run
from forkd.image.store import ImageStore

__all__ = [
    "Copy",
    "Image",
    "ImageSpec",
    "ImageStore",
    "Progress",
    "Run",
    "debian_spec",
    "directory_spec",
    "get_recipe",
    "recipe_names",
]
