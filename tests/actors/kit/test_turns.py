"""A thread that wants the interpreter does not wait for 5 ms."""

import sys
import threading
import time

from personae.actors.kit.turns import TURN_SECONDS, take_short_turns


def wait() -> float:
    """The median wait of a thread that lets another compute."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    other = threading.Thread(target=compute)
    other.start()
    try:
        waits = []
        for _ in range(40):
            begun = time.perf_counter()
            time.sleep(0)  # gives the interpreter away
            waits.append(time.perf_counter() - begun)
        return sorted(waits)[20]
    finally:
        over.set()
        other.join()


def test_who_gives_the_interpreter_away_has_it_back_soon() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.02)
        long = wait()
        take_short_turns()
        assert sys.getswitchinterval() == TURN_SECONDS
        assert wait() < long / 2
    finally:
        sys.setswitchinterval(before)
