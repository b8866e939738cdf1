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
from forkd.errors import ForkdError, InvalidInput, NotFound
from forkd.host.paths import find_home
from forkd.image import Image, ImageSpec, ImageStore, Run, debian_spec, directory_spec, get_recipe, recipe_names
from forkd.image.requirements import check_requirements, parse_requirements
from forkd.image.spec import DEFAULT_SUITE
from forkd.image.steps import parse_copy, render_step
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
    pip = build.add_argument_group("Python packages, from the index that pip uses here, installed on top")
    _add_repeated(pip, "--pip", dest="pip", metavar="P", about="a package, such as numpy==1.26.4")
    _add_repeated(pip, "--requirement", "-r", dest="pip", metavar="FILE", about="the packages that a file lists")
    steps = build.add_argument_group("steps, done last, in the order given")
    _add_repeated(
        steps, "--run", dest="steps", metavar="CMD", about="run a shell command in the image, without network"
    )
    _add_repeated(
        steps, "--copy", dest="steps", metavar="SRC:DEST", about="copy a file, or a directory's content, into the image"
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


def _add_repeated(group: argparse._ArgumentGroup, *flags: str, dest: str, metavar: str, about: str) -> None:
    """Options that share a `dest` keep their order there, each value with its option."""
    option = flags[0]
    group.add_argument(
        *flags,
        dest=dest,
        action="append",
        default=[],
        type=lambda text: (option, text),
        metavar=metavar,
        help=f"{about}; may be repeated",
    )


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
    shown = {**render_image(image), "installed": dict(image.packages), "pip": dict(image.pip)}
    if args.json:
        print_json(shown)
        return 0
    keys = ("id", "name", "root", "kernel", "initrd", "kernel_version", "python")
    facts = {key: str(shown[key] or "-") for key in keys}
    facts["size"] = render_size(image.size)
    facts["created"] = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(image.created))
    facts["source"] = render_source(image)
    facts["installed"] = f"{len(image.packages)} packages, listed by --json" if image.packages else "-"
    facts["pip"] = ", ".join(f"{name} {wheel['version']}" for name, wheel in image.pip.items()) or "-"
    for number, step in enumerate(image.source.get("steps", ()), start=1):
        facts[f"step {number}"] = render_step(step)
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
    pip = [line for option, text in args.pip for line in _read_requirements(option, text)]
    steps = [Run(text) if option == "--run" else parse_copy(text) for option, text in args.steps]
    if args.from_directory is not None:
        if args.recipe or args.package or args.mirror or args.suite:
            raise InvalidInput(
                "--from-directory cannot be combined with a recipe, package, suite or mirror",
                hint="Use --from-directory with --name, and with --pip, -r, --run and --copy",
            )
        if args.name is None:
            raise InvalidInput("An image from a directory needs a name", hint="Add --name")
        return directory_spec(Path(args.from_directory), pip=pip, steps=steps), args.name
    recipe = args.recipe or (None if args.package else _DEFAULT_RECIPE)
    packages = (*(get_recipe(recipe) if recipe else ()), *args.package)
    name = args.name or recipe
    if name is None:
        raise InvalidInput("An image of packages needs a name", hint="Add --name")
    suite = args.suite or DEFAULT_SUITE
    return debian_spec(packages, suite=suite, mirror=args.mirror, pip=pip, steps=steps), name


def _read_requirements(option: str, text: str) -> tuple[str, ...]:
    if option == "--pip":
        return check_requirements([text])
    try:
        return parse_requirements(Path(text).read_text(), text)
    except FileNotFoundError as error:
        raise NotFound(f"There is no file {text}", hint="Check the path after -r") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{text} cannot be read as text") from error


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
    source = image.source
    if source.get("kind") == "debian":
        base = f"debian {source['suite']}: {' '.join(source['packages'])}"
    elif source.get("kind") == "pack":
        base = "a pack"
    else:
        base = f"directory {source.get('path', '')}"
    pip, steps = source.get("pip", ()), source.get("steps", ())
    layers = [*([f"pip: {' '.join(pip)}"] if pip else []), *([f"steps: {len(steps)}"] if steps else [])]
    return "; ".join([base, *layers])
