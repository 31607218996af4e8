"""The comparison of bound answers with free ones: same prompts, same lengths, the same time."""

import anyio
import pytest
import typer
from fake_engine import FakeEngine
from live_server import serving
from typer.testing import CliRunner

from personae.api.app import create_app
from personae.errors import RequestError
from personae.evals.bench import masks
from personae.evals.bench.bound import LOADS, requests, seconds_a_token, wave
from personae.evals.bench.client import Answer, Request


def answer(sent: float, first: float, gaps: list[float], counts: list[int]) -> Answer:
    return Answer(Request("/", {}), sent, first=first, gaps=gaps, counts=counts)


def test_time_counts_while_all_answers_are_being_written() -> None:
    early = answer(0.0, 1.0, [5.0, 1.0, 1.0, 1.0], [1, 2, 3, 4, 5])  # waits for the other, ends at 9
    late = answer(0.5, 5.0, [1.0, 2.0, 1.0, 9.0], [1, 2, 4, 5, 6])  # begins at 5.5, two tokens in one event
    assert seconds_a_token([early, late]) == pytest.approx((3 / 3 + 3 / 3) / 2)


@pytest.mark.parametrize("load", LOADS)
def test_bound_and_free_answers_differ_in_nothing_but_the_schema(load: str) -> None:
    free, bound = (requests(load, "m", 4, 128, "a round", bound=bound) for bound in (False, True))
    assert all("response_format" in request.body for request in bound)
    assert len({request.body["prompt"] for request in bound}) == 4
    for request in bound:
        del request.body["response_format"]
    assert free == bound


@pytest.mark.parametrize("load", LOADS)
def test_a_wave_tells_how_many_tokens_there_were_at_each_event(load: str) -> None:
    with serving(create_app(FakeEngine("x" * 4000, max_model_len=4096))) as url:
        answers = anyio.run(wave, url, requests(load, "base", 3, 128, "a round", bound=False))
    assert [one.counts[-1] for one in answers] == [128] * 3
    assert all(one.counts == sorted(one.counts) and len(one.counts) == len(one.gaps) + 1 for one in answers)


def test_an_answer_that_ends_before_its_budget_is_an_error() -> None:
    sent = requests("closing", "base", 3, 128, "a round", bound=False)
    sent[1].body["stop"] = "xxxxx"
    refused = pytest.raises(RequestError, match="ended before its budget")
    with serving(create_app(FakeEngine("x" * 4000, max_model_len=4096))) as url, refused:
        anyio.run(wave, url, sent)


@pytest.mark.parametrize("options", [["--steps", "4"], ["--budget", "160"]])
def test_the_engine_by_itself_says_where_the_difference_goes(options: list[str]) -> None:
    command = typer.Typer()
    command.command()(masks.main)
    done = CliRunner().invoke(command, ["--rows", "2", "--rounds", "1", *options])
    assert done.exit_code == 0, done.output
    rows = {line.split()[1]: line.split()[3:6:2] for line in done.output.splitlines() if line.startswith("│")}
    assert set(rows) == set(masks.PARTS)
    assert rows["asking"][0] == "0", "of free rows"
    assert int(rows["masks"][1]) > int(rows["masks"][0]), "free rows only find that there is nothing to fill"
    assert (int(rows["asking"][1]) > 0) == ("--budget" in options)
