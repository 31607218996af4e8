"""A step engine that notes its steps, and the pieces of memory work between them."""

import math
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from personae.actors.enginecore.executor import Executor
from personae.actors.spec import Computed, EngineSpec, Launched, Prepared
from personae.engine.step import StepEngine
from personae.engine.worker.runner import Runner


class RecordingEngine(StepEngine):
    """Each piece of memory work takes longer than allowed between two steps, as on a large model, and lasts
    until the loop has planned everything that it can."""

    notes: list[str]
    executor: Executor
    loop: anyio.lowlevel.EventLoopToken

    def forward(self, packed, overlap):  # type: ignore[no-untyped-def]  # as in StepEngine
        self.notes.append("step")
        return super().forward(packed, overlap)

    def noting(self, note: str, pieces: Generator[Any, Any, Any]) -> Generator[Any, Any, None]:
        for piece in pieces:
            self.notes.append(note)
            with suppress(anyio.RunFinishedError):
                anyio.from_thread.run(anyio.wait_all_tasks_blocked, token=self.loop)
            self.executor._memory_work_seconds = math.inf
            yield piece


class RecordingRunner(Runner):
    """Its worker."""

    engine: RecordingEngine

    def placing(self, adapter):  # type: ignore[no-untyped-def]  # as in Runner
        return self.engine.noting("placed", super().placing(adapter))

    def lending(self, pages):  # type: ignore[no-untyped-def]  # as in Runner
        return self.engine.noting("lent", super().lending(pages))

    def returning(self, pages):  # type: ignore[no-untyped-def]  # as in Runner
        return self.engine.noting("back", super().returning(pages))


class KnownExecutor(Executor[Prepared, Computed, Launched]):
    """An executor that its engine knows."""

    def started(self) -> None:
        super().started()
        assert isinstance(self._engine, RecordingEngine)
        self._engine.executor = self


def noting(engine_spec: EngineSpec, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """The same spec with an engine that notes its steps. Use it on the caller's loop."""
    monkeypatch.setattr("personae.actors.enginecore.core.Executor", KnownExecutor)
    loop = anyio.lowlevel.current_token()

    def build() -> StepEngine:
        engine = engine_spec.build_step_engine()
        engine.__class__ = type("Recording", (RecordingEngine, type(engine)), {})
        engine.worker.__class__ = RecordingRunner
        engine.notes, engine.loop, engine.worker.engine = notes, loop, engine
        return engine

    return replace(engine_spec, build_step_engine=build)


def steps_between(notes: list[str], note: str) -> tuple[int, int]:
    """How many pieces of a kind there were, and how many steps between the first and the last of them."""
    places = [place for place, each in enumerate(notes) if each == note]
    return len(places), notes[places[0] : places[-1]].count("step")
