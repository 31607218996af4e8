"""Wire types of batches, as in OpenAI's API, and the rules by which a batch's status changes."""

from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from personae.api.wire.answers import AnswerDetails, CachedTokens
from personae.api.wire.schema import Body

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Ending = Literal["completed", "expired", "cancelled"]

MOVES: dict[Status, tuple[Status, ...]] = {
    "validating": ("in_progress", "failed", "cancelling"),
    "in_progress": ("finalizing", "cancelling"),
    "finalizing": ("completed", "expired"),
    "cancelling": ("cancelled",),
}
"""The statuses that may follow each status. A status that is not a key is final."""


class BatchError(msgspec.Struct, frozen=True):
    """An error in the input file; lines count from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The first errors."""

    data: list[BatchError]
    object: str = "list"


class Counts(msgspec.Struct, frozen=True):
    """Requests: all, answered, and answered with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of all answers."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = CachedTokens(0)
    output_tokens: int = 0
    output_tokens_details: AnswerDetails = AnswerDetails(0)
    total_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as the API shows it. Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    object: str = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None

    def moved(self, status: Status, now: float, **changes: Any) -> "Batch":
        """The batch in its next status, at the time `now`."""
        assert status in MOVES.get(self.status, ()), f"{self.id}: {self.status} cannot become {status}"
        return replace(self, status=status, **{f"{status}_at": int(now)}, **changes)


class BatchEntry(msgspec.Struct, frozen=True):
    """What is stored of a batch: its tenant, and how it will end once it is finalizing.

    `keep` is how many seconds its output files are stored; None for ever.
    """

    tenant: str
    batch: Batch
    keep: int | None = None
    ending: Ending = "completed"


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(Body, kw_only=True):
    """`POST /v1/batches`."""

    free_form: ClassVar[tuple[str, ...]] = ()

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct, frozen=True):
    """What the request would have got over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class NotRun(msgspec.Struct, frozen=True):
    """Why a request was not run."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """A line of the output file, or of the error file."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: NotRun | None
