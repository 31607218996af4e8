"""The command line: `personae serve`, `run`, `chat`, `launch`, `pull`, `list`, `show`, `rm`, `ps`, `models`,
`quantize`, `check-template`, `tenants`, `keys`, `adapters`, `database`, `eval`, `bench` and `simulate`.

Heavy packages (torch, the server) are imported inside the commands, so that `personae --help` is quick.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from personae import __version__
from personae.actors.spawn import ahead, end_ahead
from personae.api.adapters.cli import app as adapters_app
from personae.api.bundled import check_model
from personae.api.commands.command_line import (
    FAILED,
    ConfigOption,
    KeyOption,
    OptionsCommand,
    errors_in_one_line,
    expand_options,
)
from personae.api.commands.group import CommandGroup
from personae.api.database.cli import database_app
from personae.api.http.address import bind
from personae.api.options import ONE_REPLICA, ServeOptions
from personae.api.tenants.cli import keys_app, tenants_app, usage_app
from personae.errors import LoadError

app = typer.Typer(
    cls=CommandGroup,
    help="Serves many LoRA adapters of one base model from one engine.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut off the names of options in 80 columns
)

app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(usage_app)
app.add_typer(database_app, name="database")
app.add_typer(adapters_app, name="adapters")
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what the model would take, from its files' headers, and exit: with 1 if that does not fit "
        "into the memory that is free.",
    ),
]


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
    """Options that come before any command."""


@app.command(cls=OptionsCommand)
@expand_options
def serve(options: ServeOptions, config: ConfigOption = None, dry_run: DryRunOption = False) -> None:
    """Serve a model and its adapters over HTTP (OpenAI's API)."""
    if dry_run:
        _dry_run(options)
        return
    if options.node_rank:
        _serve_stage(options)
        return
    drawn = options.log_format == "text" and sys.stderr.isatty()
    one_here = not options.one_process and options.ray is None
    one_here = one_here and options.replicas == ONE_REPLICA
    if not one_here:
        end_ahead()
    with errors_in_one_line():
        bind(options.host, options.port).close()  # before anything large is imported
        from personae.api.commands.startup import StartUp

        with ahead() if one_here else nullcontext(), StartUp(drawn) as start_up:
            start_up.begin("libraries")
            from personae.api.commands.serve import run

            run(options, start_up)


def _serve_stage(options: ServeOptions) -> None:
    end_ahead()
    from personae.api.commands.serve_stage import run

    with errors_in_one_line():
        run(options)


def _dry_run(options: ServeOptions) -> None:
    from personae.api.commands.dry_run import run

    with errors_in_one_line():
        fits = run(options)
    if not fits:
        raise typer.Exit(FAILED)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model or an adapter on the Hub: org/name.")],
) -> None:
    """Download a model or an adapter from the Hugging Face Hub."""
    from personae.api.commands.cached_models import pull

    with errors_in_one_line():
        pull(name)


@app.command("list")
def list_cached(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the models and adapters that were downloaded."""
    from personae.api.commands.cached_models import show_cached

    with errors_in_one_line():
        show_cached(json=json)


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What `personae list` shows.")],
) -> None:
    """Remove a downloaded model or adapter."""
    from personae.api.commands.cached_models import remove

    with errors_in_one_line():
        remove(name)


@app.command()
def show(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="As for `personae serve`; else the default model.")
    ] = None,
) -> None:
    """Show what a model is, and what it would take, from its files' headers."""
    from personae.api.commands.dry_run import run

    with errors_in_one_line():
        try:
            options = ServeOptions(model if model is None else check_model(model))
        except ValueError as error:
            raise LoadError(f"{error}") from None
        run(options)


@app.command()
def ps(
    url: Annotated[str, typer.Option(help="Where the server runs.")] = "http://127.0.0.1:8000",
    key: KeyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List what a running server serves, and whether its engines run."""
    from personae.api.commands.served_models import run

    with errors_in_one_line():
        run(url, key, json=json)


@app.command("run", context_settings={"ignore_unknown_options": True})
def run_model(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As for `personae serve`; else the default model.")
    ] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[OPTIONS]", help="Options of `personae serve`.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
) -> None:
    """Talk to a model: serve it, as long as the conversation goes on."""
    from personae.api.commands.run import run

    raise typer.Exit(run(model, options or (), system))


@contextmanager
def _option(name: str) -> Iterator[None]:
    """A ValueError inside the block is about that option, and ends the command."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from None


@app.command()
def plan(
    model: Annotated[Path, typer.Option(metavar="MODEL", help="As for `personae serve`.")],
    devices: Annotated[str, typer.Option(metavar="NxKIND", help="What there is: 8xH100, 2xL4, 4xCPU.")],
    context: Annotated[int, typer.Option(min=2, help="Tokens of the longest sequence.")],
    rate: Annotated[float, typer.Option(help="Requests per second.")],
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt, on average; else half of --context, up to 1024."),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of an answer, on average; else a quarter of --context, up to 256."),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="Keep the weights in fewer bits: int8, int4 or fp8.")
    ] = None,
) -> None:
    """Plan replicas and ranks for a model on given devices, by arithmetic, without loading it.

    It ends with 1 if the devices cannot answer so many requests."""
    from personae.actors.options import parse_quantization
    from personae.api.commands.plan import checked_load, run

    with _option("--model"):
        model = check_model(model)
    with _option("--quantize"):
        known = None if quantize is None else parse_quantization(quantize)
    with errors_in_one_line():
        enough = run(model, devices, checked_load(rate, prompt, answer, context), quantize=known)
    if not enough:
        raise typer.Exit(FAILED)


@app.command("models")
def models(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the families of models that can be served, and the formats of their weights.

    GET /v1/models shows what a running server serves."""
    from personae.api.commands.models import run

    run(json=json)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder with plain weights.")],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the quantized model goes.")],
    texts: Annotated[
        list[Path],
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text like that which the model will see, or .jsonl with text or messages. Repeatable.",
        ),
    ],
    windows: Annotated[int, typer.Option(min=1, help="The most windows of text.")] = 128,
    width: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 512,
) -> None:
    """Quantize a model to four bits a weight, calibrated with texts (GPTQ). Needs llm-compressor."""
    from personae.api.commands.quantize import run

    with errors_in_one_line():
        run(model, out, texts, windows=windows, width=width)


@app.command("check-template")
def check_template(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE|MODEL", help="A file with a chat template, or a model; else the default one."
        ),
    ] = None,
) -> None:
    """Show what a chat template can show, and how conversations are rewritten to it."""
    from personae.api.commands.check_template import run

    with errors_in_one_line():
        run(source)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server runs.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model or adapter to talk to; else the server's first.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    key: KeyOption = None,
) -> None:
    """Talk to a running server. /help shows the commands: /adapter, /schema, /system, /tokens and others."""
    from personae.api.commands.conversation import Conversation
    from personae.api.commands.terminal import talk

    if not talk(Conversation(url, model, system, key=key)):
        raise typer.Exit(FAILED)


@app.command()
def launch(
    agent: Annotated[str, typer.Argument(help="claude or codex.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="What the agent gets.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where the server runs.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model or adapter that answers; else the server's first.")
    ] = None,
    key: KeyOption = None,
) -> None:
    """Start Claude Code or Codex on a running server: personae launch claude -- --continue."""
    from personae.api.commands.agents import prepared, start

    with errors_in_one_line():
        found = prepared(agent, arguments or (), url=url, model=model, key=key)
    start(found)
