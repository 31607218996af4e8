"""JSON Schema conformance: a model is asked for an instance of a schema. Is its answer valid?

constrained: the schema is the request's `response_format`. free: it is only in the prompt. In both modes the
prompt has the schema, so the grammar is the only difference.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jsonschema_rs

from personae.errors import RequestError
from personae.evals.harness.subject import Subject
from personae.evals.suites.schema_files import SAMPLE, SchemaCase, read_schemas
from personae.evals.suites.suite import CONSTRAINED, FREE, Case, Outcome, Suite, SuiteSettings


class SchemaSettings(SuiteSettings, frozen=True):
    """data: a file or folder; without it our own sample. every: use only every n-th schema. count: schemas, 0
    for all. limit: tokens of an answer. strict: of the response format."""

    data: str = ""
    every: int = 1
    count: int = 0
    limit: int = 256
    strict: bool = True


class Schemas(Suite):
    """One case per schema. It passes if the answer is valid."""

    settings: ClassVar = SchemaSettings
    about: ClassVar = "JSON Schema conformance of answers (MaskBench-format files)"
    modes: ClassVar = (FREE, CONSTRAINED)

    def __init__(self, settings: SchemaSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """Schemas that no validator accepts are skipped, because answers to them cannot be judged."""
        path = Path(self._settings.data) if self._settings.data else SAMPLE
        schemas = read_schemas(path, self._settings.every)
        judged = [schema for schema in schemas if validator(schema.schema) is not None]
        return [
            Case(f"{schema.file}/{schema.name}", schema.file, schema)
            for schema in judged[: self._settings.count or None]
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Every model plays everything."""
        return mode in self.modes

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """accepted: the schema was not rejected. finished: the answer was not cut off."""
        schema: SchemaCase = case.data
        written = json.dumps(schema.schema, ensure_ascii=False)
        prompt = f"Write a JSON value for this schema, and nothing else.\nSchema: {written}"
        fields: dict[str, Any] = {"max_tokens": self._settings.limit}
        if subject.mode == CONSTRAINED:
            named = {"name": "answer", "schema": schema.schema, "strict": self._settings.strict}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        expected = next((json.dumps(data, ensure_ascii=False) for _, data, ok in schema.instances if ok), "")
        if expected:
            expected = f"for example {expected}"
        try:
            answer = await subject.chat([{"role": "user", "content": prompt}], **fields)
        except RequestError as refusal:
            if subject.mode == FREE:
                raise
            note = f"The schema was refused: {refusal.message}"
            scores = {"accepted": 0.0}
            return [Outcome(passed=False, scores=scores, prompt=prompt, expected=expected, note=note)]
        choice = answer["choices"][0]
        text = str(choice["message"].get("content") or "")
        reason = why_invalid(schema.schema, text)
        finished = choice.get("finish_reason") != "length"
        return [
            Outcome(
                passed=reason is None,
                scores={"accepted": 1.0, "finished": float(finished), "valid": float(reason is None)},
                prompt=prompt,
                expected=expected,
                answer=text,
                note=reason or "",
            )
        ]


def validator(schema: Any) -> Any | None:
    """A validator of the schema's draft, including formats; None if it considers the schema malformed."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def why_invalid(schema: Any, text: str) -> str | None:
    """Why an answer does not match the schema; None if it does."""
    try:
        instance = json.loads(text)
    except ValueError as error:
        return f"It is no JSON: {error}."
    checker = validator(schema)
    assert checker is not None, "cases() left such schemas out"
    failure = next(iter(checker.iter_errors(instance)), None)
    return None if failure is None else f"It is not valid: {failure.message[:300]}"
