"""A test suite, split over forks of the sandbox in which it was loaded.

What a test run does first, it does once: the modules are imported and the fixture is built, then the sandbox is
forked, and each fork runs its part of the tests with all of that in memory. With pytest when the image has it (`forkd
image build python --pip pytest`), else with unittest, in the same way.

    python3 examples/parallel_pytest.py [TAG]
"""

import time
from concurrent.futures import ThreadPoolExecutor

from prepared import find_tag

from forkd import Sandbox

FORKS = 4
MODULES = 12
SUITE = "/root/suite"
# Every module has tests that compute, and one that waits for something, as tests do.
TESTS = """\
import time, unittest

import fixture

class Part{number}(unittest.TestCase):
    def test_every_word_is_found(self):
        for word in list(fixture.WORDS)[{number}::997]:
            self.assertEqual(fixture.WORDS[word], len(word))

    def test_what_is_not_there_is_not_found(self):
        self.assertNotIn("nothing", fixture.WORDS)

    def test_an_answer_comes_in_time(self):
        time.sleep(0.5)
"""
FIXTURE = """\
import random

random.seed(7)
WORDS = {word: len(word) for word in ("".join(random.choices("abcdef", k=9)) for _ in range(100_000))}
"""
WITH_UNITTEST = """
import io, unittest

def run(names):
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    return unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful()
"""
WITH_PYTEST = """
import pytest

def run(names):
    return pytest.main(["-q", "-p", "no:cacheprovider", *(f"{here}/{name}.py" for name in names)]) == 0
"""
LOAD = f"""
import importlib, sys
here = {SUITE!r}
sys.path.insert(0, here)
for number in range({MODULES}):
    importlib.import_module(f"test_part_{{number}}")
"""


def prepare(sandbox: Sandbox) -> list[str]:
    """The suite is there, imported, and can be run; the names of its modules."""
    names = [f"test_part_{number}" for number in range(MODULES)]
    sandbox.files.write(f"{SUITE}/fixture.py", FIXTURE)
    for number, name in enumerate(names):
        sandbox.files.write(f"{SUITE}/{name}.py", TESTS.format(number=number))
    has_pytest = sandbox.eval_value("import importlib.util\nimportlib.util.find_spec('pytest') is not None")
    print("with pytest" if has_pytest else "with unittest: the image has no pytest")
    loaded = sandbox.run_code(LOAD + (WITH_PYTEST if has_pytest else WITH_UNITTEST))
    if loaded.error:
        raise SystemExit(loaded.error.traceback)
    return names


def run(sandbox: Sandbox, names: list[str]) -> bool:
    return bool(sandbox.eval_value(f"run({names!r})", timeout=300))


def main() -> None:
    with Sandbox.create(find_tag()) as sandbox:
        names = prepare(sandbox)

        begun = time.monotonic()
        with sandbox.fork(FORKS) as forks, ThreadPoolExecutor() as pool:
            ready_s = time.monotonic() - begun
            good = all(pool.map(run, forks, [names[each::FORKS] for each in range(FORKS)]))
            split_s = time.monotonic() - begun
        assert good

        begun = time.monotonic()
        assert run(sandbox, names)
        plain_s = time.monotonic() - begun
        print(f"one after the other: {plain_s:.2f} s")
        print(f"on {FORKS} forks:          {split_s:.2f} s, {ready_s:.2f} s of it for the forks")
        print(f"{plain_s / split_s:.1f} times as fast")


if __name__ == "__main__":
    main()
