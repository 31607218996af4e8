"""`personae eval`: run suites against a server or an engine of our own, and report."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from personae.api.commands.command_line import KeyOption, reporting
from personae.errors import RequestError
from personae.evals.options import AdaptersOption

app = typer.Typer(help="Evaluate models, adapters and servers.", no_args_is_help=True)

_SOME_FAILED = 1


@app.command()
@reporting
def run(
    suites: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE]...", help="See `personae eval list`; else those for what is served."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running server, any with OpenAI's API.")] = None,
    key: KeyOption = None,
    serve: Annotated[bool, typer.Option("--serve", help="Start a server for the run.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Without --url: the model, as `personae serve` takes it."),
    ] = None,
    adapters: AdaptersOption = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A model to ask, `base` for the first base; else all. Repeatable."),
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(metavar="MODE", help="free, constrained, …; else the suite's own.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="TASK", help="Only these tasks.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Cases per task, in suites that can have more or fewer.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(metavar="SUITE.NAME=VALUE", help="A setting of a suite.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Cases sent at the same time.")] = 16,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="How many seeds; every case is played with each.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that an answer may take.")] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", file_okay=False, help="Where results and report go; else a folder below runs/."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The run's name in reports; else the folder's.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="An earlier run for the report to compare with. Repeatable."),
    ] = None,
) -> None:
    """Run suites; exit code 1 if some cases could not be judged."""
    import anyio
    from rich.console import Console

    from personae.evals.harness.records import read_run
    from personae.evals.harness.session import EvalOptions, run_session
    from personae.evals.report.terminal import summary
    from personae.evals.report.write import write_reports
    from personae.evals.served import exit_on_sigterm

    if resume and out is None:
        raise RequestError("`--resume` needs `--out`, the folder of the run to go on with.", param="out")
    folder = out or Path("runs") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    options = EvalOptions(
        suites=tuple(suites or ()),
        out=folder,
        name=name,
        url=url,
        key=key,
        serve=serve,
        model=model,
        adapters=tuple(adapters or ()),
        models=tuple(models or ()),
        modes=tuple(mode or ()),
        tasks=tuple(task or ()),
        settings=dict(_setting(text) for text in set or ()),
        count=count,
        concurrency=concurrency,
        seed=seed,
        repeat=repeat,
        temperature=temperature,
        timeout=timeout,
        resume=resume,
    )
    earlier = [read_run(path) for path in against or ()]
    with exit_on_sigterm():
        anyio.run(run_session, options, Console(stderr=True))
    finished = read_run(folder)
    html, plain = write_reports([*earlier, finished], folder)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    for table in summary(finished):
        console.print(table)
    console.print(f"{html}\n{plain}", highlight=False, soft_wrap=True)
    if any(record.error for record in finished.records):
        raise typer.Exit(_SOME_FAILED)


@app.command()
@reporting
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs; the others are compared with the first.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Where the reports go.")] = Path(),
) -> None:
    """Write the reports of one run, or of several side by side."""
    from personae.evals.harness.records import read_run
    from personae.evals.report.write import write_reports

    for path in write_reports([read_run(run) for run in runs], out):
        typer.echo(path)


@app.command("list")
@reporting
def list_suites() -> None:
    """Show the suites and their settings."""
    import msgspec

    from personae.evals.suites.registry import SUITES, suite_type

    for name in SUITES:
        try:
            suite = suite_type(name)
        except RequestError as error:
            typer.echo(f"{name}: {error.message}")
            continue
        typer.echo(f"{name}: {suite.about} (modes: {', '.join(suite.modes)})")
        for field in msgspec.structs.fields(suite.settings):
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            typer.echo(f"    --set {name}.{field.name}={_shown(default)}")


def _setting(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or "." not in key:
        raise RequestError(f"`--set` takes SUITE.NAME=VALUE; it is {text!r}.", param="set")
    return key, value


def _shown(default: object) -> str:
    if isinstance(default, list | tuple):
        return ",".join(str(entry) for entry in default)
    return "" if default is None else str(default)
