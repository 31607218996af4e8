"""The command line: `personae serve` and `personae chat`.

What is heavy (torch, the server) is imported inside the commands, so that `personae --help` is quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from personae.api.options import DeviceChoice, DtypeChoice, ServeOptions, parse_size
from personae.errors import LoadError

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="Serves many LoRA adapters of one base model from one engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_START_UP_ERROR = 2


def main() -> None:
    """The entry point of the `personae` command."""
    app()


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="A Hugging Face model folder; without it, the bundled demo model.")
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Each sub-folder is an adapter, served under its name. Can be repeated."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    device: Annotated[DeviceChoice, typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="The precision of weights and cache.")] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sequence, prompt and answer; at most the model's own."),
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens computed in one step.")] = None,
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences computed in one step.")] = None,
    kv_memory: Annotated[
        int | None, typer.Option(parser=_size, metavar="SIZE", help="Memory for the KV cache, such as 2GiB.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The base's name in requests.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of requests that give none.")] = None,
) -> None:
    """Serve a model and its adapters over HTTP, as the OpenAI API has it."""
    options = ServeOptions(
        model=model,
        adapters=tuple(adapters or ()),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_seqs=max_seqs,
        kv_memory=kv_memory,
        served_model_name=served_model_name,
        seed=seed,
    )
    from personae.api.serve import run

    try:
        run(options, host, port)
    except LoadError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(_START_UP_ERROR) from None


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server runs.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Which model or adapter to talk to; else the first.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
) -> None:
    """Talk to a running server. Ctrl-C stops an answer; /model, /system, /reset and /exit are commands."""
    from personae.api.terminal import Conversation, talk

    talk(Conversation(url, model, system))
