from pathlib import Path

import pytest

from forkd.errors import InvalidInput, NotFound
from forkd.image import debian_spec, directory_spec, get_recipe
from forkd.image.spec import MAX_PACKAGES, DebianSource

BAD_WORDS = [
    "",
    "a",
    "-o",
    "--include=x",
    "../../etc/passwd",
    "/tmp/x.deb",
    "./x.deb",
    "python3 curl",
    "python3,curl",
    "python3;id",
    "python3\n",
    "pythön3",
    "\uff50ython3",
    "Python3",
    "?essential",
    "python3/bookworm",
    "a" * 300,
    "python3\0",
]


BAD_SUITES = ["", "-x", "../x", "book worm", "BOOKWORM", "ß", "s" * 300, "bookworm\n"]
BAD_MIRRORS = [
    "",
    "ftp://x/",
    "example",
    "http://x y",
    "deb [trusted=yes] http://x",
    'http://x"',
    "http://" + "x" * 600,
]


@pytest.mark.parametrize(
    ("packages", "options", "named"),
    [
        *(([word], {}, "package name") for word in BAD_WORDS),
        *((["python3"], {"suite": word}, "suite") for word in BAD_SUITES),
        *((["python3"], {"mirror": word}, "mirror") for word in BAD_MIRRORS),
        ([f"package{i}" for i in range(MAX_PACKAGES + 1)], {}, "packages"),
    ],
)
def test_what_is_no_package_suite_or_mirror_is_refused(
    packages: list[str], options: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidInput, match=named):
        debian_spec(packages, **options)


@pytest.mark.parametrize("package", ["python3", "g++", "libc6", "python3.11", "0ad", "libstdc++-12-dev"])
def test_real_package_names_are_accepted(package: str) -> None:
    assert debian_spec([package]).source == DebianSource((package,))


def test_order_and_repetition_of_packages_make_no_difference() -> None:
    assert debian_spec(["b1", "a1", "b1"]) == debian_spec(["a1", "b1"])


def test_an_error_shows_at_most_some_of_a_long_word() -> None:
    with pytest.raises(InvalidInput) as caught:
        debian_spec(["A" * 100_000])
    assert len(str(caught.value)) < 200


def test_an_unknown_recipe_names_the_known_ones() -> None:
    assert "python3-numpy" in get_recipe("python")
    with pytest.raises(NotFound) as caught:
        get_recipe("../python")
    assert caught.value.hint is not None and "python" in caught.value.hint


def test_a_directory_with_a_null_character_is_refused() -> None:
    with pytest.raises(InvalidInput):
        directory_spec(Path("a\0b"))
