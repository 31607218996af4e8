"""Runs: what is played, how much at a time, what is written, and how an interrupted run goes on."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from scripted_target import MODELS, ScriptedTarget, Sums, SumSettings
from virtual_clock import virtual_clock

from personae.errors import Overloaded, RequestError
from personae.evals.harness.records import RESULTS, Head, Log, OutcomeRecord, read_run
from personae.evals.harness.runner import Plan, choose_models, plan, run

pytestmark = virtual_clock


def sums(body: dict) -> str:
    return str(int(body["messages"][0]["content"].split()[0]) + 1)


def head(one: Plan, **sampling: float) -> Head:
    return Head(
        name="test",
        target="a script",
        suites={"sums": {}},
        tasks={"sums": one.tasks},
        models=[model.name for model in MODELS],
        sampling={"temperature": 0.0, **sampling},
        version="0",
        started="now",
    )


async def play(
    folder: Path, one: Plan, target: ScriptedTarget, concurrency: int = 4, resume: bool = False
) -> list[OutcomeRecord]:
    seen: list[OutcomeRecord] = []
    with Log(folder, head(one), resume=resume) as log:
        await run(
            one, target, log, sampling={"temperature": 0.0}, concurrency=concurrency, on_record=seen.append
        )
        log.end(1.0, complete=True)
    return seen


def planned(count: int = 4, **more: Sequence) -> Plan:
    return plan("sums", Sums(SumSettings(count=count)), MODELS, **more)


async def test_every_combination_that_makes_sense_is_played_once(tmp_path: Path) -> None:
    target = ScriptedTarget(sums)
    seen = await play(tmp_path, planned(), target)
    combinations = {(r.case, r.model, r.mode) for r in seen}
    assert len(combinations) == len(seen) == 4 * 2 + 2 * 2
    assert ("sum/1", "poet", "free") not in combinations
    assert all(r.passed and r.prompt_tokens == 5 and r.scores == {"digits": 1.0} for r in seen)
    assert {(body["model"], body["seed"]) for body in target.asked} == {("base", 0), ("poet", 0)}
    again = read_run(tmp_path)
    assert again.records == seen
    assert again.complete


async def test_seeds_modes_and_tasks_choose(tmp_path: Path) -> None:
    seen = await play(tmp_path, planned(modes=["free"], tasks=["even"], seeds=[3, 4]), ScriptedTarget(sums))
    assert {(r.task, r.mode, r.seed) for r in seen} == {("even", "free", 3), ("even", "free", 4)}
    assert len(seen) == 8


@pytest.mark.parametrize(("limit", "most"), [(None, 5), (2, 2)])
async def test_no_more_than_so_many_at_a_time(tmp_path: Path, limit: int | None, most: int) -> None:
    target = ScriptedTarget(sums)
    one = planned(12)
    one.suite.concurrency = limit  # type: ignore[misc]  # of this instance
    await play(tmp_path, one, target, concurrency=5)
    assert target.most_at_once == most


async def test_an_interrupted_run_goes_on_where_it_was_and_tries_errors_again(tmp_path: Path) -> None:
    def stumbling(body: dict) -> str:
        if body["messages"][0]["content"].startswith("2"):
            raise RequestError("No.")
        return sums(body)

    target = ScriptedTarget(stumbling)
    with anyio.move_on_after(6.5):
        await play(tmp_path, planned(20), target, concurrency=2)
    first = read_run(tmp_path).records
    assert 0 < len(first) < 30
    failed = [r for r in first if r.error]
    assert failed
    assert failed[0].error == "RequestError: No."
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes() + b'{"type":"case","suite":"su')  # killed while writing
    target = ScriptedTarget(sums)
    seen = await play(tmp_path, planned(20), target, resume=True)
    assert len(seen) == 60 - len(first) + len(failed)
    whole = read_run(tmp_path)
    assert len({(r.case, r.model, r.mode) for r in whole.records}) == len(whole.records) == 60
    assert not [r for r in whole.records if r.error]


async def test_a_run_is_neither_overwritten_nor_continued_with_something_else(tmp_path: Path) -> None:
    one = planned(1)
    await play(tmp_path, one, ScriptedTarget(sums))
    with pytest.raises(RequestError, match="--resume"):
        Log(tmp_path, head(one))
    with pytest.raises(RequestError, match="another sampling"):
        Log(tmp_path, head(one, seed=4), resume=True)


async def test_a_server_that_is_full_is_asked_again_later(tmp_path: Path) -> None:
    begun = anyio.current_time()

    def full_at_first(body: dict) -> str:
        if anyio.current_time() - begun < 20:
            raise Overloaded("Full.", retry_after=6.0)
        return sums(body)

    records = await play(tmp_path, planned(1, modes=["free"]), ScriptedTarget(full_at_first))
    assert [record.passed for record in records] == [True, True]
    assert anyio.current_time() - begun < 60


async def test_what_a_case_stumbles_over_is_written_and_costs_no_other(tmp_path: Path) -> None:
    def broken(body: dict) -> str:
        if body["messages"][0]["content"].startswith("1 "):
            raise ZeroDivisionError("oh")
        return sums(body)

    seen = await play(tmp_path, planned(14, modes=["free"]), ScriptedTarget(broken))
    by_case = {r.case: r for r in seen if r.model == "base"}
    assert by_case["sum/1"].error == "ZeroDivisionError: oh"
    assert by_case["sum/13"].skipped == "unlucky"
    assert by_case["sum/2"].passed


async def test_models_are_chosen_by_name_and_a_wrong_one_is_named() -> None:
    assert choose_models(MODELS, ()) == list(MODELS)
    assert choose_models(MODELS, ["poet"]) == [MODELS[1]]
    renamed = [type(MODELS[0])("qwen", True), MODELS[1]]
    assert choose_models(renamed, ["base", "qwen"]) == [renamed[0]]
    with pytest.raises(RequestError, match=r"2 base models.*base, qwen"):
        choose_models([*MODELS, renamed[0]], ())
    with pytest.raises(RequestError, match="'bard'"):
        choose_models(MODELS, ["bard"])
