"""Every message between the server's main process and an HTTP worker.

They travel as frames (`actors/framing.py`) over a pair of Unix sockets, in order. A `request` is the number
of a request that a worker serves itself, a `number` that of one which it passes on. A `call` is answered by
one `CallResult` with the same number. There is one message per step and worker, never one per token.
"""

from pathlib import Path

import msgspec

from personae import errors
from personae.actors.client import EngineStats, ModelCard
from personae.actors.messages import Message, Withdraw
from personae.api.responses.store import AddedItems, KeptResponse
from personae.api.settings import ApiSettings
from personae.api.telemetry.increments import Increment
from personae.api.tenants.store import Identity
from personae.engine.sequence import Delta, LatencyTargets, SequenceLog
from personae.errors import PersonaeError, RequestFailed

Headers = tuple[tuple[bytes, bytes], ...]


class Failure(msgspec.Struct, frozen=True):
    """An error of `errors.py`, by the name of its class."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: PersonaeError) -> "Failure":
        """The error as plain data."""
        return cls(type(error).__name__, error.message, error.param, error.code, error.retry_after)

    def error(self) -> PersonaeError:
        """The error itself."""
        kind = getattr(errors, self.kind, RequestFailed)
        error: PersonaeError = kind(
            self.message, param=self.param, code=self.code, retry_after=self.retry_after
        )
        return error


# --- From the main process
# -----------------------------------------------------------------------------------------


class Begin(Message, frozen=True):
    """Before anything else: all that a worker knows. `model` is where its tokenizer is, `secret` what the
    tenants' prefix-cache salts are made from. `stores` says whether responses are stored."""

    settings: ApiSettings
    model: Path
    secret: bytes
    models: dict[str, ModelCard]
    max_model_len: int
    vocab_size: int
    stores: bool


class CallResult(Message, frozen=True):
    """The answer to a call: its `value`, or how it failed."""

    call: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None


class Deltas(Message, frozen=True):
    """What one step did for all sequences of the worker."""

    deltas: tuple[Delta, ...]


class StreamFailed(Message, frozen=True):
    """The submission of these sequences ends with an error."""

    ids: tuple[str, ...]
    failure: Failure


class Pull(Message, frozen=True):
    """The next message of a request that was passed on is wanted."""

    number: int


class AnswerBegins(Message, frozen=True):
    """The status and the headers of the answer to a request that was passed on."""

    number: int
    status: int
    headers: Headers


class AnswerPiece(Message, frozen=True):
    """A piece of its body. The next one comes after `Taken`."""

    number: int
    body: bytes
    more: bool


class AnswerEnds(Message, frozen=True):
    """Nothing more comes. `broken`: the answer is not complete."""

    number: int
    broken: bool


class Report(Message, frozen=True):
    """The newest `Increments` are wanted now."""


class Drain(Message, frozen=True):
    """Finish what runs, refuse the rest, and end."""


# --- From a worker
# -----------------------------------------------------------------------------------------


class Serving(Message, frozen=True):
    """It accepts connections."""


class Enter(Message, frozen=True):
    """A request begins: find its caller, and count it. Returns `Entered`."""

    call: int
    request: int
    headers: Headers


class Entered(msgspec.Struct, frozen=True):
    """The caller of a request. `stats` have the engine's load, if the request asks for it."""

    identity: Identity
    stats: EngineStats | None = None


class Find(Message, frozen=True):
    """Find the adapter of this name, and hold its files until the request ends. Returns a `ModelCard`."""

    call: int
    request: int
    name: str
    param: str


class HoldBytes(Message, frozen=True):
    """Count so many bytes of memory in all for a request, under this number of its own."""

    call: int
    request: int
    hold: int
    size: int


class ReleaseBytes(Message, frozen=True):
    """The memory is free."""

    request: int
    hold: int


class Open(Message, frozen=True):
    """Take the prompts from the tenant's budget and submit the sequences."""

    call: int
    request: int
    logs: tuple[SequenceLog, ...]


class Answered(Message, frozen=True):
    """So many tokens of the answer count for the tenant."""

    request: int
    tokens: int


class Used(Message, frozen=True):
    """Record the usage of a request."""

    request: int
    adapter: str | None
    prompt: int
    cached: int
    completion: int
    seconds: float


class Leave(Message, frozen=True):
    """The request has ended; nothing of it remains."""

    request: int


class FindResponse(Message, frozen=True):
    """Find a stored response. Returns a `KeptResponse`."""

    call: int
    request: int
    id: str


class PutResponse(Message, frozen=True):
    """Store a response, and what it adds to a conversation. Answered when it is on disk."""

    call: int
    request: int
    response: KeptResponse | None
    limit: int | None
    added: AddedItems | None


class BeginBackground(Message, frozen=True):
    """Answer this request in the background. Returns `Begun`."""

    call: int
    request: int
    body: bytes
    targets: LatencyTargets | None
    session: str | None


class Begun(msgspec.Struct, frozen=True):
    """A response that is made in the background, as JSON, and what of its request binds nothing."""

    response: bytes
    ignored: list[str]


class ConversationRoom(Message, frozen=True):
    """Check that the tenant may add to its conversations."""

    call: int
    request: int
    limit: int | None


class ConversationPage(Message, frozen=True):
    """Find items of a conversation. Returns them, and whether there are more."""

    call: int
    request: int
    id: str
    after: str | None
    limit: int
    order: str


class Forward(Message, frozen=True):
    """Serve this request. The scope is ASGI's."""

    number: int
    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    scheme: str
    http_version: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


class Received(Message, frozen=True):
    """The answer to `Pull`: a piece of the request's body, or that its client has disconnected."""

    number: int
    body: bytes = b""
    more: bool = False
    disconnected: bool = False


class Taken(Message, frozen=True):
    """The connection has taken the last piece of the answer."""

    number: int


class Gone(Message, frozen=True):
    """Nobody waits for the answer to a request that was passed on."""

    number: int


class Increments(Message, frozen=True):
    """What was counted since the last one."""

    increments: tuple[Increment, ...]


ToWorker = (
    Begin
    | CallResult
    | Deltas
    | StreamFailed
    | Pull
    | AnswerBegins
    | AnswerPiece
    | AnswerEnds
    | Report
    | Drain
)
ToMain = (
    Serving
    | Enter
    | Find
    | HoldBytes
    | ReleaseBytes
    | Open
    | Withdraw
    | Answered
    | Used
    | Leave
    | FindResponse
    | PutResponse
    | BeginBackground
    | ConversationRoom
    | ConversationPage
    | Forward
    | Received
    | Taken
    | Gone
    | Increments
)
