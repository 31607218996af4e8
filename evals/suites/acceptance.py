"""What the grammars accept, without a model: instances of schemas are matched byte by byte.

strict: as with `strict: true`, a schema that cannot be enforced is rejected. lenient: as without. The suite
runs in the command's own process, whatever the target is, once, for the base.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from anyio import to_thread

from personae.evals.harness.subject import Subject
from personae.evals.suites import maskbench
from personae.evals.suites.schema_files import SAMPLE, SchemaCase, read_schemas
from personae.evals.suites.suite import Case, Outcome, Suite, SuiteSettings
from personae.grammar.compiler import GrammarCompiler

STRICT, LENIENT = "strict", "lenient"


class AcceptanceSettings(SuiteSettings, frozen=True):
    """data: MaskBench-format files or a folder of JSON-Schema-Test-Suite; without it our own sample. every:
    use only every n-th schema."""

    data: str = ""
    every: int = 1


class Acceptance(Suite):
    """One case per schema. It passes if the schema is accepted, and exactly its valid instances are."""

    settings: ClassVar = AcceptanceSettings
    about: ClassVar = "instances that grammars accept (JSON-Schema-Test-Suite, MaskBench); needs no model"
    modes: ClassVar = (STRICT, LENIENT)
    concurrency: ClassVar = 1

    def __init__(self, settings: AcceptanceSettings) -> None:
        self._settings = settings
        self._compiler: GrammarCompiler | None = None

    def cases(self) -> Sequence[Case]:
        """All schemas of the data."""
        path = Path(self._settings.data) if self._settings.data else SAMPLE
        schemas = read_schemas(path, self._settings.every)
        return [
            Case(f"{number:05}/{schema.name}", schema.file, schema) for number, schema in enumerate(schemas)
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Once, because no model is involved."""
        return base and mode in self.modes

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """sound: no invalid instance is accepted. complete: no valid one is rejected, in any order of
        keys."""
        return [await to_thread.run_sync(self._try, case.data, subject.mode == STRICT)]

    def close(self) -> None:
        """End the compiler's helper process."""
        if self._compiler is not None:
            self._compiler.close()

    def _try(self, schema: SchemaCase, strict: bool) -> Outcome:
        if self._compiler is None:
            self._compiler = GrammarCompiler(maskbench.byte_vocabulary())
        report = maskbench.run([schema], self._compiler, lambda text: list(text.encode()), strict=strict)
        taken = bool(report.compiled)
        notes = [f"refused: {reason}" for reason in report.refusals.values()]
        notes += [f"accepts what is invalid: {name}" for _, name in report.false_accepts]
        notes += [f"rejects what is valid: {name}" for _, name in report.false_rejects]
        scores = {"taken": float(taken)}
        if taken:
            scores |= {
                "sound": float(not report.false_accepts),
                "complete": float(not report.false_rejects),
            }
        return Outcome(
            passed=taken and not report.false_accepts and not report.false_rejects,
            scores=scores,
            values={"compile ms": 1e3 * sum(report.seconds)},
            prompt=json.dumps(schema.schema, indent=1, ensure_ascii=False),
            note="; ".join(notes),
        )
