"""Reads what `personae eval` wrote: a folder of runs, each a folder with `results.jsonl`.

The format is that of `evals/harness/records.py`. What a run printed that this server started is in its
folder, too. Whatever else is in the folder is left alone, and nothing outside of it is opened. What is read
is bounded, and texts that are shown are cut.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import BinaryIO

import msgspec

from personae.api.eval_reports.statistics import paired, wilson
from personae.errors import NotFound, RequestError
from personae.kernels.sizes import size_text

RESULTS, PAGE, OUTPUT = "results.jsonl", "report.html", "output.log"
MOST_RUNS = 200
MOST_BYTES = 64 * 2**20
"""Of the results of one run."""
MOST_LINE = 2**20
MOST_FAILURES = 100
MOST_TEXT = 2000
TAIL_BYTES = 4096  # of what a run printed

RowKey = tuple[str, str, str, str]
"""Suite, task, model, mode."""
Case = tuple[str, str, str, str, int]
"""Suite, case, model, mode, seed."""


class Head(msgspec.Struct, tag_field="type", tag="run", kw_only=True):
    """The first line of a run's results: what was asked for."""

    name: str = ""
    target: str = ""
    suites: dict[str, dict[str, str]] = {}
    models: list[str] = []
    version: str = ""
    started: str = ""
    plays: int = 0


class Outcome(msgspec.Struct, tag_field="type", tag="case", kw_only=True):
    """One outcome. With `error` or `skipped` nothing was judged."""

    suite: str
    task: str
    case: str
    model: str
    mode: str
    seed: int = 0
    part: int = 0
    passed: bool = False
    scores: dict[str, float] = {}
    prompt: str = ""
    expected: str = ""
    answer: str = ""
    note: str = ""
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0


class Session(msgspec.Struct, tag_field="type", tag="session", kw_only=True):
    """The end of one session of a run."""

    seconds: float
    complete: bool


class ReportInfo(msgspec.Struct, kw_only=True):
    """A run. `modified` is Unix time; `page` says whether there is a report to download, `running` whether
    this server plays it now."""

    id: str
    name: str
    target: str
    suites: list[str]
    models: list[str]
    started: str
    modified: int
    bytes: int
    page: bool
    running: bool = False
    object: str = "eval_report"


class ReportRow(msgspec.Struct, kw_only=True):
    """The outcomes of one task, model and mode: `passed` of `judged`, with the 95 % interval of that share
    (Wilson's), null if nothing was judged. `scores` are means, `seconds` is the median of a case."""

    suite: str
    task: str
    model: str
    mode: str
    judged: int
    passed: int
    interval: tuple[float, float] | None
    errors: int
    skipped: int
    scores: dict[str, float]
    seconds: float | None


class FailedCase(msgspec.Struct, kw_only=True):
    """A case that did not pass, or could not be judged. Long texts are cut."""

    suite: str
    task: str
    case: str
    model: str
    mode: str
    prompt: str
    expected: str
    answer: str
    note: str
    error: str


class Report(ReportInfo, kw_only=True):
    """A run with its tables. The first `failures` are listed. `complete`: everything was played; `played`
    cases of `plays` are there, null if the run does not say how many there will be. `output` is the last line
    that an incomplete run printed, if this server started it."""

    seconds: float
    complete: bool
    played: int
    plays: int | None
    output: str | None
    rows: list[ReportRow]
    failures: list[FailedCase]
    failed: int


class ChangedRow(msgspec.Struct, kw_only=True):
    """One task, model and mode in two runs, over the `of` cases that both have judged: `gained` pass in the
    first and not in the other, `lost` the reverse. `change` is the difference of the two shares with its 95 %
    interval, `p` that of McNemar's exact test."""

    suite: str
    task: str
    model: str
    mode: str
    of: int
    before: float
    after: float
    gained: int
    lost: int
    change: float
    interval: tuple[float, float]
    p: float


class Comparison(msgspec.Struct, kw_only=True):
    """A run compared with another, `against`, on the cases that both have."""

    id: str
    against: str
    rows: list[ChangedRow]
    object: str = "eval_comparison"


