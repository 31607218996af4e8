"""A thread that wants the interpreter does not wait for Python's own 5 ms."""

import sys

from personae.actors.kit.turns import TURN_SECONDS, take_short_turns


def test_turns_are_short_from_then_on() -> None:
    before = sys.getswitchinterval()
    try:
        take_short_turns()
        assert sys.getswitchinterval() == TURN_SECONDS < before / 2
    finally:
        sys.setswitchinterval(before)
