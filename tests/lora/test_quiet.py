"""Work that nobody waits for is done by threads that step back, and by nobody else."""

import os
import sys
import threading

import pytest

from personae.lora.quiet import QuietThreads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own elsewhere")
def test_they_stand_behind_the_thread_that_asks_which_stays_what_it_was() -> None:
    before = niceness()
    assert QuietThreads(1).call(niceness) == min(before + 10, 19)
    assert niceness() == before


def test_what_the_function_returns_or_raises_comes_back() -> None:
    threads = QuietThreads(2)
    assert threads.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.call(divmod, 7, 0)
