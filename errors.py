"""Every error that Personae raises, as one tree.

    PersonaeError
    ├── RequestError              the caller can fix it; `param` names the field             HTTP 400
    │   ├── UnsupportedParameter  a field that is unknown, or known and not supported        400
    │   ├── ContextLengthExceeded the prompt and the answer do not fit the context           400
    │   ├── BudgetTooSmall        no complete bound answer fits in `max_tokens`              400
    │   ├── TemplateTooSlow       the chat template exceeded its time limit                  400
    │   ├── GrammarError          a schema, regex or grammar that cannot be enforced         400
    │   ├── Unauthorized          the API key is missing or invalid                          401
    │   ├── Forbidden             a valid key that may not do this                           403
    │   ├── NotFound              no such model, adapter, route                              404
    │   ├── MethodNotAllowed                                                                 405
    │   ├── Conflict              the name is taken                                          409
    │   ├── RequestTimeout        the client sent its request too slowly                     408
    │   ├── PayloadTooLarge       body, header or list over its limit                        413, 431
    │   ├── ToolServerFailed      an MCP server of the request does not list its tools       424
    │   └── RateLimited           this tenant's limit; `retry_after` seconds                 429
    │       ├── QuotaExceeded     the tenant's quota is used up                              429
    │       └── BudgetExceeded    the tenant's budget of the day is used up                  429
    ├── Overloaded                the server is full or stopping; `retry_after` seconds      503
    │   ├── EngineLost            the engine failed too often and is not started again       503
    │   ├── TargetOutOfReach      the first token cannot meet the client's target            503
    │   ├── GrammarDelayed        the machine had no time for the masks of a grammar         503
    │   ├── StorageFailed         the disk is full or failed                                 503
    │   ├── SourceFailed          where an adapter is fetched from failed                    503
    │   └── ActorStopped          the part of the server that would handle it is stopping    503
    ├── RequestFailed             the server accepted the request but could not finish it    500
    │   ├── AdapterOverflow       the adapter's values overflow with this prompt             400
    │   ├── AdapterUnusable       an adapter, or a mix of several, cannot be computed        400
    │   ├── Quarantined           it made the engine fail each time it ran                   500
    │   ├── DeadlineExceeded      its deadline passed                                        504
    │   ├── Cancelled             the client disconnected (never sent on the wire)           499
    │   └── ActorCrashed          a part of the server died; it may or may not have acted    500
    ├── LoadError                 a model or adapter folder cannot be loaded
    │   ├── ModelLoadError        start-up: the message names the file and the tensor
    │   ├── KernelError           start-up: a requested implementation cannot run here
    │   └── AdapterError          an adapter is rejected; the message names the tensor or field
    └── never on the wire: RestartsExhausted, StartFailed, EngineCoreDied, EngineCoreHangs and
        LineBroken (supervision); DriverError

`status`, `type` and `code` are sent on the wire in OpenAI's error shape
(https://platform.openai.com/docs/guides/error-codes).
"""

import json
from typing import Any

# The codes of GrammarTooSlow and GrammarDelayed, which identify them between processes.
GRAMMAR_TOO_SLOW = "grammar_too_slow"
GRAMMAR_DELAYED = "grammar_delayed"


def as_json(value: Any, most: int = 80) -> str:
    """A JSON value as an error shows it to who wrote it: `true`, not `True`. At most `most` characters of
    it."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shortened(text: str, most: int = 400) -> str:
    """A text that quotes what a caller sent: all of it, or its beginning and its end with `…` between them.
    A library names the value first, and then what is wrong with it."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


class PersonaeError(Exception):
    """The root of the tree. `message` is one sentence that says what is wrong and what to do next."""

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    retry: bool | None = None  # whether a retry can help; None: as its status implies

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param if param is not None else self.param
        self.code = code if code is not None else self.code
        self.retry_after = retry_after if retry_after is not None else self.retry_after


class RequestError(PersonaeError):
    """The request is wrong; `param` names the field in OpenAI's dotted form, as in `messages[0].role`."""

    status = 400
    type = "invalid_request_error"
    code: str = "invalid_value"


class UnsupportedParameter(RequestError):
    """A parameter that the server would have to ignore. It is rejected instead."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt and `max_tokens`, do not fit the model's context.

    `limit` is the context's length, `prompt` the prompt's (None if it was not counted), `asked` the
    `max_tokens` that does not fit (None if the prompt alone does not), all in tokens.
    """

    code = "context_length_exceeded"
    limit: int = 0
    prompt: int | None = None
    asked: int | None = None


class BudgetTooSmall(RequestError):
    """`max_tokens` is below the shortest answer that the schema or grammar allows."""

    code = "max_tokens_too_small"


class TemplateTooSlow(RequestError):
    """The chat template exceeded its time limit."""


