"""Back's process with a device that only takes time, for `evals/bench/gaps.py`.

    python -m personae.evals.bench.paced_back STEP_SECONDS FD

Everything else is the real thing: scheduler, actors, the executor's thread, the line to Front.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from personae.actors import back
from personae.actors.script import Script
from personae.engine.plan import StepPlan, StepResult
from personae.grammar.backend import BoundGrammar
from personae.grammar.spec import GrammarSpec
from personae.lora.adapter import Adapter

TOKEN = 7  # what it samples, always


class PacedDevice:
    """Each step blocks its thread for so many seconds, as a forward pass on a CPU does, and holds no lock."""

    runs_ahead = False
    holdings = (0, 0, 0)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def forward(self, plan: StepPlan, grammars: Mapping[GrammarSpec, BoundGrammar], /) -> None:
        """Take the time."""
        time.sleep(self._seconds)

    def sample(self, plan: StepPlan, forward: None, /) -> StepPlan:
        """Nothing to do."""
        return plan

    def finish(self, launched: StepPlan, /) -> StepResult:
        """The same token for every row."""
        return StepResult(launched.step, tuple(TOKEN if row.samples else None for row in launched.rows))

    def placing(self, adapter: Adapter, /) -> Iterator[None]:
        """Every adapter is there at once."""
        return iter(())

    def release(self, digest: str, /) -> None:
        """It needs no place."""


def paced(script: Script, seconds: float) -> Script:
    """The same script on such a device."""
    return replace(script, build_step_engine=lambda: PacedDevice(seconds))


def main() -> None:
    """Be Back."""
    seconds = float(sys.argv[1])
    assemble = back.assemble

    def assembled(*arguments: object) -> object:
        whole = assemble(*arguments)  # type: ignore[arg-type]  # as they came
        return replace(whole, script=paced(whole.script, seconds))

    back.assemble = assembled  # type: ignore[assignment]  # that is all that differs
    back.main()


if __name__ == "__main__":
    main()
