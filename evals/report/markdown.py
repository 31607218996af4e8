"""A report as Markdown: the same tables as the page, without the failing cases."""

from collections.abc import Iterator, Sequence

from personae.evals.harness.records import Run
from personae.evals.report.tables import Change, SuiteTable, tables
from personae.evals.report.text import duration, interval, percent, quantity


def markdown(runs: Sequence[Run]) -> str:
    """The whole report."""
    return "\n".join(_lines(runs)) + "\n"


def _lines(runs: Sequence[Run]) -> Iterator[str]:
    yield f"# Evaluation: {', '.join(run.head.name for run in runs)}"
    yield ""
    yield from _table(
        ["run", "target", "started", "took", "outcomes", "errors"],
        (
            [
                run.head.name,
                run.head.target,
                run.head.started,
                duration(run.seconds) + ("" if run.complete else ", not complete"),
                str(len(run.records)),
                str(sum(bool(record.error) for record in run.records)),
            ]
            for run in runs
        ),
    )
    for table in tables(runs):
        yield f"## {table.name}"
        yield ""
        yield "Passed and scores in %, with 95 % intervals (Wilson)."
        yield ""
        yield from _suite(table, runs)
        for index, run in enumerate(runs):
            title = f"Adapters against {run.head.base}" + (f", {run.head.name}" if len(runs) > 1 else "")
            yield from _changes(title, table.by_adapter(index, run.head.base), ("base", "adapter"))
        for index, run in enumerate(runs):
            title = "Constrained against free" + (f", {run.head.name}" if len(runs) > 1 else "")
            yield from _changes(title, table.by_constraint(index), ("free", "constrained"))
        for index, run in enumerate(runs[1:], 1):
            names = (runs[0].head.name, run.head.name)
            yield from _changes(f"{names[1]} against {names[0]}", table.between_runs(index), names)
        for reason, count in table.skips:
            yield f"- {count} skipped: {reason}"
        if table.skips:
            yield ""


def _suite(table: SuiteTable, runs: Sequence[Run]) -> Iterator[str]:
    several = len(runs) > 1
    head = ["task", "model", "mode", *(["run"] if several else []), "n", "passed", "interval"]
    head += [*table.scores, *(f"{name} (median / most)" for name in table.values), "errors", "s"]
    rows = []
    for key, cells in table.rows.items():
        for run, cell in zip(runs, cells, strict=True):
            if not cell.records:
                continue
            row = [*key, *([run.head.name] if several else []), str(len(cell.judged))]
            row += [percent(cell.passed), interval(cell.passed)]
            row += [percent(cell.score(name)) for name in table.scores]
            for name in table.values:
                value = cell.value(name)
                row.append("–" if value is None else f"{quantity(value[0])} / {quantity(value[1])}")
            rows.append([*row, str(cell.errors), quantity(cell.seconds)])
    yield from _table(head, rows)


def _changes(title: str, changes: Sequence[Change], names: tuple[str, str]) -> Iterator[str]:
    if not changes:
        return
    yield f"### {title}"
    yield ""
    yield from _table(
        ["task", "model", "mode", "n", *names, "change", "95 % interval", "gained", "lost", "p"],
        (
            [
                *change.label,
                str(change.difference.of),
                percent(change.before),
                percent(change.after),
                f"{100 * change.difference.change:+.1f}",
                f"{100 * change.difference.low:+.1f} to {100 * change.difference.high:+.1f}",
                str(change.difference.gained),
                str(change.difference.lost),
                "<0.001" if change.difference.p < 0.001 else f"{change.difference.p:.3f}",
            ]
            for change in changes
        ),
    )


def _table(head: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""
