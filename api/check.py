"""Checks finished answers: what a grammar may not have wholly bound, since it is not `strict`."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.answers import Extension, Validation, Violation
from personae.api.choices import Part
from personae.api.words import Words
from personae.grammar.schema.validate import validate_answer
from personae.grammar.spec import GrammarSpec


class AnswerCheck:
    """Follows one answer. Its text is checked against `content`, the arguments of calls against the schemas
    of `functions`, by name."""

    def __init__(self, content: GrammarSpec | None, functions: Mapping[str, dict[str, Any]]) -> None:
        self._content = content
        self._functions = functions
        self._words = Words()

    @classmethod
    def of(
        cls, content: GrammarSpec | None, functions: Mapping[str, dict[str, Any]] | None = None
    ) -> "AnswerCheck | None":
        """The check; None if there is nothing to check."""
        return cls(content, functions or {}) if content is not None or functions else None

    def take(self, words: Words) -> None:
        """What the answer gained."""
        self._words.add(words)

    def outcome(self) -> Validation | None:
        """Whether the answer is valid; None if it has no part that had to be checked."""
        words, violations, checked = self._words, [], False
        if self._content is not None and (words.text or not words.calls):
            checked = True
            violations += _violations(self._content, words.text, None)
        for call in words.calls:
            if (schema := self._functions.get(call.name or "")) is not None:
                checked = True
                spec = GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
                violations += _violations(spec, call.arguments, call.index)
        return Validation(not violations, violations) if checked else None


def _violations(spec: GrammarSpec, text: str, call: int | None) -> list[Violation]:
    found = validate_answer(spec, text).violations
    return [Violation(one.pointer, one.message, call) for one in found]


def extension(part: Part) -> Extension | UnsetType:
    """What the end of a choice says beyond OpenAI's fields."""
    return UNSET if part.validation is None else Extension(part.validation)
