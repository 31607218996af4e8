"""How long a thread may keep the interpreter's lock while another wants it.

Python's own measure, 5 ms, is that of programs whose threads take turns at long work. Here one thread runs
steps, and gives the lock away with every call of a library that does without it; beside it others read
adapters or take in messages. Each time it may have to wait for the whole turn of one of them: to place an
adapter of 0.5 MB beside a reader took up to 14 ms, with turns of half a millisecond 1.4. Nobody did less work
for it.
"""

import sys

TURN_SECONDS = 0.0005


def shorten_switch_interval() -> None:
    """For a process's main function."""
    sys.setswitchinterval(TURN_SECONDS)
