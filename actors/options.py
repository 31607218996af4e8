"""The options of the engine. Each is written once: its type, default, bounds and help.

The command line, the configuration file, `personae.open` and docs/operate/options.md are made from these
classes and those of `api/options.py`. A class is a group of options; the first line of its docstring is the
group's title.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from personae.engine.machine_sockets import TlsIdentity
from personae.engine.object_stores import LMCACHE, MEMORY, MOONCAKE, SCHEMES, check_store_url
from personae.engine.parallel.far_stages import FarStages
from personae.engine.quantization import QUANTIZATIONS
from personae.engine.scheduling.page_names import tenant_salt

PrefillReplicas = int | Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

OWN_MTP = Path("mtp")
"""The value of `--draft-model` for the MTP layer in the served model's own files."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """An option's description, in the `Annotated` of its field. The option's name is the field's, with
    hyphens.

    `min` and `max` bound a number. `unset` describes what None means, `metavar` is the value's name in the
    help. `parse` makes a value from text, `check` returns the value to use; both raise ValueError. A `folder`
    must exist. `env` names an environment variable that sets the default. `flag` is how the command line
    spells it, if not by its name.
    """

    help: str
    min: float | None = None
    max: float | None = None
    unset: str | None = None
    metavar: str | None = None
    parse: Callable[[str], object] | None = None
    check: Callable[[Any], object] | None = None
    folder: bool = False
    env: str | None = None
    flag: str | None = None


def check_folder(path: Path | None) -> Path | None:
    """A folder that is there, or will be made when something is written. Raises ValueError."""
    if path is not None and path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is no folder")
    return path


def parse_prefill_replicas(given: int | str) -> PrefillReplicas:
    """The value of `--prefill-replicas`. Raises ValueError."""
    text = str(given)
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a number of engines of 0 or more, or auto")
    return int(text)


def parse_size(text: str) -> int:
    """Parse a size such as `2GiB`, `512MB`, `1.5g` or `4096` into bytes. GiB is 1024^3; GB and g are 1000^3.

    Raises ValueError for any other text.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; use a form like 2GiB, 512MB or 4096")
    number, unit, binary, _ = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def check_kv_remote(url: str) -> str:
    """The URL of `--kv-remote`. Raises ValueError."""
    if url.startswith((LMCACHE, MOONCAKE)):
        return _check_page_store(url)
    url = check_store_url(url, (*SCHEMES, MEMORY))
    _needs(url, "obstore")
    return url


