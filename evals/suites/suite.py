"""The interface of a suite: its cases, and how to play one of them with one model in one mode.

A suite is one file in this folder with one class that follows the Protocol `Suite`; `registry.py` knows it by
name. A suite decides what is right and wrong. Targets, concurrency, records and reports are handled
elsewhere.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from personae.evals.harness.subject import Subject

FREE, CONSTRAINED = "free", "constrained"


class SuiteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a suite, as `--set SUITE.NAME=VALUE`. Suites add their own fields.

    models: only these of the run's models, `base` for the first base.
    """

    models: tuple[str, ...] = ()


class Case(msgspec.Struct, frozen=True):
    """One test case. `id` is unique in its suite, `task` is its row of the report."""

    id: str
    task: str
    data: Any = None


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of a case.

    scores: from 0 to 1, averaged in the report. values: measured quantities, shown by median and maximum.
    prompt, expected, answer, note: for a reader who wants to know why it failed.
    """

    passed: bool
    scores: dict[str, float] = {}
    values: dict[str, float] = {}
    prompt: str = ""
    expected: str = ""
    answer: str = ""
    note: str = ""


class Skipped(Exception):
    """Raised by `play` if the case cannot run on this target. The message says why."""


class Suite(Protocol):
    """One suite. The class is called with its settings, and reads its data then."""

    settings: ClassVar[type[SuiteSettings]]
    about: ClassVar[str]
    """A one-line description."""
    modes: ClassVar[tuple[str, ...]]
    """The default modes. `plays` may support more."""
    concurrency: ClassVar[int | None] = None
    """The most cases at a time, if the suite limits them."""

    def cases(self) -> Sequence[Case]:
        """All cases, in the report's order. Raises RequestError if the data are missing or malformed."""

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Whether the case makes sense in this mode for this model, which is an adapter unless `base`."""

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Run the case: one outcome, or several of one kind. Raises Skipped, or PersonaeError on an error."""

    def close(self) -> None:
        """Release what playing has opened."""
        return
