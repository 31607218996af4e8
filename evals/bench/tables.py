"""A benchmark's figures for the terminal."""

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from personae.evals.bench.figures import MEASURES, Figures, Ratio, measure
from personae.evals.bench.session import BenchReport


def tables(report: BenchReport) -> Iterator[Table]:
    """One table per server, then the ratios of the first to each of the others."""
    for server in report.servers:
        yield _figures(report, server.name)
    for server in report.servers[1:]:
        yield _ratios(report, server.name)


def _figures(report: BenchReport, server: str) -> Table:
    rounds = len(report.rounds(report.cells[0].name, server))
    of = "one run of each" if rounds == 1 else f"medians of {rounds} runs"
    table = Table(title=f"{server} ({of}; times in ms)", title_justify="left", title_style="bold")
    table.add_column("load")
    for name in ("tok/s", "req/s", "good/s", "first p50", "p99", "gap p50", "p99", "end p50", "p99"):
        table.add_column(name, justify="right")
    for name in ("Jain", "cached", "done", "errors"):
        table.add_column(name, justify="right")
    for cell in report.cells:
        runs = report.rounds(cell.name, server)
        table.add_row(
            cell.name,
            *(f"{_median(runs, name):.1f}" for name in list(MEASURES)[:3]),
            *(milliseconds(_median(runs, name)) for name in list(MEASURES)[3:]),
            f"{statistics.median(run.fairness for run in runs):.2f}",
            f"{sum(run.cached_tokens for run in runs) / max(1, sum(run.prompt_tokens for run in runs)):.0%}",
            f"{sum(run.completed for run in runs)}/{sum(run.requests for run in runs)}",
            errors(runs),
        )
    return table


def _ratios(report: BenchReport, server: str) -> Table:
    table = Table(
        title=f"{report.servers[0].name} over {server}, round by round: median (least–most)",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("load")
    for name in MEASURES:
        table.add_column(name, justify="right")
    for cell in report.cells:
        table.add_row(cell.name, *(ratio_text(one) for one in report.ratios(cell.name, server).values()))
    return table


def errors(runs: Sequence[Figures]) -> str:
    """What went wrong, and how often."""
    found: dict[str, int] = {}
    for run in runs:
        for what, count in run.errors.items():
            found[what] = found.get(what, 0) + count
    return ", ".join(f"{count} {what}" for what, count in found.items())


def milliseconds(seconds: float) -> str:
    """As a whole number, or with one decimal if it is small."""
    if math.isnan(seconds):
        return "–"
    return f"{1000 * seconds:.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def ratio_text(one: Ratio) -> str:
    """`1.52 (1.40–1.61)`."""
    return "–" if math.isnan(one.median) else f"{one.median:.2f} ({one.least:.2f}–{one.most:.2f})"


def _median(runs: Sequence[Figures], name: str) -> float:
    return statistics.median(measure(run, name) for run in runs)
