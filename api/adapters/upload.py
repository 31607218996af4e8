"""Receives an adapter's files: from a form, or from a folder on the server's own disk."""

import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from personae.api.http.upload import read_form, sync_folder
from personae.errors import PayloadTooLarge, RequestError
from personae.kernels.sizes import size_text
from personae.lora.disk import check_free
from personae.lora.peft_config import MAX_CONFIG
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

_CHUNK = 2**20  # bytes copied at a time


class UploadForm(msgspec.Struct):
    """The form's fields other than the files, as sent. None if not given."""

    name: str | None = None
    base_model: str | None = None
    replace: str | None = None
    shared: str | None = None

    def flag(self, field: str) -> bool:
        """A field that is true or false; false by default. Raises RequestError."""
        value = getattr(self, field)
        if value not in (None, "true", "false"):
            raise RequestError(f"`{field}` must be true or false.", param=field)
        return bool(value == "true")


async def read_adapter_form(
    stream: AsyncIterator[bytes], content_type: str, folder: Path, max_tensor_bytes: int
) -> UploadForm:
    """Read the whole form. The two files are then in `folder`, under the names that PEFT gives them.

    Raises what `read_form` raises.
    """
    files = {CONFIG_FILE: MAX_CONFIG, TENSORS_FILE: max_tensor_bytes}
    form = await read_form(stream, content_type, folder, texts=UploadForm.__struct_fields__, files=files)
    return UploadForm(**form.texts)


def copy_folder(source: Path, folder: Path, max_tensor_bytes: int, param: str) -> None:
    """Copy an adapter's two files into `folder`, and flush them to disk. Symbolic links are refused. Errors
    name the field `param`.

    Raises RequestError, PayloadTooLarge or OSError.
    """
    for name, limit in ((CONFIG_FILE, MAX_CONFIG), (TENSORS_FILE, max_tensor_bytes)):
        handle = os.open(source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as origin, (folder / name).open("xb") as copy:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise RequestError(f"`{name}` is not a file.", param=param)
            if found.st_size > limit:
                raise PayloadTooLarge(f"`{name}` has more than {size_text(limit)}.", param=param)
            check_free(folder, found.st_size)
            shutil.copyfileobj(origin, copy, _CHUNK)
            copy.flush()
            os.fsync(copy.fileno())
    sync_folder(folder)
