"""`personae bench`: load on one server or several in alternation; `personae bench steps`: parts of a step."""

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from personae.api.bundled import NAMED
from personae.api.commands.command_line import reporting
from personae.errors import RequestError
from personae.evals.options import AdaptersOption, ModelOption, QuantizeOption

if TYPE_CHECKING:
    from rich.console import Console

    from personae.evals.bench.arrivals import Arrivals
    from personae.evals.bench.cells import Cell
    from personae.evals.bench.figures import Goals
    from personae.evals.bench.session import BenchReport, ServerUnderTest

app = typer.Typer(help="Measure servers with OpenAI's API, ours and others.")

_SECONDS = {"min": 0.0}
_LENGTH = "As 128, uniform:64,256, normal:128,32 or lognormal:128,0.5."


@app.callback(invoke_without_command=True)
@reporting
def bench(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(metavar="[NAME=]URL[#MODELS]", help="A running server; else one is started."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL[#MODELS]", help="Another server, measured in alternation. Repeatable."
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="PERSONAE_API_KEY",
            help="Repeatable: with several, tenants take turns. Better given as PERSONAE_API_KEY.",
        ),
    ] = None,
    model: ModelOption = None,
    adapters: AdaptersOption = None,
    quantize: QuantizeOption = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model to ask; else all that are served. Repeatable."),
    ] = None,
    cell: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one of the default loads. Repeatable.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: clients.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop, Poisson: requests/s.")] = None,
    burst: Annotated[
        str | None, typer.Option(metavar="N,SECONDS", help="Open loop: N at once, every so often.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Open loop: JSON Lines of at, prompt_tokens, output_tokens.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How much faster the trace is played.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each load and round.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each load is played.")] = 1,
    prompt: Annotated[str | None, typer.Option(help=f"Tokens of a prompt. {_LENGTH}")] = None,
    output: Annotated[str | None, typer.Option(help=f"Tokens of an answer. {_LENGTH}")] = None,
    prefix: Annotated[int | None, typer.Option(min=0, help="Tokens of a prefix that prompts share.")] = None,
    prefixes: Annotated[
        int | None, typer.Option(min=1, help="How many different prefixes there are.")
    ] = None,
    popularity: Annotated[
        Literal["identical", "uniform", "zipf", "distinct"] | None,
        typer.Option(help="How requests are spread over the models."),
    ] = None,
    zipf: Annotated[float | None, typer.Option(min=0, help="The exponent of --popularity zipf.")] = None,
    schema: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of requests bound by a JSON Schema.")
    ] = None,
    tools: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of requests that must call a tool.")
    ] = None,
    disconnect: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of clients that disconnect early.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    api: Annotated[
        Literal["chat", "completions"] | None,
        typer.Option(help="The route: chat completions or completions."),
    ] = None,
    full: Annotated[
        bool | None, typer.Option("--full/--no-full", help="Answers go on to their full length (ignore_eos).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of all that is random.")] = None,
    slo_first: Annotated[
        float, typer.Option(**_SECONDS, help="A good request: first token within so many seconds.")
    ] = 1.0,
    slo_gap: Annotated[
        float, typer.Option(**_SECONDS, help="A good request: mean gap within so many seconds.")
    ] = 0.2,
    slo_end: Annotated[
        float | None, typer.Option(**_SECONDS, help="A good request: complete within so many seconds.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Where report.html and report.json go; else a folder below runs/.",
        ),
    ] = None,
) -> None:
    """Load a server and report. Without options of a load the default ones are played: see --cell."""
    if context.invoked_subcommand is not None:
        return
    from personae.evals.bench.figures import Goals

    given = {
        "prompt": prompt,
        "output": output,
        "prefix": prefix,
        "prefixes": prefixes,
        "popularity": popularity,
        "zipf": zipf,
        "schema": schema,
        "tools": tools,
        "disconnect": disconnect,
        "temperature": temperature,
        "api": api,
        "full": full,
        "seed": seed,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    cells = _cells(cell or (), _arrivals(concurrency, rate, burst, trace, speed), fields, requests)
    folder = out or Path("runs") / datetime.now().astimezone().strftime("bench-%Y%m%d-%H%M%S")
    with ExitStack() as stack:
        if url is None:
            folder.mkdir(parents=True, exist_ok=True)
            url = f"personae={_serve(stack, model, adapters or (), quantize, folder / 'server.log')}"
        _measure(
            [url, *(compare or ())],
            models or (),
            key or (),
            cells,
            rounds,
            Goals(slo_first, slo_gap, slo_end),
            folder,
        )


@app.command()
@reporting
def steps(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model folder; else the bundled one.")
    ] = None,
    adapters: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of adapters.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    count: Annotated[int, typer.Option("--steps", min=16, help="Steps.")] = 64,
    quantize: QuantizeOption = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also which operators the time goes to.")
    ] = False,
    busy: Annotated[
        bool, typer.Option("--busy", help="CPU time on one thread, the engine alone: for a busy machine.")
    ] = False,
) -> None:
    """Measure the parts of a decode step. Without HTTP; also the host's time between two steps."""
    from personae.evals.bench.steps import report

    report(model, adapters, rows, prompt, count, quantize=quantize, profile=profile, busy=busy)


