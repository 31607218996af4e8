"""The engine core's process with a weak spot, for `evals/chaos.py --crash`: after SIGUSR2 its next step
raises.

    python -m personae.evals.crashing_core FD

Nobody but who starts the process can choose this module, and nothing that a client sends reaches it.
"""

import signal
from typing import Any

from personae.actors.enginecore import core
from personae.engine.step import StepEngine


def plant() -> None:
    """Make the step after a signal fail."""
    forward = StepEngine.forward
    struck: list[int] = []

    def fragile(self: StepEngine, packed: Any, overlap: Any) -> Any:
        if struck:
            raise RuntimeError("planted: the device is gone")
        return forward(self, packed, overlap)

    signal.signal(signal.SIGUSR2, lambda number, frame: struck.append(number))
    StepEngine.forward = fragile  # type: ignore[method-assign, assignment]  # that is the weak spot


if __name__ == "__main__":
    plant()
    core.main()
