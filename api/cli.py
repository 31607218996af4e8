"""The command line: `personae serve`, `chat`, `tenants`, `keys` and `adapters`, and the evals' `eval`
and `bench`.

What is heavy (torch, the server) is imported inside the commands, so that `personae --help` is quick.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from personae import __version__
from personae.api.adapters.cli import KeyOption
from personae.api.adapters.cli import app as adapters_app
from personae.api.bundled import is_model, no_model
from personae.api.commands.simulate import app as simulate_app
from personae.api.options import (
    QUANTIZE_METAVAR,
    AccessOptions,
    DeviceChoice,
    DtypeChoice,
    KvDtypeChoice,
    ServeOptions,
    UnknownFields,
    quantization,
)
from personae.api.telemetry.logs import LogFormat
from personae.api.tenants.cli import keys_app, size_option, tenants_app
from personae.api.wire.compat_names import option_here
from personae.errors import EngineLost, LoadError

app = typer.Typer(
    help="Serves many LoRA adapters of one base model from one engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options where there are 80 columns
)

app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(adapters_app, name="adapters")
app.add_typer(simulate_app, name="simulate")

# Commands of what stands beside this floor, by name: imports go down only.
for _name, _module in (("eval", "personae.evals.cli"), ("bench", "personae.evals.bench.cli")):
    app.add_typer(import_module(_module).app, name=_name)

_START_UP_ERROR = 2
_ENGINE_LOST = 3
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~/-]*)?")


def main() -> None:
    """The entry point of the `personae` command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"personae {__version__}")
        raise typer.Exit


