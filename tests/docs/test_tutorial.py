"""Every command of the tutorial works, in its order, and shows what the tutorial says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_daemon import environment

from forkd.host.paths import Home

TUTORIAL = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Ids, random numbers, sizes and times are other ones each time.
_VARIES = re.compile(r"sb-[0-9a-f]+|127\.0\.0\.1:\d+|\d+\.\d+|pid \d+|\b\d+s\b| +")
# Shown while they last: a command that looks again and again may miss a short one.
_STAGES = {"booting the parent", "warming up", "freezing", "writing and checksumming"}
_RUN_S = 300.0


def steps() -> list[tuple[str, str]]:
    """Each command with the output that is shown for it; an example in Python is a command too."""
    found = []
    for language, body in _BLOCK.findall(TUTORIAL):
        if language == "python":
            found.append((f"{sys.executable} - <<'END'\n{body}END\n", ""))
        else:
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                found.append((command, shown))
    return found


@pytest.mark.vm
def test_the_commands_of_the_tutorial_work_and_show_what_it_says(fake_home: Home) -> None:
    script = f"forkd() {{ {sys.executable} -m forkd.cli.main \"$@\"; }}\ntrap 'forkd down' EXIT\nset -e\n"
    script += "".join(f"{command}\necho ---\n" for command, _ in steps())
    done = subprocess.run(
        ["sh", "-c", script],
        env=environment(fake_home, "qemu") | {"FORKD_BIND": "none"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RUN_S,
    )
    assert done.returncode == 0, done.stdout
    outputs = done.stdout.split("---\n")[:-1]
    assert len(outputs) == len(steps())
    for (command, shown), output in zip(steps(), outputs, strict=True):
        if shown:
            missed = _STAGES - {*output.splitlines()}
            expected = [line for line in shown.splitlines() if line not in missed]
            assert fixed(output.splitlines()) == fixed(expected), command


def fixed(lines: list[str]) -> list[str]:
    return [_VARIES.sub("", line) for line in lines]
