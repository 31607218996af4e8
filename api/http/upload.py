"""Reads an upload, multipart/form-data (RFC 7578), straight to disk, with never more than a chunk in memory.

The form's fields are known by name, each at most once. A file is stored under the field's own name in the
given folder. The client's name for it is returned but not used here.
"""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from anyio import Event, Lock, sleep, to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from personae.api.tenants.store import Identity
from personae.errors import (
    Cancelled,
    LoadError,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RequestError,
    StorageFailed,
)
from personae.kernels.sizes import size_text
from personae.lora.disk import check_free
from personae.lora.throttle import Throttle

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_TEXT = 256  # bytes of a text field
_FLUSH = 2**20  # bytes that are gathered before a thread writes them
_LONGEST_REST = 0.05  # seconds of rest after these; the loop's other work in that time counts as theirs
_STAGED = 16  # uploads at the same time
_STAGED_BY_TENANT = 4


@asynccontextmanager
async def receiving(
    request: Request,
    who: Identity,
    check_room: Callable[[Identity, int], None],
    stage: Callable[[str], AbstractContextManager[Path]],
) -> AsyncIterator[tuple[AsyncIterator[bytes], Path]]:
    """The body of an upload for which there is room, and a folder for it that is removed when the block ends.

    check_room: raises QuotaExceeded if a tenant may not have so many more bytes. stage: see `Staging.folder`.

    Raises QuotaExceeded, RateLimited or Overloaded before anything is read, Cancelled if the client leaves,
    and StorageFailed for any error of the disk.
    """
    length = request.headers.get("content-length", "0")
    check_room(who, int(length) if length.isdigit() else 0)
    try:
        async with aclosing(request.stream()) as stream:
            with stage(who.tenant) as folder:
                yield stream, folder
    except ClientDisconnect:
        raise Cancelled("The client went away before its upload was complete.") from None
    except OSError as error:
        raise StorageFailed(f"The upload could not be written: {error.strerror}.") from error


class MultipartForm(msgspec.Struct):
    """What arrived: the text fields, and the clients' names of the files."""

    texts: dict[str, str]
    filenames: dict[str, str]


async def read_form(
    stream: AsyncIterator[bytes],
    content_type: str,
    folder: Path,
    *,
    texts: Collection[str],
    files: Mapping[str, int],
) -> MultipartForm:
    """Read the whole body. The files are then in `folder` and flushed to disk (fsync).

    `files` gives the most bytes of each file; all of them are required. Large input is read at a pace that
    leaves the processor to others, so the client has to wait for it. Raises RequestError and PayloadTooLarge;
    the caller removes what was written by then.
    """
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError(
            "Files are uploaded as multipart/form-data with a boundary.",
            param="content-type",
            code="unsupported_media_type",
        )
    form = _FormCallbacks(folder, texts, files)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        throttle = Throttle()
        async for chunk in stream:
            parser.write(chunk)
            if form.gathered >= _FLUSH:
                await to_thread.run_sync(form.flush)
                await sleep(min(throttle.due, _LONGEST_REST))
                throttle.begin()
        if not form.complete:
            raise RequestError("The form ends before its closing boundary.", code="invalid_form")
        await to_thread.run_sync(form.finish)
    except FormParserError as error:
        raise RequestError(f"The body is not a valid multipart form: {error}.", code="invalid_form") from None
    finally:
        form.close()
    return form.fields()