@app.callback()
def _personae(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before any command."""


class _Serve(TyperCommand):
    """`serve`, which knows what other servers call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line. Ends with exit code 2 at an option of another server."""
        for arg in args:
            if (here := option_here(arg)) is not None:
                ctx.fail(f"No such option: {arg.partition('=')[0]}. {here}")
        return super().parse_args(ctx, args)


def _site(origins: list[str] | None) -> list[str] | None:
    """Origins as browsers send them, checked."""
    for origin in origins or ():
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise typer.BadParameter(f"'{origin}' is no site; write it as https://app.example, with no path.")
    return origins


def _prefix(path: str) -> str:
    """A path prefix without the slash at its end, checked."""
    if _PREFIX.fullmatch(path) is None or "//" in path:
        raise typer.BadParameter(f"'{path}' is not a path prefix; write it as /llm.")
    return path.rstrip("/")


def _model(path: Path | None) -> Path | None:
    if path is None or is_model(path):
        return path
    raise typer.BadParameter(no_model(path))


@app.command(cls=_Serve)
def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face model folder, a GGUF file, or `demo` for the small synthetic model; "
            "without it SmolLM2-135M-Instruct.",
            callback=_model,
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Each sub-folder is an adapter, served under its name. Can be repeated.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    device: Annotated[DeviceChoice, typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="The precision of weights and cache.")] = "auto",
    quantize: Annotated[
        str | None,
        typer.Option(
            parser=quantization,
            metavar=QUANTIZE_METAVAR,
            help="On a CPU, keep the base's weights in 8 or 4.5 bits, so that a token reads fewer bytes.",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        KvDtypeChoice,
        typer.Option(help="fp8 keeps keys and values in half the memory (GPUs from Ada and Hopper on)."),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a sequence, prompt and answer; else as many as the model and the memory allow.",
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens computed in one step.", show_default="512 on a CPU, 4096 on a GPU"),
    ] = None,
    max_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences computed in one step.", show_default="64 on a CPU, 256 on a GPU"),
    ] = None,
    kv_memory: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Memory for the KV cache, such as 2GiB; half of it may be lent to adapters.",
            show_default="on a CPU 2GiB, or half of a small memory; most of what is free on a GPU",
        ),
    ] = None,
    adapter_memory: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Memory for adapters on the device; else what those of --adapters need, and some to spare.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The base's name in requests. Can be repeated for further names."),
    ] = None,
    default_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Answers requests without a `model`; else the base does."),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers have to finish when the server stops.")
    ] = 30.0,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that any request may take, waiting included.")
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Logs on stderr as text, or as one JSON object a line.")
    ] = "text",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send traces to an OpenTelemetry collector, such as http://localhost:4318/v1/traces.",
        ),
    ] = None,
    hang_timeout: Annotated[
        float, typer.Option(min=2, help="Seconds in one step after which the engine is restarted.")
    ] = 60.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of the engine within a minute before the server gives up.")
    ] = 5,
    one_process: Annotated[
        bool, typer.Option("--one-process", help="Run the engine in the server's own process, for debugging.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Seed of requests that give none; else each draws its own.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where tenants, keys and uploads are kept; else they are lost at the end."
        ),
    ] = None,
    adapter_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Admins may load adapters from below this folder. Can be repeated.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="PERSONAE_SERVER_KEY",
            help="An admin's key, beside those in --data-dir. Safer in the environment.",
        ),
    ] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Serve without keys on any address.")
    ] = False,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="A site whose pages may send requests (https://app.example); * is any. Can be repeated.",
            callback=_site,
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the model writes tool calls; else detected from its chat template."
        ),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the model writes reasoning; else detected from its chat template."
        ),
    ] = None,
    batch_concurrency: Annotated[
        int, typer.Option(min=1, help="Sequences of batches computed at the same time, at most.")
    ] = 64,
    background_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a step for batches while other requests run; else chosen by the engine."
        ),
    ] = None,
    cuda_graphs: Annotated[
        bool,
        typer.Option(
            "--cuda-graphs/--no-cuda-graphs",
            help="On a GPU, launch a decode step as one graph, not kernel by kernel.",
        ),
    ] = True,
    jump_forward: Annotated[
        bool | None,
        typer.Option(
            "--jump-forward/--no-jump-forward",
            help="Append text that a grammar forces without asking the model; requests can override this.",
            show_default="on, except where decode steps are graphs",
        ),
    ] = None,
    disable_any_whitespace: Annotated[
        bool,
        typer.Option(
            "--disable-any-whitespace",
            help="Write bound JSON without blanks between its tokens; a request may say otherwise.",
        ),
    ] = False,
    unknown_fields: Annotated[
        UnknownFields,
        typer.Option(help="What to do about fields of a request that are not known."),
    ] = "refuse",
    root_path: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="The prefix under which a proxy serves the API, such as /llm.",
            callback=_prefix,
        ),
    ] = "",
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Run chat templates that requests bring; only where every client is trusted.",
        ),
    ] = False,
    default_strict: Annotated[
        bool,
        typer.Option(
            "--default-strict",
            help="Treat a schema or function without `strict` as strict: enforce all of it or refuse it.",
        ),
    ] = False,
) -> None:
    """Serve a model and its adapters over HTTP (OpenAI's API)."""
    options = ServeOptions(
        model=model,
        adapters=tuple(adapters or ()),
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
        kv_memory=kv_memory,
        adapter_memory=adapter_memory,
        served_model_name=tuple(served_model_name or ()) or None,
        default_model=default_model,
        seed=seed,
        one_process=one_process,
        max_restarts=max_restarts,
        hang_timeout=hang_timeout,
        drain_timeout=drain_timeout,
        request_timeout=request_timeout,
        log_format=log_format,
        otlp_traces_endpoint=otlp_traces_endpoint,
        tool_format=tool_format,
        reasoning_format=reasoning_format,
        batch_concurrency=batch_concurrency,
        background_tokens=background_tokens,
        cuda_graphs=cuda_graphs,
        quantize=quantize,
        jump_forward=jump_forward,
        disable_any_whitespace=disable_any_whitespace,
        unknown_fields=unknown_fields,
        root_path=root_path,
        trust_request_chat_template=trust_request_chat_template,
        default_strict=default_strict,
    )
    access = AccessOptions(
        data_dir, tuple(adapter_root or ()), insecure_no_auth, api_key, tuple(allowed_origin or ())
    )
    from personae.api.commands.serve import run

    try:
        run(options, host, port, access)
    except LoadError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(_START_UP_ERROR) from None
    except EngineLost as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(_ENGINE_LOST) from None


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server runs.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model or adapter to talk to; else the server's first.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    key: KeyOption = None,
) -> None:
    """Talk to a running server. Ctrl-C stops an answer; /model, /system, /reset and /exit are commands."""
    from personae.api.commands.terminal import Conversation, talk

    if not talk(Conversation(url, model, system, key=key)):
        raise typer.Exit(1)
