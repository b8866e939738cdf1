"""The SDK over a real daemon with the fake engine, whose guests are real agents sharing our file system."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sdk_daemon import TAG, serving
from support_daemon import make_certificate
from support_processes import is_reaped, wait_until

from forkd import (
    AsyncController,
    AsyncSandbox,
    CommandFailed,
    CommandNotStarted,
    Conflict,
    Controller,
    ControllerError,
    EvalFailed,
    ForkdError,
    GuestTimeout,
    InvalidInput,
    NotFound,
    NotRunning,
    Sandbox,
    Unauthorized,
    Unreachable,
)
from forkd.client.shared import shared_controller

pytestmark = pytest.mark.usefixtures("daemon")


@pytest.fixture
def sandbox(daemon: Controller) -> Iterator[Sandbox]:
    with Sandbox.create(TAG) as made:
        yield made


def test_a_sandbox_runs_commands_until_its_block_ends(daemon: Controller) -> None:
    with Sandbox.create(TAG, envs={"GREETING": "hello"}) as sandbox:
        assert daemon.get_sandbox(sandbox.id)["state"] == "running" and sandbox.is_running()
        result = sandbox.commands.run("echo $GREETING $((6 * 7)); echo oops >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == ("hello 42\n", "oops\n", 3)
        assert sandbox.commands.run(["echo", "a  b"], 5).stdout == "a  b\n"
        assert sandbox.commands.run("kill -9 $$").exit_code == -9
    assert not sandbox.is_running() and sandbox.kill() is False
    with pytest.raises(NotFound):
        sandbox.info()


def test_a_block_that_raises_kills_its_sandbox_too(daemon: Controller) -> None:
    with pytest.raises(KeyError):
        with Sandbox.create(TAG):
            raise KeyError
    assert daemon.list_sandboxes() == []


def test_output_comes_in_whole_characters(sandbox: Sandbox) -> None:
    pieces: list[str] = []
    command = "printf 'gr\\303'; sleep 0.3; printf '\\274\\303\\237e'; printf '\\377' >&2"
    result = sandbox.commands.run(command, on_stdout=pieces.append, on_stderr=lambda text: None)
    assert "".join(pieces) == result.stdout == "grüße" and pieces[0] == "gr"
    assert result.stderr == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_command_that_takes_too_long_is_an_error_with_what_it_wrote(sandbox: Sandbox, streamed: bool) -> None:
    callback = (lambda text: None) if streamed else None
    with pytest.raises(GuestTimeout) as caught:
        sandbox.commands.run("echo part; sleep 60", timeout=0.3, on_stdout=callback)
    assert isinstance(caught.value.body, dict) and caught.value.body["stdout"] == "part\n"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_command_that_cannot_start_is_an_error(sandbox: Sandbox, streamed: bool) -> None:
    callback = (lambda text: None) if streamed else None
    with pytest.raises(CommandNotStarted):
        sandbox.commands.run(["/no/such/program"], on_stdout=callback)


def test_exit_codes_are_checked_when_asked(sandbox: Sandbox) -> None:
    with pytest.raises(CommandFailed, match="exit code 4: no") as caught:
        sandbox.commands.run("echo no >&2; exit 4", check=True)
    assert caught.value.result.exit_code == 4
    with pytest.raises(CommandFailed):
        sandbox.commands.run("exit 4", background=True).wait(check=True)
    assert sandbox.commands.run("true", check=True).exit_code == 0


def test_a_command_in_the_background_is_written_to_read_and_waited_for(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("while read line; do echo got $line; done; exit 5", background=True, stdin=True)
    pieces = iter(handle)
    for word in ("one", "two"):
        handle.send_stdin(f"{word}\n")
        assert next(pieces).stdout == f"got {word}\n"
    assert handle.exit_code is None
    handle.close_stdin()
    result = handle.wait()
    assert (result.stdout, result.exit_code, handle.exit_code) == ("got one\ngot two\n", 5, 5)
    assert handle.kill() is False and handle.wait() == result
    with pytest.raises(Conflict):
        handle.send_stdin("three\n")


def test_a_command_in_the_background_can_be_polled(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo out; read line; exit 7", background=True, stdin=True)
    assert handle.poll() is None and handle.exit_code is None
    handle.send_stdin("\n")
    wait_until(lambda: handle.poll() is not None)
    assert handle.exit_code == handle.poll() == 7 and handle.stdout == ""
    assert handle.wait().stdout == "out\n" and handle.poll() == 7
    killed = sandbox.commands.run("sleep 1000", background=True)
    assert killed.kill()
    wait_until(lambda: killed.poll() == -9)


def test_text_for_a_command_in_the_background_is_its_whole_input(sandbox: Sandbox) -> None:
    text = "x" * 600_000
    assert sandbox.commands.run("wc -c", background=True, stdin=text).wait().stdout.strip() == "600000"


def test_a_background_command_outlives_its_handle_and_can_be_found_again(sandbox: Sandbox) -> None:
    first = sandbox.commands.run("echo early; read x; echo $x", background=True, stdin=True)
    assert next(iter(first)).stdout == "early\n"
    first.disconnect()
    (process,) = sandbox.commands.list()
    assert process.pid == first.pid and process.running and not process.pty
    sandbox.commands.send_stdin(first.pid, "late\n")
    assert sandbox.commands.connect(first.pid).wait().stdout == "early\nlate\n"
    assert first.wait().stdout == "early\nlate\n"
    with pytest.raises(NotFound):
        sandbox.commands.connect(99999999)
    assert sandbox.commands.kill(99999999) is False


def test_a_handle_as_a_block_kills_what_still_runs(sandbox: Sandbox) -> None:
    with sandbox.commands.run("echo $$; sleep 1000", background=True) as handle:
        pid = int(next(iter(handle)).stdout or 0)
        os.kill(pid, 0)
    assert sandbox.commands.connect(handle.pid).wait().exit_code == -9
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_callback_that_raises_ends_the_command(sandbox: Sandbox) -> None:
    def stop(text: str) -> None:
        raise KeyError(text)

    with pytest.raises(KeyError) as caught:
        sandbox.commands.run("echo $$; sleep 1000", on_stdout=stop)
    wait_until(lambda: is_reaped(int(caught.value.args[0])))


def read_until(shown: Iterator[bytes], end: bytes) -> None:
    seen = b""
    while end not in seen:
        seen += next(shown)


def test_a_terminal_is_typed_at_and_resized(sandbox: Sandbox) -> None:
    with sandbox.pty.create(10, 50, cmd="stty size; read x; stty size; echo $TERM; read x; exit 6") as terminal:
        shown = iter(terminal)
        read_until(shown, b"10 50\r\n")
        terminal.resize(11, 51)
        terminal.send("\n")
        read_until(shown, b"11 51\r\nxterm-256color\r\n")
        terminal.send("\n")
        assert terminal.wait() == 6 == terminal.exit_code
    with sandbox.pty.create() as shell:
        shell.send("echo $((6 * 7))\n")
        read_until(iter(shell), b"42")
        shell.send("exit 3\n")
        assert shell.wait() == 3


def test_code_runs_in_the_warmed_interpreter_and_keeps_its_names(sandbox: Sandbox) -> None:
    heard: list[str] = []
    assert sandbox.eval("warmed + 1") == "42" and sandbox.eval("y = 1") == "None"
    assert sandbox.run_code("y = 1").results == [] and sandbox.eval_value("y = 1") is None
    assert sandbox.eval_value("{'a': [y, None]}") == {"a": [1, None]}
    with pytest.raises(InvalidInput, match="JSON"):
        sandbox.eval_value("object()")
    execution = sandbox.run_code("print('hi')\ny + 1", on_stdout=heard.append)
    assert (execution.text, execution.logs.stdout, execution.error, heard) == ("2", ["hi\n"], None, ["hi\n"])
    assert sandbox.run_code("print('hi')\ny + 1") == execution
    for callback in (None, heard.append):
        error = sandbox.run_code("1 / 0", on_stderr=callback).error
        assert error is not None and (error.name, error.value) == ("ZeroDivisionError", "division by zero")
        assert "Traceback" in error.traceback
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero") as caught:
        sandbox.eval("1 / 0")
    assert isinstance(caught.value, EvalFailed) and isinstance(caught.value, ControllerError)
    with pytest.raises(GuestTimeout):
        sandbox.run_code("while True: pass", timeout=0.3)


def test_files_go_both_ways(tmp_path: Path) -> None:
    at = str(tmp_path)
    with Sandbox.create(TAG) as sandbox:
        files = sandbox.files
        assert files.write(f"{at}/deep/er/a", "grüße").size == 7 and files.read(f"{at}/deep/er/a") == "grüße"
        files.write(f"{at}/b", bytearray(b"\xff"), mode=0o640)
        files.write(f"{at}/b", b"!", append=True)
        assert files.read(f"{at}/b", format="bytes") == b"\xff!" and files.get_info(f"{at}/b").mode == 0o640
        with pytest.raises(InvalidInput, match="UTF-8"):
            files.read(f"{at}/b")
        big = bytes(range(256)) * 8192
        (tmp_path / "source").write_bytes(big)
        with (tmp_path / "source").open("rb") as source:
            assert files.write(f"{at}/c", source).size == len(big)
        assert b"".join(files.read(f"{at}/c", format="stream")) == big == (tmp_path / "c").read_bytes()
        files.write(f"{at}/d", iter(["a", "b"]))  # type: ignore[arg-type]
        assert (tmp_path / "d").read_text() == "ab"
        assert [info.name for info in files.write_files([{"path": f"{at}/e", "data": "1"}])] == ["e"]
        assert files.rename(f"{at}/e", f"{at}/f").name == "f" and not files.exists(f"{at}/e")
        assert (files.make_dir(f"{at}/g/h"), files.make_dir(f"{at}/g/h")) == (True, False)
        files.remove(f"{at}/g")
        assert sorted(entry.name for entry in files.list(at)) == ["b", "c", "d", "deep", "f", "source"]
        with pytest.raises(NotFound):
            files.read(f"{at}/none")
        with pytest.raises(ForkdError) as caught:
            files.read(at)
        assert caught.value.code == "is_dir"
        with pytest.raises(InvalidInput, match="format"):
            files.read(at, format="json")  # type: ignore[call-overload]
    with pytest.raises(NotFound):
        files.exists(f"{at}/b")


def test_names_of_files_need_not_be_text(sandbox: Sandbox, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff %2f?&=#\x01\n+")
    sandbox.files.write(f"{tmp_path}/{name}", "x")
    assert sandbox.files.list(str(tmp_path))[0].name == name and sandbox.files.read(f"{tmp_path}/{name}") == "x"
    sandbox.files.rename(f"{tmp_path}/{name}", f"{tmp_path}/{name}2")
    sandbox.files.remove(f"{tmp_path}/{name}2")
    assert os.listdir(tmp_path) == []


def test_pause_resume_timeouts_and_connect() -> None:
    with Sandbox.create(TAG, timeout=500, on_timeout="pause", metadata={"a": "b"}) as sandbox:
        info = sandbox.get_info()
        assert (info["on_timeout"], info["metadata"]) == ("pause", {"a": "b"}) and info["deadline_unix"] is not None
        assert sandbox.set_timeout(40, "kill")["on_timeout"] == "kill"
        assert sandbox.pause()["state"] == "paused" and not sandbox.is_running()
        with pytest.raises(NotRunning):
            sandbox.eval("1")
        other = Sandbox.connect(sandbox.sandbox_id, timeout=500)
        later = other.info()["deadline_unix"]
        assert other.is_running() and later is not None and later >= info["deadline_unix"]
        assert other.set_timeout(None)["deadline_unix"] is None
        assert [found["id"] for found in Sandbox.list(metadata={"a": "b"}, state="running")] == [sandbox.id]
        assert Sandbox.list(metadata={"a": "c"}) == []
    with pytest.raises(NotFound):
        Sandbox.connect(sandbox.id)


def test_a_name_finds_a_sandbox_again() -> None:
    with Sandbox.create(TAG) as sandbox, Sandbox.create(TAG) as sibling:
        assert sandbox.info()["name"] is None
        assert sandbox.rename("left")["name"] == "left"
        with pytest.raises(Conflict):
            sibling.rename("left")
        same = Sandbox.connect("left")
        assert same.id == sandbox.id and same.eval("warmed") == "41"
        assert sandbox.rename(None)["name"] is None
        with pytest.raises(NotFound):
            Sandbox.connect("left")


def test_the_constructor_forks_as_the_forkd_sdk_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        Sandbox()  # there is no pyagent
    monkeypatch.setenv("FORKD_TAG", TAG)
    with Sandbox() as sandbox:
        target = sandbox.info()["guest_addr"]
        assert sandbox.ping()["pong"] is True and sandbox.tag == TAG
        assert Sandbox(target=target, spawn=False).id == sandbox.id
        monkeypatch.setenv("FORKD_TARGET", target)
        assert Sandbox(spawn=False).id == sandbox.id
        with pytest.raises(NotFound):
            Sandbox(target="127.0.0.1:1", spawn=False)
    with Sandbox(TAG, target) as again:
        assert again.info()["guest_addr"] == target
    monkeypatch.delenv("FORKD_TARGET")
    with pytest.raises(InvalidInput):
        Sandbox(spawn=False)


def test_sandboxes_share_one_pool_and_threads_may_too(sandbox: Sandbox) -> None:
    assert shared_controller() is shared_controller()
    with ThreadPoolExecutor(16) as threads:
        results = threads.map(lambda number: sandbox.commands.run(f"echo {number}").stdout, range(48))
        assert [int(text) for text in results] == list(range(48))


def test_the_same_key_gives_the_same_sandboxes(daemon: Controller) -> None:
    first = daemon.spawn_sandboxes(TAG, 2, idempotency_key="a-key")
    again = daemon.spawn_sandboxes(TAG, 2, idempotency_key="a-key")
    assert [info["id"] for info in first] == [info["id"] for info in again]
    with pytest.raises(Conflict):
        daemon.spawn_sandboxes(TAG, 3, idempotency_key="a-key")
    for info in first:
        daemon.kill_sandbox(info["id"])


def test_snapshots_are_made_looked_at_and_removed(daemon: Controller) -> None:
    made = daemon.create_snapshot("second", "small", memory_mib=128, warm="z = 1", wait=True)
    assert made["status"] == "ready" and made in daemon.list_snapshots()
    assert daemon.get_snapshot("second") == made and daemon.snapshot_info("second")["tag"] == "second"
    assert {snapshot["tag"] for snapshot in daemon.lineage()["snapshots"]} == {TAG, "second"}
    with pytest.raises(Conflict):
        daemon.create_snapshot("second", "small")
    daemon.delete_snapshot("second")
    with pytest.raises(NotFound):
        daemon.delete_snapshot("second")


def test_workspaces_are_put_away_and_taken_up(daemon: Controller) -> None:
    made = daemon.create_workspace("desk", TAG)
    assert daemon.get_workspace("desk")["live_sandbox_id"] == made["live_sandbox_id"]
    assert daemon.suspend_workspace("desk")["status"] == "suspended"
    assert daemon.resume_workspace("desk")["status"] == "running"
    assert [found["name"] for found in daemon.list_workspaces()] == ["desk"]
    daemon.delete_workspace("desk")
    assert daemon.list_workspaces() == []


def test_events_are_listed_and_followed(daemon: Controller) -> None:
    since = max((event["id"] for event in daemon.list_events()), default=0)
    with Sandbox.create(TAG) as sandbox:
        followed = daemon.events(since=since, sandbox_id=sandbox.id)
        assert [next(followed)["type"] for _ in range(2)] == ["sandbox.created", "sandbox.running"]
        followed.close()
        assert sandbox.console() is not None
    types = [event["type"] for event in daemon.list_events(since=since, sandbox_id=sandbox.id)]
    assert types[0] == "sandbox.created" and types[-1] == "sandbox.removed"
    assert "forkd_sandboxes_active" in daemon.metrics() and daemon.healthy() and daemon.ready()


async def test_many_at_once_from_an_event_loop(tmp_path: Path) -> None:
    async def pieces() -> object:
        for number in range(3):
            yield str(number).encode()

    async with AsyncSandbox(TAG) as sandbox, await AsyncSandbox.create(TAG) as other:
        results = await asyncio.gather(*(sandbox.commands.run(f"echo {number}") for number in range(24)))
        assert [int(result.stdout) for result in results] == list(range(24))
        heard: list[str] = []

        async def listen(text: str) -> None:
            await asyncio.sleep(0)
            heard.append(text)

        assert (await other.commands.run("echo hi", on_stdout=listen)).stdout == "hi\n" and heard == ["hi\n"]
        async with await other.commands.run("echo 1; sleep 1000", background=True) as handle:
            async for piece in handle:
                assert piece.stdout == "1\n"
                break
        await other.files.write(f"{tmp_path}/a", pieces())  # type: ignore[arg-type]
        await other.files.write(f"{tmp_path}/b", iter([b"x", b"y"]))
        stream = await other.files.read(f"{tmp_path}/a", format="stream")
        assert b"".join([piece async for piece in stream]) == b"012"
        assert await other.files.read(f"{tmp_path}/b") == "xy"
        async with await other.pty.create(cmd='read x; echo "<$x>"; read x') as terminal:
            await terminal.send("typed\n")
            shown = b""
            async for piece_shown in terminal:
                shown += piece_shown
                if b"<typed>" in shown:
                    break
            await terminal.send("\n")
            assert await terminal.wait() == 0
        assert (await other.run_code("print(1)\n2", on_stdout=listen)).text == "2" and heard[-1] == "1\n"
        assert {info["id"] for info in await AsyncSandbox.list()} == {sandbox.id, other.id}
    assert await sandbox.is_running() is False and await sandbox.kill() is False


async def test_a_sandbox_that_is_let_go_lives_on_and_leaves_no_connection(daemon: Controller) -> None:
    sandbox = await AsyncSandbox(TAG)
    await sandbox.close()
    assert daemon.get_sandbox(sandbox.id)["state"] == "running"
    async with AsyncController() as controller:
        again = await AsyncSandbox.connect(sandbox.id, controller=controller)
        assert await again.kill() is True


async def test_a_cancelled_command_ends_and_its_sandbox_goes_on() -> None:
    async with await AsyncSandbox.create(TAG) as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.commands.run("sleep 1000", on_stdout=print)
        assert (await sandbox.commands.run("echo on")).stdout == "on\n"


def test_over_tcp_a_token_is_asked_for_and_tls_is_spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("a-long-enough-token-for-a-test")
    cert, key = make_certificate(tmp_path)
    (tmp_path / "token").chmod(0o600)
    flags = ["--bind", "127.0.0.1:0", "--token-file", str(tmp_path / "token")]
    with serving(tmp_path, *flags, "--tls-cert", str(cert), "--tls-key", str(key)) as served:
        _, url = served.places
        with Controller(url) as controller, pytest.raises(Unreachable, match="certificate") as caught:
            controller.version()
        assert "SSL_CERT_FILE" in (caught.value.hint or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with Controller(url) as controller, pytest.raises(Unauthorized) as refused:
            controller.version()
        assert refused.value.status == 401 and "FORKD_TOKEN" in (refused.value.hint or "")
        monkeypatch.setenv("FORKD_TOKEN", "a-long-enough-token-for-a-test")
        with Controller(url) as controller:
            assert controller.version()["engine"] == "fake"