@dataclass
class _Run:
    """A run that was read: its outcomes by case, and the ends of its sessions."""

    info: ReportInfo
    planned: int = 0
    plays: dict[Case, list[Outcome]] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)

    def add(self, line: Head | Outcome | Session) -> None:
        """Take one line."""
        match line:
            case Head(plays=planned):
                self.planned = planned
            case Session():
                self.sessions.append(line)
            case Outcome():
                played = (line.suite, line.case, line.model, line.mode, line.seed)
                if line.part == 0:
                    self.plays[played] = []
                self.plays.setdefault(played, []).append(_cut(line))

    @property
    def outcomes(self) -> Iterator[Outcome]:
        """Of all cases, in their order."""
        return (outcome for parts in self.plays.values() for outcome in parts)

    @property
    def complete(self) -> bool:
        """Whether everything was played."""
        return bool(self.sessions) and self.sessions[-1].complete


@dataclass
class _Cell:
    """What is counted of one task, model and mode."""

    passed: int = 0
    errors: int = 0
    skipped: int = 0
    seconds: list[float] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        if outcome.error or outcome.skipped:
            self.errors += bool(outcome.error)
            self.skipped += bool(outcome.skipped)
            return
        self.passed += outcome.passed
        self.seconds.append(outcome.seconds)
        for name, value in outcome.scores.items():
            self.scores.setdefault(name, []).append(value)


class EvalReports:
    """The runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> list[ReportInfo]:
        """The runs, the newest first; at most `MOST_RUNS`."""
        infos = [info for path in self._runs() if (info := _info(path)) is not None]
        return sorted(infos, key=lambda info: (-info.modified, info.id))

    def get(self, id: str) -> Report:
        """One run with its tables. Raises NotFound, and RequestError if it is too large or no run."""
        return _report(self._read(id), last_line(self._path(id) / OUTPUT))

    def compare(self, id: str, against: str) -> Comparison:
        """A run compared with another. Raises as `get` does, and RequestError if no case is in both."""
        after, before = (_verdicts(self._read(each)) for each in (id, against))
        cases: dict[RowKey, list[tuple[bool, bool]]] = {}
        for (row, case), passed in after.items():
            if (row, case) in before:
                cases.setdefault(row, []).append((before[row, case], passed))
        if not cases:
            raise RequestError(f"`{id[:80]}` and `{against[:80]}` have no case in common.", param="against")
        return Comparison(id=id, against=against, rows=[_changed(row, cases[row]) for row in _ordered(cases)])

    def _read(self, id: str) -> "_Run":
        """Of a case that was played again the later outcomes count, as in `personae eval report`."""
        path = self._path(id)
        info = _info(path)
        if info is None:
            raise RequestError(f"{RESULTS} of `{id[:80]}` does not begin with the head of a run.", param="id")
        if info.bytes > MOST_BYTES:
            size, most = size_text(info.bytes, needed=True), size_text(MOST_BYTES)
            why = f"{RESULTS} of `{id[:80]}` has {size}; at most {most} are shown."
            raise RequestError(why, param="id")
        run = _Run(info)
        with (path / RESULTS).open("rb") as file:
            for line in _lines(file):
                run.add(line)
        return run

    def page(self, id: str) -> Path:
        """The file of its report. Raises NotFound."""
        path = self._path(id) / PAGE
        if not _within(path, self._folder) or not path.is_file():
            raise NotFound(f"The run `{id[:80]}` has no {PAGE}.", param="id")
        return path

    def _path(self, id: str) -> Path:
        found = next((path for path in self._runs() if path.name == id), None)
        if found is None:
            raise NotFound(f"There is no run `{id[:80]}`.", param="id")
        return found

    def _runs(self) -> Iterator[Path]:
        """Folders with results, of those that were changed last; links out of the folder are left out."""
        try:
            with os.scandir(self._folder) as entries:
                folders = [Path(entry.path) for entry in entries if entry.is_dir()]
        except FileNotFoundError:  # the first run makes it
            return iter(())
        except OSError as error:
            raise RequestError(f"--eval-reports cannot be read: {error.strerror}.") from None
        runs = [path for path in folders if _within(path / RESULTS, self._folder)]
        return islice(sorted(runs, key=_modified, reverse=True), MOST_RUNS)


def _modified(run: Path) -> float:
    return (run / RESULTS).stat().st_mtime


def _within(path: Path, folder: Path) -> bool:
    """Whether it is a file below the folder, and no link leads out."""
    real = path.resolve()
    return real.is_file() and real.is_relative_to(folder.resolve())


def _info(run: Path) -> ReportInfo | None:
    """What the head of a run says; None if it has none."""
    path = run / RESULTS
    with path.open("rb") as file:
        head = next(_lines(file), None)
    if not isinstance(head, Head):
        return None
    status = path.stat()
    return ReportInfo(
        id=run.name,
        name=head.name or run.name,
        target=head.target,
        suites=[*head.suites],
        models=head.models,
        started=head.started,
        modified=int(status.st_mtime),
        bytes=status.st_size,
        page=_within(run / PAGE, run),
    )


_decode = msgspec.json.Decoder(Head | Outcome | Session).decode


def _lines(file: BinaryIO) -> Iterator[Head | Outcome | Session]:
    """The lines that can be read; a last one that was not finished is left out."""
    while line := file.readline(MOST_LINE):
        if line.endswith(b"\n"):
            try:
                yield _decode(line)
            except msgspec.DecodeError:
                continue


def last_line(path: Path) -> str | None:
    """The last line of a text file that says something; None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def _verdicts(run: _Run) -> dict[tuple[RowKey, Case], bool]:
    """Whether each judged case passed, with all of its parts."""
    found: dict[tuple[RowKey, Case], bool] = {}
    for case, parts in run.plays.items():
        for part in parts:
            if not part.error and not part.skipped:
                key = (part.suite, part.task, part.model, part.mode), case
                found[key] = found.get(key, True) and part.passed
    return found


