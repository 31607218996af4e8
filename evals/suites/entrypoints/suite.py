"""vLLM's and llama.cpp's entry-point tests, restated: each case checks the same of an answer, over HTTP, for
any server. Nothing is downloaded, and nothing depends on a model's knowledge.

If we intentionally differ, the case checks our behaviour instead, and its note says how it differs.
"""

from collections.abc import Sequence
from typing import ClassVar

import httpx

from personae.evals.harness.subject import Subject
from personae.evals.suites.entrypoints import (  # noqa: F401  # they register their checks
    llama_cpp,
    vllm_chat,
    vllm_completions,
    vllm_routes,
    vllm_tools,
)
from personae.evals.suites.entrypoints.kit import CHECKS, Restated, Server, Unlike
from personae.evals.suites.suite import FREE, Case, Outcome, Skipped, Suite, SuiteSettings


class EntrypointSettings(SuiteSettings, frozen=True):
    """seconds: the time limit of one request."""

    seconds: float = 300.0


class Entrypoints(Suite):
    """One case per test of theirs. Several of them may share one check."""

    settings: ClassVar = EntrypointSettings
    about: ClassVar = "what vLLM's and llama.cpp's own entry-point tests check, asked of a server"
    modes: ClassVar = (FREE,)
    concurrency: ClassVar = 1  # some checks read the server's counters

    def __init__(self, settings: EntrypointSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """A row of the report for each of their files."""
        return [Case(one.id, f"{one.project} {one.file}", one) for one in CHECKS]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Only the base, because nothing here depends on the weights."""
        return mode == FREE and base

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """Passed if the server does what the case expects."""
        if subject.target.url is None:
            raise Skipped("it asks over HTTP: run with --url or --serve")
        key = subject.target.key
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=subject.target.url, headers=headers, timeout=self._settings.seconds
        ) as client:
            return [await outcome(case.data, Server(client, subject.model, subject.sampling["seed"]))]


async def outcome(one: Restated, server: Server) -> Outcome:
    """The outcome of one check. An answer with another shape is a failure like any other."""
    try:
        await one.run(server)
    except Unlike as unlike:
        return Outcome(passed=False, expected=str(unlike), note=one.differs)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        found = f"an answer of the expected shape ({type(error).__name__}: {error})"
        return Outcome(passed=False, expected=found, note=one.differs)
    return Outcome(passed=True, note=one.differs)
