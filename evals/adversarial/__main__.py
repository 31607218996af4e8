"""Sends schemas over HTTP to a server whose model always prefers forbidden tokens.

    python -m personae.evals.adversarial ../shared/data/jsonschemabench --every 24 --out runs/adversarial

Without a folder it uses our own sample. It prints how many schemas were accepted, how many of their answers
were incomplete or invalid, and the refusals by keyword. Object schemas are also used as the parameters of a
function that the model must call, in the format `--tool-format`. `--resume` continues an interrupted run;
`personae eval report` shows the answers. Exit code 1 if an accepted schema's answer breaks its promise.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Console

from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO
from personae.evals.adversarial.engine import serving
from personae.evals.harness.records import OutcomeRecord, read_run
from personae.evals.harness.session import EvalOptions, run_session
from personae.evals.suites.adversarial import Adversarial

SUITE = "adversarial"


def tally(records: list[OutcomeRecord], mode: str) -> tuple[list[str], int]:
    """Lines about the records of a mode, and how many answers break their promise."""
    played = [record for record in records if record.mode == mode]
    judged = [record for record in played if record.judged]
    accepted = [record for record in judged if record.scores["accepted"]]
    refused = [record for record in judged if not record.scores["accepted"]]
    broken = [record for record in accepted if not record.scores["whole"]]
    invalid = [record for record in accepted if record.scores["whole"] and not record.scores["valid"]]
    silent = [record for record in accepted if not record.scores["told"]]
    share = 100 * len(accepted) / max(1, len(judged))
    lines = [
        f"{mode}: {len(accepted)} of {len(judged)} accepted ({share:.1f} %); of their answers "
        f"{len(broken)} not whole, {len(invalid)} not valid, {len(silent)} of these not said to be"
    ]
    for keyword, count in Counter(record.note.partition(":")[0] for record in refused).most_common():
        lines.append(f"{count:6} refused: {keyword}")
    lines += [f"       {record.case}: {record.note[:120]}" for record in (*broken, *invalid)]
    failed = [record for record in played if not record.judged]
    lines += [f"       {record.case}: {record.error}" for record in failed]
    return lines, sum(not record.passed for record in accepted) + len(failed)


async def play(
    options: EvalOptions, engine: EngineOptions, console: Console, tool_format: str = "hermes"
) -> Path:
    """Start the server and run the suite against it."""
    async with serving(engine, tool_format) as url:
        return await run_session(msgspec.structs.replace(options, url=url), console)


def main(
    data: Annotated[Path | None, typer.Argument(help="A file or folder of schemas.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Each so-many-th schema.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Seeds; each has other tastes.")] = 1,
    model: Annotated[Path, typer.Option(help="Whose tokenizer and sizes it has.")] = DEMO / "model",
    tool_format: Annotated[str, typer.Option(help="How it writes calls.")] = "hermes",
    modes: Annotated[str, typer.Option(help="With commas.")] = ",".join(Adversarial.modes),
    concurrency: Annotated[int, typer.Option(min=1, help="Schemas at a time.")] = 16,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/adversarial"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Play and print."""
    settings = {f"{SUITE}.every": str(every)} | ({} if data is None else {f"{SUITE}.data": str(data)})
    options = EvalOptions(
        suites=(SUITE,),
        out=out,
        settings=settings,
        modes=tuple(modes.split(",")),
        repeat=repeat,
        concurrency=concurrency,
        resume=resume,
    )
    console = Console(stderr=True)
    engine = EngineOptions(model, dtype="float32", max_seqs=concurrency)
    anyio.run(play, options, engine, console, tool_format)
    wrong = 0
    for mode in options.modes:
        lines, count = tally(read_run(out).records, mode)
        print("\n".join(lines))
        wrong += count
    sys.exit(wrong > 0)


if __name__ == "__main__":
    typer.run(main)
