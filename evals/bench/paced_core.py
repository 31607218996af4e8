"""The engine core's process with a model that only takes time, for `evals/bench/gaps.py`.

    python -m personae.evals.bench.paced_core STEP_SECONDS FD

Everything else is real: scheduler, actors, the executor's thread, packing, sampling, the connection to the
frontend.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from personae.actors.enginecore import core
from personae.actors.spec import EngineSpec
from personae.engine.config import ModelConfig
from personae.engine.step import StepEngine

TOKEN = 7  # always the likeliest


class PacedModel:
    """Each forward pass blocks its thread for a fixed time, as on a CPU, and holds no lock."""

    def __init__(self, config: ModelConfig, seconds: float) -> None:
        self.config = config
        self._seconds = seconds

    def forward(
        self,
        tokens: torch.Tensor,
        positions: object,
        kv: object,
        batch: object,
        lora: object = None,
        overlap: Callable[[], None] | None = None,
        parts: object = None,
    ) -> torch.Tensor:
        """Take the time, including the overlap callback. tokens [T]; returns [T, 1]."""
        begun = time.perf_counter()
        if overlap is not None:
            overlap()
        time.sleep(max(0.0, self._seconds - (time.perf_counter() - begun)))
        return torch.zeros(len(tokens), 1)

    def logits(self, hidden: torch.Tensor, output: object, logit_mask: object = None) -> torch.Tensor:
        """The same logits for every row: hidden [S, 1] to [S, V]."""
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        logits[:, TOKEN] = 1.0
        return logits


def paced(engine_spec: EngineSpec, seconds: float) -> EngineSpec:
    """The same engine with such a model."""

    def build() -> StepEngine:
        engine: Any = engine_spec.build_step_engine()
        engine.worker.model = PacedModel(engine.worker.model.config, seconds)
        return cast(StepEngine, engine)  # except for its model

    return replace(engine_spec, build_step_engine=build)


def main() -> None:
    """Run the engine core."""
    seconds = float(sys.argv[1])
    assemble = vars(core)["assemble"]

    def assembled(*arguments: Any, **options: Any) -> Any:
        whole = assemble(*arguments, **options)
        return replace(whole, engine_spec=paced(whole.engine_spec, seconds))

    vars(core)["assemble"] = assembled  # that is all that differs
    core.main()


if __name__ == "__main__":
    main()
