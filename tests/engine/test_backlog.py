"""How long the queue is."""

import pytest
from fake_executor import make_log

from personae.engine.backlog import FIRST_ANSWER, MEMORY, Backlog


def test_what_waits_over_the_measured_rate_is_the_time_to_come_back() -> None:
    backlog = Backlog()
    for number in range(10):
        backlog.wait(make_log(f"{number}", range(80), max_tokens=20))
    assert backlog.tokens == 1000
    assert backlog.seconds == 0, "nothing was measured"
    backlog.measured(500, 1.0)
    assert backlog.seconds == pytest.approx(2.0)
    backlog.leave("3")
    backlog.leave("3")
    backlog.leave("nobody")
    assert backlog.tokens == 900


def test_one_that_waits_again_counts_once_and_only_for_what_is_left() -> None:
    backlog = Backlog()
    backlog.wait(make_log("a", range(10), max_tokens=6))
    backlog.wait(make_log("a", range(10), emitted=(1, 2), max_tokens=6))
    assert backlog.tokens == 12 + 4


def test_long_answers_are_expected_to_be_as_long_as_answers_are() -> None:
    backlog = Backlog()
    backlog.wait(make_log("a", range(10), max_tokens=100_000))
    assert backlog.tokens == 10 + FIRST_ANSWER
    for _ in range(200):
        backlog.answered(30)
    backlog.wait(make_log("a", range(10), max_tokens=100_000))
    assert backlog.tokens == 40


def test_the_rate_follows_what_is_measured_and_forgets() -> None:
    backlog = Backlog()
    assert backlog.rate == 0
    for _ in range(int(10 * MEMORY)):
        backlog.measured(100, 1.0)
    assert backlog.rate == pytest.approx(100)
    for _ in range(int(10 * MEMORY)):
        backlog.measured(1000, 1.0)
    assert backlog.rate == pytest.approx(1000, rel=0.01)
