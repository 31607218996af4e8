"""Steps are expected to take what they took lately, whatever the first of them, or a stall, took."""

import random

import pytest

from personae.engine.scheduling.step_time import StepTime


def seconds(rows: int, prompts: int) -> float:
    return 0.012 + 0.0008 * rows + 0.0003 * prompts


def test_rows_and_prompts_are_told_apart_after_a_first_step_that_took_for_ever() -> None:
    times, rng = StepTime(), random.Random(0)
    assert times.of(5, 10) == 0
    assert times.room(5, 1.0) == 0.0
    times.observe(0, 64, 2.2)
    times.observe(1, 0, 0.5)
    for step in range(400):
        rows, prompts = rng.randint(1, 16), rng.randint(8, 90) if step % 4 == 0 else 0
        stall = rng.uniform(0.05, 0.3) if rng.random() < 0.1 else 0.0
        times.observe(rows, prompts, seconds(rows, prompts) + stall)
    assert times.of(8, 0) == pytest.approx(seconds(8, 0), rel=0.15)
    assert times.of(8, 60) == pytest.approx(seconds(8, 60), rel=0.15)
    assert times.room(8, seconds(8, 60)) == pytest.approx(60, rel=0.25)
    assert times.room(8, 0.001) == 0


def test_a_change_of_speed_is_noticed_within_some_thirty_steps() -> None:
    times = StepTime()
    for step in range(300):
        times.observe(1 + step % 16, 0, seconds(1 + step % 16, 0))
    for step in range(30):
        times.observe(1 + step % 16, 0, 3 * seconds(1 + step % 16, 0))
    assert times.of(8, 0) == pytest.approx(3 * seconds(8, 0), rel=0.3)
