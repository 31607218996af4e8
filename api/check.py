"""Checks finished answers that a grammar may not have bound completely because it is not `strict`."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import anyio
import msgspec
from anyio.lowlevel import RunVar

from personae.api.output_pieces import OutputPieces
from personae.api.wire.answers import Validation, Violation
from personae.grammar.sandbox.checker import Checker, check_at_once
from personae.grammar.schema.validate import SchemaValidation as Found
from personae.grammar.spec import GrammarSpec

SECONDS = 10.0  # for which an answer waits for its check
_AT_ONCE = 4  # checks of a tenant in the checker; its other checks wait, other tenants' do not
_Limiters = WeakValueDictionary[str, anyio.CapacityLimiter]  # kept while they are used
_LIMITERS: RunVar[_Limiters] = RunVar("places of checks, by tenant")
_CHECKER = Checker()  # one process for all, started when it is first needed


class AnswerCheck:
    """Follows one answer of a tenant. Its text is checked against `content`, and the arguments of calls
    against the schemas of `functions`, by name."""

    def __init__(
        self, tenant: str, content: GrammarSpec | None, functions: Mapping[str, dict[str, Any]]
    ) -> None:
        self._tenant = tenant
        self._content = content
        self._functions = functions
        self._words = OutputPieces()

    def take(self, words: OutputPieces) -> None:
        """What the answer gained."""
        self._words.add(words)

    async def outcome(self) -> Validation | None:
        """Whether the answer is valid. None if no part of it had to be checked."""
        parts, calls = self._parts()
        if not parts:
            return None
        found = check_at_once(parts)
        if found is None:
            found = await _checked_in_process(self._tenant, parts)
        if found is None:
            return Validation(None, [])
        violations = [
            Violation(one.pointer, one.message, call)
            for call, part in zip(calls, found, strict=True)
            for one in part.violations
        ]
        return Validation(not violations, violations)

    def _parts(self) -> tuple[list[tuple[GrammarSpec, str]], list[int | None]]:
        """The parts to check, and for each the index of the call whose arguments it is; None for the text."""
        words = self._words
        parts: list[tuple[GrammarSpec, str]] = []
        calls: list[int | None] = []
        if self._content is not None and (words.text or not words.calls):
            parts.append((self._content, words.text))
            calls.append(None)
        for call in words.calls:
            if (schema := self._functions.get(call.name or "")) is not None:
                spec = GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
                parts.append((spec, call.arguments))
                calls.append(call.index)
        return parts, calls


async def _checked_in_process(tenant: str, parts: list[tuple[GrammarSpec, str]]) -> list[Found] | None:
    """The outcomes. None if the limits did not allow the checks."""
    limiters = _LIMITERS.get(None)
    if limiters is None:
        _LIMITERS.set(limiters := _Limiters())
    places = limiters.setdefault(tenant, anyio.CapacityLimiter(_AT_ONCE))
    with anyio.move_on_after(SECONDS):
        return await anyio.to_thread.run_sync(_CHECKER.check, parts, limiter=places, abandon_on_cancel=True)
    return None
