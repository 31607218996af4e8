"""Turns runs into the content of a report: cells, differences, failing cases. No markup here."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from personae.api.eval_reports.statistics import Difference, Interval, paired, wilson
from personae.evals.harness.records import OutcomeRecord, Run
from personae.evals.suites.suite import CONSTRAINED, FREE

RowKey = tuple[str, str, str]
"""Task, model, mode."""


@dataclass(eq=False)
class TableCell:
    """All outcomes of one task, model and mode in one run."""

    records: list[OutcomeRecord] = field(default_factory=list)

    @property
    def judged(self) -> list[OutcomeRecord]:
        """The outcomes that count."""
        return [record for record in self.records if record.judged]

    @property
    def passed(self) -> Interval:
        """The share that passed."""
        return wilson(sum(record.passed for record in self.judged), len(self.judged))

    @property
    def errors(self) -> int:
        """How many could not be judged because of an error."""
        return sum(bool(record.error) for record in self.records)

    @property
    def skipped(self) -> int:
        """How many were not tried."""
        return sum(bool(record.skipped) for record in self.records)

    @property
    def seconds(self) -> float | None:
        """The median time of a case."""
        return statistics.median(r.seconds for r in self.judged) if self.judged else None

    def score(self, name: str) -> Interval | None:
        """The mean of a score over the outcomes that have it."""
        scores = [record.scores[name] for record in self.judged if name in record.scores]
        return wilson(sum(scores), len(scores)) if scores else None

    def value(self, name: str) -> tuple[float, float] | None:
        """Median and maximum of a measured quantity."""
        values = [record.values[name] for record in self.judged if name in record.values]
        return (statistics.median(values), max(values)) if values else None


@dataclass
class Change:
    """How two sides differ on the cases that both have."""

    label: tuple[str, str, str]
    before: Interval
    after: Interval
    difference: Difference


@dataclass
class SuiteTable:
    """One suite over all runs. `rows` maps task, model and mode to a cell per run."""

    name: str
    rows: dict[RowKey, list[TableCell]]
    scores: list[str]
    values: list[str]
    skips: list[tuple[str, int]]

    def total(self, run: int) -> TableCell:
        """All cells of one run together."""
        return TableCell([record for row in self.rows.values() for record in row[run].records])

    def series(self, mode: str) -> int:
        """The colour of a mode."""
        return list(dict.fromkeys(key[2] for key in self.rows)).index(mode)

    @property
    def errors(self) -> int:
        """How many outcomes of all runs could not be judged."""
        return sum(cell.errors for row in self.rows.values() for cell in row)

    def between_runs(self, run: int) -> list[Change]:
        """How `run` differs from the first."""
        return list(_changes((key, row[0].records, row[run].records) for key, row in self.rows.items()))

    def by_constraint(self, run: int) -> list[Change]:
        """How binding the answers changes the results of one run."""
        free = {(task, model): row[run] for (task, model, mode), row in self.rows.items() if mode == FREE}
        bound = {
            (task, model): row[run] for (task, model, mode), row in self.rows.items() if mode == CONSTRAINED
        }
        return list(
            _changes(
                ((*key, ""), free[key].records, cell.records) for key, cell in bound.items() if key in free
            )
        )

    def by_adapter(self, run: int, base: str) -> list[Change]:
        """How adapters differ from the base in one run; empty if no case differs."""
        pairs = ((own, (own[0], base, own[2])) for own in self.rows if own[1] != base)
        changes = list(
            _changes(
                (own, self.rows[other][run].records, self.rows[own][run].records)
                for own, other in pairs
                if other in self.rows
            )
        )
        return changes if any(one.difference.gained or one.difference.lost for one in changes) else []

    def failures(self, run: int) -> dict[RowKey, list[OutcomeRecord]]:
        """The cases that did not pass, including errors."""
        failed = {
            key: [record for record in row[run].records if not record.skipped and not record.passed]
            for key, row in self.rows.items()
        }
        return {key: records for key, records in failed.items() if records}


def tables(runs: Sequence[Run]) -> list[SuiteTable]:
    """One table per suite, in the order in which they ran."""
    names = list(dict.fromkeys(name for run in runs for name in run.head.suites))
    names += sorted({record.suite for run in runs for record in run.records} - set(names))
    made = []
    for name in names:
        rows: dict[RowKey, list[TableCell]] = {}
        records = [record for run in runs for record in run.records if record.suite == name]
        if not records:
            continue
        tasks = _places(
            [*(task for run in runs for task in run.head.tasks.get(name, ())), *(r.task for r in records)]
        )
        models = _places(
            [*(model for run in runs for model in run.head.models), *(record.model for record in records)]
        )
        for index, run in enumerate(runs):
            for record in run.records:
                if record.suite == name:
                    row = rows.setdefault(
                        (record.task, record.model, record.mode), [TableCell() for _ in runs]
                    )
                    row[index].records.append(record)
        ordered = sorted(rows, key=lambda key: (tasks[key[0]], models[key[1]], key[2] != FREE, key[2]))
        skips = Counter(record.skipped for record in records if record.skipped)
        made.append(
            SuiteTable(
                name,
                {key: rows[key] for key in ordered},
                list(dict.fromkeys(score for record in records for score in record.scores)),
                list(dict.fromkeys(value for record in records for value in record.values)),
                skips.most_common(),
            )
        )
    return made


def _places(names: Iterable[str]) -> dict[str, int]:
    """The first position of each name."""
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _changes(
    sides: Iterable[tuple[RowKey, list[OutcomeRecord], list[OutcomeRecord]]],
) -> Iterable[Change]:
    for label, before, after in sides:
        old = {(r.case, r.part, r.seed): r.passed for r in before if r.judged}
        new = {(r.case, r.part, r.seed): r.passed for r in after if r.judged}
        shared = old.keys() & new.keys()
        if not shared:
            continue
        gained = sum(new[key] and not old[key] for key in shared)
        lost = sum(old[key] and not new[key] for key in shared)
        yield Change(
            label,
            wilson(sum(old[key] for key in shared), len(shared)),
            wilson(sum(new[key] for key in shared), len(shared)),
            paired(gained, lost, len(shared)),
        )
