"""Packs as the daemon serves them: sent from any byte on, and received piece by piece."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from forkd.engines.base import Engine
from forkd.errors import Conflict, ForkdError, InvalidInput, NoCapacity, NotFound, SnapshotDamaged
from forkd.host.paths import Home
from forkd.host.threads import in_thread, offloaded
from forkd.image import ImageStore
from forkd.model.names import SnapshotTag
from forkd.runtime.packing import OpenPack, Packing
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.unpacking import Import, Imported, ImportOptions
from forkd.store.keys import SigningKey, TrustList

_log = logging.getLogger(__name__)

MAX_SENT = 8  # packs that are made at once
MAX_UPLOADS = 8
MAX_UPLOADS_EACH = 4  # of one token
IDLE_S = 1800.0  # after which an upload that nobody goes on with is given up
MAX_PIECE_BYTES = 8 << 20


@dataclass
class Upload:
    """A pack on its way in. `done` is kept for a while: the answer may have been lost."""

    id: str
    owner: str | None
    work: Import
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    done: Imported | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def offset(self) -> int:
        return self.work.unpacker.offset


class Packs:
    def __init__(self, home: Home, engine: Engine, snapshots: Snapshots) -> None:
        self._engine = engine
        self._snapshots = snapshots
        self._images = ImageStore(home)
        signing = SigningKey(home.signing_key)
        self._trusted = TrustList(home.trust, signing)
        self._packing = Packing(snapshots.store, self._images, signing)
        self._uploads: dict[str, Upload] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sent = 0

    @property
    def in_flight(self) -> int:
        return sum(each.done is None for each in self._uploads.values())

    def recover(self) -> None:
        """After a crash: what a pack left half-way."""
        try:
            self._images.drop_unused_imports(self._snapshots.store.images_in_use())
        except (ForkdError, OSError) as error:
            _log.warning("Images that came with packs were not looked through: %s", error)

    @contextlib.asynccontextmanager
    async def opened(self, tag: SnapshotTag, *, image: bool) -> AsyncIterator[OpenPack]:
        """To be sent. What it is made of stays until the block ends."""
        if not self._snapshots.store.has(tag):
            self._snapshots.check_not_making(tag)
        if self._sent >= MAX_SENT:
            raise NoCapacity(f"{MAX_SENT} packs are being sent already", hint="Try again when one is done")
        self._sent += 1
        try:
            async with offloaded(self._packing.opened(tag, image=image)) as pack:
                yield pack
        finally:
            self._sent -= 1

    def begin(self, owner: str | None, options: ImportOptions) -> Upload:
        self._make_room(owner)
        open_ones = [each for each in self._uploads.values() if each.done is None]
        if len(open_ones) >= MAX_UPLOADS or sum(each.owner == owner for each in open_ones) >= MAX_UPLOADS_EACH:
            raise NoCapacity("Too many packs are being received", hint="Finish one, or remove it")
        snapshots = self._snapshots
        work = Import(self._engine, snapshots.store, self._images, self._trusted, options, snapshots.check_not_making)
        upload = Upload(secrets.token_hex(12), owner, work)
        self._uploads[upload.id] = upload
        self._wind(upload)
        return upload

    def _make_room(self, owner: str | None) -> None:
        """Of one token, an upload that was begun and never filled gives way to a new one."""
        mine = [each for each in self._uploads.values() if each.done is None and each.owner == owner]
        empty = [each for each in mine if each.offset == 0 and not each.lock.locked()]
        if len(mine) >= MAX_UPLOADS_EACH and empty:
            self._uploads.pop(empty[0].id)
            if empty[0].timer is not None:
                empty[0].timer.cancel()

    def get(self, upload_id: str, owner: str | None) -> Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.owner != owner:
            raise NotFound("There is no such upload", hint="It may have been given up after a while: begin again")
        return upload

    async def append(self, upload_id: str, owner: str | None, offset: int, data: bytes) -> Upload:
        """The bytes at `offset`. Those of the piece before may come a second time: their answer may have been lost."""
        async with self._used(upload_id, owner) as upload:
            if data and offset + len(data) == upload.offset:
                return upload
            if upload.done is not None or offset != upload.offset:
                raise Conflict(
                    f"The upload is at byte {upload.offset}, not at {offset}", hint="Ask where it is, and go on there"
                )
            await self._work(upload, lambda: upload.work.feed(data))
        return upload

    async def finish(self, upload_id: str, owner: str | None) -> Imported:
        async with self._used(upload_id, owner) as upload:
            if upload.done is None:
                done: list[Imported] = []
                await self._work(upload, lambda: done.append(upload.work.finish()))
                upload.done = done[0]
                self._snapshots.tell_of_imported(upload.done.made)
            return upload.done

    async def drop(self, upload_id: str, owner: str | None) -> None:
        async with self._used(upload_id, owner) as upload:
            await self._give_up(upload)

    async def close(self) -> None:
        for upload in list(self._uploads.values()):
            async with upload.lock:
                await self._give_up(upload)
        if self._ending:
            await asyncio.wait(self._ending)

    @contextlib.asynccontextmanager
    async def _used(self, upload_id: str, owner: str | None) -> AsyncIterator[Upload]:
        upload = self.get(upload_id, owner)
        async with upload.lock:
            self.get(upload_id, owner)  # it may have ended while we waited
            try:
                yield upload
            finally:
                if upload.id in self._uploads:
                    self._wind(upload)

    async def _work(self, upload: Upload, work: Callable[[], None]) -> None:
        """In a thread. After a failure nothing is left of the upload."""
        try:
            await in_thread(work)
        except BaseException as error:
            await self._give_up(upload)
            if isinstance(error, OSError):
                raise SnapshotDamaged(f"The pack could not be written: {error.strerror}") from error
            raise

    async def _give_up(self, upload: Upload) -> None:
        self._uploads.pop(upload.id, None)
        if upload.timer is not None:
            upload.timer.cancel()
        await in_thread(upload.work.abort)

    def _wind(self, upload: Upload) -> None:
        if upload.timer is not None:
            upload.timer.cancel()
        upload.timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, upload)

    def _expire(self, upload: Upload) -> None:
        if not upload.lock.locked() and upload.id in self._uploads:
            task = asyncio.create_task(self._give_up(upload), name=f"give up upload {upload.id}")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


def check_origin(text: str) -> str:
    if not text or len(text) > 300 or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidInput("The origin of a pack is an address of at most 300 characters", hint="Leave it out")
    return text
