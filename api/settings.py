"""What the HTTP side is told when it is made: limits, and what a request means when it says nothing."""

from pathlib import Path

import msgspec

from personae.api.options import AccessOptions, Opened, ServeOptions, UnknownFields
from personae.engine.config import GenerationDefaults


class ApiSettings(msgspec.Struct, frozen=True):
    """The limits of the HTTP side. Sizes are bytes, times are seconds.

    `defaults` are the model's own sampling parameters, for requests that give none. `seed` is that of
    requests that give none; None draws one for each. `max_n` bounds `n`, `max_sequences` bounds prompts times
    `n` of one request, `max_logprobs` bounds every kind of logprobs, `max_prompt_logprobs` their number over
    all tokens of all prompts of a request. `max_json_depth` bounds the nesting of free-form JSON (schemas,
    template arguments), `max_grammar_bytes` what binds an answer, `max_choice_bytes` a list of choices. A
    request's head and body must arrive within `header_seconds` and `body_seconds`; a client that leaves its
    answer unread, more than the connection's buffers hold, is dropped after `stall_seconds`.
    `request_seconds` is the longest that a request may take, its own timeout may be shorter; None is without
    a limit. An upload of an adapter has limits of its own, `max_upload_bytes` and `upload_seconds`; a file
    for batches `max_file_bytes`. A batch has at most `max_batch_lines` requests, a tenant at most
    `max_open_batches` batches that are not done, unless its own limits say otherwise, and `max_ended_batches`
    that are: the oldest are forgotten. All batches together have `batch_concurrency` sequences in the engine.
    `adapter_roots` are the folders below which admins may load adapters by path. `insecure` asks for no keys
    even if there are any. `allowed_origins` are the web sites whose pages may ask from a browser, "*" is any.
    `max_adapters`, if known, is how many adapters the engine can hold in memory at once; `/metrics` shows it.
    `max_rank`, if known, is the largest rank that it can hold. `tool_format` and `reasoning_format` name how
    the model writes calls and reasoning, "none" for not at all; None finds it from the chat template.
    `jump_forward` is for requests that do not say, None leaves it to the engine. So is
    `disable_any_whitespace`: JSON without blanks between its tokens.
    `unknown_fields` says what happens to fields that no request has. `default_model` answers requests that
    name none; None is the base. `root_path` is a proxy's prefix before every route. `trust_chat_template`
    lets requests bring a chat template of their own. `about` describes the engine.
    `default_strict` is the `strict` of schemas and functions that do not have it.
    """

    defaults: GenerationDefaults = GenerationDefaults()
    seed: int | None = None
    max_n: int = 16
    max_sequences: int = 512
    max_logprobs: int = 20
    max_prompt_logprobs: int = 2**18
    max_stop: int = 16
    max_messages: int = 4096
    max_json_depth: int = 64
    max_grammar_bytes: int = 2**20
    max_choice_bytes: int = 2**16
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100
    header_seconds: float = 15.0
    body_seconds: float = 30.0
    stall_seconds: float = 60.0
    request_seconds: float | None = None
    max_upload_bytes: int = 2**30
    max_file_bytes: int = 200 * 2**20
    max_batch_lines: int = 50_000
    max_open_batches: int = 100
    max_ended_batches: int = 1000
    batch_concurrency: int = 64
    upload_seconds: float = 600.0
    adapter_roots: tuple[Path, ...] = ()
    insecure: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_adapters: int | None = None
    max_rank: int | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    jump_forward: bool | None = None
    disable_any_whitespace: bool = False
    unknown_fields: UnknownFields = "refuse"
    default_model: str | None = None
    root_path: str = ""
    trust_chat_template: bool = False
    about: str = ""
    default_strict: bool = False


def serve_settings(options: ServeOptions, opened: Opened, access: AccessOptions | None = None) -> ApiSettings:
    """The settings for an engine that was opened with these options."""
    access = access or AccessOptions()
    return ApiSettings(
        defaults=opened.defaults,
        max_adapters=opened.max_adapters,
        batch_concurrency=options.batch_concurrency,
        max_rank=None if opened.bounds is None else opened.bounds.max_rank,
        seed=options.seed,
        jump_forward=options.jump_forward,
        disable_any_whitespace=options.disable_any_whitespace,
        default_strict=options.default_strict,
        request_seconds=options.request_timeout,
        adapter_roots=access.adapter_roots,
        insecure=access.insecure_no_auth,
        allowed_origins=access.allowed_origins,
        tool_format=options.tool_format,
        reasoning_format=options.reasoning_format,
        unknown_fields=options.unknown_fields,
        default_model=options.default_model,
        root_path=options.root_path,
        trust_chat_template=options.trust_request_chat_template,
        about=opened.about,
    )
