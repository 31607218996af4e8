"""The options of the server and of `personae.open`, each written once: its type, default, bounds and help.

Adding an option takes one field in the class of its group, here or in `actors/options.py`, and the code that
reads it. `api/commands/command_line.py` makes the command line and the configuration file from the fields,
`make docs` the table in docs/operate/options.md, and `checked` the errors of `personae.open`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from personae.actors.options import (
    BatchingOptions,
    ClusterOptions,
    ModelOptions,
    OptionInfo,
    PrefillReplicas,
    check_folder,
    parse_prefill_replicas,
    parse_size,
)
from personae.api.adapters.sources.url import check_prefixes
from personae.api.base_models.names import check_models
from personae.api.bundled import check_model
from personae.api.database.schema import check_database_url
from personae.api.hub.names import check_adapters
from personae.api.mcp.allowed import check_servers
from personae.api.telemetry.logs import LogFormat, LogLevel
from personae.api.tenants.prices import check_prices
from personae.engine.object_stores import check_store_url

UnknownFields = Literal["refuse", "ignore"]
MaxTokensOverflow = Literal["clamp", "refuse"]
PropertyOrder = Literal["schema", "any"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~/-]*)?")


class Replicas:
    """The value of `--replicas`: from `least` to `most` engines, as the load asks for. `least` may be 0. A
    single number is both. Raises ValueError for anything else."""

    def __init__(self, given: "int | str | Replicas") -> None:
        found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", str(given))
        if found is None or int(found[2] or found[1]) < 1:
            raise ValueError(
                f"{str(given)!r} is not a number of engines of 1 or more, or a range such as 1:4"
            )
        self.least = int(found[1])
        self.most = int(found[2] or self.least)
        if self.most < self.least:
            raise ValueError(
                f"{str(given)!r} has its larger number first; write it as {self.most}:{self.least}"
            )

    def __str__(self) -> str:
        return str(self.least) if self.fixed else f"{self.least}:{self.most}"

    def __repr__(self) -> str:
        return f"Replicas('{self}')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicas) and (self.least, self.most) == (other.least, other.most)

    def __hash__(self) -> int:
        return hash((self.least, self.most))

    @property
    def fixed(self) -> bool:
        """Whether there are always as many."""
        return self.least == self.most


ONE_REPLICA = Replicas(1)


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Origins as browsers send them."""
    for origin in origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ValueError(f"'{origin}' is not a site; write it as https://app.example, with no path.")
    return origins


