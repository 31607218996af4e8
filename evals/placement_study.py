"""A study of placement policies over numbers of replicas: runs it and draws its plots.

    python -m personae.evals.placement_study run results.jsonl --replicas 4 --requests 1000
    python -m personae.evals.placement_study draw results.jsonl docs/internals/placement

`run` appends a line per policy to a file, so a long study can run in parts. `draw` makes a table, and an SVG
for each figure, from all lines of the file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from personae.actors.simulation.capacity import quantile
from personae.actors.simulation.scenario import PLACEMENT_NAMES, PlacementName, SimulationReport
from personae.actors.simulation.world import simulate
from personae.evals.placement import day
from personae.evals.plots import lines

app = typer.Typer(add_completion=False, no_args_is_help=True)

_COLOURS = {
    "random": "#9aa5b1",
    "least-loaded": "#d97706",
    "prefix": "#7c3aed",
    "d2lpm": "#059669",
    "estimated": "#2563eb",
}


class Result(msgspec.Struct, frozen=True):
    """A policy with a number of replicas. Times are milliseconds, shares from 0 to 1, the fairness gap
    is in weighted tokens."""

    replicas: int
    policy: PlacementName
    seed: int
    requests: int
    tokens_a_busy_second: float
    first_p50: float
    first_p99: float
    hits: float
    goodput: float
    loads_a_request: float
    fairness_gap: float


FIGURES: dict[str, tuple[str, Callable[[Result], float]]] = {
    "throughput": (
        "answer tokens for each busy second of a device",
        lambda r: r.tokens_a_busy_second,
    ),
    "first_token": ("first token, p99, ms", lambda r: r.first_p99),
    "hits": ("prompt tokens found in the prefix cache, %", lambda r: 100 * r.hits),
    "goodput": ("answers within their targets, %", lambda r: 100 * r.goodput),
    "loads": ("adapters loaded for each request", lambda r: r.loads_a_request),
    "fairness": ("fairness gap, weighted tokens", lambda r: r.fairness_gap),
}


@app.command()
def run(
    results: Path,
    replicas: Annotated[int, typer.Option(min=2)] = 4,
    requests: Annotated[int, typer.Option(min=1)] = 1000,
    rate: Annotated[float, typer.Option(help="Requests a second for each replica.")] = 40.0,
    seed: int = 1,
) -> None:
    """Serve the same requests with each policy."""
    for policy in PLACEMENT_NAMES:
        report = simulate(day(policy, replicas, requests, rate, seed))
        with results.open("ab") as file:
            file.write(msgspec.json.encode(_result(policy, report)) + b"\n")


@app.command()
def draw(results: Path, folder: Path) -> None:
    """Write the plots into a folder, and print the table."""
    found = [msgspec.json.decode(line, type=Result) for line in results.read_bytes().splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, value) in FIGURES.items():
        (folder / f"{name}.svg").write_text(plot(title, found, value), encoding="utf-8")
    typer.echo(table(found))


def table(found: list[Result]) -> str:
    """All results, as Markdown."""
    lines = [
        "| replicas | policy | tokens/busy s | first token p50, ms | p99, ms | prefix hits | goodput "
        "| loads a request | fairness gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.replicas} | {one.policy} | {one.tokens_a_busy_second:.0f} | {one.first_p50:.0f} | "
        f"{one.first_p99:.0f} | {one.hits:.0%} | {one.goodput:.0%} | {one.loads_a_request:.2f} | "
        f"{one.fairness_gap:.0f} |"
        for one in sorted(found, key=lambda one: (one.replicas, PLACEMENT_NAMES.index(one.policy)))
    ]
    return "\n".join(lines)


def plot(title: str, found: list[Result], value: Callable[[Result], float]) -> str:
    """An SVG: a line per policy, by number of replicas."""
    by_policy = {
        policy: [(one.replicas, value(one)) for one in found if one.policy == policy] for policy in _COLOURS
    }
    return lines(title, "replicas", by_policy, _COLOURS)


def _result(policy: PlacementName, report: SimulationReport) -> Result:
    scenario = report.scenario
    return Result(
        scenario.replicas,
        policy,
        scenario.seed,
        report.requests,
        report.tokens / report.busy,
        1000 * quantile(report.waits, 0.5),
        1000 * quantile(report.waits, 0.99),
        report.hits / max(report.queries, 1),
        report.good / max(report.targeted, 1),
        report.loads / report.requests,
        report.fairness_gap,
    )


if __name__ == "__main__":
    app()
