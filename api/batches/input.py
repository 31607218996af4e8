"""Reads the input file of a batch: completely once to check it, then again line by line.

Blocking; for threads.
"""

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from personae.api.batches.model import BatchError, InputLine
from personae.api.embeddings.wire import EmbeddingRequest
from personae.api.responses.request import ResponsesRequest
from personae.api.settings import ApiSettings
from personae.api.wire.decode import LONG, decode, named_error, why_not_json
from personae.api.wire.json_scan import check_keys
from personae.api.wire.schema import ChatRequest, CompletionRequest
from personae.errors import RequestError, UnsupportedParameter
from personae.kernels.sizes import size_text
from personae.lora.throttle import Throttle

BatchRequest = ChatRequest | CompletionRequest | ResponsesRequest | EmbeddingRequest
ENDPOINTS: dict[str, type[BatchRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
}
MOST_ERRORS = 100  # of a file that are reported
_MAX_ID = 512
_READ_BYTES = 2**20

_decode = msgspec.json.Decoder(InputLine).decode


class Checked(msgspec.Struct):
    """The result of the check: how many requests, which errors, and on which line each model is first
    named."""

    total: int = 0
    errors: list[BatchError] = []
    models: dict[str, int] = {}


def check(path: Path, endpoint: str, settings: ApiSettings) -> Checked:
    """Read the whole file. Stops after MOST_ERRORS errors."""
    found, seen, throttle = Checked(), dict[str, int](), Throttle()
    with path.open("rb") as file:
        for number, text in _lines(file.readline, settings.max_body_bytes):
            if len(found.errors) >= MOST_ERRORS:
                break
            if found.total >= settings.max_batch_lines:
                most = settings.max_batch_lines
                found.errors.append(
                    BatchError("too_many_requests", f"A batch has at most {most} requests.", None, number)
                )
                break
            found.total += 1
            if len(text) > LONG:
                throttle.rest()
            try:
                if len(text) > settings.max_body_bytes:
                    raise RequestError(
                        f"Line {number} has more than {size_text(settings.max_body_bytes)}, the limit for a "
                        "request.",
                        code="line_too_long",
                    )
                for model in _check_line(text, number, endpoint, seen, settings):
                    found.models.setdefault(model, number)
            except RequestError as error:
                found.errors.append(BatchError(error.code, error.message, error.param, number))
    if not found.total:
        found.errors.append(BatchError("empty_file", "The input file has no requests."))
    return found


class Requests:
    """The requests of a file that was checked, a few at a time."""

    def __init__(self, path: Path, settings: ApiSettings) -> None:
        self._file = path.open("rb")
        self._lines = _lines(self._file.readline, settings.max_body_bytes)

    def take(self, count: int) -> list[InputLine]:
        """The next requests, up to `count` and not many bytes at a time. Empty at the end."""
        lines: list[InputLine] = []
        size = 0
        while len(lines) < count and size < _READ_BYTES:
            if (found := next(self._lines, None)) is None:
                break
            lines.append(_decode(found[1]))
            size += len(found[1])
        return lines

    def __iter__(self) -> Iterator[InputLine]:
        return (_decode(text) for _, text in self._lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines(readline: Callable[[int], bytes], longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, numbered from 1. Of a line that is too long, only the beginning."""
    number = 0
    while text := readline(longest + 2):
        number += 1
        while not text.endswith(b"\n") and (rest := readline(longest)):
            text = text[: longest + 1]
            if rest.endswith(b"\n"):
                break
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        if text.strip():
            yield number, text.strip()


def _check_line(
    text: bytes, number: int, endpoint: str, seen: dict[str, int], settings: ApiSettings
) -> list[str]:
    """The models that the line names. Raises RequestError for any error in it."""
    try:
        line = _decode(text)
    except msgspec.ValidationError as error:
        if (field := named_error(error, InputLine)).param is None:
            raise RequestError(f"The line is not a request: {error}.", code="invalid_line") from None
        raise field from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = why_not_json(text, error)
        raise RequestError(f"The line is not valid JSON: {why}.", code="invalid_json_line") from None
    except RecursionError:
        raise RequestError("The line's JSON is nested too deeply.", code="invalid_json_line") from None
    if len(text) - len(line.body) <= LONG:
        check_keys(text.replace(bytes(line.body), b"null", 1))
    if not 0 < len(line.custom_id) <= _MAX_ID:
        raise RequestError(f"`custom_id` must have 1 to {_MAX_ID} characters.", param="custom_id")
    if line.custom_id in seen:
        raise RequestError(
            f"The `custom_id` is that of line {seen[line.custom_id]}.",
            param="custom_id",
            code="duplicate_custom_id",
        )
    seen[line.custom_id] = number
    if line.method != "POST":
        raise RequestError("`method` must be POST.", param="method", code="invalid_method")
    if line.url != endpoint:
        raise RequestError(
            f"`url` must be the batch's endpoint, {endpoint}.", param="url", code="invalid_url"
        )
    try:
        type, unknown = ENDPOINTS[endpoint], settings.unknown_fields
        body = decode(bytes(line.body), type, settings.max_json_depth, unknown=unknown)
        if not isinstance(body, EmbeddingRequest) and body.stream:
            raise UnsupportedParameter("A batch's answers are not streamed.", param="stream")
        if body.timeout is not None:
            raise UnsupportedParameter(
                "A batch has a completion window, its requests no timeout.", param="timeout"
            )
    except RequestError as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise
    named = () if body.model is None else (body.model,)
    return [*named, *(entry.name for entry in body.adapters or ())]
