"""A run on disk: a folder whose `results.jsonl` has a head, and one line per outcome.

Lines are only appended. So an interrupted run is continued by playing the cases without a line. An unfinished
last line is cut off then.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from personae.errors import RequestError

RESULTS = "results.jsonl"


class Head(msgspec.Struct, tag_field="type", tag="run", kw_only=True):
    """What was requested. `suites` maps each suite to its settings, `tasks` to its rows in order. Adapters
    are compared with `base`, if it is part of the run. `plays`: how many cases were to be played; 0 if
    that is not known."""

    name: str
    target: str
    suites: dict[str, dict[str, str]]
    tasks: dict[str, list[str]]
    models: list[str]
    sampling: dict[str, float | int]
    version: str
    started: str
    base: str = ""
    plays: int = 0


class OutcomeRecord(msgspec.Struct, tag_field="type", tag="case", omit_defaults=True, kw_only=True):
    """One outcome. `part` numbers the outcomes of one case. With `error` or `skipped` nothing was judged."""

    suite: str
    task: str
    case: str
    model: str
    mode: str
    seed: int = 0
    part: int = 0
    passed: bool = False
    scores: dict[str, float] = {}
    values: dict[str, float] = {}
    prompt: str = ""
    expected: str = ""
    answer: str = ""
    note: str = ""
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def judged(self) -> bool:
        """Whether it counts."""
        return not self.error and not self.skipped


class SessionRecord(msgspec.Struct, tag_field="type", tag="session", kw_only=True):
    """The end of one session: how long it took, and whether everything has been played."""

    seconds: float
    complete: bool


Line = Head | OutcomeRecord | SessionRecord
Key = tuple[str, str, str, str, int]


def key_of(record: OutcomeRecord) -> Key:
    """Identifies a play."""
    return record.suite, record.case, record.model, record.mode, record.seed


class Run(msgspec.Struct):
    """A run that was read from disk."""

    head: Head
    records: list[OutcomeRecord]
    seconds: float = 0.0
    complete: bool = False


def read_run(folder: Path) -> Run:
    """The run in a folder or file. Raises RequestError if there is none, or it cannot be read.

    If a case was played again after an error, the later outcome counts.
    """
    path = folder / RESULTS if folder.is_dir() else folder
    lines = list(_lines(path))
    if not lines or not isinstance(lines[0], Head):
        raise RequestError(f"{path} is no run: its first line has to be its head.", param="run")
    plays: dict[Key, list[OutcomeRecord]] = {}
    for line in lines:
        if isinstance(line, OutcomeRecord):
            if line.part == 0:
                plays[key_of(line)] = []
            plays.setdefault(key_of(line), []).append(line)
    sessions = [line for line in lines if isinstance(line, SessionRecord)]
    return Run(
        lines[0],
        [record for parts in plays.values() for record in parts],
        sum(session.seconds for session in sessions),
        bool(sessions) and sessions[-1].complete,
    )


def _lines(path: Path) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    try:
        raw = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}.", param="run") from None
    for number, line in enumerate(raw[:-1], 1):  # what follows the last line break was not finished
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise RequestError(f"{path}, line {number}: {error}.", param="run") from None


class Log:
    """A run that is being written; a context manager. It opens an existing run to continue it."""

    def __init__(self, folder: Path, head: Head, *, resume: bool = False) -> None:
        """Raises RequestError if there is a run that may not be continued, or a run with other settings."""
        self.path = folder / RESULTS
        self.done: set[Key] = set()
        exists = self.path.exists() and self.path.stat().st_size > 0
        if exists and not resume:
            raise RequestError(f"{folder} has results already; `--resume` continues them.", param="out")
        folder.mkdir(parents=True, exist_ok=True)
        if exists:
            run = read_run(folder)
            if difference := _difference(run.head, head):
                raise RequestError(f"{folder} was begun with another {difference}.", param=difference)
            failed = {key_of(record) for record in run.records if record.error}
            self.done = {key_of(record) for record in run.records} - failed
            self.records = [record for record in run.records if key_of(record) in self.done]
            whole = self.path.read_bytes().rpartition(b"\n")[0]
            self.path.write_bytes(whole + b"\n")
        else:
            self.records = []
        self._file = self.path.open("ab")
        if not exists:
            self._add([head])

    def add(self, records: list[OutcomeRecord]) -> None:
        """Write the outcomes of one play."""
        self.records += records
        self._add(records)

    def end(self, seconds: float, *, complete: bool) -> None:
        """Write how the session ended."""
        self._add([SessionRecord(seconds=seconds, complete=complete)])

    def _add(self, lines: list[OutcomeRecord] | list[Head] | list[SessionRecord]) -> None:
        self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _difference(old: Head, new: Head) -> str:
    """The setting that differs and may not change when a run is continued."""
    if old.sampling != new.sampling:
        return "sampling"
    for name, settings in new.suites.items():
        if name in old.suites and old.suites[name] != settings:
            return f"setting of suite {name}"
    return ""


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
