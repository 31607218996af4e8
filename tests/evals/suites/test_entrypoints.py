"""vLLM's and llama.cpp's entry-point tests, as the suite restates them, on the bundled model."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from real_server import Running, running

from personae.api.options import ServeOptions
from personae.evals.harness.target import TargetModel
from personae.evals.suites.entrypoints.kit import CHECKS, Restated, Server, Unlike, expect
from personae.evals.suites.entrypoints.suite import Entrypoints, EntrypointSettings, outcome
from personae.evals.suites.entrypoints.table import table

ROOT = Path(__file__).resolve().parents[3]
UNIQUE = {one.run: one for one in CHECKS}.values()


def named(one: Restated) -> str:
    return f"{one.run.__module__.rpartition('.')[2]}.{one.run.__name__}"


def marked(one: Restated) -> object:
    return pytest.param(one, id=named(one))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(ServeOptions(Path("demo"), device="cpu")) as server:
        yield server


async def judge(one: Restated, url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        found = await outcome(one, Server(client, "personae-demo", seed=0))
    return "" if found.passed else found.expected


@pytest.mark.parametrize("one", [marked(one) for one in UNIQUE])
def test_the_server_does_what_the_other_projects_test_checks(one: Restated, server: Running) -> None:
    assert anyio.run(judge, one, server.url) == ""


def test_whatever_an_answer_lacks_is_a_failure_that_says_what_was_expected() -> None:
    async def unlike(server: Server) -> None:
        expect(False, "a kind word")

    async def shapeless(server: Server) -> None:
        raise KeyError("choices")

    for run, delivered in ((unlike, "a kind word"), (shapeless, "KeyError")):
        found = anyio.run(outcome, Restated("x", "y", "z", run, "on purpose"), None)
        assert (found.passed, found.note) == (False, "on purpose")
        assert delivered in found.expected
    with pytest.raises(Unlike, match="three"):
        expect([], "three")


def test_every_case_has_a_name_of_its_own_and_is_put_to_the_base() -> None:
    suite = Entrypoints(EntrypointSettings())
    cases = suite.cases()
    assert len({case.id for case in cases}) == len(cases) > 90
    for model in (TargetModel("base", True), TargetModel("adapter", False)):
        assert suite.plays(cases[0], model.name, "free", base=model.base) is model.base


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
