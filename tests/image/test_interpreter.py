from __future__ import annotations

import pytest

from forkd.errors import InvalidInput
from forkd.image.interpreter import get_interpreter
from forkd.image.tree import Node, parse_listing, resolve

PROGRAM = Node("f", 0o755)
FILE = Node("f", 0o644)
DIRECTORY = Node("d", 0o755)


def link(target: str) -> Node:
    return Node("l", 0o777, target)


def python(minor: int, prefix: str = "usr", lib: str = "lib", whole: bool = True) -> dict[str, Node]:
    library = f"{prefix}/{lib}/python3.{minor}"
    tree = {f"{prefix}/bin/python3.{minor}": PROGRAM, f"{library}/os.py": FILE}
    if whole:
        tree |= {f"{library}/json/__init__.py": FILE, f"{library}/json": DIRECTORY}
    parts = [*prefix.split("/")]
    parents = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return tree | dict.fromkeys((*parents, f"{prefix}/bin", f"{prefix}/{lib}", library), DIRECTORY)


def test_the_python3_of_the_image_is_chosen() -> None:
    assert get_interpreter({**python(11), "usr/bin/python3": link("python3.11")}) == "/usr/bin/python3"


def test_links_are_followed_inside_the_image_only() -> None:
    tree = {
        **python(12, prefix="opt/py"),
        "usr": DIRECTORY,
        "usr/bin": DIRECTORY,
        "usr/bin/python3": link("/etc/alternatives/python3"),
        "etc": DIRECTORY,
        "etc/alternatives": DIRECTORY,
        "etc/alternatives/python3": link("../../../../../opt/py/bin/python3.12"),
    }
    assert get_interpreter(tree) == "/usr/bin/python3"


def test_a_link_to_a_python_that_only_the_host_has_is_none() -> None:
    tree = {"usr": DIRECTORY, "usr/bin": DIRECTORY, "usr/bin/python3": link("/usr/bin/python3.11")}
    with pytest.raises(InvalidInput, match="no Python"):
        get_interpreter(tree)


def test_links_in_a_circle_are_no_python() -> None:
    tree = {
        "usr": DIRECTORY,
        "usr/bin": DIRECTORY,
        "usr/bin/python3": link("python"),
        "usr/bin/python": link("python3"),
    }
    with pytest.raises(InvalidInput, match="no Python"):
        get_interpreter(tree)


def test_a_link_to_the_root_itself_is_no_python() -> None:
    with pytest.raises(InvalidInput, match="no Python"):
        get_interpreter({"usr": DIRECTORY, "usr/bin": DIRECTORY, "usr/bin/python3": link("/")})


@pytest.mark.parametrize("minor", [2, 7])
def test_an_old_python_is_refused_with_its_version(minor: int) -> None:
    with pytest.raises(InvalidInput, match=f"is 3.{minor}"):
        get_interpreter({**python(minor), "usr/bin/python3": link(f"python3.{minor}")})


def test_a_newer_one_beside_an_old_python3_is_found() -> None:
    tree = {**python(7), **python(13), "usr/bin/python3": link("python3.7")}
    assert get_interpreter(tree) == "/usr/bin/python3.13"


def test_the_one_below_usr_local_comes_first() -> None:
    tree = {**python(9), **python(12, prefix="usr/local")}
    assert get_interpreter(tree) == "/usr/local/bin/python3.12"


def test_a_program_named_just_python3_has_the_version_of_its_library() -> None:
    tree = python(10, lib="lib64")
    tree["usr/bin/python3"] = tree.pop("usr/bin/python3.10")
    assert get_interpreter(tree) == "/usr/bin/python3"


def test_a_python_without_its_whole_library_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lacks parts of its library") as caught:
        get_interpreter(python(11, whole=False))
    assert caught.value.hint is not None and "python3" in caught.value.hint


def test_a_file_that_cannot_be_executed_is_no_python() -> None:
    tree = {**python(11), "usr/bin/python3.11": FILE}
    with pytest.raises(InvalidInput, match="no Python"):
        get_interpreter(tree)


def test_a_listing_may_hold_any_name() -> None:
    listing = b"d 755 odd dir\0\0l 777 odd dir/new\nline\t\xff\0/target \xfe\0f 4755 x\0\0"
    tree = parse_listing(listing)
    assert tree["odd dir"] == DIRECTORY
    assert tree["odd dir/new\nline\t\udcff"].target == "/target \udcfe"
    assert tree["x"].executable


def test_parents_of_the_root_are_the_root() -> None:
    assert resolve({"a": DIRECTORY, "a/b": FILE}, "../../a/../a/./b") == "a/b"
