"""A study of placement policies over numbers of replicas: runs it and draws its plots.

    python -m personae.evals.placement_study run results.jsonl --replicas 4 --requests 1000
    python -m personae.evals.placement_study draw results.jsonl docs/internals/placement

`run` appends a line per policy to a file, so a long study can run in parts. `draw` makes a table, and an SVG
for each figure, from all lines of the file.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from personae.actors.simulation.capacity import quantile
from personae.actors.simulation.scenario import PLACEMENT_NAMES, PlacementName, SimulationReport
from personae.actors.simulation.world import simulate
from personae.evals.placement import day

app = typer.Typer(add_completion=False, no_args_is_help=True)

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 260, 56, 110, 34, 40
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
    """A self-contained SVG: a line per policy, by number of replicas."""
    counts = sorted({one.replicas for one in found})
    most = max(map(value, found)) * 1.1 or 1.0
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(counts) - 1, 1)

    def place(one: Result) -> tuple[float, float]:
        up = value(one) / most * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + step * counts.index(one.replicas), _HEIGHT - _BOTTOM - up

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="11" fill="#1f2933">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="12" font-weight="bold">{title}</text>',
    ]
    for tick in range(5):
        y = _HEIGHT - _BOTTOM - tick / 4 * (_HEIGHT - _TOP - _BOTTOM)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick / 4 * most)}</text>'
        )
    for index, count in enumerate(counts):
        x = _LEFT + step * index
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{count}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">replicas</text>')
    for index, (policy, colour) in enumerate(_COLOURS.items()):
        mine = sorted((one for one in found if one.policy == policy), key=lambda one: one.replicas)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, mine))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in map(place, mine)]
        y = _TOP + 16 * index + 8
        parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 14}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 30}" y="{y + 1}">{policy}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(value: float) -> str:
    """A number for an axis."""
    digits = max(2 - math.ceil(math.log10(value)), 0) if value > 0 else 0
    return f"{value:.{digits}f}"


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
