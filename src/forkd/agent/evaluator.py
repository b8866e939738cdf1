"""Inside the warmed interpreter: user code in one lasting namespace, one request after another.

Runs in a process forked from the agent. What it imports beyond the agent's own modules is imported here, so that the
agent stays small.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from json.encoder import encode_basestring_ascii as quote

from forkd.wire.agent import (
    BECOME,
    EVAL,
    FAILED,
    FREEZE,
    MORE,
    REPLY,
    Joiner,
    Parser,
    encode_message,
    unpack_become,
    unpack_code,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any, Dict, List, NoReturn, Optional, Tuple

    Compiled = Tuple[Optional[types.CodeType], Optional[types.CodeType]]

REPR_LIMIT = 64 * 1024
TEXT_LIMIT = 256 * 1024  # of a message or traceback
_VALUE_LIMIT = 64 * 1024  # of a value as JSON
_VALUE_REPR_LIMIT = 16 * 1024  # values that print longer are not even tried
_COMPILED_KEPT = 256
_COMPILED_BYTES = 4096  # longer code is compiled every time
_SOURCES_KEPT = 512  # pieces of code kept for tracebacks; more than are kept compiled
_SOURCE_BYTES_KEPT = 4 * 1024 * 1024
FROZEN = b'{"ok":true}'  # the answer to FREEZE
_SHORT = 1000
_LARGE = 1e300
_READ_BYTES = 128 * 1024
_STATEMENT_STARTS = ("import ", "from ", "for ", "def ", "class ", "if ", "with ", "del ", "assert ", "raise ")


def run(requests: int, answers: int, out: int, err: int, env: Dict[str, str]) -> NoReturn:
    """The life of the process, right after the fork. Never returns into the agent's code."""
    try:
        _leave_agent(requests, answers, out, err)
        evaluator = Evaluator(env)
        evaluator.serve(requests, answers)
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        except BaseException:
            pass
    finally:
        os._exit(70)


def _leave_agent(requests: int, answers: int, out: int, err: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    low, high = sorted((requests, answers))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, max(high + 1, 1024))
    os.setsid()  # signals to the agent's group must not reach us, nor ours the agent


