"""Reads what `personae eval` wrote: a folder of runs, each a folder with `results.jsonl`.

The format is that of `evals/harness/records.py`. Whatever else is in the folder is left alone, and nothing
outside of it is opened. What is read is bounded, and texts that are shown are cut.
"""

import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from pathlib import Path
from typing import BinaryIO

import msgspec

from personae.errors import NotFound, RequestError
from personae.kernels.sizes import size_text

RESULTS, PAGE = "results.jsonl", "report.html"
MOST_RUNS = 200
MOST_BYTES = 64 * 2**20
"""Of the results of one run."""
MOST_LINE = 2**20
MOST_FAILURES = 100
MOST_TEXT = 2000
Z = 1.959964  # of a 95 % interval

RowKey = tuple[str, str, str, str]
"""Suite, task, model, mode."""


class Head(msgspec.Struct, tag_field="type", tag="run", kw_only=True):
    """The first line of a run's results: what was asked for."""

    name: str = ""
    target: str = ""
    suites: dict[str, dict[str, str]] = {}
    models: list[str] = []
    version: str = ""
    started: str = ""


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
    """A run. `modified` is Unix time; `page` says whether there is a report to download."""

    id: str
    name: str
    target: str
    suites: list[str]
    models: list[str]
    started: str
    modified: int
    bytes: int
    page: bool
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
    """A run with its tables. The first `failures` are listed. `complete`: everything was played."""

    seconds: float
    complete: bool
    rows: list[ReportRow]
    failures: list[FailedCase]
    failed: int


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
        path = self._path(id)
        info = _info(path)
        if info is None:
            raise RequestError(f"{RESULTS} of `{id[:80]}` does not begin with the head of a run.", param="id")
        if info.bytes > MOST_BYTES:
            size, most = size_text(info.bytes, needed=True), size_text(MOST_BYTES)
            why = f"{RESULTS} of `{id[:80]}` has {size}; at most {most} are shown."
            raise RequestError(why, param="id")
        with (path / RESULTS).open("rb") as file:
            return _report(info, _lines(file))

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


def _report(info: ReportInfo, lines: Iterator[Head | Outcome | Session]) -> Report:
    """The tables. Of a case that was played again the later outcomes count, as in `personae eval report`."""
    plays: dict[tuple[str, str, str, str, int], list[Outcome]] = {}
    sessions: list[Session] = []
    for line in lines:
        if isinstance(line, Session):
            sessions.append(line)
        elif isinstance(line, Outcome):
            key = (line.suite, line.case, line.model, line.mode, line.seed)
            if line.part == 0:
                plays[key] = []
            plays.setdefault(key, []).append(_cut(line))
    cells: dict[RowKey, _Cell] = {}
    failed: list[Outcome] = []
    for outcome in (one for parts in plays.values() for one in parts):
        row = outcome.suite, outcome.task, outcome.model, outcome.mode
        cells.setdefault(row, _Cell()).add(outcome)
        if not outcome.passed and not outcome.skipped:
            failed.append(outcome)
    return Report(
        **msgspec.structs.asdict(info),
        seconds=sum(session.seconds for session in sessions),
        complete=bool(sessions) and sessions[-1].complete,
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
    return ReportRow(
        suite=suite,
        task=task,
        model=model,
        mode=mode,
        judged=judged,
        passed=cell.passed,
        interval=_wilson(cell.passed, judged) if judged else None,
        errors=cell.errors,
        skipped=cell.skipped,
        scores={name: statistics.fmean(values) for name, values in cell.scores.items()},
        seconds=statistics.median(cell.seconds) if judged else None,
    )


def _wilson(passed: int, judged: int) -> tuple[float, float]:
    """Where a share lies with 95 % confidence."""
    share, weight = passed / judged, Z * Z / judged
    middle = share + weight / 2
    spread = Z * sqrt(share * (1 - share) / judged + weight / (4 * judged))
    return max((middle - spread) / (1 + weight), 0.0), min((middle + spread) / (1 + weight), 1.0)


def _failure(outcome: Outcome) -> FailedCase:
    return FailedCase(**{name: getattr(outcome, name) for name in FailedCase.__struct_fields__})
