"""How many replicas only compute prompts follows the load: decided alone, and played in the simulator."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest

from personae.actors.messages import ChangeRole, Message
from personae.actors.options import PrefillReplicas, parse_prefill_replicas
from personae.actors.replicas.dispatcher import Dispatcher
from personae.actors.replicas.launch import check_prefill
from personae.actors.replicas.roles import CALM, FULL, LEAST, OVERFULL, PATIENCE, RoleLoad, RolePolicy
from personae.actors.simulation.scenario import Scenario
from personae.actors.simulation.trouble import Costs
from personae.actors.simulation.workload import SimulatedWorkload, TracedPrompt
from personae.actors.simulation.world import simulate
from personae.errors import LoadError


def load(
    prompts: float,
    prefill: int = 0,
    serving: int = 4,
    rows: int = 8,
    longer: float = 0.2,
    step: Callable[[int], float] = lambda rows: 0.01 + 0.001 * rows,
) -> RoleLoad:
    return RoleLoad(serving, prefill, prompts, longer, rows, 32, step)


@pytest.mark.parametrize(
    ("prompts", "serving", "best"),
    [
        (0.0, 4, 0),
        (LEAST / 2, 4, 0),  # an engine would be idle most of the time
        (LEAST, 4, 1),
        (FULL, 4, 1),
        (FULL + 0.01, 4, 2),
        (1.5, 4, 2),
        (1.0, 2, 0),  # one is not enough, and two would leave none
        (0.5, 1, 0),
    ],
)
def test_so_many_engines_compute_prompts_as_these_need(prompts: float, serving: int, best: int) -> None:
    assert RolePolicy().best(load(prompts, serving=serving)) == best


def test_answers_without_a_slot_at_the_other_engines_leave_no_engine_for_prompts() -> None:
    assert RolePolicy().best(load(0.5, rows=96)) == 1
    assert RolePolicy().best(load(0.5, rows=97)) == 0


def test_no_engine_leaves_if_more_rows_would_make_steps_longer_than_prompts_do() -> None:
    costly = load(0.5, serving=2, rows=16, longer=0.05, step=lambda rows: 0.01 * rows)
    assert RolePolicy().best(costly) == 0
    assert RolePolicy().best(costly._replace(longer=0.09)) == 1


def test_more_engines_compute_prompts_after_some_patience_and_fewer_after_a_calm_time() -> None:
    policy = RolePolicy()
    assert [policy.wanted(second, load(0.5)) for second in range(6)] == [0] * int(PATIENCE) + [1]
    wanted = [policy.wanted(100 + second, load(0.0, prefill=1)) for second in range(31)]
    assert wanted == [1] * int(CALM) + [0]


def test_a_load_that_comes_and_goes_changes_nothing() -> None:
    policy = RolePolicy()
    assert {policy.wanted(second, load(0.5 if second % 4 else 0.0)) for second in range(100)} == {0}


@pytest.mark.parametrize("prompts", [0.65, 0.8, OVERFULL])
def test_a_load_about_a_limit_keeps_the_engines_that_there_are(prompts: float) -> None:
    assert RolePolicy().best(load(prompts, prefill=1)) == 1
    assert RolePolicy().best(load(prompts, prefill=2)) == 2


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("3", 3), ("auto", "auto")])
def test_the_option_is_a_number_or_auto(text: str, value: int | str) -> None:
    assert parse_prefill_replicas(text) == value


@pytest.mark.parametrize("text", ["-1", "1.5", "many", "", "٣"])
def test_any_other_value_of_the_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of engines of 0 or more, or auto"):
        parse_prefill_replicas(text)


@pytest.mark.parametrize(
    ("prefill", "least", "most", "error"),
    [
        (0, 1, 1, None),
        (1, 2, 2, None),
        (2, 2, 4, "--prefill-replicas 2 leaves no engine of --replicas 2 for answers."),
        ("auto", 1, 4, None),
        ("auto", 1, 1, "--prefill-replicas auto needs --replicas of 2 or more."),
    ],
)
def test_an_option_that_leaves_no_engine_for_answers_is_refused(
    prefill: PrefillReplicas, least: int, most: int, error: str | None
) -> None:
    with nullcontext() if error is None else pytest.raises(LoadError, match=re.escape(error)):
        check_prefill(prefill, least, most)


def short_and_long_and_short() -> Scenario:
    """Two engines: short prompts for 80 seconds, and long ones among them from second 15 to 40."""
    arrivals = [(at / 2, TracedPrompt((at,), 6, 40)) for at in range(160)]
    return two_engines(arrivals + [(15.3 + at, long_prompt(at)) for at in range(25)])


def long_prompt(number: int) -> TracedPrompt:
    """It takes half a second, and nothing of it is cached."""
    return TracedPrompt(tuple(range(1000 * number, 1000 * number + 40)), 640, 20)


def two_engines(arrivals: list[tuple[float, TracedPrompt]]) -> Scenario:
    arrivals = sorted(arrivals)
    workload = SimulatedWorkload(
        requests=len(arrivals),
        trace=tuple(at for at, _ in arrivals),
        prompts=tuple(prompt for _, prompt in arrivals),
        adapters=0,
        schemas=0.0,
        siblings=0.0,
        leaves=0.0,
        slow=0.0,
        speculates=False,
    )
    costs = Costs(step=0.03, token=0.0008, row=0.0001)
    return Scenario(
        1, workload, costs, pages=2048, page_size=16, batch=512, lull=1000, replicas=2, transfer=True
    )


def test_prompts_that_a_prefill_engine_cannot_compute_in_time_are_computed_by_the_others() -> None:
    scenario = two_engines([(at / 3, long_prompt(at)) for at in range(45)])  # 1.5 seconds of them a second
    report = simulate(replace(scenario, prefill=1))
    assert max(report.waits) < 4.0  # the queue would grow to more than 10 seconds
    assert 20 <= report.prefilled <= 40


def test_an_engine_computes_only_prompts_while_long_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[ChangeRole] = []
    handle = Dispatcher._handle_replica

    def noted(self: Dispatcher, message: Message) -> None:
        if isinstance(message, ChangeRole):
            changes.append(message)
        handle(self, message)  # type: ignore[arg-type]  # as the original

    monkeypatch.setattr(Dispatcher, "_handle_replica", noted)
    fixed, chosen = (simulate(replace(short_and_long_and_short(), prefill=count)) for count in (0, "auto"))
    assert [change.prefill for change in changes] == [True, False]
    assert all(before.replica == after.replica for before, after in pairwise(changes))
    assert fixed.prefilled == 0
    assert 10 <= chosen.prefilled <= 25
    before, after = (sum(pause > 0.2 for pause in report.pauses) for report in (fixed, chosen))
    assert before >= 20
    assert after <= before / 3
    assert chosen.outcomes == fixed.outcomes


def test_roles_follow_the_load_while_engines_die_and_come_and_go() -> None:
    scenario = replace(short_and_long_and_short(), prefill="auto", replicas=3, transfer_fails=0.1)
    report = simulate(replace(scenario, faults_every=3.0, kinds=("kill", "scale")))
    assert report.faults.keys() == {"kill", "scale"}
    assert report.prefilled
    assert report.outcomes.keys() <= {"stop", "length", "unlucky"}
