"""What a suite is: cases, and how one of them is put to one model in one mode.

A suite is one file in this folder with one class that keeps the Protocol `Suite`; `registry.py` knows it by
name. It says what is right and wrong; targets, concurrency, records and reports are not its business.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from personae.evals.harness.subject import Subject

FREE, CONSTRAINED = "free", "constrained"


class SuiteSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be set of a suite, as `--set SUITE.NAME=VALUE`; suites add fields of their own.

    models: only these of the models that are asked, `base` for the first base.
    """

    models: tuple[str, ...] = ()


class Case(msgspec.Struct, frozen=True):
    """One thing to be tried. `id` is unique in its suite, `task` is its row of the report."""

    id: str
    task: str
    data: Any = None


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a case.

    scores: from 0 to 1, averaged in the report. values: measured quantities, shown by median and maximum.
    prompt, expected, answer, note: for whoever reads why it failed.
    """

    passed: bool
    scores: dict[str, float] = {}
    values: dict[str, float] = {}
    prompt: str = ""
    expected: str = ""
    answer: str = ""
    note: str = ""


class Skipped(Exception):
    """Raised by `play`: this case cannot be tried on this target; the message says why."""


class Suite(Protocol):
    """One suite. The class is called with its settings, and reads its data then."""

    settings: ClassVar[type[SuiteSettings]]
    about: ClassVar[str]
    """One line for people."""
    modes: ClassVar[tuple[str, ...]]
    """Run unless others are asked for; `plays` may know more."""
    concurrency: ClassVar[int | None] = None
    """The most cases at a time, if the suite minds."""

    def cases(self) -> Sequence[Case]:
        """All cases, in the report's order. Raises RequestError when the data are missing or malformed."""

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Whether the case makes sense for this model, which is an adapter unless `base`, in this mode."""

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Try it: one outcome, or several of one kind. Raises Skipped, or PersonaeError if it went wrong."""

    def close(self) -> None:
        """Let go of what playing has opened."""
        return