class Evaluator:
    def __init__(self, env: Dict[str, str]) -> None:
        # Before '' is on the path: a user's ./random.py must not become ours.
        import ast
        import linecache
        import traceback
        import types

        from forkd.agent import reseed

        self._ast = ast
        self._linecache = linecache
        self._traceback = traceback
        self._reseed = reseed
        self._encoder = json.JSONEncoder(allow_nan=False)
        self._running = False
        self._count = 0
        self._compiled: Dict[bytes, Compiled] = {}
        self._sources: List[Tuple[str, int]] = []
        self._source_bytes = 0
        self._pid = os.getpid()
        self._namespace = self._make_main(types)
        self._api = _install_api()
        os.environ.clear()
        os.environ.update(env)
        _reopen_output()
        _enter_home()
        signal.signal(signal.SIGINT, self._on_interrupt)

    def serve(self, requests: int, answers: int) -> NoReturn:
        parser, joiner = Parser(), Joiner()
        while True:
            data = os.read(requests, _READ_BYTES)
            if not data:
                os._exit(0)  # the agent is gone
            for kind, flags, stream, payload in parser.feed(data):
                whole: bytes | None = payload
                if flags & MORE or joiner.active:
                    whole = joiner.join(kind, flags, stream, payload)
                if whole is None:
                    continue
                flags, answer = self._handle(kind, whole)
                if os.getpid() != self._pid:
                    os._exit(0)  # user code forked, and its child returned to here
                self._write(answers, encode_message(REPLY, stream, answer, flags))

    def evaluate(self, code: bytes) -> bytes:
        """Run `code`; returns its value or exception as JSON."""
        try:
            return self._evaluate(code)
        except KeyboardInterrupt as error:
            # It came between the end of user code and our note of that.
            self._running = False
            return self._render_error(error)

    def _evaluate(self, code: bytes) -> bytes:
        try:
            self._running = True
            value = self._execute(code)
            text = repr(value)
            self._running = False
        except BaseException as error:
            self._running = False
            return self._render_error(error)
        finally:
            _flush_output()
        return self._render_value(value, text)

    def _handle(self, kind: int, payload: bytes) -> Tuple[int, bytes]:
        if kind == EVAL:
            return 0, self.evaluate(unpack_code(payload))
        if kind == BECOME:
            return self._become(payload)
        if kind == FREEZE:
            return self._freeze()
        return FAILED, b'{"ok":false,"error":"Unknown request"}'

    def _write(self, answers: int, data: bytes) -> None:
        while data:
            data = data[os.write(answers, data) :]

    # User code

    def _execute(self, code: bytes) -> object:
        body, last = self._compiled.get(code) or self._compile(code)
        if body is not None:
            exec(body, self._namespace)
        return None if last is None else eval(last, self._namespace)

    def _compile(self, code: bytes) -> Compiled:
        """Statements, and the expression at the end. Cached: forks often run the code their parent was warmed with."""
        self._count += 1
        name = "<eval %d>" % self._count
        text = code.decode()
        self._remember(name, text)
        compiled = self._compile_expression(text, name) or self._compile_statements(text, name)
        if len(code) <= _COMPILED_BYTES:
            if len(self._compiled) >= _COMPILED_KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[code] = compiled
        return compiled

    def _compile_expression(self, text: str, name: str) -> Compiled | None:
        """Most calls are one expression: then we save turning the syntax tree into Python objects and back."""
        if not looks_like_expression(text):
            return None
        try:
            return None, compile(text, name, "eval", 0, True)
        except SyntaxError:
            return None

    def _compile_statements(self, text: str, name: str) -> Compiled:
        tree: Any = compile(text, name, "exec", self._ast.PyCF_ONLY_AST, True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], self._ast.Expr) else None
        body = compile(tree, name, "exec", 0, True) if tree.body else None
        if last is None:
            return body, None
        return body, compile(self._ast.Expression(last.value), name, "eval", 0, True)

    def _remember(self, name: str, code: str) -> None:
        """Keep the source for tracebacks and inspect; the oldest is dropped first."""
        # As linecache itself keeps files: without a newline at the end carets are a column off.
        lines = [line + "\n" for line in code.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
        self._linecache.cache[name] = (len(code), None, lines, name)
        self._sources.append((name, len(code)))
        self._source_bytes += len(code)
        while len(self._sources) > _SOURCES_KEPT or self._source_bytes > _SOURCE_BYTES_KEPT:
            oldest, size = self._sources.pop(0)
            self._source_bytes -= size
            self._linecache.cache.pop(oldest, None)

    def _on_interrupt(self, _signal: int, _frame: object) -> None:
        # A deadline may pass just when the code ends: then there is nothing to interrupt.
        if self._running:
            raise KeyboardInterrupt

    def _make_main(self, types: Any) -> Dict[str, Any]:
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = [""]
        namespace: Dict[str, Any] = main.__dict__
        namespace["__builtins__"] = sys.modules["builtins"]
        return namespace

    # Results

    def _render_value(self, value: object, text: str) -> bytes:
        # Plain values without the encoder: in a fresh fork it is cold code.
        kind = type(value)
        if value is None:
            return b'{"ok":true,"repr":"None","value":null}'
        if (kind is int and len(text) < _SHORT) or (kind is float and -_LARGE < value < _LARGE):  # type: ignore[operator]
            return b'{"ok":true,"repr":"%s","value":%s}' % (text.encode(), text.encode())
        encode = self._encoder.encode
        shown = quote(text[:REPR_LIMIT])
        if len(text) <= _VALUE_REPR_LIMIT:
            try:
                as_json = encode(value)
            except Exception:
                pass
            else:
                if len(as_json) <= _VALUE_LIMIT:
                    return ('{"ok":true,"repr":%s,"value":%s}' % (shown, as_json)).encode()
        truncated = "true" if len(text) > REPR_LIMIT else "false"
        return ('{"ok":true,"repr":%s,"truncated":%s}' % (shown, truncated)).encode()

    def _render_error(self, error: BaseException) -> bytes:
        described = {
            "type": type(error).__qualname__[:200],
            "message": _text_of(error)[:TEXT_LIMIT],
            "traceback": self._format(error)[:TEXT_LIMIT],
        }
        module = type(error).__module__
        if module not in ("builtins", "__main__"):
            described["type"] = "%s.%s" % (str(module)[:200], described["type"])
        return self._encoder.encode({"ok": False, "error": described}).encode()

    def _format(self, error: BaseException) -> str:
        trace = error.__traceback__
        while trace is not None and _is_ours(trace):
            trace = trace.tb_next
        last = trace
        while last is not None and last.tb_next is not None:
            if _is_ours(last.tb_next):
                last.tb_next = None  # our handler of SIGINT, called from wherever the code was
            last = last.tb_next
        try:
            return "".join(self._traceback.format_exception(type(error), error, trace))
        except BaseException as broken:
            return "The traceback could not be formatted: %s" % type(broken).__name__

    # The fork contract

    def _become(self, payload: bytes) -> Tuple[int, bytes]:
        api = self._api
        fields, env, _ = unpack_become(payload)
        for item in env:
            name, _, value = item.partition("=")
            os.environ[name] = value
        identity = api._identity
        identity["sandbox_id"], identity["hostname"], identity["machine_id"] = fields[1:4]
        try:
            self._running = True
            evidence = self._reseed.reseed(bytes.fromhex(fields[4]))
            for hook in api._hooks[:]:
                hook()
            self._running = False
        except BaseException as error:
            self._running = False
            return FAILED, self._encoder.encode({"ok": False, "error": self._format(error)[-TEXT_LIMIT:]}).encode()
        finally:
            _flush_output()
        return 0, ('{"ok":true,"hooks":%d,%s}' % (len(api._hooks), evidence)).encode()

    def _freeze(self) -> Tuple[int, bytes]:
        # Do once what every fork does first, so that lazy set-up happens here.
        try:
            self._reseed.reseed(os.urandom(64))
        except Exception:
            pass  # then every fork will fail at it and report that
        _flush_output()
        gc.collect()
        gc.freeze()
        return 0, FROZEN


def looks_like_expression(code: str) -> bool:
    """A guess that only saves time."""
    return not ("\n" in code or ";" in code or " = " in code or len(code) > 512 or code.startswith(_STATEMENT_STARTS))


def _is_ours(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename == __file__


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "<the message could not be read>"


def _flush_output() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        pass  # user code replaced or closed them


def _reopen_output() -> None:
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", False), "utf-8", "surrogateescape")
    sys.stdout = _text_output(1)
    sys.stderr = _text_output(2)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, "__%s__" % name, getattr(sys, name))


def _text_output(fd: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def _enter_home() -> None:
    start = os.getcwd()
    home = os.environ.get("HOME", "/")
    try:
        os.chdir(home)
    except OSError:
        os.chdir("/")
    sys.path[:] = [""] + [entry for entry in sys.path if entry not in ("", start)]


def _install_api() -> Any:
    """The module user code gets from `import forkd`; on a host that is the SDK, which gets these functions too."""
    package = sys.modules["forkd"]
    if hasattr(package, "on_fork"):
        return package
    from forkd.agent import guest_api

    package.on_fork = guest_api.on_fork  # type: ignore[attr-defined]
    package.identity = guest_api.identity  # type: ignore[attr-defined]
    return guest_api
