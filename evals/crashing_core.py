"""The engine core's process with a planted fault, for `evals/chaos.py`: after SIGUSR2 its next step raises,
and so does a step that admits a prompt of `POISON` tokens.

    python -m personae.evals.crashing_core FD
    python -m personae.evals.crashing_core dial FD

Only the program that starts the process can choose this module. Nothing that a client sends can reach it.
"""

import signal
from typing import Any

from personae.actors.enginecore import core
from personae.engine.plan import StepPlan
from personae.engine.step import StepEngine

POISON = (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7)


def plant() -> None:
    """Make the step after a signal fail, and each step that admits poison."""
    forward, prepare = StepEngine.forward, StepEngine.prepare
    struck: list[int] = []

    def fragile(self: StepEngine, packed: Any, overlap: Any) -> Any:
        if struck:
            raise RuntimeError("planted: the device is gone")
        return forward(self, packed, overlap)

    def poisoned(self: StepEngine, plan: StepPlan, grammars: Any) -> Any:
        if any(admission.log.tokens[: len(POISON)] == POISON for admission in plan.admissions):
            raise RuntimeError("planted: poison")
        return prepare(self, plan, grammars)

    signal.signal(signal.SIGUSR2, lambda number, frame: struck.append(number))
    StepEngine.prepare = poisoned  # type: ignore[method-assign]  # that is another
    StepEngine.forward = fragile  # type: ignore[method-assign, assignment]  # that is the weak spot


if __name__ == "__main__":
    plant()
    core.main()
