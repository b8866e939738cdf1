"""The warmed interpreter."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from rehearsed import Guest
from support_processes import is_reaped, until

from forkd.errors import AgentError, InvalidInput
from forkd.guest.agent import Agent


def wait_for(path: Path) -> str:
    """Code that takes until the file is there."""
    return f"import os, time\nwhile not os.path.exists('{path}'): time.sleep(0.01)"


async def test_the_agent_says_who_it_is(agent: Agent, guest: Guest) -> None:
    info = await agent.ping()
    assert info.pid == guest.process.pid
    assert info.interpreter_pid != info.pid
    assert info.uptime_s >= 0


async def test_the_value_of_the_last_expression_is_the_result(agent: Agent) -> None:
    result = await agent.eval("x = [1, 2]\nx.append(None)\nx")
    assert (result.ok, result.repr, result.has_value, result.value) == (True, "[1, 2, None]", True, [1, 2, None])
    assert (await agent.eval("y = 5")).repr == "None"
    assert (await agent.eval("")).repr == "None"
    assert (await agent.eval("for i in range(3): pass")).ok
    assert (await agent.eval("if True:\n    z = 1\nz; y")).value == 5


async def test_values_that_are_no_json_come_as_repr_only(agent: Agent) -> None:
    for code in ("object", "float('nan')", "{1, 2}", "[" * 90 + "]" * 90 + " and {(1,): 2}"):
        result = await agent.eval(code)
        assert result.ok and not result.has_value and result.value is None and result.repr
    assert (await agent.eval("{'a': (1, 'é')}")).value == {"a": [1, "é"]}


async def test_a_long_repr_is_cut(agent: Agent) -> None:
    result = await agent.eval("'x' * 10_000_000")
    assert result.truncated and not result.has_value
    assert result.repr is not None and len(result.repr) == 64 * 1024
    assert not (await agent.eval("'x' * 40_000")).truncated


async def test_state_is_kept_and_classes_can_be_pickled(agent: Agent) -> None:
    await agent.eval("import pickle\nclass Point:\n    def __init__(self, x): self.x = x")
    assert (await agent.eval("pickle.loads(pickle.dumps(Point(7))).x")).value == 7
    assert (await agent.eval("__name__")).value == "__main__"
    assert (await agent.eval("import inspect; inspect.getsource(Point.__init__)")).value.startswith("    def __init__")


async def test_code_seen_before_is_not_compiled_again_but_runs_again(agent: Agent) -> None:
    await agent.eval("n = 0")
    for count in range(1, 4):
        assert (await agent.eval("n += 1\nn")).value == count
    for n in range(600):
        await agent.eval(f"{n}")
    error = (await agent.eval("n += 1\nn.missing")).error
    assert error is not None and "n.missing" in error.traceback
    assert (await agent.eval("n")).value == 4


async def test_plain_values_keep_their_types(agent: Agent) -> None:
    for code, value in [
        ("True", True),
        ("-5", -5),
        ("1.5", 1.5),
        ("'a\\n\"'", 'a\n"'),
        ("1e310", None),
        ("10**400", 10**400),
    ]:
        result = await agent.eval(code)
        assert type(result.value) is type(value) and result.value == value


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
async def test_carets_stand_below_what_failed(agent: Agent, end: str) -> None:
    error = (await agent.eval(f"x = 1\nx + missing + x{end}")).error
    assert error is not None
    source, carets = error.traceback.splitlines()[2:4]
    assert source[carets.index("^") : carets.rindex("^") + 1] == "missing"


async def test_exceptions_come_with_their_source_lines_and_without_ours(agent: Agent) -> None:
    await agent.eval("def divide(x):\n    return 1 / x")
    error = (await agent.eval("print('before')\ndivide(0)")).error
    assert error is not None
    assert (error.type, error.message) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / x" in error.traceback and "divide(0)" in error.traceback
    assert "evaluator" not in error.traceback
    syntax = (await agent.eval("x = = 1")).error
    assert syntax is not None and syntax.type == "SyntaxError" and "evaluator" not in syntax.traceback
    exit_error = (await agent.eval("import sys; sys.exit(3)")).error
    assert exit_error is not None and (exit_error.type, exit_error.message) == ("SystemExit", "3")
    mean = await agent.eval("class Mean(Exception):\n    def __str__(self): raise ValueError\nraise Mean")
    assert mean.error is not None and mean.error.type == "Mean"
    assert (await agent.eval("json.decoder.JSONDecodeError")).error is not None
    deep = await agent.eval("def f(): f()\nf()")
    assert deep.error is not None and deep.error.type == "RecursionError"


async def test_prints_come_from_python_from_c_and_from_children(agent: Agent) -> None:
    heard: list[tuple[str, bytes]] = []
    result = await agent.eval(
        "import os, sys\n"
        "print('python')\n"
        "os.write(1, b'raw\\xff\\n')\n"
        "os.system('echo child')\n"
        "sys.stderr.write('no newline')\n"
        "print('partial', end='')",
        on_output=lambda kind, data: heard.append((kind, data)),
    )
    assert result.stdout == b"python\nraw\xff\nchild\npartial"
    assert result.stderr == b"no newline"
    assert b"".join(data for kind, data in heard if kind == "stdout") == result.stdout


async def test_a_flood_of_output_is_whole_or_cut_where_asked(agent: Agent) -> None:
    code = "import sys\nfor i in range(200): sys.stdout.write('%07d\\n' % i * 2500)"
    whole = await agent.eval(code, max_output_bytes=10_000_000)
    assert len(whole.stdout) == 200 * 2500 * 8 and not whole.output_truncated
    assert whole.stdout[-8:] == b"0000199\n"
    cut = await agent.eval(code, max_output_bytes=1000)
    assert len(cut.stdout) == 1000 and cut.output_truncated


async def test_code_of_a_megabyte_is_taken_and_more_is_refused(agent: Agent) -> None:
    assert (await agent.eval("len('%s')" % ("x" * 1_000_000))).value == 1_000_000
    with pytest.raises(InvalidInput):
        await agent.eval("#" * 2_000_000)


async def test_code_that_is_too_slow_is_interrupted_and_keeps_its_state(agent: Agent) -> None:
    await agent.eval("kept = 1")
    result = await agent.eval("import time\nwhile True: time.sleep(0.01)", timeout_s=0.2)
    assert result.timed_out and not result.interpreter_restarted
    assert result.error is not None and result.error.type == "KeyboardInterrupt"
    assert "evaluator" not in result.error.traceback
    assert (await agent.eval("kept")).value == 1


async def test_code_that_will_not_be_interrupted_is_killed(agent: Agent) -> None:
    await agent.eval("kept = 1")
    result = await agent.eval(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('in')\ntime.sleep(60)",
        timeout_s=0.2,
    )
    assert result.timed_out and result.interpreter_restarted and result.signal == signal.SIGKILL
    assert result.stdout == b"in\n"
    assert (await agent.eval("'kept' in globals()")).value is False


@pytest.mark.parametrize(
    ("code", "exit_code", "signal_number"),
    [
        ("import os; print('bye', flush=True); os._exit(3)", 3, None),
        ("print('bye', flush=True); import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, signal.SIGSEGV),
    ],
)
async def test_the_death_of_the_interpreter_is_a_result(
    agent: Agent, code: str, exit_code: int | None, signal_number: int | None
) -> None:
    before = await agent.ping()
    result = await agent.eval(code)
    assert result.error is not None and result.error.type == "InterpreterDied"
    assert result.interpreter_restarted and (result.exit_code, result.signal) == (exit_code, signal_number)
    assert result.stdout == b"bye\n"
    assert (await agent.eval("1 + 1")).value == 2
    after = await agent.ping()
    assert after.pid == before.pid and after.interpreter_pid != before.interpreter_pid


async def test_an_interpreter_that_dies_between_calls_is_replaced(agent: Agent) -> None:
    pid = (await agent.ping()).interpreter_pid
    await agent.eval("import os, threading; threading.Timer(0.05, os._exit, [1]).start()")
    await until(lambda: is_reaped(pid))  # the agent has seen it die
    assert (await agent.eval("1 + 1")).value == 2


async def test_a_child_of_user_code_that_returns_from_the_call_does_not_answer_twice(agent: Agent) -> None:
    assert (await agent.eval("import os\nchild = os.fork()\nchild and os.waitpid(child, 0)[1]")).value == 0
    assert (await agent.eval("2")).value == 2


async def test_user_code_that_writes_into_the_agents_pipe_loses_its_interpreter_and_nothing_else(agent: Agent) -> None:
    code = "import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'garbage' * 100)\n    except OSError: pass"
    result = await agent.eval(code)
    assert result.interpreter_restarted and result.signal == signal.SIGKILL
    assert (await agent.eval("1 + 1")).value == 2


async def test_calls_are_served_in_order_and_the_queue_is_bounded(agent: Agent, tmp_path: Path) -> None:
    await agent.eval("seen = []")
    first = asyncio.create_task(agent.eval(wait_for(tmp_path / "go")))
    calls = [asyncio.create_task(agent.eval(f"seen.append({n}) or {n}")) for n in range(40)]
    await until(lambda: sum(call.done() for call in calls) >= 8)
    (tmp_path / "go").touch()
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [result for result in results if isinstance(result, AgentError)]
    assert len(refused) == 8 and {error.code for error in refused} == {"busy"}
    assert (await agent.eval("seen")).value == list(range(32))
    await first


async def test_a_deadline_counts_from_the_call_not_from_its_turn(agent: Agent, tmp_path: Path) -> None:
    first = asyncio.create_task(agent.eval(wait_for(tmp_path / "go")))
    await asyncio.sleep(0)  # it is on its way, before the second
    second = await agent.eval("ran = True", timeout_s=0.1)
    assert second.timed_out and not second.ok
    (tmp_path / "go").touch()
    assert (await first).ok
    assert (await agent.eval("'ran' in globals()")).value is False


async def test_a_cancelled_call_is_interrupted_in_the_guest(agent: Agent, tmp_path: Path) -> None:
    code = f"import time; open('{tmp_path}/runs', 'w').close(); time.sleep(60)"
    task = asyncio.create_task(agent.eval(code))
    await until((tmp_path / "runs").exists)
    task.cancel()
    started = time.monotonic()
    assert (await agent.eval("1")).value == 1
    assert time.monotonic() - started < 5


async def test_what_background_code_prints_between_calls_is_dropped(agent: Agent, tmp_path: Path) -> None:
    print_late = f"def late(): print('late', flush=True); open('{tmp_path}/printed', 'w').close()"
    await agent.eval(f"import threading\n{print_late}\nthreading.Timer(0.1, late).start()")
    await until((tmp_path / "printed").exists)
    await agent.ping()  # by the time it has answered, the agent has read what was printed before
    assert (await agent.eval("1")).stdout == b""


async def test_the_interpreters_descriptors_and_path_are_its_own(agent: Agent) -> None:
    await agent.eval(
        "import os\ndef target(fd):\n    try: return os.readlink('/proc/self/fd/' + fd)\n    except OSError: return ''"
    )
    opened = (await agent.eval("sorted(map(target, os.listdir('/proc/self/fd')))")).value
    assert [name.split(":")[0] for name in opened] == ["", "/dev/null", "pipe", "pipe", "pipe", "pipe"]
    assert (await agent.eval("import sys; sys.path[0]")).value == ""
    assert (await agent.eval("os.getcwd() == os.environ['HOME']")).value is True
    assert (await agent.eval("'PYTHONPATH' in os.environ")).value is False
    assert (await agent.eval("sys.stdin.read()")).value == ""
