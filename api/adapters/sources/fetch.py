"""Fetches an adapter from its source, in a process of its own that is ended when its time is over.

So a library that hangs, or that takes much memory, holds nothing of the server.
"""

import os
import subprocess
import sys
from typing import Literal

import anyio
import msgspec

from personae.api.adapters.sources.url import SourceUrl
from personae.errors import (
    Forbidden,
    NotFound,
    PayloadTooLarge,
    PersonaeError,
    RequestError,
    SourceFailed,
    StorageFailed,
)

_COMMAND = (sys.executable, "-m", "personae.api.adapters.sources.fetching")
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


class FetchJob(msgspec.Struct, frozen=True):
    """Fetch the two files of the adapter at `source` into `folder`, within `seconds`. `prefix` is what the
    operator allows; a source that leads out of it is refused. The tensors have at most `max_tensor_bytes`."""

    source: SourceUrl
    prefix: SourceUrl
    folder: str
    max_tensor_bytes: int
    seconds: float


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The files are there and flushed. `source` has the exact revision, if there are revisions."""

    source: str


FailureKind = Literal["not_found", "forbidden", "too_large", "invalid", "disk", "failed"]


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """Why there is no adapter, as a sentence."""

    kind: FailureKind
    message: str


_decode = msgspec.json.Decoder(Fetched | FetchFailed).decode


async def fetch(job: FetchJob) -> str:
    """The exact source, once its files are in the job's folder.

    Raises NotFound, Forbidden, PayloadTooLarge or RequestError for what the source has, SourceFailed if it
    does not answer in time or fails, and StorageFailed for the disk. The process has ended by then.
    """
    try:
        with anyio.fail_after(job.seconds):
            ended = await anyio.run_process(
                _COMMAND,
                input=msgspec.json.encode(job),
                stderr=None,
                check=False,
                env={**os.environ, **_QUIET},
            )
    except TimeoutError:
        raise SourceFailed(
            f"`{job.source}` could not be fetched within {job.seconds:g} s.", param="source"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise SourceFailed(f"The process that fetches adapters cannot start: {error}.") from error
    try:
        answer: Fetched | FetchFailed = _decode(ended.stdout)
    except msgspec.DecodeError:
        raise SourceFailed(
            f"The process that fetches adapters ended with exit code {ended.returncode}.", param="source"
        ) from None
    if isinstance(answer, FetchFailed):
        raise _error(answer)
    return answer.source


def _error(failed: FetchFailed) -> PersonaeError:
    message = failed.message
    match failed.kind:
        case "not_found":
            return NotFound(message, param="source", code="source_not_found")
        case "forbidden":
            return Forbidden(message, param="source", code="source_not_allowed")
        case "too_large":
            return PayloadTooLarge(message, param="source")
        case "invalid":
            return RequestError(message, param="source", code="invalid_source")
        case "disk":
            return StorageFailed(message)
        case "failed":
            return SourceFailed(message, param="source")