class GrammarError(RequestError):
    """A schema, regex or grammar that is malformed or cannot be enforced."""

    code = "invalid_schema"


class NotEnforced(GrammarError):
    """A strict schema that is well-formed, but that no grammar enforces completely.

    `unexplained`: trials, which take long, may still find the keywords that have to go.
    """

    unexplained = False


class GrammarTooSlow(GrammarError):
    """The masks of a grammar exceeded their time limit, so the answer was ended."""

    code = GRAMMAR_TOO_SLOW
    retry = False


class Unauthorized(RequestError):
    """The API key is missing or invalid. The message does not say which."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is valid but may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(RequestError):
    """No such model, adapter or route. Another tenant's is reported the same way."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class Conflict(RequestError):
    """The name is taken."""

    status = 409
    code = "conflict"


class RequestTimeout(RequestError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    """The body, a header or a list is over its limit."""

    status = 413
    code = "payload_too_large"


class ToolServerFailed(RequestError):
    """An MCP server that the request names does not list its tools. Nothing was generated."""

    status = 424
    code = "mcp_server_failed"


class RateLimited(RequestError):
    """This tenant's limit is reached; `retry_after` says when to come back, in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1.0


class QuotaExceeded(RateLimited):
    """This tenant's quota is used up. Something must be removed, or end, before there is room."""

    code = "quota_exceeded"
    retry_after = 60.0


class BudgetExceeded(RateLimited):
    """What this tenant may use in a day does not suffice; `retry_after` is until the next day, in seconds."""

    code = "budget_exceeded"


class Overloaded(PersonaeError):
    """A bounded queue is full, or the server is stopping. `retry_after` is in seconds."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"
    retry_after = 1.0


class EngineLost(Overloaded):
    """The engine failed too often and is not started again. The server is about to exit."""

    code = "engine_lost"
    retry_after = 30.0


class GrammarDelayed(Overloaded):
    """The machine was too busy to make the masks of a grammar in time, so the answer was ended."""

    code = GRAMMAR_DELAYED
    retry_after = 30.0


class TargetOutOfReach(Overloaded):
    """The first token cannot meet the client's latency target, and the client asked to be refused then."""

    code = "target_out_of_reach"


class StorageFailed(Overloaded):
    """The disk is full or failed. Nothing has changed."""

    code = "storage_failed"
    retry_after = 30.0


class SourceFailed(Overloaded):
    """The place from which an adapter is fetched failed, or did not answer in time. Nothing has changed."""

    code = "source_failed"
    retry_after = 30.0


class ActorStopped(Overloaded):
    """The actor has stopped for good, or its supervision tree is stopping."""

    code = "actor_stopped"


class RequestFailed(PersonaeError):
    """An accepted request that could not be finished. It is never the caller's fault."""

    code = "request_failed"


class AdapterOverflow(RequestFailed):
    """The adapter's values are finite, but the model's results with this prompt are not."""

    status = 400
    type = "invalid_request_error"
    code = "adapter_overflow"
    param = "model"
    retry = False


class AdapterUnusable(RequestFailed):
    """An adapter, or a mix of several, cannot be computed: its values overflow with this base, or a norm is
    zero."""

    status = 400
    type = "invalid_request_error"
    code = "adapter_unusable"
    param = "model"
    retry = False


class Quarantined(RequestFailed):
    """The request made the engine fail each time it ran, so it is not tried again."""

    code = "quarantined"
    retry = False


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed while it was queued or running."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    retry = False


class Cancelled(RequestFailed):
    """The client disconnected. No one receives this error; it exists for logs and counters."""

    status = 499
    code = "cancelled"


class ActorCrashed(RequestFailed):
    """The actor died or was restarted before it answered. The message may or may not have taken effect."""

    code = "actor_crashed"


class LoadError(PersonaeError):
    """A folder on disk cannot be loaded."""


class ModelLoadError(LoadError):
    """The model folder is incomplete or does not match its config. The message says what is wrong."""


class KernelError(LoadError):
    """A requested operator implementation cannot run on this device. The message says why."""


class AdapterError(LoadError):
    """The adapter is malformed or made for another base. The message names the tensor or field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_adapter"


class RestartsExhausted(PersonaeError):
    """A supervisor gave up because its children died too often. The last death is the `__cause__`."""


class StartFailed(PersonaeError):
    """A child could not be started the first time. The reason is the `__cause__`."""


class EngineCoreDied(PersonaeError):
    """The engine core's process has ended. The message has its exit code, its last step and its last
    output."""


class EngineCoreHangs(PersonaeError):
    """The engine core's process is alive but makes no progress."""


class LineBroken(PersonaeError):
    """The other process sent something that is not a valid frame."""


class DriverError(PersonaeError):
    """A call of the GPU's driver failed, or the driver cannot be called."""