class Staging:
    """A folder in which every upload has a folder of its own until it is complete. It is then renamed out of
    it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged: Counter[str] = Counter()
        self._turn = Lock()
        self._freed: Event | None = None  # set when the waiting one may check again
        self._janitor = ThreadPoolExecutor(1, "janitor")
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise LoadError(f"--data-dir: {path} cannot be made: {error.strerror}.") from None

    @contextmanager
    def folder(self, tenant: str) -> Iterator[Path]:
        """A new, empty folder. What is still in it when the block ends is deleted.

        Raises RateLimited or Overloaded if too many are in use, because each may grow as large as an upload.
        Raises OSError if the disk has no room for one.
        """
        if (refusal := self._full(tenant)) is not None:
            raise refusal
        folder = self._path / secrets.token_hex(16)
        folder.mkdir(mode=0o700)
        self._staged[tenant] += 1
        try:
            yield folder
        finally:
            self._staged -= Counter([tenant])
            if self._freed is not None:
                self._freed.set()
            self._janitor.submit(shutil.rmtree, folder, ignore_errors=True)

    @asynccontextmanager
    async def folder_in_turn(self, tenant: str) -> AsyncIterator[Path]:
        """As `folder`, but if too many are in use it waits until one is free, first come, first served."""
        async with self._turn:
            while self._full(tenant) is not None:
                self._freed = Event()
                await self._freed.wait()
            opened = ExitStack()
            folder = opened.enter_context(self.folder(tenant))
        with opened:
            yield folder

    def _full(self, tenant: str) -> Overloaded | RateLimited | None:
        """Why there is no folder for the tenant now. None if there is one."""
        if self._staged[tenant] >= _STAGED_BY_TENANT:
            return RateLimited(f"This tenant has {_STAGED_BY_TENANT} uploads running; wait for one to end.")
        if self._staged.total() >= _STAGED:
            return Overloaded(f"{_STAGED} uploads are running; try again shortly.")
        return None

    def discard(self, path: Path) -> None:
        """Delete a folder on the same disk. It need not exist."""
        trash = self._path / secrets.token_hex(16)
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return
        except OSError:  # a full disk may have no room for another name
            shutil.rmtree(path, ignore_errors=True)
            return
        self._janitor.submit(shutil.rmtree, trash, ignore_errors=True)

    def settle(self) -> None:
        """Wait until all deletions so far are done."""
        self._janitor.submit(lambda: None).result()

    def close(self) -> None:
        """Wait until all deletions are done."""
        self._janitor.shutdown()


class _FormCallbacks:
    """The parser's callbacks, and the fields that they have read."""

    def __init__(self, folder: Path, texts: Collection[str], files: Mapping[str, int]) -> None:
        self._folder = folder
        self._limits = {**dict.fromkeys(texts, _MAX_TEXT), **files}
        self._texts: dict[str, bytearray] = {}
        self._filenames: dict[str, str] = {}
        self._files: dict[str, BinaryIO] = {}
        self._wanted = tuple(files)
        self._name = ""
        self._left = 0
        self._header = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._chunks: list[tuple[BinaryIO, bytes]] = []
        self.gathered = 0
        self.complete = False

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._headers.clear,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._begin,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _header_end(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _begin(self) -> None:
        """A part's headers are complete: check that its field is known and new."""
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "backslashreplace")
        if kind != b"form-data" or not name:
            raise RequestError("A part of the form has no name.", code="invalid_form")
        if name not in self._limits:
            raise RequestError(
                f"`{name[:80]}` is not a field of this form; those are {', '.join(self._limits)}.",
                param=name[:80],
                code="unknown_parameter",
            )
        if name in self._texts or name in self._files:
            raise RequestError(f"`{name}` appears twice in the form.", param=name, code="invalid_form")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise RequestError(f"`{name}` has an encoding that is not served.", param=name)
        self._name, self._left = name, self._limits[name]
        if name in self._wanted:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._files[name] = os.fdopen(os.open(self._folder / name, flags, 0o600), "wb", buffering=0)
            self._filenames[name] = options.get(b"filename", b"").decode("utf-8", "replace")
        else:
            self._texts[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left < 0:
            raise PayloadTooLarge(
                f"`{self._name}` has more than {size_text(self._limits[self._name])}.", param=self._name
            )
        if self._name in self._texts:
            self._texts[self._name] += data[start:end]
        else:
            self._chunks.append((self._files[self._name], data[start:end]))
            self.gathered += end - start

    def _end(self) -> None:
        self.complete = True

    def flush(self) -> None:
        """Write what was gathered. Raises OSError, also shortly before the disk is full."""
        check_free(self._folder, self.gathered)
        chunks, self._chunks, self.gathered = self._chunks, [], 0
        for file, data in chunks:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def finish(self) -> None:
        """Flush everything to disk. Raises RequestError if a file is missing."""
        for name in self._wanted:
            if name not in self._files:
                raise RequestError(f"`{name}` is required.", param=name, code="missing_required_parameter")
        self.flush()
        for file in self._files.values():
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def fields(self) -> MultipartForm:
        texts = {}
        for name, value in self._texts.items():
            try:
                texts[name] = value.decode()
            except UnicodeDecodeError:
                raise RequestError(f"`{name}` is not UTF-8.", param=name) from None
        return MultipartForm(texts, self._filenames)


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
