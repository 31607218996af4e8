"""How long a thread may keep the interpreter lock while another thread wants it.

Python's default, 5 ms, suits programs whose threads take turns at long work. Here one thread runs steps, and
releases the lock in many library calls; other threads read adapters or handle messages meanwhile. After each
release it may have to wait until such a thread's interval ends. Placing an adapter of 0.5 MB while another
thread read one took up to 14 ms with the default, and 1.4 ms with half a millisecond. No thread did less work
for it.
"""

import sys

TURN_SECONDS = 0.0005


def shorten_switch_interval() -> None:
    """Call it in a process's main function."""
    sys.setswitchinterval(TURN_SECONDS)
