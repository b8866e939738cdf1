# Generated from async_packs.py by tools/unasync.py: do not edit.
"""Packs: snapshots with all they stand on, between daemons, files and web servers. Everything goes on after a cut."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, TypeVar, Unpack

from forkd.client.arguments import Data, content_of, drop_unset
from forkd.client.call import API, Again, Call, delete, get, post, query_of
from forkd.client.endpoint import find_endpoint
from forkd.client.failures import error_of_answer, error_of_transport
from forkd.client.resume import (
    FIRST_PIECE,
    MAX_REDIRECTS,
    PIECE,
    OnProgress,
    PackOptions,
    Patience,
    Position,
    Pushed,
    check_url,
    find_origin,
    follow,
    is_plain_place,
)
from forkd.client.transport import Transport
from forkd.errors import ForkdError, NotFound, Unauthorized, Unreachable
from forkd.wire import api

if TYPE_CHECKING:
    import httpx

    from forkd.client.controller import Controller

_PACK_S = 600.0  # to hash a snapshot that was never looked at, and to find a place in the middle of a pack
_TIMEOUT_S = 60.0

T = TypeVar("T")


class PackCalls:
    """The part of a controller that has to do with packs."""

    transport: Transport

    def pack_snapshot(
        self, tag: str, *, image: bool = True, on_progress: OnProgress | None = None
    ) -> Generator[bytes, None, None]:
        """A snapshot with its chain and its image, for a file. Without `image`, who unpacks it must have it."""
        return _resumed(_Pack(self.transport, tag, image), on_progress)

    def unpack_snapshot(
        self,
        content: Data,
        *,
        origin: str = "file",
        on_progress: OnProgress | None = None,
        **options: Unpack[PackOptions],
    ) -> api.PackImported:
        """Take in a pack. Its key is remembered for `origin`, when it is one that is trusted from now on."""
        upload = self.begin_upload(origin=origin, **options)
        return self._fill_upload(upload["id"], content, on_progress)

    def pull_snapshot(
        self,
        url: str,
        *,
        remote_token: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[PackOptions],
    ) -> api.PackImported:
        """Take in a pack from a web server, which needs `Range` to go on after a cut. Redirects stay on the host."""
        check_url(url)
        upload = self.begin_upload(origin=find_origin(url), **options)
        fetched = _resumed(_Page(url, remote_token), None)
        with closing(fetched):
            return self._fill_upload(upload["id"], fetched, on_progress)

    def push_snapshot(
        self,
        snapshot_tag: str,
        url: str,
        *,
        remote_token: str | None = None,
        image: bool | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[PackOptions],
    ) -> Pushed:
        """Give it to another daemon, where it may have another `tag`, or put it on a web server that takes PUT.

        `image` None: a daemon gets the image when it has not got it, a web server always.
        """
        from forkd.client.controller import Controller

        if not is_plain_place(url):
            check_url(url)
        with Controller.at(find_endpoint(url.partition("?")[0], remote_token or "")) as other:
            if is_plain_place(url) or _is_daemon(other):
                counted = Counted(on_progress)
                imported = self._push(snapshot_tag, other, image, counted, **options)
                return {"url": url, "bytes": counted.bytes, "imported": imported}
        size = _put(self, snapshot_tag, url, remote_token, image is not False, on_progress)
        return {"url": url, "bytes": size, "imported": None}

    def _push(
        self,
        snapshot_tag: str,
        other: PackCalls,
        image: bool | None,
        counted: Counted,
        **options: Unpack[PackOptions],
    ) -> api.PackImported:
        for with_image in (False, True) if image is None else (image,):
            upload = other.begin_upload(**options)
            pieces = self.pack_snapshot(snapshot_tag, image=with_image)
            try:
                with closing(pieces):
                    return other._fill_upload(upload["id"], pieces, counted)
            except NotFound:
                if with_image or image is not None:
                    raise
        raise AssertionError("the last attempt returns or raises")

    # The routes

    def begin_upload(self, *, origin: str | None = None, **options: Unpack[PackOptions]) -> api.PackUpload:
        body = drop_unset(origin=origin, **options)
        return self.transport.send(post(api.PackUpload, "packs", body=body))

    def get_upload(self, upload_id: str) -> api.PackUpload:
        return self.transport.send(get(api.PackUpload, "packs", upload_id))

    def append_upload(self, upload_id: str, offset: int, data: bytes) -> api.PackUpload:
        """At most 8 MiB. The same piece a second time does no harm."""
        query = query_of(offset=offset)
        call = Call(
            api.PackUpload,
            "PATCH",
            (API, "packs", upload_id),
            query,
            content=data,
            again=Again.SAFE,
            takes_s=_PACK_S,
        )
        return self.transport.send(call)

    def finish_upload(self, upload_id: str) -> api.PackImported:
        call = post(api.PackImported, "packs", upload_id, "finish", again=Again.SAFE, takes_s=_PACK_S)
        return self.transport.send(call)

    def drop_upload(self, upload_id: str) -> None:
        self.transport.send(delete("packs", upload_id))

    def _fill_upload(self, upload_id: str, content: Data, on_progress: OnProgress | None) -> api.PackImported:
        try:
            offset = 0
            with closing(_pieces(content_of(content))) as pieces:
                for piece in pieces:
                    state = self._append(upload_id, offset, piece)
                    offset += len(piece)
                    if on_progress is not None:
                        total = state["total_bytes"]
                        on_progress(offset, None if not total else state["unpacked_bytes"] / total)
            return self.finish_upload(upload_id)
        except BaseException:
            with suppress(ForkdError):
                self.drop_upload(upload_id)
            raise

    def _append(self, upload_id: str, offset: int, piece: bytes) -> api.PackUpload:
        patience = Patience(begun=offset > 0)
        while True:
            try:
                return self.append_upload(upload_id, offset, piece)
            except Unreachable:
                wait_s = patience.next_wait()
                if wait_s is None:
                    raise
                time.sleep(wait_s)


def _is_daemon(other: Controller) -> bool:
    try:
        other.version()
    except Unauthorized:
        return True
    except ForkdError:
        return False
    return True


class Counted:
    """Passes progress on, and keeps the count."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self.bytes = 0

    def __call__(self, done: int, part: float | None) -> None:
        self.bytes = done
        if self._on_progress is not None:
            self._on_progress(done, part)


