"""A thread that wants the interpreter does not wait for Python's default of 5 ms."""

import sys

from personae.actors.kit.switch_interval import TURN_SECONDS, shorten_switch_interval


def test_the_switch_interval_is_short() -> None:
    before = sys.getswitchinterval()
    try:
        shorten_switch_interval()
        assert sys.getswitchinterval() == TURN_SECONDS < before / 2
    finally:
        sys.setswitchinterval(before)
