"""Bound answers of an adversarial model: are they complete and valid, whatever it prefers?

Made for the server of `python -m personae.evals.adversarial`, but any server works. strict: a schema that
cannot be enforced is rejected, and the answer of an accepted one is valid. lenient: every schema is accepted,
and the server says if an answer is invalid. tools: the same as strict, for the arguments of a required call.
"""

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from personae.errors import RequestError
from personae.evals.harness.subject import Subject
from personae.evals.suites.schema_files import SAMPLE, SchemaCase, read_schemas
from personae.evals.suites.schemas import validator, why_invalid
from personae.evals.suites.suite import Case, Outcome, Suite, SuiteSettings

STRICT, LENIENT, TOOLS = "strict", "lenient", "tools"
_SHORTEST = re.compile(r" has (\d+)\.$")
_KEYWORD = re.compile(r"[Tt]he (?:keywords?|format|reference) '([^']+)'")


class AdversarialSettings(SuiteSettings, frozen=True):
    """data: a file or folder of schemas; without it our own sample. every: use only every n-th schema. limit:
    tokens of an answer; if the shortest answer needs more, it gets that and `room` more."""

    data: str = ""
    every: int = 1
    limit: int = 96
    room: int = 16


class Adversarial(Suite):
    """One case per schema. It passes if the schema is rejected with a keyword, or the answer keeps its
    promise."""

    settings: ClassVar = AdversarialSettings
    about: ClassVar = "bound answers are whole and valid, whatever the model prefers"
    modes: ClassVar = (STRICT, LENIENT, TOOLS)

    def __init__(self, settings: AdversarialSettings) -> None:
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """Schemas that no validator accepts are skipped, because answers to them cannot be judged."""
        path = Path(self._settings.data) if self._settings.data else SAMPLE
        schemas = read_schemas(path, self._settings.every)
        return [
            Case(f"{number:05}/{schema.name}", schema.file, schema)
            for number, schema in enumerate(schemas)
            if validator(schema.schema) is not None
        ]

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """By the base alone, because the requests do not depend on the model. Arguments must be an object."""
        is_object = isinstance(case.data.schema, dict) and case.data.schema.get("type") == "object"
        return base and mode in self.modes and (mode != TOOLS or is_object)

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """accepted: not rejected. whole: it is JSON. valid: it matches the schema. told: if it does not, the
        server says so.

        `note` begins with the keyword of a rejection, or says what is wrong.
        """
        schema: SchemaCase = case.data
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": "?"}],
            **_asked(schema.schema, subject.mode),
            # The schemas get several of the model's preferences; over all seeds each schema gets all of them.
            "seed": subject.sampling["seed"] + zlib.crc32(case.id.encode()) % 2**31,
            "max_tokens": self._settings.limit,
        }
        try:
            answer = await subject.chat(**fields)
        except RequestError as refusal:
            found = _SHORTEST.search(refusal.message) if refusal.code == "max_tokens_too_small" else None
            if found is None:
                return [_refused(refusal)]
            fields["max_tokens"] = int(found[1]) + self._settings.room
            try:
                answer = await subject.chat(**fields)
            except RequestError as again:
                return [_refused(again)]
        [choice] = answer["choices"]
        text = _said(choice["message"], subject.mode)
        reason = why_invalid(schema.schema, text)
        told = reason is None or _says_invalid(choice) or _says_invalid(answer)
        whole = _is_json(text)
        scores = {"accepted": True, "whole": whole, "valid": reason is None, "told": told}
        return [
            Outcome(
                passed=reason is None or (subject.mode == LENIENT and whole and told),
                scores={name: float(score) for name, score in scores.items()},
                answer=text,
                note=reason or "",
            )
        ]


def _asked(schema: Any, mode: str) -> dict[str, Any]:
    """The fields that bind the answer."""
    if mode == TOOLS:
        function = {"name": "answer", "parameters": schema, "strict": True}
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
    named = {"name": "answer", "schema": schema, "strict": mode == STRICT}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _said(message: dict[str, Any], mode: str) -> str:
    """The requested JSON; "" if there is none."""
    if mode != TOOLS:
        return str(message.get("content") or "")
    calls = message.get("tool_calls") or [{"function": {"arguments": ""}}]
    return str(calls[0]["function"]["arguments"])


def _refused(refusal: RequestError) -> Outcome:
    keyword = _KEYWORD.search(refusal.message)
    note = f"{keyword[1] if keyword else refusal.code}: {refusal.message}"
    return Outcome(passed=keyword is not None, scores={"accepted": 0.0}, note=note)


def _says_invalid(part: dict[str, Any]) -> bool:
    return part.get("personae", {}).get("validation", {}).get("valid") is False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