def _check_prefix(path: str) -> str:
    """A path prefix, without a slash at its end."""
    if _PREFIX.fullmatch(path) is None or "//" in path:
        raise ValueError(f"'{path}' is not a path prefix; write it as /llm.")
    return path.rstrip("/")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters."""

    adapters: Annotated[
        tuple[Path, ...],
        OptionInfo(
            "A folder whose sub-folders are adapters, or NAME=DIR for one adapter, or NAME=org/name for one "
            "on the Hugging Face Hub. Can be repeated.",
            metavar="[NAME=]DIR",
            check=check_adapters,
        ),
    ] = ()
    bundled_adapters: Annotated[
        bool,
        OptionInfo(
            "Serve the adapters that come with the default model and with `demo`. One of --adapters replaces "
            "the one of its name.",
        ),
    ] = True
    adapter_versions: Annotated[
        int,
        OptionInfo("How many earlier versions of an uploaded adapter are kept.", min=0, max=1000),
    ] = 5
    adapter_source: Annotated[
        tuple[str, ...],
        OptionInfo(
            "Adapters may be fetched from sources that begin with this: hf://, hf://org, hf://org/name, "
            "s3://bucket/folder, gs://…, az://…, wandb://entity, mlflow://models, mlflow://runs or "
            "file:///folder. Can be repeated.",
            metavar="PREFIX",
            check=check_prefixes,
        ),
    ] = ()
    fetches_per_minute: Annotated[
        int,
        OptionInfo(
            "How many adapters a minute the requests of each tenant may have fetched by naming a source of "
            "--adapter-source in `model`; a tenant's own limit goes before. 0: none.",
            min=0,
        ),
    ] = 0
    adapter_root: Annotated[
        tuple[Path, ...],
        OptionInfo(
            "Admins may load adapters from below this folder. Can be repeated.", metavar="DIR", folder=True
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Answers."""

    default_model: Annotated[
        str | None, OptionInfo("Answers requests without a `model`.", metavar="NAME", unset="the base")
    ] = None
    tool_format: Annotated[
        str | None,
        OptionInfo(
            "How the model writes tool calls.",
            metavar="NAME",
            unset="detected from the model's chat template",
        ),
    ] = None
    reasoning_format: Annotated[
        str | None,
        OptionInfo(
            "How the model writes reasoning.", metavar="NAME", unset="detected from the model's chat template"
        ),
    ] = None
    seed: Annotated[
        int | None, OptionInfo("Seed of requests that give none.", unset="each request draws its own")
    ] = None
    default_strict: Annotated[
        bool,
        OptionInfo("Treat a schema or function without `strict` as strict: enforce all of it or refuse it."),
    ] = False
    max_tokens_overflow: Annotated[
        MaxTokensOverflow | None,
        OptionInfo(
            "A `max_tokens` that does not fit behind the prompt: it becomes what fits and a header says so, "
            "or it is refused.",
            unset="clamp on /v1/messages and /v1/responses, refuse on the other routes",
        ),
    ] = None
    jump_forward: Annotated[
        bool,
        OptionInfo(
            "Append text that a grammar forces without asking the model. A request can override this."
        ),
    ] = True
    disable_any_whitespace: Annotated[
        bool,
        OptionInfo("Write bound JSON without whitespace between its tokens. A request can override this."),
    ] = False
    property_order: Annotated[
        PropertyOrder,
        OptionInfo(
            "The order of properties in bound JSON: the schema's, or any. A request can override this."
        ),
    ] = "schema"
    unknown_fields: Annotated[UnknownFields, OptionInfo("What to do about unknown fields in a request.")] = (
        "refuse"
    )
    trust_request_chat_template: Annotated[
        bool,
        OptionInfo("Run chat templates that requests bring. Use it only where every client is trusted."),
    ] = False
    stream_ping_interval: Annotated[
        float,
        OptionInfo(
            "Seconds without an event after which a stream gets a comment, so that proxies keep it open. "
            "0: never.",
            min=0,
        ),
    ] = 15.0
    request_timeout: Annotated[
        float | None, OptionInfo("Seconds that any request may take, waiting included.", min=0.001)
    ] = None
    batch_concurrency: Annotated[
        int, OptionInfo("Most sequences of batch jobs that are computed at the same time.", min=1)
    ] = 64


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Tenants and access."""

    data_dir: Annotated[
        Path | None,
        OptionInfo(
            "The folder of tenants, keys, uploads and batches.",
            metavar="DIR",
            check=check_folder,
            unset="none; they are lost when the server stops",
        ),
    ] = None
    database_url: Annotated[
        str | None,
        OptionInfo(
            "A PostgreSQL database for tenants, keys, usage, batches and stored responses. It replaces the "
            "file in --data-dir. Several servers may share it, each with a --data-dir of its own. Needs "
            "psycopg (pip install 'psycopg[binary]').",
            metavar="URL",
            env="PERSONAE_DATABASE_URL",
            check=check_database_url,
        ),
    ] = field(default=None, repr=False)
    object_store: Annotated[
        str | None,
        OptionInfo(
            "With --database-url: where servers keep the contents of adapters and files, such as "
            "s3://bucket/prefix or file:///folder. Needs obstore (pip install obstore).",
            metavar="URL",
            check=check_store_url,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        OptionInfo(
            "An admin's key, in addition to those in --data-dir. Safer in the environment.",
            metavar="KEY",
            env="PERSONAE_SERVER_KEY",
        ),
    ] = field(default=None, repr=False)
    mcp_server: Annotated[
        tuple[str, ...],
        OptionInfo(
            "Requests to /v1/responses may use the MCP servers at this URL and below it as tools: "
            "https://mcp.example/team. Can be repeated. Needs mcp (pip install 'mcp>=2').",
            metavar="URL",
            check=check_servers,
        ),
    ] = ()
    mcp_timeout: Annotated[
        float, OptionInfo("Seconds that an MCP server may take for an answer.", min=0.001)
    ] = 60.0
    price: Annotated[
        tuple[str, ...],
        OptionInfo(
            "The price of a million tokens of prompts and of answers of a model or adapter, as poet=0.5/1.5; "
            "a third number is that of cached tokens, * is any other name. Can be repeated.",
            metavar="NAME=PROMPT/ANSWER",
            check=check_prices,
        ),
    ] = ()
    store_responses: Annotated[
        bool, OptionInfo("Keep responses for 30 days, unless a request has `store: false`.")
    ] = True
    insecure_no_auth: Annotated[bool, OptionInfo("Serve without keys on any address.")] = False
    allowed_origin: Annotated[
        tuple[str, ...],
        OptionInfo(
            "A site whose pages may send requests (https://app.example); * is any. Can be repeated.",
            metavar="ORIGIN",
            check=_check_origins,
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Server."""

    host: Annotated[str, OptionInfo("The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, OptionInfo("The port to listen on; 0 takes any free port.", min=0, max=65535)] = 8000
    ssl_certfile: Annotated[
        Path | None,
        OptionInfo(
            "Serve over TLS with this certificate chain, in PEM. SIGHUP reads the file again.",
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        OptionInfo(
            "The private key of --ssl-certfile, in PEM.",
            metavar="FILE",
            unset="in the certificate's file",
        ),
    ] = None
    root_path: Annotated[
        str,
        OptionInfo(
            "The prefix under which a proxy serves the API, such as /llm.",
            metavar="PATH",
            check=_check_prefix,
        ),
    ] = ""
    drain_timeout: Annotated[
        float, OptionInfo("Seconds that running answers have to finish when the server stops.", min=0)
    ] = 30.0
    session_ttl: Annotated[
        int,
        OptionInfo(
            "Seconds for which the keys and values of a session are kept after its last request, within its "
            "tenant's share. 0 keeps them no longer than others.",
            min=0,
            max=30 * 86400,
        ),
    ] = 600
    kv_events: Annotated[
        str | None,
        OptionInfo(
            "Publish what enters and leaves the prefix caches over ZeroMQ, such as tcp://127.0.0.1:5557, and "
            "place requests by it. Needs pyzmq (pip install pyzmq).",
            metavar="ENDPOINT",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        OptionInfo("With --kv-events: where subscribers ask for what they missed.", metavar="ENDPOINT"),
    ] = None
    kv_events_topic: Annotated[str, OptionInfo("With --kv-events: the topic.", metavar="TEXT")] = ""
    log_format: Annotated[LogFormat, OptionInfo("Logs on stderr as text, or as one JSON object a line.")] = (
        "text"
    )
    log_level: Annotated[LogLevel, OptionInfo("The least important level that is logged.")] = "info"
    tenant_metrics: Annotated[
        int,
        OptionInfo(
            "How many tenants have series of their own in /metrics, by name; all others share one. 0: none.",
            min=0,
            max=1000,
        ),
    ] = 0
    eval_reports: Annotated[
        Path | None,
        OptionInfo(
            "Show admins the runs of `personae eval` in this folder, and let them start some.",
            metavar="DIR",
            check=check_folder,
        ),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        OptionInfo(
            "Send traces to an OpenTelemetry collector, such as http://localhost:4318/v1/traces.",
            metavar="URL",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Engine process."""

    hang_timeout: Annotated[
        float, OptionInfo("Seconds in one step after which the engine is restarted.", min=2)
    ] = 60.0
    max_restarts: Annotated[
        int,
        OptionInfo("Restarts of the engine within a minute of running before the server gives up.", min=0),
    ] = 5
    replicas: Annotated[
        Replicas,
        OptionInfo(
            "Engines, each with a share of the cores or a GPU of its own. Streams survive the loss of one. "
            "MIN:MAX adds engines while work waits, and removes them when fewer would do. With 0:MAX none "
            "runs while nobody asks.",
            parse=Replicas,
            metavar="N|MIN:MAX",
        ),
    ] = ONE_REPLICA
    prefill_replicas: Annotated[
        PrefillReplicas,
        OptionInfo(
            "So many of --replicas only compute prompts; the others go on with the answers. With auto the "
            "load decides how many do. This turns --kv-transfer on.",
            parse=parse_prefill_replicas,
            metavar="N|auto",
        ),
    ] = 0

    silence_timeout: Annotated[
        float,
        OptionInfo(
            "With --replicas: seconds of silence after which an engine's streams move to another.", min=1
        ),
    ] = 3.0
    engine_grace: Annotated[
        float,
        OptionInfo(
            "With --data-dir: seconds that engines keep their weights after the server was killed, so that "
            "the next start is fast. 0: they end with it.",
            min=0,
            max=3600,
        ),
    ] = 60.0
    spare_process: Annotated[
        bool,
        OptionInfo(
            "Keep a process that has the model loaded and replaces an engine that dies, so that the pause is "
            "shorter. Both map the same packed weights; adapters and processes for grammars are its own. On "
            "Linux and a CPU the KV cache of an engine that was killed stays, too. On a GPU the process has "
            "its libraries only. For one engine."
        ),
    ] = False
    one_process: Annotated[bool, OptionInfo("Run the engine in the server's own process, for debugging.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class SeveralModelsOptions:
    """Several models."""

    models: Annotated[
        tuple[str, ...],
        OptionInfo(
            "Serve this model under this name, in place of the argument MODEL. Can be repeated: each engine "
            "then starts with the first request for its model. The file has a list, `models`.",
            metavar="NAME=MODEL",
            check=check_models,
            flag="--model",
        ),
    ] = ()
    keep_alive: Annotated[
        float | None,
        OptionInfo(
            "With --model: an engine stops so many seconds after its last request.",
            min=0,
            unset="when another needs its memory",
        ),
    ] = None
    models_memory: Annotated[
        int | None,
        OptionInfo(
            "With --model: the memory that the engines may take together. The least recently used ones stop "
            "to make room.",
            min=1,
            parse=parse_size,
            metavar="SIZE",
            unset="what is free when the server starts",
        ),
    ] = None


@dataclass(frozen=True)
class ServeOptions(
    ModelOptions,
    SeveralModelsOptions,
    BatchingOptions,
    AdapterOptions,
    AnswerOptions,
    ServerOptions,
    AccessOptions,
    ProcessOptions,
    ClusterOptions,
):
    """Every option of `personae serve`. `personae.open` takes them too."""

    model: Annotated[
        Path | None,
        OptionInfo(
            "A Hugging Face model folder, a GGUF file, a name on the Hub (org/name, org/name@REVISION, "
            "org/name:Q4_K_M for a GGUF file), or `demo` for the small synthetic model.",
            unset="SmolLM2-135M-Instruct",
            check=check_model,
        ),
    ] = None


GROUPS = ServeOptions.__bases__


class Option(NamedTuple):
    """One option as its class describes it."""

    name: str
    type: Any
    default: Any
    info: OptionInfo

    @property
    def text(self) -> str:
        """How the command line spells it."""
        return self.info.flag or f"--{self.name.replace('_', '-')}"


def options_of(group: type) -> Iterator[Option]:
    """The options of a group, or of all groups in one class, in the order of the source."""
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        annotated = get_args(hints[each.name])
        if annotated and isinstance(annotated[-1], OptionInfo):
            yield Option(each.name, annotated[0], each.default, annotated[-1])


def shared(options: Any, kind: type) -> dict[str, Any]:
    """The values of those options that another class of options also has."""
    names = {each.name for each in options_of(kind)} & {each.name for each in options_of(type(options))}
    return {name: getattr(options, name) for name in names}


def checked(options: ServeOptions) -> ServeOptions:
    """The options with every value checked and converted: sizes may be texts such as `2GiB`.

    A dataclass does not check by itself. Raises ValueError, which names the option.
    """
    values = {each.name: getattr(options, each.name) for each in options_of(ServeOptions)}
    for each in options_of(ServeOptions):
        try:
            values[each.name] = _checked(each, values[each.name])
        except ValueError as error:
            raise ValueError(f"`{each.name}`: {str(error).rstrip('.')}.") from None
    return ServeOptions(**values)


def _checked(each: Option, value: Any) -> Any:
    """One option's value, converted from text if necessary. Raises ValueError."""
    info = each.info
    if info.parse is not None and isinstance(value, str):
        value = info.parse(value)
    if get_origin(each.type) is tuple and isinstance(value, str | Path):
        value = (value,)
    value = msgspec.convert(value, each.type, dec_hook=lambda kind, raw: kind(raw))
    if value is None:
        return None
    if info.min is not None and value < info.min:
        raise ValueError(f"{value} is less than {info.min}")
    if info.max is not None and value > info.max:
        raise ValueError(f"{value} is more than {info.max}")
    return value if info.check is None else info.check(value)
