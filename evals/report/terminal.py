"""A run's figures for the terminal."""

from collections.abc import Iterator

from rich.table import Table

from personae.evals.harness.records import Run
from personae.evals.report.tables import tables
from personae.evals.report.text import interval, percent, quantity


def summary(run: Run) -> Iterator[Table]:
    """A table for each suite."""
    for suite in tables([run]):
        shown = Table(title=suite.name, title_justify="left", title_style="bold")
        for name in ("task", "model", "mode"):
            shown.add_column(name)
        for name in ("n", "passed %", "95 %", *suite.scores, *suite.values, "errors"):
            shown.add_column(name, justify="right")
        for key, [cell] in suite.rows.items():
            values = [cell.value(name) for name in suite.values]
            shown.add_row(
                *key,
                str(len(cell.judged)),
                percent(cell.passed),
                interval(cell.passed),
                *(percent(cell.score(name)) for name in suite.scores),
                *(
                    "–" if value is None else f"{quantity(value[0])} / {quantity(value[1])}"
                    for value in values
                ),
                str(cell.errors) if cell.errors else "",
            )
        yield shown
