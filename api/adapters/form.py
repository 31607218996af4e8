"""Reads an upload, multipart/form-data (RFC 7578), straight to disk: never more than a chunk in memory.

The form's fields are known by name, each at most once; what else a client sends (file names, content types)
is never used. Two fields are files and get the names that PEFT gives them.
"""

import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from personae.errors import PayloadTooLarge, RequestError
from personae.lora.peft import CONFIG_FILE, TENSORS_FILE
from personae.lora.peft_config import MAX_CONFIG

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_TEXTS = ("name", "base_model", "replace", "shared")
_MAX_TEXT = 256  # bytes of a text field
_FLUSH = 2**20  # bytes that are gathered before a thread writes them


class UploadForm(msgspec.Struct):
    """The fields beside the files, as they came; None is not given."""

    name: str | None = None
    base_model: str | None = None
    replace: str | None = None
    shared: str | None = None

    def flag(self, field: str) -> bool:
        """A field that is true or false; false when not given. Raises RequestError."""
        value = getattr(self, field)
        if value not in (None, "true", "false"):
            raise RequestError(f"`{field}` must be true or false.", param=field)
        return bool(value == "true")


async def read_form(
    stream: AsyncIterator[bytes], content_type: str, folder: Path, max_tensor_bytes: int
) -> UploadForm:
    """Read the whole body; the files lie in `folder` and are on disk (fsync) when this returns.

    Raises RequestError and PayloadTooLarge; whatever was written by then is the caller's to remove.
    """
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise RequestError(
            "An adapter is uploaded as multipart/form-data with a boundary.",
            param="content-type",
            code="unsupported_media_type",
        )
    form = _Form(folder, {CONFIG_FILE: MAX_CONFIG, TENSORS_FILE: max_tensor_bytes})
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for chunk in stream:
            parser.write(chunk)
            if form.gathered >= _FLUSH:
                await to_thread.run_sync(form.flush)
        if not form.complete:
            raise RequestError("The form ends before its closing boundary.", code="invalid_form")
        await to_thread.run_sync(form.finish)
    except FormParserError as error:
        raise RequestError(f"The body is no valid multipart form: {error}.", code="invalid_form") from None
    finally:
        form.close()
    return form.fields()


class _Form:
    """What the parser's callbacks fill."""

    def __init__(self, folder: Path, files: dict[str, int]) -> None:
        self._folder = folder
        self._limits = {**dict.fromkeys(_TEXTS, _MAX_TEXT), **files}
        self._texts: dict[str, bytearray] = {}
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
        """A part's headers are complete: it is a field that is known and new."""
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
            raise RequestError(f"`{name}` stands twice in the form.", param=name, code="invalid_form")
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise RequestError(f"`{name}` has an encoding that is not served.", param=name)
        self._name, self._left = name, self._limits[name]
        if name in self._wanted:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._files[name] = os.fdopen(os.open(self._folder / name, flags, 0o600), "wb", buffering=0)
        else:
            self._texts[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._left -= end - start
        if self._left < 0:
            raise PayloadTooLarge(
                f"`{self._name}` has more than {self._limits[self._name]} bytes.", param=self._name
            )
        if self._name in self._texts:
            self._texts[self._name] += data[start:end]
        else:
            self._chunks.append((self._files[self._name], data[start:end]))
            self.gathered += end - start

    def _end(self) -> None:
        self.complete = True

    def flush(self) -> None:
        """Write what was gathered."""
        chunks, self._chunks, self.gathered = self._chunks, [], 0
        for file, data in chunks:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def finish(self) -> None:
        """Have all of it on disk. Raises RequestError if a file is missing."""
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

    def fields(self) -> UploadForm:
        texts = {}
        for name, value in self._texts.items():
            try:
                texts[name] = value.decode()
            except UnicodeDecodeError:
                raise RequestError(f"`{name}` is not UTF-8.", param=name) from None
        return UploadForm(**texts)


def copy_folder(source: Path, folder: Path, max_tensor_bytes: int) -> None:
    """Copy an adapter's two files into `folder`, and have them on disk. Symbolic links are refused.

    Raises RequestError, PayloadTooLarge or OSError.
    """
    for name, limit in ((CONFIG_FILE, MAX_CONFIG), (TENSORS_FILE, max_tensor_bytes)):
        handle = os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as origin, (folder / name).open("xb") as copy:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise RequestError(f"`{name}` is no file.", param="lora_path")
            if found.st_size > limit:
                raise PayloadTooLarge(f"`{name}` has more than {limit} bytes.", param="lora_path")
            shutil.copyfileobj(origin, copy, _FLUSH)
            copy.flush()
            os.fsync(copy.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Have the folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
