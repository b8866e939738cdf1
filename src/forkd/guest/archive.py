"""Directories of the guest as tar streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from forkd.errors import AgentError, ForkdError, InvalidInput, ProtocolError, Unsupported
from forkd.guest.exchange import Caller, get_int, parse_failure, parse_object
from forkd.guest.files import TRANSFER_S, check_path
from forkd.guest.process import Process
from forkd.guest.results import CommandResult
from forkd.wire.archive import MAX_SKIPPED

_MAX_ANSWER_BYTES = 256 * 1024
_MAX_TEXT = 4200
# What an agent says that does not know archives: it takes them for commands without arguments.
_OLD_AGENT = "A command needs a list of arguments"


@dataclass(frozen=True)
class Unpacked:
    files: int
    bytes: int
    skipped: tuple[tuple[str, str], ...]  # name in the archive, and reason


class ArchiveCalls(Caller):
    async def pack(self, path: str) -> AsyncGenerator[bytes, None]:
        """An archive of what is in a directory. It ends early when that can be read no further, and says why."""
        errors = bytearray()
        async with await self._start("pack", path, stdin=False) as process:
            async for kind, data in process:
                if kind == "stdout":
                    yield data
                elif len(errors) < _MAX_ANSWER_BYTES:
                    errors += data
            _check_done(await process.wait(), bytes(errors))

    async def unpack(self, path: str, content: AsyncIterator[bytes], *, keep: bool = False) -> Unpacked:
        """Into a directory, which is made. What was unpacked before a failure stays. `keep`: with owners."""
        async with await self._start("unpack", path, stdin=True, keep=keep) as process:
            async for data in content:
                await process.write_stdin(data)
            process.close_stdin()
            result = await process.wait(max_output_bytes=_MAX_ANSWER_BYTES)
        _check_done(result, result.stderr)
        return parse_unpacked(result.stdout)

    async def _start(self, task: str, path: str, *, stdin: bool, keep: bool = False) -> Process:
        request = {"archive": task, "path": check_path(path), "stdin": stdin, "keep": keep}
        process = Process(self.channel, request, TRANSFER_S)
        try:
            await process.started()
        except InvalidInput as error:
            if _OLD_AGENT not in error.message:
                raise
            raise Unsupported(
                "The sandbox comes from a snapshot whose agent cannot copy directories",
                hint="Make the snapshot again; or copy an archive with: forkd exec SANDBOX -- tar c DIRECTORY",
            ) from error
        return process


def parse_unpacked(answer: bytes) -> Unpacked:
    found = parse_object(answer)
    skipped = found.get("skipped")
    if not isinstance(skipped, list) or len(skipped) > MAX_SKIPPED:
        raise ProtocolError("The guest did not say what it left out")
    for pair in skipped:
        texts = isinstance(pair, list) and len(pair) == 2 and all(isinstance(each, str) for each in pair)
        if not texts or max(map(len, pair)) > _MAX_TEXT:
            raise ProtocolError("The guest did not say what it left out")
    return Unpacked(get_int(found, "files"), get_int(found, "bytes"), tuple((name, why) for name, why in skipped))


def _check_done(result: CommandResult, errors: bytes) -> None:
    if result.ok:
        return
    raise find_failure(result, errors, "it copied a directory")


def find_failure(result: CommandResult, errors: bytes, doing: str) -> ForkdError:
    """What a task of the agent said before it ended."""
    try:
        return parse_failure(errors)
    except ProtocolError:
        return AgentError(f"The guest's agent ended with {result.returncode} while {doing}")
