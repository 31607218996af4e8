"""What an open console costs, from windows with and without it."""

import pytest

from personae.evals.console_cost import Window, interval, report


def test_the_interval_holds_the_median_and_is_narrow_where_all_are_equal() -> None:
    assert interval([0.5] * 9) == (0.5, 0.5, 0.5)
    middle, low, high = interval([-0.2, -0.1, 0.0, 0.1, 0.2])
    assert middle == 0.0
    assert -0.2 <= low < middle < high <= 0.2


def test_a_console_that_takes_a_hundredth_of_the_server_is_reported_as_that() -> None:
    without = Window(seconds=10.0, tokens=1000.0, server=10.0, frontend=1.0)
    with_it = Window(seconds=10.0, tokens=990.0, server=10.0, frontend=1.09, polls=5)
    lines = report([(without, with_it)] * 4)
    assert "20 polls" in lines[0]
    assert "tokens/s: 100.0, with a console 99.0; by pairs -1.00%" in lines[2]
    assert "tokens for a processor second of the server: 100.0" in lines[3]
    more = 1000 * (1.09 - 0.99) / 5
    assert f"a poll: {more:.2f} ms more of the frontend, 1.000% of the server's" in lines[-1]


@pytest.mark.parametrize("polls", [0, 7])
def test_a_window_without_polls_does_not_divide_by_them(polls: int) -> None:
    window = Window(seconds=1.0, tokens=1.0, server=1.0, frontend=0.1, polls=polls)
    assert "0.000%" in report([(window, window)])[-1]
