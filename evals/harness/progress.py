"""A line per suite during a run: its progress, its score so far, and its first error."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TimeElapsedColumn as Elapsed

from personae.api.eval_reports.statistics import wilson
from personae.evals.harness.records import OutcomeRecord


class Board:
    """The progress display; a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            Elapsed(),
            TimeRemainingColumn(),
            console=console,
        )
        self._lines: dict[str, TaskID] = {}
        self._tallies: dict[str, Tally] = {}

    def begin(self, suite: str, total: int, done: list[OutcomeRecord]) -> None:
        """Show a suite. `done` are outcomes of an earlier session."""
        self._lines[suite] = self._progress.add_task(suite, total=total, score="")
        self._tallies[suite] = Tally()
        for record in done:
            self.count(record)

    def count(self, record: OutcomeRecord) -> None:
        """Show one more outcome."""
        tally = self._tallies[record.suite]
        tally.count(record)
        if record.error and tally.errors == 1:
            told = f"{record.suite}: {record.case} with {record.model}: {record.error}"
            self._progress.console.print(told, style="red", markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._lines[record.suite], advance=0 if record.part else 1, score=tally.shown())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Tally:
    """Counts of outcomes."""

    def __init__(self) -> None:
        self.judged = self.passed = self.errors = self.skipped = 0
        self.reason = ""  # why the first one was skipped

    def count(self, record: OutcomeRecord) -> None:
        """Count one more outcome."""
        self.judged += record.judged
        self.passed += record.judged and record.passed
        self.errors += bool(record.error)
        self.skipped += bool(record.skipped)
        self.reason = self.reason or record.skipped

    def shown(self) -> str:
        """The counts as text."""
        parts = []
        if self.judged:
            share, low, high = wilson(self.passed, self.judged)
            parts.append(f"[green]{100 * share:.1f} %[/] [dim]({100 * low:.0f}-{100 * high:.0f})[/]")
        if self.errors:
            parts.append(f"[red]{self.errors} errors[/]")
        if self.skipped:
            parts.append(f"[yellow]{self.skipped} skipped:[/] {escape(self.reason)}")
        return " ".join(parts)