def _changed(row: RowKey, cases: list[tuple[bool, bool]]) -> ChangedRow:
    """How a row changed, from each case's verdict before and after."""
    suite, task, model, mode = row
    gained = sum(after and not before for before, after in cases)
    lost = sum(before and not after for before, after in cases)
    difference = paired(gained, lost, len(cases))
    return ChangedRow(
        suite=suite,
        task=task,
        model=model,
        mode=mode,
        of=len(cases),
        before=sum(before for before, _ in cases) / len(cases),
        after=sum(after for _, after in cases) / len(cases),
        gained=gained,
        lost=lost,
        change=difference.change,
        interval=(difference.low, difference.high),
        p=difference.p,
    )


def _report(run: _Run, output: str | None) -> Report:
    """The tables of a run, which printed `output` last."""
    cells: dict[RowKey, _Cell] = {}
    failed: list[Outcome] = []
    for outcome in run.outcomes:
        row = outcome.suite, outcome.task, outcome.model, outcome.mode
        cells.setdefault(row, _Cell()).add(outcome)
        if not outcome.passed and not outcome.skipped:
            failed.append(outcome)
    return Report(
        **msgspec.structs.asdict(run.info),
        seconds=sum(session.seconds for session in run.sessions),
        complete=run.complete,
        played=len(run.plays),
        plays=run.planned or None,
        output=None if run.complete else output,
        rows=[_row(*key, cells[key]) for key in _ordered(cells)],
        failures=[_failure(outcome) for outcome in failed[:MOST_FAILURES]],
        failed=len(failed),
    )


def _ordered(rows: Iterable[RowKey]) -> list[RowKey]:
    """Suites, then their tasks, models and modes, each in the order in which they come."""
    rows = [*rows]
    columns = [list(dict.fromkeys(names)) for names in zip(*rows, strict=True)]
    places = [{name: place for place, name in enumerate(names)} for names in columns]
    return sorted(rows, key=lambda row: [place[name] for place, name in zip(places, row, strict=True)])


def _cut(outcome: Outcome) -> Outcome:
    for name in ("prompt", "expected", "answer", "note", "error"):
        text = getattr(outcome, name)
        if len(text) > MOST_TEXT:
            setattr(outcome, name, f"{text[:MOST_TEXT]}…")
    return outcome


def _row(suite: str, task: str, model: str, mode: str, cell: _Cell) -> ReportRow:
    judged = len(cell.seconds)
    passed = wilson(cell.passed, judged)
    return ReportRow(
        suite=suite,
        task=task,
        model=model,
        mode=mode,
        judged=judged,
        passed=cell.passed,
        interval=(passed.low, passed.high) if judged else None,
        errors=cell.errors,
        skipped=cell.skipped,
        scores={name: fmean(values) for name, values in cell.scores.items()},
        seconds=median(cell.seconds) if judged else None,
    )


def _failure(outcome: Outcome) -> FailedCase:
    return FailedCase(**{name: getattr(outcome, name) for name in FailedCase.__struct_fields__})
