"""Five continuations of one running interpreter; the best one is kept.

A search is under way in a sandbox: its variables are in memory and nowhere else. It is forked into five, each goes on
with another step width, and the sandbox takes the place of the one that came farthest.

    python3 examples/branch_and_pick.py [TAG]
"""

from concurrent.futures import ThreadPoolExecutor

from prepared import find_tag

from forkd import Sandbox

# Runs in the guest. A valley full of holes, the lowest at (0, 0): where a search ends depends on how it steps.
BEGIN = """
import math, random

def height(x, y):
    return 20 + x * x + y * y - 10 * (math.cos(2 * math.pi * x) + math.cos(2 * math.pi * y))

def search(width, steps):
    global here, lowest, tried
    for _ in range(steps):
        x, y = here
        there = random.gauss(x, width), random.gauss(y, width)
        tried += 1
        if height(*there) < lowest:
            here, lowest = there, height(*there)
    return lowest

here, lowest, tried = (4.3, -3.7), height(4.3, -3.7), 0
"""
WIDTHS = [0.01, 0.05, 0.2, 1.0, 5.0]


def main() -> None:
    with Sandbox.create(find_tag()) as sandbox:
        sandbox.run_code(BEGIN)
        start = sandbox.eval_value("search(0.5, 30)")
        print(f"{sandbox.id}: lowest {start:.3f} after 30 steps")

        with sandbox.fork(len(WIDTHS)) as forks:
            # Each fork has the functions, the place it was at, and random numbers of its own.
            with ThreadPoolExecutor() as pool:
                found = list(pool.map(lambda fork, width: fork.eval_value(f"search({width}, 300)"), forks, WIDTHS))
            for fork, width, lowest in zip(forks, WIDTHS, found, strict=True):
                print(f"  {fork.id}: width {width:<4} lowest {lowest:.3f}")

            best = found.index(min(found))
            sandbox.promote(forks[best])

        kept, tried = sandbox.eval_value("[lowest, tried]")
        assert (kept, tried) == (found[best], 330)
        print(f"{sandbox.id}: goes on from there, lowest {kept:.3f}; the other {len(WIDTHS) - 1} are gone")


if __name__ == "__main__":
    main()
