"""The lock: what set-up installs is what pyproject.toml allows, by hash, and says nothing of where it comes from."""

import re
from importlib.metadata import distribution

import pytest
from packaging.utils import canonicalize_name

from tools import lock


@pytest.mark.parametrize("extra", ["server", "dev"])
def test_it_has_all_that_is_needed_in_versions_that_are_allowed(extra: str) -> None:
    """After a change of the dependencies: make lock."""
    locked = lock.parse_lock(lock.lock_path(extra).read_text())
    wanted = lock.read_wanted(extra)
    for requirement in wanted:
        version, hashes = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"
        assert hashes and all(re.fullmatch("[0-9a-f]{64}", one) for one in hashes)
    installed = {
        name: lock.Package(name, version, tuple(distribution(name).requires or ()))
        for name, (version, _) in locked.items()
    }
    assert [package.name for package in lock.find_needed(wanted, installed)] == sorted(locked)


def test_what_is_installed_here_is_what_is_locked() -> None:
    locked = lock.parse_lock(lock.lock_path("dev").read_text())
    assert {name: distribution(name).version for name in locked} == {name: pin for name, (pin, _) in locked.items()}


def test_it_names_no_place() -> None:
    for extra in lock.EXTRAS:
        assert "//" not in lock.lock_path(extra).read_text()
        assert "@" not in lock.lock_path(extra).read_text()


def test_only_files_that_linux_on_x86_64_can_install_count() -> None:
    package = lock.Package("a-b", "1.2", ())
    usable = ["a_b-1.2.tar.gz", "a_b-1.2-py3-none-any.whl", "a_b-1.2-cp311-cp311-manylinux_2_17_x86_64.whl"]
    usable += ["a_b-1.2-cp313-cp313-musllinux_1_2_x86_64.whl", "a_b-1.2-cp38-abi3-manylinux2014_x86_64.whl"]
    assert all(lock.is_usable(name, package) for name in usable)
    others = ["a_b-1.3.tar.gz", "a_c-1.2.tar.gz", "a_b-1.2-cp310-cp310-manylinux_2_17_x86_64.whl", "a_b-1.2.exe"]
    others += ["a_b-1.2-cp311-cp311-win_amd64.whl", "a_b-1.2-cp311-cp311-manylinux_2_17_aarch64.whl"]
    assert not any(lock.is_usable(name, package) for name in others)