def _serve(
    stack: ExitStack, model: Path | None, adapters: Sequence[Path], quantize: str | None, log: Path
) -> str:
    from personae.evals.served import Served, exit_on_sigterm

    arguments = [str(model or NAMED)]
    for folder in adapters:
        arguments += ["--adapters", str(folder)]
    if quantize:
        arguments += ["--quantize", quantize]
    stack.enter_context(exit_on_sigterm())
    return stack.enter_context(Served(arguments, log)).url


def _arrivals(
    concurrency: int | None, rate: float | None, burst: str | None, trace: Path | None, speed: float
) -> "Arrivals | None":
    from personae.evals.bench.arrivals import Bursts, Closed, Poisson, Trace

    if sum(way is not None for way in (concurrency, rate, burst, trace)) > 1:
        raise RequestError("Take one of --concurrency, --rate, --burst and --trace.", param="rate")
    if concurrency is not None:
        return Closed(concurrency)
    if rate is not None:
        return Poisson(rate)
    if trace is not None:
        return Trace(str(trace), speed)
    if burst is not None:
        size, _, every = burst.partition(",")
        try:
            return Bursts(int(size), float(every))
        except ValueError:
            raise RequestError("`--burst` takes N,SECONDS, such as 16,4.", param="burst") from None
    return None


def _cells(
    names: Sequence[str], arrivals: "Arrivals | None", fields: dict[str, Any], requests: int | None
) -> "list[Cell]":
    """The default loads, some of them, or one of the user's own."""
    from msgspec.structs import replace

    from personae.evals.bench.arrivals import Closed
    from personae.evals.bench.cells import CELLS, Cell
    from personae.evals.bench.workload import Workload, length

    for name in ("prompt", "output"):
        if name in fields:
            length(fields[name])
    if names or (arrivals is None and not fields):
        known = {cell.name: cell for cell in CELLS}
        if missing := [name for name in names if name not in known]:
            raise RequestError(
                f"There is no load {missing[0]!r}; there are {', '.join(known)}.", param="cell"
            )
        if arrivals is not None or fields:
            raise RequestError("`--cell` names a whole load; leave the other options out.", param="cell")
        cells = [known[name] for name in names or known]
        return [replace(cell, requests=requests) if requests else cell for cell in cells]
    about = " ".join(f"{name}={value}" for name, value in fields.items())
    return [
        Cell(
            name="custom",
            about=about or "as asked for",
            workload=Workload(**fields),
            arrivals=arrivals or Closed(8),
            requests=requests or 64,
        )
    ]


def _measure(
    urls: Sequence[str],
    models: Sequence[str],
    keys: Sequence[str],
    cells: "list[Cell]",
    rounds: int,
    goals: "Goals",
    folder: Path,
) -> None:
    import asyncio

    from rich.console import Console

    from personae.evals.bench.page import page
    from personae.evals.bench.session import write_json
    from personae.evals.bench.tables import tables

    report = asyncio.run(_play(urls, models, keys, cells, rounds, goals, Console(stderr=True)))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(report, folder / "report.json")
    (folder / "report.html").write_text(page(report), encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console.width = 180
    for table in tables(report):
        console.print(table)
    console.print(f"{folder / 'report.html'}\n{folder / 'report.json'}", highlight=False, soft_wrap=True)


async def _play(
    urls: Sequence[str],
    models: Sequence[str],
    keys: Sequence[str],
    cells: "list[Cell]",
    rounds: int,
    goals: "Goals",
    console: "Console",
) -> "BenchReport":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from personae.evals.bench.client import Answer
    from personae.evals.bench.session import compare, subject

    servers: list[ServerUnderTest] = []
    for place, text in enumerate(urls):
        name, found, url = text.partition("=")
        if not found or "/" in name:
            name, url = text.partition("#")[0], text
        servers.append(await subject(url, models, keys if place == 0 else (), name))
    if len({len(one.models) == 1 for one in servers}) > 1:
        # One serves several models and another does not: only what both can be asked is compared.
        alike = [cell for cell in cells if cell.workload.popularity == "identical"]
        for cell in cells:
            if cell not in alike:
                console.print(f"{cell.name}: left out, not every server has several models", highlight=False)
        cells = alike
    columns = (TextColumn("load"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("load", total=rounds * len(servers) * sum(cell.requests for cell in cells))

        def on_answer(answer: Answer) -> None:
            progress.advance(task)

        return await compare(servers, cells, rounds, goals, on_answer)
