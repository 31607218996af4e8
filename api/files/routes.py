"""`/v1/files`, as in OpenAI's API."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from personae.api.exchange import exchange_of
from personae.api.files.store import KEPT, FileRecord, expiry
from personae.api.http.operation import Content, operation
from personae.api.http.upload import read_form, receiving
from personae.api.respond import json_response
from personae.errors import NotFound, RequestError, UnsupportedParameter

if TYPE_CHECKING:
    from personae.api.batches.manager import BatchManager

ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_MAX_FILENAME = 255


class FileList(msgspec.Struct):
    """A page of files."""

    data: list[FileRecord]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: str = "file"
    deleted: bool = True


_Kept = Annotated[int, Meta(ge=KEPT[0], le=KEPT[1])]
_File = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class FileUpload(msgspec.Struct):
    """The form of an upload, for the description; `upload.py` reads it."""

    file: _File
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | UnsetType = msgspec.field(name=ANCHOR, default=UNSET)
    seconds: _Kept | UnsetType = msgspec.field(name=SECONDS, default=UNSET)


class ListFiles(msgspec.Struct):
    """The query of `GET /v1/files`."""

    purpose: str | UnsetType = UNSET
    after: str | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


@operation(
    "POST",
    "/v1/files",
    body=Content("multipart/form-data", FileUpload),
    answers={200: FileRecord},
    refuses=(404,),
)
async def create_file(request: Request) -> Response:
    """Upload a file of requests for a batch."""
    exchange = exchange_of(request)
    files, who = batches_of(request).files, exchange.caller.identity
    async with receiving(request, who, files.check_room, files.stage) as (stream, folder):
        form = await read_form(
            stream,
            request.headers.get("content-type", ""),
            folder,
            texts=("purpose", ANCHOR, SECONDS),
            files={"file": exchange.settings.max_file_bytes},
        )
        _check_purpose(form.texts.get("purpose"))
        record = await files.add(
            who,
            folder / "file",
            filename=_filename(form.filenames["file"]),
            purpose="batch",
            seconds=_seconds(form.texts),
        )
    return json_response(record)


@operation("GET", "/v1/files", query=ListFiles, answers={200: FileList}, refuses=(404,))
async def list_files(request: Request) -> Response:
    """List the tenant's files, a page at a time."""
    exchange = exchange_of(request)
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("`order` must be asc or desc.", param="order")
    data, more = batches_of(request).files.page(
        exchange.caller.tenant,
        query.get("purpose"),
        query.get("after"),
        page_size(request, 10_000, 10_000),
        order,
    )
    return json_response(FileList(data, more, *ends(data)))


@operation("GET", "/v1/files/{id}", answers={200: FileRecord}, refuses=(404,))
async def get_file(request: Request) -> Response:
    """Show a file."""
    exchange = exchange_of(request)
    return json_response(batches_of(request).files.find(exchange.caller.tenant, request.path_params["id"]))


@operation(
    "GET",
    "/v1/files/{id}/content",
    answers={200: Content("application/octet-stream")},
    refuses=(404,),
)
async def get_content(request: Request) -> Response:
    """Send the content of a file."""
    exchange = exchange_of(request)
    files = batches_of(request).files
    record = files.find(exchange.caller.tenant, request.path_params["id"])
    return FileResponse(
        await files.bring(record.id),
        media_type="application/octet-stream",
        headers={"content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}"},
    )


@operation("DELETE", "/v1/files/{id}", answers={200: FileDeleted}, refuses=(404, 409))
async def delete_file(request: Request) -> Response:
    """Remove a file that no batch reads any more."""
    exchange, id = exchange_of(request), request.path_params["id"]
    await batches_of(request).remove_file(exchange.caller.tenant, id)
    return json_response(FileDeleted(id))


def batches_of(request: Request) -> "BatchManager":
    """The store of files and batches. Raises NotFound if the server has none."""
    batches: BatchManager | None = request.app.state.batches
    if batches is None:
        raise NotFound("This server keeps no files and runs no batches.", code="unknown_url")
    return batches


def page_size(request: Request, default: int, most: int) -> int:
    """`limit`. Raises RequestError."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise RequestError(f"`limit` must be from 1 to {most}.", param="limit", code="out_of_range")
    return int(text)


def ends(page: Sequence[Any]) -> tuple[str | None, str | None]:
    """The ids of a page's first and last entries."""
    return (page[0].id, page[-1].id) if page else (None, None)


def _check_purpose(purpose: str | None) -> None:
    if purpose is None:
        raise RequestError("`purpose` is required.", param="purpose", code="missing_required_parameter")
    if purpose != "batch":
        raise UnsupportedParameter(
            f"Files are for batches here: `purpose` must be batch, not {purpose[:40]!r}.", param="purpose"
        )


def _seconds(texts: dict[str, str]) -> int | None:
    anchor, seconds = texts.get(ANCHOR), texts.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestError(f"`{ANCHOR}` must be created_at.", param=ANCHOR)
    if seconds is None or not (seconds.isascii() and seconds.isdigit()):
        raise RequestError(f"`{SECONDS}` must be a number of seconds.", param=SECONDS)
    return expiry(int(seconds[:12]), SECONDS)


def _filename(given: str) -> str:
    """The client's name for its file, in a form that can be shown. No file has this name here."""
    name = "".join(char for char in given if char.isprintable())[:_MAX_FILENAME]
    return name or "upload.jsonl"
