"""What `personae serve` is asked for, as plain data."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import anyio
import msgspec
from typer import BadParameter

from personae.api.telemetry.logs import LogFormat
from personae.engine.quantization import QUANTIZATIONS
from personae.errors import PersonaeError

if TYPE_CHECKING:
    from personae.actors.client import EngineClient
    from personae.engine.config import GenerationDefaults
    from personae.lora.bounds import AdapterBounds

DeviceChoice = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
KvDtypeChoice = Literal["auto", "fp8"]
UnknownFields = Literal["refuse", "ignore"]

QUANTIZE_METAVAR = f"[{'|'.join(QUANTIZATIONS)}]"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class ServeOptions(msgspec.Struct, frozen=True):
    """Everything that opening an engine needs; None means that the engine chooses.

    `model` is a Hugging Face model folder, a GGUF file or "demo", None the default (`bundled.py`). Each
    sub-folder of each folder in `adapters` is an adapter. `kv_memory` and `adapter_memory` are in bytes, the
    other sizes are in tokens or sequences. `seed` is that of requests that give none. Unless it is in
    `one_process`, the engine is started again when it dies, `max_restarts` times within a minute, or when a
    step takes more than `hang_timeout` seconds. A server that is to stop gives answers `drain_timeout`
    seconds to finish. `request_timeout` is the most seconds that any request may take.
    `otlp_traces_endpoint` is the URL of an OpenTelemetry collector.
    `tool_format` and `reasoning_format` are names of formats, or "none". Batches have `batch_concurrency`
    sequences in the engine, and beside other requests `background_tokens` of a step. `cuda_graphs`: on a
    GPU decode steps are captured as graphs. `kv_cache_dtype`: "fp8" keeps keys and values in half the memory.
    `quantize` is how the base's weights are kept, None for as `dtype` says. `jump_forward`: text that a
    grammar forces is appended without asking the model, unless a request says otherwise.
    `disable_any_whitespace`: bound JSON has no blanks between its tokens, unless a request says otherwise.
    `served_model_name` is the base's name, or all of its names. `default_model` answers requests that name
    none. `unknown_fields` of a request are refused or ignored. `root_path` is the prefix that a proxy puts
    before every route. With `trust_request_chat_template` requests may bring a chat template.
    `default_strict`: a schema or function without `strict` is strict.
    """

    model: Path | None = None
    adapters: tuple[Path, ...] = ()
    device: DeviceChoice = "auto"
    dtype: DtypeChoice = "auto"
    kv_cache_dtype: KvDtypeChoice = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    max_seqs: int | None = None
    kv_memory: int | None = None
    adapter_memory: int | None = None
    served_model_name: str | tuple[str, ...] | None = None
    default_model: str | None = None
    seed: int | None = None
    one_process: bool = False
    max_restarts: int = 5
    hang_timeout: float = 60.0
    drain_timeout: float = 30.0
    request_timeout: float | None = None
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    batch_concurrency: int = 64
    background_tokens: int | None = None
    cuda_graphs: bool = True
    quantize: str | None = None
    jump_forward: bool | None = None
    disable_any_whitespace: bool = False
    unknown_fields: UnknownFields = "refuse"
    root_path: str = ""
    trust_request_chat_template: bool = False
    default_strict: bool = False


async def _never() -> None:
    await anyio.sleep_forever()


def _ignore(error: PersonaeError) -> None:
    pass


def _nothing() -> str:
    return ""


class AccessOptions(msgspec.Struct, frozen=True):
    """Who may use the server, and what it keeps.

    `data_dir` has the tenants, their keys and their adapters; None keeps nothing. `adapter_roots` are the
    folders below which admins may load adapters by path. `insecure_no_auth` asks nobody for a key. `api_key`
    is an admin's, beside those of `data_dir`, and is kept nowhere. Pages of `allowed_origins` may ask from a
    browser.
    """

    data_dir: Path | None = None
    adapter_roots: tuple[Path, ...] = ()
    insecure_no_auth: bool = False
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """An open engine, and what the API wants to know of the model besides.

    `max_adapters` is how many adapters fit in memory at once, `bounds` what each of them must fit; None if
    nobody knows. `lost` waits until the engine has failed for good; `end_all` ends every stream with an
    error, and refuses new ones with it. `describe` says what every actor is doing, `about` what was opened.
    """

    client: "EngineClient"
    defaults: "GenerationDefaults"
    max_adapters: int | None = None
    bounds: "AdapterBounds | None" = None
    lost: Callable[[], Awaitable[None]] = _never
    end_all: Callable[[PersonaeError], None] = _ignore
    describe: Callable[[], str] = _nothing
    about: str = ""


def quantization(name: str) -> str:
    """The option of `--quantize`. Raises BadParameter where there is no such format."""
    if name not in QUANTIZATIONS:
        raise BadParameter(f"{name!r} is not one of {', '.join(map(repr, QUANTIZATIONS))}.")
    return name


def parse_size(text: str) -> int:
    """Bytes in a size such as `2GiB`, `512MB`, `1.5g` or `4096`; GiB is 1024^3, GB and g are 1000^3.

    Raises ValueError when it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write one like 2GiB, 512MB or 4096")
    number, unit, binary, _ = match.groups()
    if binary and not unit:
        raise ValueError(f"{text!r} is no size; write one like 2GiB, 512MB or 4096")
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])
