import pytest

from forkd.errors import InvalidInput
from forkd.image.root import Node, get_interpreter, parse_listing, resolve

PROGRAM = Node("f", 0o755)
FILE = Node("f", 0o644)
DIRECTORY = Node("d", 0o755)
USR_BIN = {"usr": DIRECTORY, "usr/bin": DIRECTORY}


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


def test_links_are_followed_inside_the_image_only() -> None:
    tree = {
        **python(12, prefix="opt/py"),
        **USR_BIN,
        "usr/bin/python3": link("/etc/alternatives/python3"),
        "etc": DIRECTORY,
        "etc/alternatives": DIRECTORY,
        "etc/alternatives/python3": link("../../../../../opt/py/bin/python3.12"),
    }
    assert get_interpreter(tree) == "/usr/bin/python3"


@pytest.mark.parametrize(
    "tree",
    [
        {**USR_BIN, "usr/bin/python3": link("/usr/bin/python3.11")},
        {**USR_BIN, "usr/bin/python3": link("python"), "usr/bin/python": link("python3")},
        {**USR_BIN, "usr/bin/python3": link("/")},
        {**python(11), "usr/bin/python3.11": FILE},
    ],
    ids=["a link to one only the host has", "links in a circle", "a link to the root", "not executable"],
)
def test_what_cannot_be_run_is_no_python(tree: dict[str, Node]) -> None:
    with pytest.raises(InvalidInput, match="no Python"):
        get_interpreter(tree)


@pytest.mark.parametrize("minor", [2, 7])
def test_an_old_python_is_refused_with_its_version(minor: int) -> None:
    with pytest.raises(InvalidInput, match=f"is 3.{minor}"):
        get_interpreter({**python(minor), "usr/bin/python3": link(f"python3.{minor}")})


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ({**python(7), **python(13), "usr/bin/python3": link("python3.7")}, "/usr/bin/python3.13"),
        ({**python(9), **python(12, prefix="usr/local")}, "/usr/local/bin/python3.12"),
        ({**python(11), "usr/bin/python3": link("python3.11")}, "/usr/bin/python3"),
    ],
    ids=["a newer one beside an old python3", "below /usr/local first", "python3 first"],
)
def test_the_right_one_of_several_is_chosen(tree: dict[str, Node], found: str) -> None:
    assert get_interpreter(tree) == found


def test_a_program_named_just_python3_has_the_version_of_its_library() -> None:
    tree = python(10, lib="lib64")
    tree["usr/bin/python3"] = tree.pop("usr/bin/python3.10")
    assert get_interpreter(tree) == "/usr/bin/python3"


def test_a_python_without_its_whole_library_is_refused() -> None:
    with pytest.raises(InvalidInput, match="lacks parts of its library") as caught:
        get_interpreter(python(11, whole=False))
    assert caught.value.hint is not None and "python3" in caught.value.hint


def test_a_listing_may_hold_any_name() -> None:
    listing = b"d 755 odd dir\0\0l 777 odd dir/new\nline\t\xff\0/target \xfe\0f 4755 x\0\0"
    tree = parse_listing(listing)
    assert tree["odd dir"] == DIRECTORY
    assert tree["odd dir/new\nline\t\udcff"].target == "/target \udcfe"
    assert tree["x"].executable


def test_parents_of_the_root_are_the_root() -> None:
    assert resolve({"a": DIRECTORY, "a/b": FILE}, "../../a/../a/./b") == "a/b"