class _Pack:
    """The pack of a daemon, from any byte on."""

    def __init__(self, transport: Transport, tag: str, image: bool) -> None:
        self.position = Position(f"the pack of {tag}")
        self._transport = transport
        self._tag = tag
        self._image = image

    def chunks(self) -> Generator[bytes, None, None]:
        call = Call(
            bytes,
            "GET",
            (API, "snapshots", self._tag, "pack"),
            query_of(image=None if self._image else "false"),
            headers=self.position.render_headers(),
            again=Again.SAFE,
            takes_s=_PACK_S,
        )
        return self._transport.download(call, self._begin)

    def _begin(self, response: httpx.Response) -> None:
        self.position.begin(response.status_code, response.headers)


class _Page:
    """What is at an address of a web server, from any byte on."""

    def __init__(self, url: str, token: str | None) -> None:
        self.position = Position(url)
        self._url = url
        self._token = token

    def chunks(self) -> Generator[bytes, None, None]:
        import httpx

        headers = {"Accept-Encoding": "identity", **self.position.render_headers()}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        url = self._url
        with httpx.Client(timeout=_TIMEOUT_S) as client:
            for _ in range(MAX_REDIRECTS):
                try:
                    with client.stream("GET", url, headers=headers) as response:
                        if response.has_redirect_location:
                            url = follow(url, response.headers.get("location"))
                            continue
                        if not response.is_success:
                            response.read()
                            raise _refusal(response, url)
                        self.position.begin(response.status_code, response.headers)
                        yield from response.iter_bytes()
                        return
                except httpx.HTTPError as error:
                    raise error_of_transport(error, name=url, url=url) from None
        raise Unreachable(f"{self._url} leads from one place to the next", hint="Name the place where the pack is")


def _refusal(response: httpx.Response, url: str) -> ForkdError:
    if response.status_code >= 500:
        return Unreachable(f"{url} answered {response.status_code}", hint="Try again later")
    error = error_of_answer(response)
    error.hint = "Check the address"
    return error


def _resumed(source: _Pack | _Page, on_progress: OnProgress | None) -> Generator[bytes, None, None]:
    """All of it, however often the connection breaks."""
    position, patience = source.position, Patience()
    while True:
        try:
            with closing(source.chunks()) as chunks:
                for chunk in chunks:
                    if new := position.take(chunk):
                        patience.progress()
                        if on_progress is not None:
                            on_progress(position.at, position.at / position.total if position.total else None)
                        yield new
            return
        except Unreachable:
            wait_s = patience.next_wait()
            if wait_s is None:
                raise
            time.sleep(wait_s)


def _pieces(content: bytes | Iterator[bytes]) -> Generator[bytes, None, None]:
    """A small one first, then large ones."""
    held, wanted = bytearray(), FIRST_PIECE
    if isinstance(content, bytes):
        held += content
    else:
        for chunk in content:
            held += chunk
            if len(held) >= wanted:
                yield bytes(held[:wanted])
                del held[:wanted]
                wanted = PIECE
    while held:
        yield bytes(held[:wanted])
        del held[:wanted]
        wanted = PIECE


def _put(
    controller: PackCalls, tag: str, url: str, token: str | None, image: bool, on_progress: OnProgress | None
) -> int:
    """To a server that only takes files. It cannot go on after a cut, so it begins again."""
    import httpx

    headers = {"Content-Type": "application/octet-stream"} | ({"Authorization": f"Bearer {token}"} if token else {})
    patience = Patience()
    while True:
        counted = Counted(on_progress)
        try:
            with (
                httpx.Client(timeout=_TIMEOUT_S) as client,
                closing(controller.pack_snapshot(tag, image=image, on_progress=counted)) as pieces,
            ):
                response = client.put(url, content=pieces, headers=headers)
            if response.is_success:
                return counted.bytes
            raise _refusal(response, url)
        except httpx.HTTPError as error:
            failed = error_of_transport(error, name=url, url=url)
        except Unreachable as error:
            failed = error
        wait_s = patience.next_wait()
        if wait_s is None:
            raise failed
        time.sleep(wait_s)
