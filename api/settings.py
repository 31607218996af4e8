"""The settings of the HTTP side: its options, its limits, and what is known of the model."""

from dataclasses import dataclass, field

from personae.api.options import AccessOptions, AdapterOptions, AnswerOptions, ServerOptions
from personae.engine.generation_config import GenerationDefaults


@dataclass(frozen=True, kw_only=True)
class ApiSettings(AdapterOptions, AnswerOptions, ServerOptions, AccessOptions):
    """The options and limits that requests are answered by. Sizes are bytes, times are seconds.

    `defaults` are the model's own sampling parameters, for requests that give none. `max_n` limits `n`,
    `max_sequences` limits prompts times `n` of one request, `max_logprobs` limits every kind of logprobs,
    `max_prompt_logprobs` their number over all tokens of all prompts of a request. `max_json_depth` limits
    the nesting of free-form JSON (schemas, template arguments), `max_grammar_bytes` what binds an answer,
    `max_choice_bytes` a list of choices. A request's head and body must arrive within `header_seconds` and
    `body_seconds`. A client that does not read its answer is dropped after `stall_seconds`, once the
    connection's buffers are full. What a client sends after an answer that closes its connection is read and
    discarded for `linger_seconds` and up to `linger_bytes`, so that it gets the answer. An upload of an
    adapter has limits of its own, `max_upload_bytes` and `upload_seconds`; a file for batches has
    `max_file_bytes`. A batch has at most `max_batch_lines` requests. Unless its own limits say otherwise, a
    tenant has at most `max_open_batches` unfinished batches and `max_ended_batches` ended ones, of which the
    oldest are removed. `max_adapters`, if known, is the number of adapters that the engine can hold in memory
    at once; `/metrics` shows it. `max_rank`, if known, is the largest rank that it can hold. `embedding_size`
    is the length of its vectors. `about` describes the engine.
    """

    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
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
    linger_seconds: float = 30.0
    linger_bytes: int = 64 * 2**20
    max_upload_bytes: int = 2**30
    max_file_bytes: int = 200 * 2**20
    max_batch_lines: int = 50_000
    max_open_batches: int = 100
    max_ended_batches: int = 1000
    upload_seconds: float = 600.0
    max_adapters: int | None = None
    max_rank: int | None = None
    embedding_size: int | None = None
    about: str = ""
