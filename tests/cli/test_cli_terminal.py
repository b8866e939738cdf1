"""`forkd exec -it` and `forkd shell` in a real terminal."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from typing import Self

import pytest
from cli_cases import DEADLINE_S, Cli
from support_processes import has_ended, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A person at a terminal in which forkd runs."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.keyboard, self.tty = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.tty)
        self.process = subprocess.Popen(
            cli.command(*words),
            env={**cli.env, "TERM": "vt100", "LINES": "24", "COLUMNS": "80"},  # not what counts
            stdin=self.tty,
            stdout=self.tty,
            stderr=self.tty,
            # A session whose terminal this is, so that resizing it reaches forkd as a signal.
            preexec_fn=_take_terminal,
        )
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def expect(self, text: str) -> str:
        """What is on the screen up to this text, once it is there."""
        wanted = text.encode()
        deadline = time.monotonic() + 20
        os.set_blocking(self.keyboard, False)
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self.keyboard, 65536)
            except BlockingIOError:
                time.sleep(0.02)
        found, _, self.seen = self.seen.partition(wanted)
        return found.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.keyboard)
        os.close(self.tty)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        assert termios.tcgetattr(self.tty) == self.before, "the terminal is not as it was"
        return code


def test_a_shell_has_a_terminal_of_this_ones_size_and_kind(warm: Cli, sandbox: str) -> None:
    with Terminal(warm, "shell", sandbox, "-e", "PS1=ready> ", "-w", "/tmp") as person:
        person.type("stty size; tty -s && echo is-$((1+1))-tty; echo term=$TERM; pwd\n")
        person.expect("24 80")
        person.expect("is-2-tty")
        person.expect("term=vt100")
        person.expect("/tmp")
        person.resize(40, 100)
        person.process.send_signal(signal.SIGWINCH)
        # The size comes by another way than what is typed. Computed, as what is typed is shown too.
        person.type('until [ "$(stty size)" = "40 100" ]; do sleep 0.05; done; echo is-$((40 + 60))-wide\n')
        person.expect("is-100-wide")
        person.type("exit 5\n")
        assert person.end() == 5


def test_keys_go_to_the_guest_ctrl_c_too(warm: Cli, sandbox: str) -> None:
    script = "trap 'echo caught' INT; echo ready.; cat; echo over"
    with Terminal(warm, "exec", "-it", sandbox, "--", "sh", "-c", script) as person:
        person.expect("ready.")
        person.type("hello\n")
        person.expect("hello\r\nhello")
        person.type("\x03")
        person.expect("caught")
        person.expect("over")
        assert person.end() == 0


def test_what_is_typed_ahead_is_not_lost(warm: Cli, sandbox: str) -> None:
    with Terminal(warm, "exec", "-it", sandbox, "--", "sh", "-c", "read line; echo got=$line.") as person:
        person.type("early\n")
        person.expect("got=early.")
        assert person.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_put_back_whatever_happens(warm: Cli, sandbox: str, number: int, code: int) -> None:
    with Terminal(warm, "exec", "-it", sandbox, "--", "sh", "-c", "echo pid=$$.; exec sleep 60") as person:
        person.expect("pid=")
        guest = int(person.expect("."))
        person.process.send_signal(number)
        assert person.end() == code
        wait_until(lambda: has_ended(guest))


def test_a_sandbox_that_ends_puts_the_terminal_back_too(warm: Cli, sandbox: str) -> None:
    with Terminal(warm, "exec", "-it", sandbox, "--", "sh", "-c", "echo ready.; exec sleep 60") as person:
        person.expect("ready.")
        assert warm.ask("rm", sandbox).returncode == 0
        person.expect("error: ")
        assert person.end() != 0


def test_a_terminal_without_input_shows_what_a_command_does_with_one(warm: Cli, sandbox: str) -> None:
    done = warm("exec", "-t", sandbox, "--", "sh", "-c", "test -t 1 && echo yes", COLUMNS="80", LINES="24")
    assert (done.returncode, done.stdout) == (0, "yes\r\n")