def _check_page_store(url: str) -> str:
    """The URL of an LMCache server or of a Mooncake master. Raises ValueError."""
    scheme = LMCACHE if url.startswith(LMCACHE) else MOONCAKE
    if "@" in url:
        raise ValueError(f"a URL that begins with {scheme} has no credentials.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        options = parse_qs(parts.query, strict_parsing=bool(parts.query))
        metrics = int(options.pop("metrics_port", ["1"])[0])
    except ValueError:
        raise ValueError(f"{url!r} has no host and port; write it as {scheme}127.0.0.1:5555.") from None
    if host is None or port is None or parts.path.strip("/"):
        raise ValueError(f"{url!r} has no host and port alone; write it as {scheme}127.0.0.1:5555.")
    if scheme == MOONCAKE:
        if options or not 0 < metrics < 2**16:
            raise ValueError(f"{url!r} may have ?metrics_port=PORT, the HTTP port of Mooncake's master.")
        _needs(url, "mooncake", "mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine with CUDA 12")
        return url
    if parts.query or not _is_here(host):
        raise ValueError(f"{url!r} is not on this machine: LMCache's server shares its memory with us.")
    _needs(url, "zmq", "pyzmq")
    return url.rstrip("/")


def _is_here(host: str) -> bool:
    """Whether it is a loopback address, or localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _needs(url: str, module: str, package: str = "") -> None:
    """Raises ValueError if a module is not installed."""
    if find_spec(module) is None:
        raise ValueError(f"{url!r} needs {module} (pip install {package or module}).")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of HOST:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{address!r} is not HOST:PORT.")
    return host.strip("[]"), int(port)


def check_address(address: str) -> str:
    """The value of `--dist-init-addr`. Raises ValueError."""
    host_and_port(address)
    return address


def parse_quantization(name: str) -> str:
    """Return the name of a weight format. Raises ValueError for an unknown one."""
    if name not in QUANTIZATIONS:
        raise ValueError(f"{name!r} is not one of {', '.join(map(repr, QUANTIZATIONS))}.")
    return name


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    served_model_name: Annotated[
        str | tuple[str, ...] | None,
        OptionInfo("The base's name in requests. Repeat the option for more names.", metavar="NAME"),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], OptionInfo("Where the model runs.")] = "auto"
    dtype: Annotated[Dtype, OptionInfo("The precision of weights and KV cache.")] = "auto"
    tensor_parallel_size: Annotated[
        int,
        OptionInfo(
            "Share the model between this many processes of the machine: each has a part of every layer. On "
            "GPUs each process has a GPU.",
            min=1,
            max=64,
            metavar="RANKS",
        ),
    ] = 1
    enable_dp_attention: Annotated[
        bool,
        OptionInfo(
            "Give each of those processes sequences of its own: it has all of each layer's attention, and "
            "the keys and values of its own sequences. They share the MLPs and experts (data-parallel "
            "attention).",
        ),
    ] = False
    attention_ranks: Annotated[
        int | None,
        OptionInfo(
            "With --enable-dp-attention: so many of those processes have attention and sequences. The others "
            "have the MLPs and experts, and nothing else (attention/FFN disaggregation).",
            min=1,
            max=63,
            unset="all have both",
            metavar="RANKS",
        ),
    ] = None
    enable_two_batch_overlap: Annotated[
        bool,
        OptionInfo(
            "With --tensor-parallel-size: compute a step of 64 tokens or more as two halves. While a rank "
            "waits for the other ranks' part of one half, it computes the other half.",
        ),
    ] = False
    expert_parallel_size: Annotated[
        int,
        OptionInfo(
            "Divide the experts of a mixture of experts among this many groups of those processes: each "
            "group has whole experts. It must divide --tensor-parallel-size, or the ranks "
            "without attention. 1 cuts every expert.",
            min=1,
            max=64,
            metavar="GROUPS",
        ),
    ] = 1
    enable_eplb: Annotated[
        bool,
        OptionInfo(
            "Move experts between those groups while the server runs, so that all groups compute as much "
            "(expert parallelism load balancing). It needs --expert-parallel-size.",
        ),
    ] = False
    num_redundant_experts: Annotated[
        int | None,
        OptionInfo(
            "With --enable-eplb: room in each layer for this many copies of popular experts, in all groups "
            "together.",
            min=0,
            max=4096,
            unset="one for each group",
            metavar="EXPERTS",
        ),
    ] = None
    pipeline_parallel_size: Annotated[
        int,
        OptionInfo(
            "Divide the layers among this many stages: each is a process, or with --tensor-parallel-size as "
            "many. On GPUs each process has a GPU.",
            min=1,
            max=64,
            metavar="STAGES",
        ),
    ] = 1
    nnodes: Annotated[
        int,
        OptionInfo(
            "Machines that share the model, one stage on each, without Ray: --pipeline-parallel-size must be "
            "the same number. Each runs the same command with its own --node-rank.",
            min=1,
            max=64,
            metavar="MACHINES",
        ),
    ] = 1
    node_rank: Annotated[
        int,
        OptionInfo(
            "With --nnodes: this machine's number. Machine 0 serves. The others take only the options that "
            "name ranks and machines, and ignore the rest.",
            min=0,
            max=63,
            metavar="NUMBER",
        ),
    ] = 0
    dist_init_addr: Annotated[
        str | None,
        OptionInfo(
            "With --nnodes: where the first machine listens for the others while it starts.",
            check=check_address,
            metavar="HOST:PORT",
        ),
    ] = None
    dist_identity: Annotated[
        Path | None,
        OptionInfo(
            "With --nnodes: a file with the key and the certificate of all machines. The first one makes it; "
            "copy it to the others. Who has it can take part.",
            metavar="FILE",
        ),
    ] = None
    dist_backend: Annotated[
        Literal["auto", "shared-memory", "gloo", "nccl"],
        OptionInfo(
            "How those processes exchange data while they compute. auto: by shared memory on a CPU, by NCCL "
            "on GPUs. gloo is for tests, and slower.",
        ),
    ] = "auto"
    quantize: Annotated[
        str | None,
        OptionInfo(
            "Keep the base's weights in fewer bits, so that a token reads fewer bytes: int8, int4 "
            "(4.5 bits), or fp8 (on a GPU from Ada and Hopper on).",
            parse=parse_quantization,
            metavar=f"[{'|'.join(QUANTIZATIONS)}]",
        ),
    ] = None
    packed_weights_size: Annotated[
        int | None,
        OptionInfo(
            "The most that packed weights may take in ~/.cache/personae/weights. On a CPU the next start "
            "maps them instead of packing them again, and replicas share them. 0 keeps none.",
            min=0,
            parse=parse_size,
            unset="20GiB",
            metavar="SIZE",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        OptionInfo(
            "Keep keys and values in half the memory: int8 on a CPU, fp8 on a GPU from Ada and Hopper on."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        OptionInfo(
            "Tokens of a sequence, prompt and answer together.",
            min=1,
            unset="as many as the model and the memory allow",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool, OptionInfo("On a GPU, launch a decode step as one graph instead of kernel by kernel.")
    ] = True
    lora_side_stream: Annotated[
        bool,
        OptionInfo(
            "On a GPU, begin the adapters' part of a step in parallel with the base's product, within CUDA "
            "graphs. Whether it is faster has not been measured."
        ),
    ] = False
    speculate: Annotated[
        Literal["off", "ngram", "draft", "auto"] | None,
        OptionInfo(
            "Guess tokens and verify several in a step. ngram guesses from the prompt, the answer so far and "
            "`prediction`, draft with --draft-model; both try every guess. auto uses all of these, as far as "
            "they pay by measurement. Answers stay the same.",
            unset="auto on a CPU and with --draft-model, else off",
        ),
    ] = None
    draft_model: Annotated[
        Path | None,
        OptionInfo(
            "A smaller model with the same tokenizer, or an EAGLE-3 head of the served model, that guesses "
            "tokens, with --speculate draft or auto: a folder, a GGUF file, or a name on the Hub. `mtp` "
            "means the MTP layer in the served model's own files.",
            metavar="MODEL",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchingOptions:
    """Batching and memory."""

    max_seqs: Annotated[
        int | None, OptionInfo("Sequences computed in one step.", min=1, unset="64 on a CPU, 256 on a GPU")
    ] = None
    max_batch_tokens: Annotated[
        int | None, OptionInfo("Tokens computed in one step.", min=1, unset="512 on a CPU, 4096 on a GPU")
    ] = None
    background_tokens: Annotated[
        int | None,
        OptionInfo(
            "Tokens of a step for batch jobs while other requests run.", min=1, unset="chosen by the engine"
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        OptionInfo(
            "Memory for the KV cache, such as 2GiB. Adapters may borrow half of it.",
            min=0,
            parse=parse_size,
            metavar="SIZE",
            unset="on a CPU 2GiB, or half of a small memory; on a GPU see --gpu-memory-utilization",
        ),
    ] = None
    kv_host_bytes: Annotated[
        int | None,
        OptionInfo(
            "With a GPU: host memory where pages of the KV cache are kept when the GPU has no room for them, "
            "such as 20GiB. Each engine of --replicas takes so much.",
            min=1,
            parse=parse_size,
            metavar="SIZE",
        ),
    ] = None
    kv_disk: Annotated[
        Path | None,
        OptionInfo(
            "A folder where pages of the KV cache are kept when memory has no room for them. So prefixes are "
            "found again after a restart.",
            metavar="DIR",
            check=check_folder,
        ),
    ] = None
    kv_disk_bytes: Annotated[
        int | None,
        OptionInfo(
            "The most that this folder may hold.", min=1, parse=parse_size, metavar="SIZE", unset="20GiB"
        ),
    ] = None
    kv_remote: Annotated[
        str | None,
        OptionInfo(
            "A store where pages of the KV cache are kept, too: s3://bucket/prefix or file:///folder (needs "
            "obstore: pip install obstore), lmcache://127.0.0.1:5555 or mooncake://HOST:50051. Servers that "
            "share it find the prefixes of one another.",
            metavar="URL",
            check=check_kv_remote,
        ),
    ] = None
    kv_remote_bytes: Annotated[
        int | None,
        OptionInfo(
            "The most that pages of one model may take there.",
            min=1,
            parse=parse_size,
            metavar="SIZE",
            unset="20GiB",
        ),
    ] = None
    kv_transfer: Annotated[
        bool,
        OptionInfo(
            "With --replicas: engines fetch pages of the KV cache from one another where that is sooner than "
            "computing them; with --ray over TCP with TLS."
        ),
    ] = False
    kv_transfer_backend: Annotated[
        Literal["sockets", "nixl"],
        OptionInfo(
            "What carries these pages. NIXL reads them from the other engine's memory, without TLS: for a "
            "private network with RDMA. Needs nixl (pip install nixl)."
        ),
    ] = "sockets"
    gpu_memory_utilization: Annotated[
        float,
        OptionInfo(
            "The share of a GPU's memory that weights, adapters, steps and the KV cache together may take. "
            "Without --kv-memory the cache gets what the others leave of it.",
            min=0.1,
            max=1,
            metavar="SHARE",
        ),
    ] = 0.9
    adapter_memory: Annotated[
        int | None,
        OptionInfo(
            "Memory for adapters on the device.",
            min=0,
            parse=parse_size,
            metavar="SIZE",
            unset="what the adapters of --adapters need, and some to spare",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Engines on other machines."""

    ray: Annotated[
        str | None,
        OptionInfo(
            "Start the engines of --replicas on the nodes of a Ray cluster: its address, `auto`, or `local` "
            "for one on this machine. Needs Ray (pip install ray).",
            metavar="ADDRESS",
        ),
    ] = None
    gpus_per_replica: Annotated[
        float | None,
        OptionInfo(
            "With --ray: GPUs of a node that an engine takes.",
            min=0,
            metavar="GPUS",
            unset="1 for each rank with --device cuda, else 0",
        ),
    ] = None
    cpus_per_replica: Annotated[
        float | None,
        OptionInfo(
            "With --ray: processor cores that an engine takes. Its stages have equal parts of them, and each "
            "is on one node.",
            min=0.1,
            unset="one for each of its ranks",
            metavar="CORES",
        ),
    ] = None
    cluster_host: Annotated[
        str | None,
        OptionInfo(
            "With --ray: this machine's address that engines on other nodes call.",
            unset="the one that Ray knows it by",
            metavar="ADDRESS",
        ),
    ] = None
    cluster_port: Annotated[
        int,
        OptionInfo(
            "With --ray: the port that engines call, for firewalls; 0 takes any free port.", min=0, max=65535
        ),
    ] = 0
    adapter_cache: Annotated[
        Path | None,
        OptionInfo(
            "With --ray: the folder in which each node keeps the adapters that it got from this server.",
            unset="~/.cache/personae/adapters",
        ),
    ] = None
    adapter_cache_size: Annotated[
        int | None,
        OptionInfo(
            "How much that folder may hold; with --object-store also the adapters in --data-dir.",
            min=0,
            parse=parse_size,
            unset="20GiB",
            metavar="SIZE",
        ),
    ] = None


@dataclass(frozen=True)
class EngineOptions(ModelOptions, BatchingOptions):
    """The options of one engine, as plain data that is sent to the engine core's process.

    `model` is a Hugging Face model folder or a GGUF file. Each sub-folder of each folder in `adapters` is an
    adapter, named after its folder; `named_adapters` are pairs of a name and an adapter's folder. Adapters
    that are added later lie in `adapter_store`, by digest. The tenants' prefix-cache salts are derived from
    `secret`. `share` engines use this machine's memory. With `record_kv_events` the engine reports what
    enters and leaves its prefix cache. Other engines ask for its pages at `page_socket`, or on other machines
    with `page_identity` at a port that it chooses. `far_stages`: all stages but the first are on other
    machines. `page_file`: a file in memory for the KV cache, which outlives the engine core. None in any
    option means that the engine chooses.
    """

    model: Path
    adapters: tuple[Path, ...] = ()
    adapter_store: Path | None = None
    secret: bytes | None = None
    share: int = 1
    record_kv_events: bool = False
    named_adapters: tuple[tuple[str, Path], ...] = ()
    page_socket: Path | None = None
    page_identity: TlsIdentity | None = field(default=None, repr=False)
    far_stages: FarStages | None = field(default=None, repr=False)
    page_file: Path | None = None

    @property
    def gives_pages(self) -> bool:
        """Whether it gives pages to other engines, and fetches theirs."""
        return self.page_socket is not None or self.page_identity is not None

    def base_names(self, own: str) -> tuple[str, ...]:
        """The names of the base, each once. If none is configured: its `own` name."""
        given = self.served_model_name
        names = (given,) if isinstance(given, str) else given or ()
        return tuple(dict.fromkeys(names)) or (own,)

    def salts(self) -> Callable[[str], bytes]:
        """Return a function from a tenant to its prefix-cache salt. Salts derive from `secret`, or from a new
        random one."""
        return partial(tenant_salt, self.secret or secrets.token_bytes(32))
