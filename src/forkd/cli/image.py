"""`forkd image`: build, list, inspect and remove images."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forkd.cli.arguments import add_json
from forkd.cli.commands import Actions
from forkd.cli.output import print_facts, print_json, print_lines, print_rows, render_age, render_size, show
from forkd.cli.progress import Shown
from forkd.cli.report import report_removed
from forkd.errors import ForkdError, InvalidInput
from forkd.host.paths import find_home
from forkd.image import Image, ImageSpec, ImageStore, debian_spec, directory_spec, get_recipe, recipe_names
from forkd.image.spec import DEFAULT_SUITE
from forkd.store.snapshots import SnapshotStore

_DEFAULT_RECIPE = "python"


def add_image(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser)
    build = actions.add("build", run_build, "build an image; one that is already built is reused")
    recipes = ", ".join(recipe_names())
    build.add_argument("recipe", nargs="?", help=f"a ready-made set of packages: {recipes} (default {_DEFAULT_RECIPE})")
    build.add_argument("--name", help="the image's name (default: the recipe's name)")
    build.add_argument(
        "--package", "-p", action="append", default=[], metavar="P", help="a Debian package to install; may be repeated"
    )
    build.add_argument("--from-directory", metavar="DIR", help="take the root file system from a directory")
    build.add_argument("--suite", help=f"the Debian release (default {DEFAULT_SUITE})")
    build.add_argument("--mirror", metavar="URL", help="the package archive to use (default: the suite's own)")
    build.add_argument("--fresh", action="store_true", help="fetch the packages again even if the image is there")
    actions.add("ls", run_ls, "list the images")
    inspect = actions.add("inspect", run_inspect, "check an image's files and show everything about it")
    inspect.add_argument("image", metavar="IMAGE", help="a name or an id")
    remove = actions.add("rm", run_rm, "remove images")
    remove.add_argument("image", metavar="IMAGE", nargs="+", help="a name or an id")
    actions.add("prune", run_prune, "remove images whose name now belongs to a newer image")
    for action in actions.parsers():
        add_json(action)


def run_build(args: argparse.Namespace) -> int:
    spec, name = parse_request(args)
    with Shown(quiet=args.json) as progress:
        image = ImageStore(find_home()).build(spec, name, progress, fresh=args.fresh)
    return show(args, render_image(image), lambda _: print(f"{name}  {image.id}  {render_size(image.size)}"))


def run_ls(args: argparse.Namespace) -> int:
    images = ImageStore(find_home()).list()
    return show(args, [render_image(image) for image in images], lambda _: _print_images(images))


def _print_images(images: Sequence[Image]) -> None:
    now = time.time()
    rows = (
        (
            image.name or "-",
            image.id,
            render_size(image.size),
            render_age(now - image.created),
            image.kernel_version,
            render_source(image),
        )
        for image in images
    )
    print_rows(("NAME", "ID", "SIZE", "AGE", "KERNEL", "SOURCE"), rows, folded=("SOURCE",))


def run_inspect(args: argparse.Namespace) -> int:
    image = ImageStore(find_home()).open(args.image)
    shown = {**render_image(image), "installed": dict(image.packages)}
    if args.json:
        print_json(shown)
        return 0
    keys = ("id", "name", "root", "kernel", "initrd", "kernel_version", "python")
    facts = {key: str(shown[key] or "-") for key in keys}
    facts["size"] = render_size(image.size)
    facts["created"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(image.created))
    facts["source"] = render_source(image)
    facts["installed"] = f"{len(image.packages)} packages, listed by --json" if image.packages else "-"
    print_facts(facts)
    return 0


def run_rm(args: argparse.Namespace) -> int:
    home = find_home()
    store = ImageStore(home)
    in_use = SnapshotStore(home.snapshots).images_in_use()
    removed, failed = [], {}
    for ref in dict.fromkeys(args.image):
        try:
            store.remove(ref, in_use)
            removed.append(ref)
        except ForkdError as error:
            failed[ref] = error
    return report_removed(args, removed, failed)


def run_prune(args: argparse.Namespace) -> int:
    home = find_home()
    removed = ImageStore(home).prune(SnapshotStore(home.snapshots).images_in_use())
    return show(args, {"removed": removed}, lambda _: print_lines(removed))


def parse_request(args: argparse.Namespace) -> tuple[ImageSpec, str]:
    """What to build, and its name."""
    if args.from_directory is not None:
        if args.recipe or args.package or args.mirror or args.suite:
            raise InvalidInput(
                "--from-directory cannot be combined with a recipe, package, suite or mirror",
                hint="Use --from-directory with --name only",
            )
        if args.name is None:
            raise InvalidInput("An image from a directory needs a name", hint="Add --name")
        return directory_spec(Path(args.from_directory)), args.name
    recipe = args.recipe or (None if args.package else _DEFAULT_RECIPE)
    packages = (*(get_recipe(recipe) if recipe else ()), *args.package)
    name = args.name or recipe
    if name is None:
        raise InvalidInput("An image of packages needs a name", hint="Add --name")
    return debian_spec(packages, suite=args.suite or DEFAULT_SUITE, mirror=args.mirror), name


def render_image(image: Image) -> dict[str, Any]:
    return {
        "id": image.id,
        "name": image.name,
        "root": str(image.root),
        "kernel": str(image.kernel),
        "initrd": str(image.initrd),
        "kernel_version": image.kernel_version,
        "python": image.python,
        "size_bytes": image.size,
        "created": image.created,
        "source": dict(image.source),
    }


def render_source(image: Image) -> str:
    if image.source.get("kind") == "debian":
        return f"debian {image.source['suite']}: {' '.join(image.source['packages'])}"
    return f"directory {image.source.get('path', '')}"
