"""Several fixes of a failing test, each tried on a fork; the one that passes is kept.

The repository is in a sandbox, as an agent left it. Every candidate gets a fork of that sandbox, with the repository,
what is built, and what runs. No candidate sees what another one did, and nothing has to be undone.

    python3 examples/fix_tests.py [TAG]
"""

from concurrent.futures import ThreadPoolExecutor

from prepared import find_tag

from forkd import CommandFailed, Sandbox

PROJECT = "/root/project"
SOURCE = """\
def split_bill(total_cents, people):
    \"\"\"What each pays, in cents. All of them together pay the total.\"\"\"
    share = total_cents // people
    return [share] * people
"""
TESTS = """\
import unittest

from bill import split_bill

class SplitBill(unittest.TestCase):
    def test_all_pay_the_same_when_it_can_be_divided(self):
        self.assertEqual(split_bill(900, 3), [300, 300, 300])

    def test_they_pay_the_total_together(self):
        self.assertEqual(sum(split_bill(1000, 3)), 1000)

    def test_nobody_pays_a_cent_more_than_another_unless_there_is_one_left(self):
        shares = split_bill(1001, 3)
        self.assertLessEqual(max(shares) - min(shares), 1)

    def test_cents_are_whole(self):
        self.assertTrue(all(isinstance(share, int) for share in split_bill(1000, 3)))
"""
COUNT = TESTS.count("def test_")
RETURN = "    return [share] * people\n"
# What a model would propose: what is written in place of the last line.
CANDIDATES = {
    "divide exactly": "    return [total_cents / people] * people\n",
    "round up": "    return [-(-total_cents // people)] * people\n",
    "the first pays the rest": "    return [share + total_cents % people] + [share] * (people - 1)\n",
    "spread the rest": "    return [share + (each < total_cents % people) for each in range(people)]\n",
}
RUN_TESTS = "python3 -m unittest -q"


def try_fix(sandbox: Sandbox, name: str) -> bool:
    """Whether all tests pass with it."""
    source = sandbox.files.read(f"{PROJECT}/bill.py")
    sandbox.files.write(f"{PROJECT}/bill.py", source.replace(RETURN, CANDIDATES[name]))
    try:
        sandbox.commands.run(RUN_TESTS, cwd=PROJECT, check=True)
    except CommandFailed as failed:
        print(f"  {sandbox.id}: {name}: {failed.result.stderr.count('FAIL:')} of {COUNT} tests fail")
        return False
    print(f"  {sandbox.id}: {name}: all tests pass")
    return True


def main() -> None:
    with Sandbox.create(find_tag()) as sandbox:
        sandbox.files.write(f"{PROJECT}/bill.py", SOURCE)
        sandbox.files.write(f"{PROJECT}/test_bill.py", TESTS)
        broken = sandbox.commands.run(RUN_TESTS, cwd=PROJECT)
        print(f"{sandbox.id}: {broken.stderr.count('FAIL:')} of {COUNT} tests fail, {len(CANDIDATES)} fixes are tried")

        with sandbox.fork(len(CANDIDATES)) as forks, ThreadPoolExecutor() as pool:
            passed = list(pool.map(try_fix, forks, CANDIDATES))
            sandbox.promote(forks[passed.index(True)])

        # A last step that may break what works: the attempt is undone when it raises.
        try:
            with sandbox.attempt():
                sandbox.commands.run("rm bill.py", cwd=PROJECT)
                sandbox.commands.run(RUN_TESTS, cwd=PROJECT, check=True)
        except CommandFailed:
            print(f"{sandbox.id}: cleaning up went too far, and was undone")
        sandbox.commands.run(RUN_TESTS, cwd=PROJECT, check=True)
        print(sandbox.files.read(f"{PROJECT}/bill.py"))


if __name__ == "__main__":
    main()
