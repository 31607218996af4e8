"""The host's time between two steps of 64 rows, with a device that costs the processor next to nothing.

    python -m personae.evals.bench.gaps --rows 64 --step-ms 5 --rounds 5

The device sleeps for `--step-ms` instead of running the model. Packing, sampling, scheduler, executor,
supervision, processes, the connection between them and streaming are real (`paced_core.py`). So only the
host's own work, and other programs, are between the end of one step and the beginning of the next. One
process and two processes alternate, on the executor's own clock. It prints the median and the 95th percentile
of every round, then the medians of the rounds. With the real model: `personae bench steps`.
"""

import statistics
import sys
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

from personae.actors.assembly import assemble
from personae.actors.options import EngineOptions
from personae.api.bundled import DEMO
from personae.evals.bench.paced_core import paced
from personae.evals.bench.steps import in_process_gaps, multi_process_gaps


def main(
    rows: int = 64,
    step_ms: float = 5.0,
    steps: Annotated[int, typer.Option(help="Of every round.")] = 400,
    rounds: int = 5,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 16,
) -> None:
    """Measure and print, in microseconds."""
    options = EngineOptions(DEMO / "model", (), max_seqs=rows, max_model_len=2048)
    engine_spec = paced(assemble(options).engine_spec, step_ms / 1000)
    command = (sys.executable, "-m", "personae.evals.bench.paced_core", str(step_ms / 1000))
    ways = {
        "one process": partial(in_process_gaps, engine_spec, rows, False, prompt, steps),
        "two processes": partial(
            multi_process_gaps, options, engine_spec, rows, False, prompt, steps, command
        ),
    }
    table = Table("round", *(f"{name}, {cut}" for name in ways for cut in ("p50", "p95")), "steps")
    found: list[list[float]] = []
    for number in range(rounds):
        line: list[float] = []
        seen: list[str] = []
        for measure in ways.values():
            gaps, _ = anyio.run(measure, backend_options={"use_uvloop": True})
            cuts = statistics.quantiles(gaps, n=20)
            line += [1e6 * cuts[9], 1e6 * cuts[18]]
            seen.append(str(len(gaps)))
        found.append(line)
        table.add_row(str(number + 1), *(f"{value:.0f}" for value in line), " + ".join(seen))
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    table.add_row("median", *(f"{value:.0f}" for value in medians), "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
